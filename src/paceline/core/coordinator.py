"""The coordinator: a policy, its ledger, and the journal of their events and commands."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.core.errors import StalledError
from paceline.core.journal import Entry, Header, Journal
from paceline.core.ledger import Ledger
from paceline.core.policy import Policy
from paceline.core.protocol import (
    Cancel,
    Command,
    Discard,
    Engine,
    Event,
    Finished,
    Interrupted,
    Release,
    Stop,
    WorkerId,
)
from paceline.core.schema import load_state, save_state
from paceline.core.state import describe


class Coordinator:
    """Turns events into commands, which the caller carries out; it performs no I/O itself.

    copied: whether to copy the policy; if False, the coordinator changes the given object.
    """

    def __init__(
        self, policy: Policy, batch: int = 1, journal: Journal | None = None, *, copied: bool = True
    ) -> None:
        self.policy = copy.deepcopy(policy) if copied else policy
        if journal is None:
            journal = Journal(Header(describe(policy), batch))
        self.journal = journal
        self.whole = True  # whether the engine has carried out all commands
        header = journal.header
        self.ledger = Ledger(batch, header.message_bytes, header.prices, header.peer)

    def handle(self, now: float, event: Event) -> Entry:
        """Record the event, ask the policy, then apply and return its commands."""
        ledger = self.ledger
        commands: list[Command] = []
        news = ledger.record(now, event)
        if isinstance(event, Finished) and event.task not in ledger.held:
            commands.append(Discard(event.task))  # too late: the task is no longer awaited
        for each in news:
            if isinstance(each, Cancel | Release):
                commands.append(each)
            elif ledger.stopped is not None:
                continue
            elif isinstance(each, Interrupted):
                commands.append(ledger.apply(Stop(each.reason)))
            else:
                apply = ledger.apply
                commands += [apply(c) for c in self.policy.react(ledger, each)]
        entry = Entry(now, event, tuple(commands))
        self.journal.append(entry)
        return entry

    def state(self) -> dict[str, Any]:
        """Return the state of policy and ledger as plain JSON data."""
        return {"policy": save_state(self.policy), "ledger": save_state(self.ledger)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state()`; the policy must have the same settings."""
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
    """Run until all coordinators have stopped; yield each entry after its commands ran."""
    while any(c.ledger.stopped is None for c in coordinators.values()):
        occurred = engine.next_event()
        if occurred is None:
            books = "; ".join(f"{node}: {c}" for node, c in coordinators.items())
            raise StalledError(f"no event can come and the policy has not stopped. {books}")
        now, node, event = occurred
        coordinator = coordinators[node]
        coordinator.whole = False
        entry = coordinator.handle(now, event)
        for command in entry.commands:
            engine.execute(node, command)
        coordinator.whole = True
        yield node, entry


def run(coordinators: Mapping[WorkerId, Coordinator], engine: Engine) -> None:
    """Drive the coordinators until all have stopped: one loop for every engine."""
    for _ in drive(coordinators, engine):
        pass


def replay(policy: Policy, journal: Journal) -> Journal:
    """Return the journal of a fresh policy fed with a journal's events.

    Equal journals mean equal runs.
    """
    found = Journal(journal.header)
    for entry in replayed(policy, journal):
        found.append(entry)
    return found


def replayed(policy: Policy, journal: Journal) -> Iterator[Entry]:
    """Yield the entries of a fresh policy that is fed with a journal's events."""
    header = journal.header
    coordinator = Coordinator(policy, header.batch, Journal(header, keep=False))
    if header.state is not None:
        if describe(policy) != header.policy:
            raise ValueError(
                f"the journal continues a run of {header.policy}, whose state does not fit "
                f"{describe(policy)}; give the policy of that run"
            )
        coordinator.load(header.state)
    for entry in journal:
        yield coordinator.handle(entry.now, entry.event)
