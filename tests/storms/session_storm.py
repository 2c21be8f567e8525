"""Whole runs that processes join, in bad weather, with what must hold checked all the time.

`play(seed)` draws a policy, clients and a weather, and trains with the real engine, seats and
trainer. Clients die, leave, are paused and wake up, come late and in too great a number. Their
messages are late, lost or doubled, and the hub is killed. Then the weather calms down, and the run
has to end. A broken promise raises `Violation`, with the command that shows it again.

The promises of other storms hold (see docs/faults.md), and these of seats:

S1   A seat has one client at a time, and a client one seat; a worker's name has one seat.
S2   An answer counts if the client sends it that fetched the call, and still has the seat.
S3   When a seat ends, its calls fail, its client must dial in again, and the engine notices.
S4   A call is fetched once.
S5   A client that left or is silent is removed, and its seat with it.
S6   No client waits while a seat is vacant.
S7   Every client hears of the end of the run.

    python -m tests.storms.session_storm [--seed N] [--storms N] [--first N]
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.coordinator import replay
from paceline.core.journal import read_entries
from paceline.core.protocol import Event, Step, WorkerId
from paceline.engines.base import Job
from paceline.engines.ray.calls import Calls
from paceline.engines.ray.engine import Ray
from paceline.engines.ray.job import RayJob, Timeouts
from paceline.engines.ray.pool import Cluster, Pool
from paceline.policies.named import sync
from paceline.report.callbacks import Callback, Progress
from paceline.sessions.engine import SeatCluster, Sessions
from paceline.training.checkpoint import Checkpoints
from paceline.training.run import Run
from paceline.training.trainer import Trainer
from tests.storms.cases import Case, case_of
from tests.storms.serial import History
from tests.storms.session_clients import ALL_LEFT, Crowd, SimulatedHub
from tests.storms.session_weather import Arena, Rush
from tests.storms.simulated import SimulatedRay
from tests.storms.storm import (
    CheckedJob,
    Outcome,
    Storm,
    Violation,
    check_samples,
    require,
    weather_out,
)
from tests.storms.weather import DriverKilled, Weather, World

TIMEOUT = 20.0
"""Seconds of virtual time that a task may take."""
_STEPS = 16  # in bad weather
_CALM = 3  # and after it
_ENDS_IN = 5.0  # seconds in which a run ends that is told to
_TERM = "ended by its user"
_MOST = 150_000  # things that happen in one run; more of them are a loop without progress
_SYNC_EVERY = 3  # storms: one of so many is under `sync`


@dataclass
class SessionOutcome(Outcome):
    """What a storm was like, with how often the run was ended from outside."""

    ends: int = 0
    same_bits: bool = False  # whether it was compared with an undisturbed run


def play(seed: int, folder: Path) -> SessionOutcome:
    """Train through a storm; raise `Violation` if a promise is broken.

    folder: an empty one, for checkpoints and journals.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    case = _case(rng, seed)
    # With few losses all take part in each step, so that bits can be compared.
    few = case.name == "sync" and case.needs == case.workers
    weather = Rush.drawn(rng, 0.1 if few else 1.0)
    world = Arena(seed, weather, case.workers, TIMEOUT)
    storm = SessionStorm(seed, case, world, folder, rng)
    weather_out(storm)
    told = world.faults, storm.kills, world.happened, world.now
    return SessionOutcome(case, weather, *told, ends=storm.terms, same_bits=storm.same_bits)


def _case(rng: random.Random, seed: int) -> Case:
    if seed % _SYNC_EVERY == 0:
        n = rng.randint(2, 5)
        return Case("sync", sync(), n, rng.choice((1, n)))
    while (case := case_of(rng)).servers:
        pass
    return case


