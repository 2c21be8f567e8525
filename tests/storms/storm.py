"""Whole runs in bad weather, with what must hold checked after everything that happens.

`play(seed)` draws a policy, a fleet and a weather, trains under it with checkpoints, kills the
driver now and then and resumes, lets the weather calm down, and has the run end. Whatever breaks a
promise raises `Violation`, with the one command that shows it again.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from math import inf
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

import paceline.training.checkpoint as checkpoint
from paceline.codecs.quantize import BFloat16
from paceline.core.copies import samples_of
from paceline.core.errors import ServersLost, SlicesLost
from paceline.core.journal import Entry, Header, read_entries, read_header
from paceline.core.protocol import Command, Event, Finished, Start, Step, WorkerId
from paceline.engines.base import Job
from paceline.engines.checks import KNOWN
from paceline.engines.ray.job import RayJob, Timeouts
from paceline.engines.ray.pool import Member, Pool
from paceline.engines.ray.reducer import DriverReducer
from paceline.engines.ray.servers.reducer import ShardedReducer
from paceline.engines.ray.worker import Answer, Token
from paceline.learners.base import Array, Server
from paceline.learners.robust import RobustServer
from paceline.policies.backups import Backups
from paceline.report.callbacks import Callback, Progress
from paceline.training.checkpoint import Checkpoints
from paceline.training.run import Run
from paceline.training.trainer import Trainer
from tests.storms.cases import Case, case_of
from tests.storms.processes import JOINS_IN, POISON, RAISED
from tests.storms.serial import History, Places, serial
from tests.storms.simulated import SimulatedRay
from tests.storms.weather import DriverKilled, Weather, World

TIMEOUT = 20.0
"""Seconds of virtual time that a task may take."""
_STEPS = 48  # in bad weather
_CALM = 8  # and after it
_TERM = "terminated by SIGTERM"
_MOST = 60_000  # things that happen in one run; more of them are a loop without progress


Lost: TypeAlias = Callable[[ServersLost], None]


class Violation(AssertionError):
    """A promise is broken."""


@dataclass
class Outcome:
    """What a storm was like."""

    case: Case
    weather: Weather
    faults: Counter[str] = field(default_factory=Counter)
    kills: int = 0  # of the driver
    events: int = 0
    seconds: float = 0.0  # of virtual time
    servers_lost: int = 0  # times that the model had to be taken from a checkpoint
    returned: int = 0  # nodes of a decentralized run that joined again


def play(seed: int, folder: Path, only: str | Case | None = None) -> Outcome:
    """Train through a storm; raise `Violation` if a promise is broken.

    folder: an empty one, for checkpoints and journals.
    only: a case of your own, or the name of one; by default any.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    case = case_of(rng) if not isinstance(only, Case) else only
    while isinstance(only, str) and case.name != only:
        case = case_of(rng)
    weather = Weather.of(rng, case.workers - case.needs, case.nodes)
    # By the seed, so that the other storms stay what they were.
    if case.servers and case.down is None and seed % 5 == 0:
        case = replace(case, down=BFloat16())
    if case.servers and case.codec is None and seed % 4 in (1, 2):
        case = replace(case, sum_on_nodes=True)
    world = World(
        seed, weather, case.workers, TIMEOUT, case.nodes, bool(seed % 2), 1 + seed // 2 % 2
    )
    storm = Storm(seed, case, world, folder, rng)
    weather_out(storm)
    return Outcome(
        case, weather, world.faults, storm.kills, world.happened, world.now, storm.servers_lost
    )


class HasEnd(Protocol):
    """A storm of any kind."""

    def run(self) -> None: ...
    def told(self) -> str: ...


def weather_out(storm: HasEnd) -> None:
    """Have a storm happen, without a word in the log; whatever breaks says how to see it again."""
    log = logging.getLogger("paceline")
    level = log.level
    log.setLevel(logging.CRITICAL)  # workers are lost all the time
    try:
        storm.run()
    except Violation as error:
        raise Violation(f"{error}\n{storm.told()}") from error
    except Exception as error:
        raise Violation(f"{type(error).__name__}: {error}\n{storm.told()}") from error
    finally:
        log.setLevel(level)


