"""Messages between nodes: whatever is lost, late or left out, both ends of a link have one copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.codecs.base import Codec, Message, pack, unpack
from paceline.core.protocol import Figure, Peer, Step, Task, Want, Work
from paceline.gossip.node import Node, RejectedUpdate, consensus
from paceline.gossip.outbox import Outbox
from tests.conftest import make_learner

EACH: frozenset[Want] = frozenset({"rate", ("each", "norm"), ("each", "change"), ("each", "move")})


def node(name: str = "w0", codec: Codec | None = None, *neighbors: str) -> Node:
    learner = make_learner()
    layout = learner.server().layout
    peer = Peer(name, neighbors or ("w1",), layout.tensors)
    return Node(peer, learner, 0, None, codec, EACH)


def advance(one: Node, id: int = 0) -> dict[Figure, tuple[float, ...]]:
    task = Task(id, "w0", Work(), one.version, 0.0, 8, 8 * id)
    one.compute(task, lambda done: True)
    _, figures = one.step(Step({id: 1.0}))
    return dict(figures)


CODECS: list[Codec | None] = [
    None,
    pl.codecs.TopK(0.1),
    pl.codecs.Int8(),
    pl.codecs.Chain(pl.codecs.TopK(0.2), pl.codecs.Int8()),
]


@pytest.mark.parametrize("codec", CODECS)
def test_both_ends_have_the_same_copy(codec: Codec | None) -> None:
    sender, receiver = node("w0", codec), node("w1", codec, "w0")
    tensors = len(sender.server.layout.tensors)
    random = np.random.default_rng(0)
    for turn in range(12):
        advance(sender, turn)
        chosen = None if turn % 3 == 0 else sorted(
            random.choice(tensors, random.integers(1, tensors + 1), replace=False).tolist()
        )  # fmt: skip
        assert receiver.receive("w0", sender.publish(chosen)) == sender.version
        np.testing.assert_array_equal(sender._copies["w0"], receiver._copies["w0"])
    assert not np.array_equal(receiver._copies["w0"], receiver._copies["w1"])


@pytest.mark.parametrize("codec", CODECS[1:])
def test_what_a_message_leaves_out_is_in_the_next(codec: Codec) -> None:
    sender = node("w0", codec)
    advance(sender)
    gap = [np.linalg.norm(sender.vector() - sender._copies["w0"])]
    for _ in range(60):
        sender.publish(None)
        gap.append(np.linalg.norm(sender.vector() - sender._copies["w0"]))
    assert gap[-1] < 0.01 * gap[0]


def test_a_message_about_some_tensors_leaves_the_others() -> None:
    sender, receiver = node("w0"), node("w1", None, "w0")
    advance(sender)
    before = receiver._copies["w0"].copy()
    receiver.receive("w0", sender.publish([1]))
    start, stop = sender.server.layout.tensors[0], sum(sender.server.layout.tensors[:2])
    trained = sender.server.layout.trained
    changed = np.flatnonzero(receiver._copies["w0"][:trained] != before[:trained])
    assert changed.size and start <= changed.min() and changed.max() < stop


def test_a_message_is_as_short_as_its_tensors() -> None:
    sender = node("w0")
    sizes, tail = (
        sender.server.layout.tensors,
        sender.server.layout.size - sum(sender.server.layout.tensors),
    )
    for place, size in enumerate(sizes):
        assert 0 <= sender.publish([place]).nbytes - 4 * (size + tail) < 120


def test_who_has_no_copy_needs_a_whole_one() -> None:
    codec = pl.codecs.TopK(0.1)
    sender, stranger = node("w0", codec), node("w5", codec, "w4")
    advance(sender)
    assert stranger.receive("w0", sender.publish(None)) is None
    assert stranger.receive("w0", sender.whole_copy()) == 1
    advance(sender, 1)
    assert stranger.receive("w0", sender.publish(None)) == 2
    np.testing.assert_array_equal(sender._copies["w0"], stranger._copies["w0"])


def test_a_message_that_a_whole_copy_holds_already_is_left_out() -> None:
    codec = pl.codecs.TopK(0.1)
    sender, receiver = node("w0", codec), node("w1", codec, "w0")
    advance(sender)
    message = sender.publish(None)
    receiver.receive("w0", sender.whole_copy())
    receiver.receive("w0", message)
    np.testing.assert_array_equal(sender._copies["w0"], receiver._copies["w0"])


def test_a_missing_message_is_noticed() -> None:
    codec = pl.codecs.TopK(0.1)
    sender, receiver = node("w0", codec), node("w1", codec, "w0")
    sender.publish(None)
    with pytest.raises(RuntimeError, match="message 2 from w0 to w1 arrived after message 0"):
        receiver.receive("w0", sender.publish(None))


@pytest.mark.parametrize("codec", CODECS[:2], ids=["dense", "top"])
def test_a_message_that_comes_twice_or_late_counts_once(codec: Codec | None) -> None:
    sender, receiver = node("w0", codec), node("w1", codec, "w0")
    messages = []
    for turn in range(3):
        advance(sender, turn)
        messages.append(sender.publish(None))
    whole = sender.whole_copy()
    for message in messages:
        receiver.receive("w0", message)
    for old in (*messages[:2], messages[2], messages[0]):
        assert receiver.receive("w0", old) in (None, 3)  # a dense one is a whole copy too
        np.testing.assert_array_equal(sender._copies["w0"], receiver._copies["w0"])
    advance(sender, 3)
    assert receiver.receive("w0", sender.publish(None)) == 4
    assert receiver.receive("w0", whole) is None  # late: it would take the copy back
    advance(sender, 4)
    assert receiver.receive("w0", sender.publish(None)) == 5
    np.testing.assert_array_equal(sender._copies["w0"], receiver._copies["w0"])


def test_the_same_copy_at_an_earlier_step_is_no_news() -> None:
    codec = pl.codecs.TopK(0.1)
    sender, receiver = node("w0", codec), node("w1", codec, "w0")
    advance(sender, 0)
    sender.publish(None)
    early = sender.whole_copy()
    advance(sender, 1)  # without a message: the copy stays, and is of a later step
    assert receiver.receive("w0", early) == 1
    assert receiver.receive("w0", sender.whole_copy()) == 2
    assert receiver.receive("w0", early) is None  # it came twice, and late


@pytest.mark.parametrize("codec", CODECS[:3], ids=["dense", "top", "int8"])
def test_what_is_no_sound_message_of_its_sender_is_refused(codec: Codec | None) -> None:
    sender, receiver = node("w0", codec), node("w1", codec, "w0", "w2")
    advance(sender)
    message = sender.publish(None)
    parts = [part.clone() for part in unpack(message).parts]
    place = next(i for i, part in enumerate(parts) if part.is_floating_point())
    spoiled = {}
    for value in ("nan", "inf"):
        changed = parts[place].clone()
        changed[0] = float(value)
        spoiled[value] = pack(Message((*parts[:place], changed, *parts[place + 1 :])))
    shorter = (*parts[:place], parts[place][:-1], *parts[place + 1 :])
    spoiled["short"] = pack(Message(shorter))
    spoiled["untrained"] = pack(Message((*parts[:-1], torch.zeros(parts[-1].numel() + 1))))
    spoiled["cut"], spoiled["noise"] = message[:-1], np.full(40, 7, np.uint8)
    for bad in spoiled.values():
        with pytest.raises(RejectedUpdate, match="a message from w0 to w1"):
            receiver.receive("w0", bad)
        assert np.array_equal(receiver._copies["w0"], receiver._start)
    with pytest.raises(RejectedUpdate, match="carries the name of w2"):
        receiver.receive("w2", message)
    assert receiver.receive("w0", message) == 1


def test_a_message_out_of_all_proportion_is_refused_unless_it_is_said_again() -> None:
    sender, receiver = node("w0"), node("w1", None, "w0")
    for turn in range(3):
        advance(sender, turn)
        receiver.receive("w0", sender.publish(None))
    before = receiver._copies["w0"].copy()
    sender.server.vector[0] += 1e9
    with pytest.raises(RejectedUpdate, match="it moves a copy by 1e\\+09"):
        receiver.receive("w0", sender.publish(None))
    np.testing.assert_array_equal(receiver._copies["w0"], before)
    assert receiver.receive("w0", sender.whole_copy()) == 3
    np.testing.assert_array_equal(sender._copies["w0"], receiver._copies["w0"])


def test_nothing_is_taken_from_who_is_gone() -> None:
    sender, receiver = node("w0"), node("w1", None, "w0")
    advance(sender)
    receiver.forget("w0")
    assert receiver.receive("w0", sender.publish(None)) is None
    assert receiver.receive("w0", sender.whole_copy()) is None and "w0" not in receiver._copies
    late = sender.whole_copy()
    sender.return_to_life()
    with pytest.raises(RejectedUpdate, match="w0 joined again, and w1 has not been told yet"):
        receiver.receive("w0", sender.whole_copy())  # so that it is sent again
    receiver.welcome("w0")
    assert receiver.receive("w0", late) is None  # of its earlier life
    assert receiver.receive("w0", sender.whole_copy()) == 1
    assert receiver.receive("w0", late) is None


def test_a_result_that_is_not_finite_is_of_no_use_until_it_is_the_models_doing() -> None:
    one = node("w0")

    def compute(id: int) -> int:
        return one.compute(Task(id, "w0", Work(), 0, 0.0, 8, 8 * id), lambda done: True).samples

    sound = one.vector()
    assert compute(0) == 8
    one.server.vector[:] = np.nan
    assert [compute(id) for id in (1, 2, 3)] == [0, 0, 8]
    one.server.vector[:] = sound
    assert compute(4) == 8
    one.server.vector[:] = np.nan
    assert compute(5) == 0


def test_a_codec_with_a_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="include what earlier messages left out"):
        node("w0", pl.codecs.Feedback(pl.codecs.TopK(0.1)))


def test_an_outbox_is_never_longer_than_the_copy() -> None:
    codec = pl.codecs.TopK(0.2)
    sender, receiver = node("w0", codec), node("w1", codec, "w0")
    outbox, size = Outbox(sender), sender.server.vector.nbytes
    for turn in range(40):
        advance(sender, turn)
        outbox.add(sender.publish(None))
        assert sum(message.nbytes for message in outbox._messages) <= size
        if turn % 13 == 0:
            for message in outbox.take():
                receiver.receive("w0", message)
            assert outbox.take() == []
            np.testing.assert_array_equal(sender._copies["w0"], receiver._copies["w0"])
    for _ in range(20):
        outbox.add(sender.publish(None))
    assert len(outbox.take()) == 1  # the copy, in place of twenty messages


def test_figures_are_those_of_the_tensors() -> None:
    one = node("w0")
    advance(one)
    one.publish(None)
    before, figures = one.vector(), advance(one, 1)
    after, start = one.vector(), 0
    for place, size in enumerate(one.server.layout.tensors):
        x, y = after[start : start + size], before[start : start + size]
        assert figures["norm"][place] == pytest.approx(float(np.linalg.norm(x)))
        # All was made public before this step.
        assert figures["change"][place] == pytest.approx(float(np.linalg.norm(x - y)), rel=1e-5)
        assert figures["move"][place] == figures["change"][place]
        start += size


def test_a_mix_is_taken_before_the_gradient() -> None:
    one = node("w0", None, "w1")
    one._copies["w1"] = np.full_like(one.vector(), 2.0)
    own, task = one.vector(), Task(0, "w0", Work(), 0, 0.0, 8, 0)
    result = one.compute(task, lambda done: True)
    assert result.vector is not None
    gradient = np.array(result.vector)
    one.step(Step({0: 1.0}, {"w1": 0.25}))
    trained = one.server.layout.trained
    expected = (0.75 * own + 0.25 * 2.0)[:trained] - 0.1 * gradient[:trained]
    np.testing.assert_allclose(one.vector()[:trained], expected, rtol=1e-5, atol=1e-6)


def test_consensus_is_the_distance_from_the_mean() -> None:
    assert consensus({"a": np.array([0.0, 0.0]), "b": np.array([6.0, 8.0])}) == pytest.approx(5.0)