class SessionStorm(Storm):
    """One run that clients join, over as many lives of its hub as it takes."""

    world: Arena

    def __init__(
        self, seed: int, case: Case, world: Arena, folder: Path, rng: random.Random
    ) -> None:
        super().__init__(seed, case, world, folder, rng)
        self.every, self.same_bits = rng.randint(4, 12), False
        world.most = _MOST
        full = case.name == "sync" and case.needs == case.workers
        size = self.size = rng.randint(case.needs + 2 * full, case.workers + 3)
        self.crowd = Crowd(world, size, stay=size if full else rng.randint(case.needs, size))

    def told(self) -> str:
        return (
            f"seed {self.seed}: {self.case.name} on {self.case.workers} seats for {self.size} "
            f"clients, {self.case.policy}, {self.weather}; again: "
            f"python -m tests.storms.session_storm --seed {self.seed}"
        )

    def run(self) -> None:
        while (run := self._attempt()) is None:
            self.crowd.new_hub()
            self.world.new_hub()
            if self.kills + self.terms > 4:
                self.world.weather = self.world.weather.calm()
        self.crowd.end()
        self._check_end(run)

    def _attempt(self) -> Run | None:
        """Train until the end; None if the hub was killed, or told to end the run."""
        hub = self.crowd.hub
        engine = CheckedSessions(self.case, self.world, hub)
        asked: list[float] = []  # when the run was told to end

        def interrupt(reason: str) -> None:
            asked.append(self.world.now)
            engine.interrupt(reason)

        self.world.terminate = lambda: interrupt(_TERM)
        hub.interrupt = interrupt
        trainer = self._trainer(engine, checkpoints=self._checkpoints, journal=self._journal)
        before, run = set(self.folder.glob("*.jsonl")), None
        try:
            trainer.resume(self.folder / "saved", missing_ok=True)
            run = trainer.fit(steps=_STEPS + _CALM)
            engine.check_closed()
        except DriverKilled:
            self.kills += 1
        self.segments += sorted(set(self.folder.glob("*.jsonl")) - before)
        if run is not None:
            again = replay(run.driven_policy, run.journal)
            require(again == run.journal, "I5", "the journal does not replay")
        if run is not None and run.reason in (_TERM, ALL_LEFT):
            saved = self._saved(run.steps).is_dir()
            require(saved, "I6", f"step {run.steps} is not saved after the end")
            late = self.world.now - asked[0]
            require(late <= _ENDS_IN, "I7", f"{run.reason!r} ended the run {late:.0f} s later")
            self.terms += 1
            run = None
        if run is None:
            self._tear_journal()
        return run

    @property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.folder / "saved", every=self.every, keep=_STEPS)

    @property
    def _journal(self) -> Path:
        return self.folder / "run.jsonl"

    def _trainer(self, engine: Ray, **options: Any) -> Trainer:
        case = self.case
        return Trainer(
            case.learner,
            case.policy,
            engine,
            seed=self.seed,
            callbacks=[_Calm(self.world)],
            min_workers=case.needs,
            progress=False,
            codec=case.codec,
            model_codec=case.down,
            robust=case.robust,
            **options,
        )

    def _check_end(self, run: Run) -> None:
        steps = _STEPS + _CALM
        require(run.steps == steps, "I7", f"ended after {run.steps} of {steps} steps: {run.reason}")
        require(bool(np.isfinite(run.model).all()), "I9", f"the model is {run.model}")
        histories = [self._history(path) for path in self.segments]
        self._check_segments(histories, run)
        check_samples(histories, steps)
        if self.case.name == "sync" and not any(history.dropped for history in histories):
            self._check_undisturbed(histories, run)

    def _check_undisturbed(self, histories: list[History], run: Run) -> None:
        """I5: under `sync` each step uses the samples that it uses without faults.

        If all workers took part in each step, the model has the same bits, too.
        """
        batch = self.case.learner.batch_size
        for version, used in histories[-1].used.items():
            due = {(-1, place) for place in range((version - 1) * batch, version * batch)}
            require(used == due, "I5", f"step {version} uses other samples than without faults")
        if any(size != self.case.workers for path in self.segments for size in _sizes(path)):
            return
        world = World(self.seed, Weather(), self.case.workers, TIMEOUT)
        calm = self._trainer(SimulatedRay(self.case.workers, world)).fit(steps=run.steps)
        same = np.array_equal(calm.model, run.model)
        require(same, "I5", f"the model is {run.model}, and without faults {calm.model}")
        self.same_bits = True


