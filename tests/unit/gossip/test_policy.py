"""The decisions of a node: a transcript, random histories, and repaired graphs."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline as pl
from paceline.core.coordinator import Coordinator, replay
from paceline.core.journal import Header, Journal
from paceline.core.protocol import (
    Command,
    Event,
    Figures,
    Finished,
    Joined,
    Left,
    Peer,
    Received,
    Send,
    Start,
    Step,
    Stepped,
    worker_names,
)
from paceline.core.schema import save_state
from paceline.core.state import describe


def coordinator(policy: pl.gossip.Gossip, me: str, batch: int = 16) -> Coordinator:
    neighbors = tuple(policy.graph.weights(me))
    header = Header(describe(policy), batch, peer=Peer(me, neighbors, (4, 100)))
    return Coordinator(policy, batch, Journal(header))


@dataclass
class Talk:
    """A node that is fed events by hand."""

    policy: pl.gossip.Gossip
    me: str = "w1"
    now: float = 0.0
    figures: Figures = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.node = coordinator(self.policy, self.me)

    def hear(self, event: Event) -> tuple[Command, ...]:
        self.now += 1.0
        return self.node.handle(self.now, event).commands

    def finish(self) -> tuple[Command, ...]:
        (task,) = self.node.ledger.running
        return self.hear(Finished(task, 4, 0.5, {"loss": 1.0}))

    def stepped(self, figures: Figures | None = None, rate: float = 0.1) -> tuple[Command, ...]:
        return self.hear(Stepped(self.node.ledger.version, {"rate": rate}, figures or {}))


def test_a_transcript() -> None:
    talk = Talk(
        pl.gossip.Gossip(pl.gossip.ring(4), pl.gossip.Difference(0.6), pl.gossip.OnChange(0.5))
    )
    (start,) = talk.hear(Joined("w1"))
    assert isinstance(start, Start)
    assert start.task.work.tiles == {1: 4} and start.task.samples == 4
    step, again = talk.finish()
    assert step == Step({0: 1.0}, {"w0": 0.6 / 3, "w2": 0.6 / 3, "w1": -2 * (0.6 / 3)})
    assert isinstance(again, Start) and again.task.tile_offsets == (4,)
    # The thresholds are 0.5 * 0.1 * sqrt(4) and 0.5 * 0.1 * sqrt(100).
    assert talk.stepped({"change": (0.09, 0.51)}) == (Send(("w0", "w2"), (1,)),)
    assert talk.hear(Received("w2", 1)) == ()
    talk.finish()
    assert talk.stepped({"change": (0.09, 0.49)}) == ()
    assert talk.stepped({"change": (0.2, 0.6)}) == (Send(("w0", "w2")),)


def test_averaging_leaves_the_rest_to_the_model() -> None:
    talk = Talk(pl.gossip.Gossip(pl.gossip.ring(4), pl.gossip.Averaging()))
    talk.hear(Joined("w1"))
    assert talk.finish()[0] == Step({0: 1.0}, {"w0": 1 / 3, "w2": 1 / 3})
    assert talk.stepped() == (Send(("w0", "w2")),)


def test_a_link_mixes_at_the_pace_of_its_slower_end() -> None:
    talk = Talk(pl.gossip.Gossip(pl.gossip.ring(4), pl.gossip.Difference(0.6)))
    talk.hear(Joined("w1"))
    for turn in range(200):
        step = talk.finish()[0]
        talk.stepped()
        talk.hear(Received("w0", 3 * talk.node.ledger.version))  # three times as quick
        if turn % 4 == 3:  # and w2 is four times as slow, with a message for each of its steps
            talk.hear(Received("w2", talk.node.ledger.version // 4))
    assert isinstance(step, Step)
    assert step.mix["w0"] == pytest.approx(0.2)
    assert step.mix["w2"] == pytest.approx(0.05, rel=0.05)
    assert sum(step.mix.values()) == 0.0
    # Nothing more is heard of w2, which may have no news, but in the end counts for less and less.
    for turn in range(300):
        step = talk.finish()[0]
        assert isinstance(step, Step)
        assert step.mix["w2"] == pytest.approx(0.05 * min(1, 150 / max(turn, 1)), rel=0.05)


def test_local_steps_neither_mix_nor_send() -> None:
    talk = Talk(pl.gossip.Gossip(pl.gossip.ring(4), pl.gossip.Difference(0.5), local_steps=3))
    talk.hear(Joined("w1"))
    mixed, sent = [], []
    for _ in range(7):
        step = talk.finish()[0]
        assert isinstance(step, Step)
        mixed.append(bool(step.mix))
        sent.append(bool(talk.stepped()))
    assert mixed == [True, False, False, True, False, False, True]
    assert sent == [False, False, True, False, False, True, False]


def test_a_dead_neighbor_is_routed_around() -> None:
    talk = Talk(pl.gossip.Gossip(pl.gossip.ring(5), pl.gossip.Difference(0.5)))
    talk.hear(Joined("w1"))
    assert talk.hear(Left("w2")) == (Send(("w3",), whole=True),)
    step = talk.finish()[0]
    assert isinstance(step, Step) and set(step.mix) == {"w0", "w1"}  # w3's copy is not here yet
    assert talk.stepped() == (Send(("w0", "w3")),)
    talk.hear(Received("w3", 1))
    step = talk.finish()[0]
    assert isinstance(step, Step) and set(step.mix) == {"w0", "w1", "w3"}


def test_one_that_comes_back_is_sent_a_copy() -> None:
    talk = Talk(pl.gossip.Gossip(pl.gossip.ring(5), pl.gossip.Difference(0.5)))
    talk.hear(Joined("w1"))
    talk.hear(Left("w2"))
    assert talk.hear(Joined("w2")) == (Send(("w2",), whole=True),)
    step = talk.finish()[0]
    assert isinstance(step, Step) and set(step.mix) == {"w0", "w1"}
    assert talk.stepped() == (Send(("w0", "w2")),)
    # And the one that was away itself tells everyone where it is, even if it never took a step.
    talk.hear(Left("w1"))
    commands = talk.hear(Joined("w1"))
    assert commands[0] == Send(("w0", "w2"), whole=True)
    assert isinstance(commands[1], Start) and commands[1].task.attempt == 2


def test_the_last_node_goes_on_alone() -> None:
    talk = Talk(pl.gossip.Gossip(pl.gossip.ring(3), pl.gossip.Difference(0.5)))
    talk.hear(Joined("w1"))
    talk.hear(Left("w0"))
    assert talk.hear(Left("w2")) == ()
    assert talk.finish()[0] == Step({0: 1.0}, {})
    assert talk.stepped() == ()


@pytest.mark.parametrize("order", [("w2", "w3", "w5"), ("w5", "w3", "w2"), ("w3", "w5", "w2")])
def test_all_mend_the_graph_alike_whatever_they_hear_first(order: tuple[str, ...]) -> None:
    graph = pl.gossip.torus(3, 3)
    expected = graph.without("w2", "w3", "w5")
    for me in expected.nodes:
        talk = Talk(pl.gossip.Gossip(graph), me)
        talk.hear(Joined(me))
        for gone in order:
            talk.hear(Left(gone))
        talk.finish()
        (send,) = talk.stepped()
        assert isinstance(send, Send) and set(send.to) == set(expected.neighbors[me])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=80), st.sampled_from(["ring", "torus", "complete"]))
def test_random_histories_are_legal_and_replay(moves: list[int], name: str) -> None:
    graph = {
        "ring": pl.gossip.ring(6),
        "torus": pl.gossip.torus(2, 3),
        "complete": pl.gossip.complete(6),
    }[name]
    policy = pl.gossip.Gossip(
        graph, pl.gossip.Difference(0.7), pl.gossip.OnChange(0.3, every=4), local_steps=2
    )
    talk = Talk(policy, "w0")
    talk.hear(Joined("w0"))
    others, away = list(graph.nodes[1:]), set[str]()
    for at, move in enumerate(moves):
        peer = others[(at * 7 + move) % len(others)]
        if move < 4 and talk.node.ledger.running:
            before = talk.node.ledger.version
            talk.finish()
            assert talk.node.ledger.version == before + 1
            change = (move * 0.1, move * 0.9)
            for command in talk.stepped({"change": change}):
                assert isinstance(command, Send) and not away & set(command.to)
        elif move < 7 and peer not in away:
            talk.hear(Received(peer, at))
        elif move < 9 and len(away) < 4 and peer not in away:
            away.add(peer)
            talk.hear(Left(peer))
        elif peer in away:
            away.remove(peer)
            talk.hear(Joined(peer))
        assert len(talk.node.ledger.running) == 1
    assert replay(policy, talk.node.journal) == talk.node.journal
    save_state(talk.node.policy)


def test_shares_add_up_to_the_batch() -> None:
    policy, found = pl.gossip.Gossip(pl.gossip.ring(7)), 0
    for me in policy.graph.nodes:
        (start,) = coordinator(policy, me, batch=30).handle(0.0, Joined(me)).commands
        assert isinstance(start, Start) and start.task.samples in (4, 5)
        found += start.task.samples
    assert found == 30


def test_what_cannot_be_is_refused() -> None:
    policy = pl.gossip.Gossip(pl.gossip.ring(4))
    with pytest.raises(ValueError, match="has 4 nodes and the engine 5 workers, w0 to w4"):
        policy.check(worker_names(5), 100)
    with pytest.raises(ValueError, match="batch_size=3 cannot be shared among 4 nodes"):
        policy.check(worker_names(4), 3)
    with pytest.raises(ValueError, match="local_steps=0"):
        pl.gossip.Gossip(pl.gossip.ring(4), local_steps=0)
