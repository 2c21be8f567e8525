"""The contract of a policy: what has a default, and what a wrapper passes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

import paceline as pl
from paceline.core.policy import Findings, Policy, Wrapper
from paceline.core.protocol import Command, Event, Joined, Prices, Stop, View, Want, Work
from paceline.testing import transcript

ASKED = {name for name in vars(Policy) if not name.startswith("_")}


class Plain(Policy):
    """Says nothing that it need not."""

    def react(self, view: View, event: Event) -> Iterator[Command]:
        yield Stop("plain")


class Peculiar(Policy):
    """Answers every question in another way than the defaults do."""

    wants: frozenset[Want] = frozenset({"norm"})
    decentralized = needs_exact_results = True
    placement, plan = "a placement", "a plan"

    def __init__(self) -> None:
        self.checked: list[object] = []

    def react(self, view: View, event: Event) -> Iterator[Command]:
        yield Stop("peculiar")

    def check(self, workers: Sequence[str], batch: int) -> None:
        self.checked.append((workers, batch))

    def check_prices(self, prices: Prices, message_bytes: int) -> None:
        self.checked.append((prices, message_bytes))

    def works(self) -> Sequence[Work]:
        return [Work(steps=7)]

    def results_per_step(self, workers: int) -> int:
        return workers + 1

    def placed(self, placement: object) -> Policy:
        return Plain()

    def findings(self) -> Findings:
        return Findings(3, ["a change"])


@dataclass
class Around(Wrapper):
    inner: Policy


def test_a_policy_that_does_not_react_is_none() -> None:
    with pytest.raises(TypeError, match="react"):
        type("Idle", (Policy,), {})()


def test_all_but_react_has_a_default() -> None:
    plain = Plain()
    plain.check(["w0"], 1)
    plain.check_prices(Prices(), 0)
    assert (plain.wants, plain.works(), plain.results_per_step(5)) == (frozenset(), (), 5)
    assert not plain.decentralized and not plain.needs_exact_results
    assert (plain.placement, plain.plan, plain.innermost) == (None, None, plain)
    assert plain.findings() == Findings(0, None)
    with pytest.raises(
        ValueError, match=r"Plain\(\) sizes its tasks itself and takes no placement"
    ):
        plain.placed(pl.BySpeed())


def test_a_wrapper_passes_every_question_on() -> None:
    assert set(vars(Wrapper)) >= ASKED
    inner = Peculiar()
    wrapper = Around(Around(inner))
    assert wrapper.innermost is inner
    for name in ("wants", "decentralized", "needs_exact_results", "placement", "plan"):
        assert getattr(wrapper, name) == getattr(inner, name) != getattr(Plain(), name), name
    assert wrapper.works() == [Work(steps=7)]
    assert wrapper.results_per_step(4) == 5
    assert wrapper.findings() == Findings(3, ["a change"])
    wrapper.check(["w0", "w1"], 16)
    wrapper.check_prices(Prices(per_hour=1.0), 8)
    assert inner.checked == [(["w0", "w1"], 16), (Prices(per_hour=1.0), 8)]
    (entry,) = transcript(wrapper, [(0.0, Joined("w0"))])
    assert entry.commands == (Stop("peculiar"),)


def test_a_placement_goes_to_the_innermost_policy_of_a_copy() -> None:
    given = pl.policies.Until(pl.policies.OnlyWorkers(["w0", "w1"], pl.sync()), steps=5)
    speed = pl.BySpeed()
    placed = given.placed(speed)
    assert placed.placement is speed and given.placement is None
    assert placed == pl.policies.Until(
        pl.policies.OnlyWorkers(["w0", "w1"], pl.policies.Gather(placement=speed)), steps=5
    )


@pytest.mark.parametrize("given", [pl.BySpeed, pl.partition.even(8, 2), "fast"])
def test_what_is_no_placement_is_refused(given: object) -> None:
    for policy in (pl.sync(), pl.deadline(1.0)):
        with pytest.raises(ValueError, match=r"placement=.*give an object, pl.BySpeed\(\)"):
            policy.placed(given)


def test_policies_declare_what_they_need() -> None:
    assert pl.coded(1).needs_exact_results and not pl.sync().needs_exact_results
    assert pl.gossip.Gossip(pl.gossip.ring(4)).decentralized and not pl.sync().decentralized
    assert [work.steps for work in pl.local_sgd(16).works()] == [16]
    assert [work.budget for work in pl.deadline(1.0).works()] == [0.8]
    assert all(work.parts for work in pl.coded(1).works())
    assert pl.policies.Gather(work=lambda view, worker: Work()).works() == ()
    assert pl.k_sync(3).results_per_step(8) == 3
    assert pl.sync().results_per_step(8) == 8
    assert pl.policies.OnlyWorkers(["w0", "w1"], pl.sync()).results_per_step(8) == 2
