"""One place where decisions are made: a policy, its ledger, and a journal of both."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.core.journal import Entry, Header, Journal
from paceline.core.ledger import Ledger
from paceline.core.protocol import (
    Command,
    Discard,
    Engine,
    Event,
    Finished,
    Interrupted,
    Policy,
    Stop,
    WorkerId,
)
from paceline.core.state import describe, load_state, save_state


class StalledError(RuntimeError):
    """Nothing runs, no timer is set, and the policy has not stopped."""


class Coordinator:
    """Feed it events, carry out the commands it returns. It does nothing itself."""

    def __init__(self, policy: Policy, batch: int = 1, journal: Journal | None = None) -> None:
        self.policy = copy.deepcopy(policy)  # the caller's policy is a recipe
        if journal is None:
            journal = Journal(Header(describe(policy), batch))
        self.journal = journal
        header = journal.header
        self.ledger = Ledger(batch, header.message_bytes, header.prices, header.peer)

    def handle(self, now: float, event: Event) -> Entry:
        """Book the event, ask the policy, book and return its commands."""
        ledger = self.ledger
        commands: tuple[Command, ...] = ()
        news = ledger.record(now, event)
        if isinstance(event, Finished) and not news:
            if event.task not in ledger.held:  # else it came twice, and the first one counts
                commands = (Discard(event.task),)  # too late: nobody waits for it
        elif ledger.stopped is None:
            if isinstance(event, Interrupted):
                commands = (ledger.apply(Stop(event.reason)),)
            elif news:
                apply = ledger.apply
                commands = tuple([apply(c) for c in self.policy.react(ledger, event)])
        entry = Entry(now, event, commands)
        self.journal.append(entry)
        return entry

    def state(self) -> dict[str, Any]:
        """Return policy and books as plain JSON data."""
        return {"policy": save_state(self.policy), "ledger": save_state(self.ledger)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state()`, under a policy of the same making."""
        load_state(self.policy, state["policy"])
        self.ledger.restore(state["ledger"])

    def __str__(self) -> str:
        on = self.ledger
        return (
            f"version {on.version} at t={on.now:g}: {len(on.workers)} workers "
            f"({len(on.idle)} idle), {len(on.running)} tasks running, {len(on.held)} results "
            f"held, {len(on.lost)} tasks lost, timers {on.timers or 'none'}"
        )


def drive(
    coordinators: Mapping[WorkerId, Coordinator], engine: Engine
) -> Iterator[tuple[WorkerId, Entry]]:
    """Run until all coordinators have stopped, yielding each entry once it is carried out."""
    while any(c.ledger.stopped is None for c in coordinators.values()):
        occurred = engine.next_event()
        if occurred is None:
            books = "; ".join(f"{node}: {c}" for node, c in coordinators.items())
            raise StalledError(f"no event can come and the policy has not stopped. {books}")
        now, node, event = occurred
        entry = coordinators[node].handle(now, event)
        for command in entry.commands:
            engine.execute(node, command)
        yield node, entry


def run(coordinators: Mapping[WorkerId, Coordinator], engine: Engine) -> None:
    """Drive the coordinators until all have stopped: one loop for every engine."""
    for _ in drive(coordinators, engine):
        pass


def replay(policy: Policy, journal: Journal) -> Journal:
    """Feed a journal's events to a fresh policy. Equal journals mean equal runs."""
    found = Journal(journal.header)
    for entry in replayed(policy, journal):
        found.append(entry)
    return found


def replayed(policy: Policy, journal: Journal) -> Iterator[Entry]:
    """Yield what a fresh policy answers to each of a journal's events."""
    header = journal.header
    coordinator = Coordinator(policy, header.batch, Journal(header, keep=False))
    if header.state is not None:
        if describe(policy) != header.policy:
            raise ValueError(
                f"the journal continues a run of {header.policy}, whose state does not "
                f"fit {describe(policy)}"
            )
        coordinator.load(header.state)
    for entry in journal:
        yield coordinator.handle(entry.now, entry.event)