class Storm:
    """One run, from its start to its end, over as many lives of the driver as it takes."""

    def __init__(
        self, seed: int, case: Case, world: World, folder: Path, rng: random.Random
    ) -> None:
        self.seed, self.case, self.world, self.folder, self.rng = seed, case, world, folder, rng
        self.weather = world.weather
        self.kills = self.servers_lost = self.terms = 0
        self._last_error: ServersLost | None = None
        self.poisoned = False  # whether the user was told of samples that raise everywhere
        self.segments: list[Path] = []
        self.every = rng.randint(2, 9)
        world.most = _MOST

    def told(self) -> str:
        """Say what the storm was, and how to see it again."""
        return (
            f"seed {self.seed}: {self.case.name} on {self.case.workers} workers, "
            f"{self.case.servers} servers and {self.case.nodes} machines, {self.case.policy}, "
            f"{self.weather}; again: python benchmarks/chaos.py --seed {self.seed}"
        )

    def run(self) -> None:
        while (run := self._attempt()) is None:
            if self.poisoned:
                return
            self.world.restart()
            self._calm_in_time()
        self._check_end(run)

    def _calm_in_time(self) -> None:
        """End the bad weather if it has ended training too often."""
        if self.kills + self.servers_lost + self.terms > 6:
            self.world.weather = self.world.weather.calm()

    def _attempt(self) -> Run | None:
        """Train until the end; None if the driver was killed on the way."""
        engine = CheckedRay(self.case, self.world, self._lost)
        self.world.terminate = lambda: engine.interrupt(_TERM)
        policy = self.case.policy
        if self.seed % 2:  # tasks are soon overdue, and redone
            policy = Backups(policy, factor=1.0, floor=0.2)
        trainer = Trainer(
            self.case.learner,
            policy,
            engine,
            seed=self.seed,
            callbacks=[_Calm(self.world), _Drains(engine, self.world, self.seed)],
            min_workers=self.case.needs,
            checkpoints=Checkpoints(self.folder / "saved", every=self.every, keep=_STEPS),
            journal=self.folder / "run.jsonl",
            progress=False,
            codec=self.case.codec,
            model_codec=self.case.down,
            robust=self.case.robust,
        )
        before = set(self.folder.glob("*.jsonl"))
        run = None
        try:
            with _torn_writes(self.world):
                trainer.resume(self.folder / "saved", missing_ok=True)
                run = trainer.fit(steps=_STEPS + _CALM)
            engine.check_closed()
        except ServersLost as error:
            self._lost(error)
            engine.check_closed()
        except DriverKilled:
            self.kills += 1
        except RAISED as error:
            require(POISON in str(error), "I13", f"one worker's exception ended the run: {error}")
            engine.check_closed()
            self.poisoned = True
        made = set(self.folder.glob("*.jsonl")) - before
        self.segments += sorted(made, key=lambda path: path.stat().st_mtime_ns)
        if run is not None and run.reason == _TERM:
            saved = self._saved(run.steps).is_dir()
            require(saved, "I6", f"step {run.steps} is not saved after SIGTERM")
            self.terms += 1
            run = None
        if run is None:
            self._tear_journal()
        return run

    def _lost(self, error: ServersLost) -> None:
        """I7: it takes a lost machine, and then a checkpoint helps."""
        if error is self._last_error:
            return
        self._last_error = error
        named = any(all(node in str(error) for node in pair) for pair in self.world.no_routes)
        machines = self.world.faults["node"] + self.world.faults["notice"]
        lost = machines > 0 and isinstance(error, SlicesLost)
        require(lost or named, "I7", f"processes alone were lost: {error}")
        self.world.no_routes.clear()  # as its reader would see to
        self.servers_lost += 1
        self._calm_in_time()

    def _tear_journal(self) -> None:
        """Leave the beginning of one more line, as a crash does."""
        if self.segments and self.rng.random() < 0.5:
            line = '{"now":1e9,"event":{"type":"Left","worker":"w0"}}'
            with open(self.segments[-1], "a", encoding="utf-8") as file:
                file.write(line[: self.rng.randint(1, len(line))])

    def _check_end(self, run: Run) -> None:
        steps = _STEPS + _CALM
        require(run.steps == steps, "I7", f"ended after {run.steps} of {steps} steps: {run.reason}")
        require(bool(np.isfinite(run.model).all()), "I9", f"the model is {run.model}")
        histories = [self._history(path) for path in self.segments]
        self._check_segments(histories, run)
        check_samples(histories, steps)

    def _history(self, path: Path) -> History:
        header = read_header(path)
        entries = list(read_entries(path))
        started = [c.task for e in entries for c in e.commands if isinstance(c, Start)]
        self.world.faults["redone"] += sum(task.copy_of is not None for task in started)
        check_journal(header, entries, self.case)
        server: Server = self.case.learner.server()
        if self.case.robust is not None:
            server = RobustServer(server, self.case.robust)
        if header.state is not None:
            saved = checkpoint.read(self._saved(header.version))
            server.load(saved.server)
        case = self.case
        given = case.learner, server, self.seed, case.exact, case.tiles, case.down
        return serial(header, entries, *given)

    def _saved(self, version: int) -> Path:
        return Checkpoints(self.folder / "saved").folder(version)

    def _check_segments(self, histories: list[History], run: Run) -> None:
        """I5 and I6: done again one after the other, it gives the same bits."""
        if not self.case.exact:
            return
        for before, after in pairwise(histories):
            known = before.models.get(after.began)
            if known is not None:
                same = self._same(known, after.models[after.began])
                require(same, "I6", f"resumed at version {after.began} with another model")
        last = histories[-1].models[max(histories[-1].models)]
        same = self._same(last, run.model)
        require(same, "I5", f"the journal leads to {last}, and training led to {run.model}")

    def _same(self, one: Array, other: Array) -> bool:
        return bool((abs(one - other) <= self.case.tolerance * abs(one)).all())


