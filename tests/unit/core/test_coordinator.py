"""The coordinator: a policy with its books and its journal, and the loop around it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

import paceline as pl
from paceline.core.coordinator import Coordinator, drive, replay, run
from paceline.core.errors import PolicyError, StalledError
from paceline.core.journal import Entry, Header, Journal
from paceline.core.policy import Policy
from paceline.core.protocol import (
    MAIN,
    Assign,
    Cancel,
    Command,
    Discard,
    Event,
    Finished,
    Interrupted,
    Joined,
    Left,
    SetTimer,
    Start,
    Step,
    Stepped,
    Stop,
    TimerFired,
    View,
    Want,
)
from paceline.core.schema import save_state
from paceline.core.state import describe
from paceline.testing import Done, ScriptedEngine


@dataclass
class Scripted(Policy):
    """Answers with what it was given, and remembers what it was shown."""

    answers: dict[type[Event], list[Command]] = field(default_factory=dict)
    shown: list[Event] = field(default_factory=list)
    wants: frozenset[Want] = frozenset()

    def react(self, view: View, event: Event) -> Iterator[Command]:
        self.shown.append(event)
        yield from self.answers.get(type(event), ())


def shown(coordinator: Coordinator) -> list[Event]:
    assert isinstance(coordinator.policy, Scripted)
    return coordinator.policy.shown


def test_the_callers_policy_is_a_recipe() -> None:
    policy = Scripted({Joined: [Assign("w0")]})
    first, second = Coordinator(policy), Coordinator(policy)
    first.handle(0.0, Joined("w0"))
    assert policy.shown == []
    assert shown(second) == []
    assert shown(first) == [Joined("w0")]
    gather = pl.sync()
    before = save_state(gather)
    coordinator = Coordinator(gather, batch=8)
    coordinator.handle(0.0, Joined("w0"))
    assert save_state(gather) == before != save_state(coordinator.policy)


def test_commands_are_stamped_booked_and_written_down() -> None:
    coordinator = Coordinator(Scripted({Joined: [Assign("w0"), SetTimer("t", 2.0)]}), batch=4)
    entry = coordinator.handle(1.0, Joined("w0"))
    start, timer = entry.commands
    assert isinstance(start, Start)
    assert (start.task.samples, start.task.since, timer) == (4, 1.0, SetTimer("t", 2.0))
    assert coordinator.ledger.running == {0: start.task}
    assert list(coordinator.journal) == [Entry(1.0, Joined("w0"), (start, timer))]
    assert coordinator.journal.header.batch == 4


def test_each_command_takes_effect_before_the_next_is_thought_of() -> None:
    class Looking(Scripted):
        def react(self, view: View, event: Event) -> Iterator[Command]:
            yield Assign("w0")
            yield SetTimer("t", 10.0 + len(view.running) - len(view.idle))

    entry = Coordinator(Looking()).handle(0.0, Joined("w0"))
    assert entry.commands[1] == SetTimer("t", 11.0)


def test_a_late_result_is_discarded_and_never_shown() -> None:
    policy = Scripted(
        {Joined: [Assign("w0")], TimerFired: [Cancel(0)], Stepped: [SetTimer("t", 9)]}
    )
    coordinator = Coordinator(policy)
    coordinator.handle(0.0, Joined("w0"))
    coordinator.handle(0.0, Stepped(1))
    coordinator.handle(9.0, TimerFired("t"))
    entry = coordinator.handle(10.0, Finished(0, 1))
    assert entry.commands == (Discard(0),)
    assert not any(isinstance(event, Finished) for event in shown(coordinator))
    assert list(coordinator.journal)[-1] == entry


def test_a_result_that_comes_twice_is_discarded_the_second_time() -> None:
    coordinator = Coordinator(Scripted({Joined: [Assign("w0")], Finished: [Step({0: 1.0})]}))
    coordinator.handle(0.0, Joined("w0"))
    assert coordinator.handle(1.0, Finished(0, 1)).commands == (Step({0: 1.0}),)
    assert coordinator.handle(1.0, Finished(0, 1)).commands == (Discard(0),)
    assert coordinator.ledger.version == 1


def test_what_is_no_news_is_not_shown() -> None:
    coordinator = Coordinator(Scripted({TimerFired: [Stop("woken")]}))
    assert coordinator.handle(0.0, TimerFired("never set")).commands == ()
    assert coordinator.handle(0.0, Left("nobody")).commands == ()
    assert shown(coordinator) == []


def test_an_interruption_stops_without_asking() -> None:
    coordinator = Coordinator(Scripted({Interrupted: [SetTimer("t", 9.0)]}))
    assert coordinator.handle(1.0, Interrupted("enough")).commands == (Stop("enough"),)
    assert coordinator.ledger.stopped == "enough"
    assert shown(coordinator) == []
    assert coordinator.handle(1.0, Interrupted("again")).commands == ()
    assert coordinator.ledger.stopped == "enough"


def test_once_stopped_nobody_is_asked_any_more() -> None:
    coordinator = Coordinator(
        Scripted({Joined: [Assign("w0"), Assign("w0")], Stepped: [Stop("x")]})
    )
    coordinator.handle(0.0, Joined("w0"))
    coordinator.handle(0.0, Stepped(1))
    assert coordinator.handle(1.0, Finished(0, 1)).commands == ()
    assert list(coordinator.ledger.held) == [0]  # it is booked nevertheless
    assert coordinator.handle(1.0, Finished(7, 1)).commands == (Discard(7),)
    assert len(shown(coordinator)) == 2


def test_an_illegal_command_is_the_policys_fault() -> None:
    coordinator = Coordinator(Scripted({Joined: [Assign("w5")]}))
    with pytest.raises(PolicyError, match="no such worker; present are w0"):
        coordinator.handle(0.0, Joined("w0"))


# --- the loop ------------------------------------------------------------------------------------


def test_a_stalled_run_tells_its_books() -> None:
    engine = ScriptedEngine([(0.0, Joined("w0")), (0.0, Joined("w1")), (1.5, Done("w0"))])
    coordinator = Coordinator(pl.policies.MinWorkers(2, pl.sync()), batch=8)
    with pytest.raises(StalledError) as stall:
        run({MAIN: coordinator}, engine)
    assert str(stall.value) == (
        "no event can come and the policy has not stopped. main: version 0 at t=1.5: 2 workers "
        "(1 idle), 1 tasks running, 1 results held, 0 tasks lost, timers none"
    )


def test_a_stalled_run_tells_what_it_waits_for() -> None:
    script: list[tuple[float, Event | Done]] = [(0.0, Joined("w0")), (0.5, Left("w0"))]
    with pytest.raises(StalledError, match=r"0 workers .* 1 tasks lost, timers {'deadline': 9.0}"):
        run({MAIN: Coordinator(pl.deadline(9.0))}, ScriptedEngine(script))


def test_an_entry_is_yielded_once_it_is_carried_out_and_the_loop_ends_with_the_stop() -> None:
    script: list[tuple[float, Event | Done]] = [
        (0.0, Joined("w0")),
        *((seconds, Done("w0")) for seconds in (1.0, 2.0, 3.0)),
    ]
    engine = ScriptedEngine(script)
    coordinator = Coordinator(pl.policies.Until(pl.k_sync(1), steps=2))
    told: list[Command] = []
    for node, entry in drive({MAIN: coordinator}, engine):
        told += entry.commands
        assert node == MAIN
        assert engine.commands == told
    assert told[-1] == Stop("2 steps taken")
    assert coordinator.ledger.now == 2.0


# --- replays -------------------------------------------------------------------------------------


def played(policy: pl.policies.Gather, journal: Journal | None = None) -> Coordinator:
    coordinator = Coordinator(policy, 8, journal)
    events: list[tuple[float, Event]] = [
        *((0.0, Joined("w0")), (0.0, Joined("w1")), (0.0, Joined("w2"))),
        *((1.0, Finished(1, 8)), (1.0, Stepped(1)), (1.5, Finished(0, 8)), (2.0, Left("w2"))),
    ]
    for now, event in events:
        coordinator.handle(now, event)
    return coordinator


def test_a_replay_equals_the_run_and_another_policy_does_not() -> None:
    journal = played(pl.k_sync(1)).journal
    assert replay(pl.k_sync(1), journal) == journal
    assert replay(pl.k_sync(2), journal) != journal


def test_a_replay_has_the_header_of_the_run() -> None:
    journal = played(pl.k_sync(1), Journal(Header("mine", 8, {"seed": 3}))).journal
    again = replay(pl.k_sync(1), journal)
    assert again.header == journal.header
    assert replay(pl.k_sync(1), Journal(Header("", 3))).header.batch == 3


def test_a_resumed_journal_is_replayed_from_its_state() -> None:
    first = played(pl.k_async(2))
    resumed = Coordinator(
        pl.k_async(2), 8, Journal(Header(describe(pl.k_async(2)), 8, None, first.state()))
    )
    resumed.load(first.state())
    later: list[tuple[float, Event]] = [
        *((3.0, Joined("w3")), (4.0, Finished(3, 4)), (4.5, Finished(4, 4)), (5.0, Left("w0"))),
    ]
    for now, event in later:
        resumed.handle(now, event)
        first.handle(now, event)
    steps = [c for entry in resumed.journal for c in entry.commands if isinstance(c, Step)]
    assert [list(step.weights) for step in steps] == [[3, 4]]
    assert list(resumed.journal) == list(first.journal)[-len(later) :]
    assert replay(pl.k_async(2), resumed.journal) == resumed.journal


def test_a_result_that_comes_twice_counts_once_and_is_kept() -> None:
    coordinator = Coordinator(pl.k_sync(2), batch=4)
    for worker in ("w0", "w1"):
        coordinator.handle(0.0, Joined(worker))
    first, other = list(coordinator.ledger.running)
    coordinator.handle(1.0, Finished(first, 2))
    assert coordinator.handle(2.0, Finished(first, 2)).commands == ()
    (step, *_) = coordinator.handle(3.0, Finished(other, 2)).commands
    assert step == Step({first: 0.5, other: 0.5})