def _sizes(path: Path) -> list[int]:
    """Return the number of results of each step in a journal."""
    commands = [command for entry in read_entries(path) for command in entry.commands]
    return [len(command.weights) for command in commands if isinstance(command, Step)]


class _Calm(Callback):
    """Ends the bad weather after so many steps: then the run has to end too."""

    def __init__(self, world: World) -> None:
        self._world = world

    def stepped(self, progress: Progress) -> None:
        if progress.step == _STEPS:
            self._world.weather = self._world.weather.calm()


# --- the engine ----------------------------------------------------------------------------------


class SessionJob(CheckedJob):
    """Looks at itself, and at the seats, after every event."""

    def __init__(self, hub: SimulatedHub, world: World, workers: int, *given: Any) -> None:
        super().__init__(world, workers, lambda _: None, *given)  # no servers are lost
        self._hub = hub
        self._early = 0  # events of clients that came and went before the run began

    def start_clock(self) -> None:
        super().start_clock()
        self._early = len(self._events)

    def next_event(self) -> tuple[float, WorkerId, Event] | None:
        self._hub.seats.check()
        if self._early:
            self._early -= 1
            return RayJob.next_event(self)
        found = super().next_event()
        self._hub.seats.check()
        return found

    def _check_joined(self) -> None:
        """S3: the engine takes no worker for present whose seat has ended."""
        for name, member in self._pool.members.items() if self._world.inbox.empty() else ():
            require(not member.actor.ended, "S3", f"{name} counts as present: {member.actor.ended}")


class SimulatedSeats(SeatCluster):
    """The real cluster of seats, in virtual time."""

    def __init__(self, world: Arena, hub: SimulatedHub) -> None:
        super().__init__(hub.seats)
        self._world = world

    def calls(self) -> Calls:
        return Calls(self._world.inbox, self.clock)

    def clock(self) -> float:
        return self._world.now

    def node(self) -> str:
        return "hub"

    def nodes(self) -> set[str]:
        return {"hub"}


class _Checked(Ray):
    """Makes jobs that look at themselves; `Sessions` takes it for `Ray`."""

    world: Arena
    hub: SimulatedHub

    def _make_job(self, job: Job, pool: Pool) -> RayJob:
        timeouts = Timeouts(self._timeout, self._start_timeout)
        given = job, pool, self.fleet, self._calls, self._events, timeouts, None
        return SessionJob(self.hub, self.world, self.size, *given)


class CheckedSessions(Sessions, _Checked):
    """The real engine on simulated clients."""

    def __init__(self, case: Case, world: Arena, hub: SimulatedHub) -> None:
        self.world, self.hub = world, hub
        super().__init__(case.workers, hub.seats, timeout=TIMEOUT, last=_STEPS + _CALM)
        self._start_timeout = 5.0

    def _make_cluster(self) -> Cluster:
        return SimulatedSeats(self.world, self.hub)

    def check_closed(self) -> None:
        seats = self.hub.seats
        left = [*seats._vacant, *(c for c in seats.clients if seats.name(c) is not None)]
        require(not left and self._pool is None, "I11", f"seats are still there: {left}")


# --- many ----------------------------------------------------------------------------------------


def main() -> None:
    """Play many storms, one after the other, and say what they were like."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seed", type=int, help="play one storm, and nothing else")
    options.add_argument("--storms", type=int, default=1000, help="how many")
    options.add_argument("--first", type=int, default=0, help="the first seed")
    given = options.parse_args()
    first, count = (given.first, given.storms) if given.seed is None else (given.seed, 1)
    begin, faults, broken = time.perf_counter(), Counter[str](), 0
    kills = ends = same = 0
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = play(seed, Path(folder))
            except Violation as violation:
                broken += 1
                print(violation, flush=True)
                continue
        faults += outcome.faults
        kills, ends, same = kills + outcome.kills, ends + outcome.ends, same + outcome.same_bits
    print(f"{count} storms, {broken} violations, {time.perf_counter() - begin:.1f} s")
    print(f"{faults.total()} faults: {dict(faults.most_common())}")
    print(f"{kills} kills of the hub, {ends} early ends, {same} runs bit for bit as undisturbed")


if __name__ == "__main__":
    main()