class CheckedJob(RayJob):
    """Looks at itself after every event."""

    def __init__(self, world: World, workers: int, lost: Lost, *given: Any) -> None:
        super().__init__(*given)
        self._world, self._size, self._tell_lost = world, workers, lost
        self._poisoned: dict[tuple[object, ...], list[tuple[str, str]]] = {}
        self._tokens: dict[int, Token] = {}

    def start_clock(self) -> None:
        """Note from now on the token of each result that the driver takes in."""
        super().start_clock()
        if isinstance(self.reducer, DriverReducer):
            take = self.reducer.accept

            def accept(answer: Answer) -> bool:
                taken = take(answer)
                if taken:
                    self._tokens[answer.token.task] = answer.token
                return taken

            vars(self.reducer)["accept"] = accept

    def next_event(self) -> tuple[float, WorkerId, Event] | None:
        with self._telling():
            found = super().next_event()
        self._world.usual_is_known = len(self._check._norms) >= KNOWN
        self._check_joined()
        most = 8 * self._size + 64
        held, expected = self._held_and_expected()
        reducer = self.reducer
        steps = reducer.machine.steps if isinstance(reducer, ShardedReducer) else None
        sizes = {
            "orders": len(self._orders),
            "events": len(self._events),
            "calls": sum(len(calls) for calls in self._calls._open.values()),
            "held": len(held),
            "expected": len(expected),
            "senders": len(self._senders),
            "steps to take again": len(steps.history.log) if steps else 0,
            "steps to take": len(steps.waiting) if steps else 0,
        }
        for slot in steps.slots if steps else ():
            published = slot.newest.parts[0].ref.future()
            if not published.is_lost() and published.done() and not published.failed():
                part = published.result(timeout=0)
                values = part[0]["values"] if isinstance(part, tuple) else part
                finite = bool(np.isfinite(values).all())
                require(finite, "I9", f"server {slot.server} has published {published}")
        for name, size in sizes.items():
            require(size <= most, "I8", f"{size} {name} for {self._size} workers")
        return found

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell of lost servers, also if the run goes on from a checkpoint by itself."""
        try:
            yield
        except ServersLost as error:
            self._tell_lost(error)
            raise

    def _held_and_expected(self) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
        """Return the results that the reducer holds, and those that it waits for."""
        match self.reducer:
            case ShardedReducer(machine=machine):
                return machine.results.held, machine.results.expected
            case DriverReducer(_results=results, _expected=expected):
                return results._held, expected
        return {}, {}

    def _token(self, task: int) -> Token:
        """Return the token under which a held result came."""
        if isinstance(self.reducer, DriverReducer):
            return self._tokens[task]
        token: Token = self._held_and_expected()[0][task].token
        return token

    def _check_joined(self) -> None:
        """I14: a worker joins soon after there is a machine for it, however late that is."""
        for name, member in self._pool.members.items():
            waits = member.actor.alive and not member.joined and not member.draining
            due = member.actor.due if waits else None
            joins = due is None or self._world.now <= due
            require(joins, "I14", f"{name} had a machine and did not join in {JOINS_IN} s")

    def _failed(self, member: Member, future: Future[Any]) -> bool:
        """I13: samples that raise on two machines end the run, and nothing less does."""
        error = future.exception(timeout=0)
        order = None if member.busy is None else self._orders.get(member.busy.task)
        if not self._pool.is_current(member) or POISON not in str(error) or order is None:
            return super()._failed(member, future)
        assert member.place is not None
        places = self._poisoned.setdefault(samples_of(order.task), [])
        places.append((member.name, member.place.node))
        names, nodes = ({place[i] for place in places} for i in (0, 1))
        try:
            lost = super()._failed(member, future)
        except RAISED:
            elsewhere = len(names) > 1 or len(nodes) > 1
            require(elsewhere, "I13", f"an exception on {names} alone ended the run")
            raise
        require(len(nodes) < 2, "I13", f"the same samples raised on {nodes}, and the run went on")
        return lost

    def execute(self, command: Command) -> None:
        if isinstance(command, Step):
            for id in command.weights:
                token = self._token(id)
                require(token.task == id, "I1", f"{token} is used as task {id}")
                require(token.run == self._run, "I2", f"{token} is of another run")
        with self._telling():
            super().execute(command)
        if isinstance(command, Step):
            finite = bool(np.isfinite(self._job.server.vector).all())
            require(finite, "I9", "a step made the model not finite")

    def _finished(self, member: Member, future: Future[Any]) -> None:
        before = len(self._events)
        super()._finished(member, future)
        told = any(isinstance(event, Finished) for event in list(self._events)[before:])
        alive = self._pool.is_current(member)
        require(not told or alive, "I2", f"a result of a former {member.name} was taken in")


class CheckedRay(SimulatedRay):
    """Runs jobs that look at themselves."""

    def __init__(self, case: Case, world: World, lost: Lost = lambda _: None) -> None:
        self._tell_lost = lost
        servers = case.servers or "driver"
        options: dict[str, Any] = {"start_timeout": 5.0, "respawns": 10**6}
        super().__init__(case.workers, world, servers, sum_on_nodes=case.sum_on_nodes, **options)

    def _make_job(self, job: Job, pool: Pool) -> RayJob:
        timeouts = Timeouts(self._timeout, self._start_timeout)
        given = job, pool, self.fleet, self._calls, self._events, timeouts, None
        return CheckedJob(self.world, self.size, self._tell_lost, *given)

    def check_closed(self) -> None:
        alive = [a.name for a in self.world.actors if a.alive and not a.ending]
        require(not alive and self._pool is None, "I11", f"still there after the end: {alive}")


class _Calm(Callback):
    """Ends the storm after so many steps: then the run has to end too."""

    def __init__(self, world: World) -> None:
        self._world = world

    def stepped(self, progress: Progress) -> None:
        if progress.step == _STEPS:
            self._world.weather = self._world.weather.calm()


class _Drains(Callback):
    """Has a worker drain now and then, in every third storm, or a machine with all on it."""

    def __init__(self, engine: CheckedRay, world: World, seed: int) -> None:
        self._engine, self._world = engine, world
        self._rng = random.Random(seed) if seed % 3 == 0 else None

    def stepped(self, progress: Progress) -> None:
        if self._rng is not None and self._rng.random() < 0.2:
            self._world.faults["drain"] += 1
            self._engine.drain(self._rng.choice(self._engine.workers))
        elif self._rng is not None and self._rng.random() < 0.1:
            self._world.drain_node(self._rng.uniform(2.0, 30.0))


@contextlib.contextmanager
def _torn_writes(world: World) -> Iterator[None]:
    """Have the driver killed in the middle of writing a checkpoint, now and then."""
    written = checkpoint.write

    def write(folder: Path, *given: Any) -> None:
        if not world.strikes("torn"):
            return written(folder, *given)
        left = world.rng.randint(1, 8)

        def flush(path: Path) -> None:
            nonlocal left
            left -= 1
            if not left:
                if path.is_file():
                    content = path.read_bytes()
                    path.write_bytes(content[: world.rng.randint(0, len(content))])
                raise DriverKilled

        original = checkpoint.flush
        checkpoint.flush = flush
        try:
            written(folder, *given)
        finally:
            checkpoint.flush = original

    _put(write)
    try:
        yield
    finally:
        _put(written)


def _put(write: Any) -> None:
    checkpoint.write = write


def require(holds: bool, invariant: str, told: str) -> None:
    """Raise `Violation` if something does not hold."""
    if not holds:
        raise Violation(f"{invariant}: {told}")


# --- what a journal must be like ----------------------------------------------------------------


def check_journal(header: Header, entries: list[Entry], case: Case) -> None:
    """I1, I4, I10: no result is used twice, steps follow each other, none is too stale."""
    tasks: dict[int, int] = {}
    used: set[int] = set()
    version = header.version
    now = 0.0
    for entry in entries:
        require(entry.now >= now, "I4", f"time went from {now} to {entry.now}")
        now = entry.now
        for command in entry.commands:
            task = getattr(command, "task", None)
            if type(command).__name__ == "Start":
                tasks[task.id] = task.version  # type: ignore[union-attr]
            if isinstance(command, Step):
                twice = used & set(command.weights)
                require(not twice, "I1", f"tasks {sorted(twice)} are used twice")
                used |= set() if command.keep else set(command.weights)
                for id in command.weights:
                    require(id in tasks, "I2", f"task {id} was never started in this life")
                    late = version - tasks[id]
                    stale = late <= case.staleness
                    require(stale, "I10", f"task {id} is {late} versions behind")
                version += 1


def check_samples(histories: list[History], steps: int) -> None:
    """I3: each sample that was handed out is used once, or was given up, or is still to be done.

    What a crash took back is left out: of each life of the driver, all after the checkpoint from
    which the next one went on.
    """
    used: dict[int, Places] = {}
    dropped: Places = set()
    for history, following in zip_longest(histories, histories[1:]):
        last = inf if following is None else following.began
        until = inf if following is None else history.last_before(following)
        for version in [v for v in used if v > history.began]:
            del used[version]
        used |= {v: places for v, places in history.used.items() if v <= last}
        dropped |= {p for at, places in history.dropped if at <= until for p in places}
    require(sorted(used) == list(range(1, steps + 1)), "I4", "steps are missing")
    seen: Places = set()
    for version, places in sorted(used.items()):
        again = places & seen
        require(not again, "I3", f"step {version} uses samples {sorted(again)[:5]} again")
        seen |= places
    last_of: dict[int, int] = {}
    for stream, place in seen:
        last_of[stream] = max(last_of.get(stream, 0), place)
    handed_out = {(stream, p) for stream, last in last_of.items() for p in range(last + 1)}
    missing = handed_out - seen - dropped - histories[-1].pending
    require(not missing, "I3", f"samples {sorted(missing)[:5]} were lost")
