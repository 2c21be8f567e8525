"""The start of a run: the initial state, or a checkpoint that fits the run."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.errors import CheckpointError
from paceline.core.ledger import Ledger
from paceline.core.logs import logger_of
from paceline.core.protocol import WorkerId
from paceline.gossip.job import NodeState
from paceline.gossip.policy import Gossip
from paceline.learners.base import Server
from paceline.training.changes import (
    OtherRun,
    changed_coordinator,
    changed_server,
    changes_of,
    check_allow,
)
from paceline.training.checkpoint import Checkpoints, Snapshot, Unreachable
from paceline.training.checkpoint.files import Files
from paceline.training.checkpoint.nodes import node_files
from paceline.training.checkpoint.validate import (
    check_coordinator,
    check_engine,
    check_model,
    check_server,
)
from paceline.training.settings import Settings

logger = logger_of(__name__)


@dataclass(frozen=True)
class Start:
    """The start of a run.

    snapshot: the state of training; None: the initial state.
    saved: the place of the newest checkpoint.
    nodes: the states of all nodes of a decentralized run.
    changed: what differs from the settings of the checkpoint.
    """

    snapshot: Snapshot | None = None
    saved: str | None = None
    nodes: Mapping[WorkerId, NodeState] | None = None
    changed: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        return 0 if self.snapshot is None else self.snapshot.step

    @property
    def is_under_way(self) -> bool:
        """Whether restored workers continue their tasks, so that the run waits for no worker."""
        if self.snapshot is None or self.snapshot.engine is None:
            return False
        ledger = Ledger()
        ledger.restore(self.snapshot.coordinator["ledger"])
        return ledger.next_task > 0

    def server(self, settings: Settings) -> Server:
        """Make a server with the model of the snapshot, or with the initial one."""
        server = settings.server()
        if self.snapshot is not None:
            server.load(self.snapshot.server)
        return server


def restore(
    settings: Settings,
    path: Path | str | Checkpoints,
    missing_ok: bool,
    allow: Collection[str] = (),
) -> Start | None:
    """Return the start at a checkpoint, or at the newest valid checkpoint in a folder.

    Return None if there is no checkpoint and `missing_ok` is true.
    allow: the settings that may differ from the saved ones.
    """
    allowed = check_allow(allow)
    saves = _saves_at(settings.given.checkpoints, path)
    found = saves.found()
    if not found and missing_ok:
        return None
    if not found:
        raise CheckpointError(
            f"no checkpoint at {saves.path}: no step-… folder with a manifest; to start a new run "
            "in that case, use resume(…, missing_ok=True)"
        )
    refused = []
    for place in found:
        try:
            with saves.fetched(place) as folder:
                if isinstance(settings.policy, Gossip):
                    return _checked_nodes(
                        settings, settings.policy, place, folder, saves.key, allowed
                    )
                start = _checked(settings, place, folder, saves.key, allowed)
            if getattr(settings.learner, "keeps_inner_state", False):
                logger.warning(
                    "%s has no state of the workers' inner optimizers: each begins with a new one",
                    place,
                )
            elif any(work.overlap for work in settings.policy.works()):
                logger.warning(
                    "%s has no models of workers in mid-round: with overlap=True, each begins from "
                    "the run's model, on another trajectory",
                    place,
                )
            return start
        except (OtherRun, Unreachable):
            raise
        except CheckpointError as error:
            if found == [str(saves.path)]:
                raise
            refused.append(str(error))
            logger.warning("%s is skipped: %s", place, error)
    raise CheckpointError(f"no checkpoint at {saves.path} is usable: {'; '.join(refused)}")


def _saves_at(known: Checkpoints | None, path: Path | str | Checkpoints) -> Checkpoints:
    """Return the checkpoints at a path, with the known options and key if it is inside theirs."""
    if isinstance(path, Checkpoints):
        return path
    if known is not None and f"{path}/".startswith(f"{known.path}/"):
        return replace(known, path=path)
    return Checkpoints(path)


def _checked(
    settings: Settings, place: str, folder: Path, key: bytes | None, allow: frozenset[str]
) -> Start:
    """Return the start at a checkpoint; refuse a state that does not fit the settings."""
    with _refusing(place):
        files = Files(folder, key)
        changes = changes_of(settings, place, files.data, allow)
        same_policy = all(change.name != "policy" for change in changes)
        check_coordinator(
            settings.policy if same_policy else None, settings.learner.batch_size, files
        )
        check_server(settings.server(), files, of_same_rules="optimizer" not in allow)
        snapshot, told = files.snapshot(), [str(change) for change in changes]
        if "optimizer" in allow:
            state, more = changed_server(settings, snapshot, changes)
            snapshot, told = replace(snapshot, server=state), [*told, *more]
        if told:
            state_of_all = changed_coordinator(settings, place, snapshot, changes)
            snapshot = replace(snapshot, coordinator=state_of_all, engine=None)
            logger.info("resumed at step %d with %s", snapshot.step, "; ".join(told))
        server = settings.server()
        server.load(snapshot.server)
        check_model(server, files)
        if not settings.engine.is_exact:  # work in flight is handed out again
            snapshot = replace(snapshot, engine=None)
        if snapshot.engine is not None:
            _compare_engine(settings, snapshot, server, files)
    return Start(snapshot, place, changed=tuple(told))


@contextmanager
def _refusing(place: str) -> Iterator[None]:
    """Refuse a state that fails anywhere, as a forged one may."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{place} does not fit this run: {why}; use another checkpoint"
        ) from error


def _checked_nodes(
    settings: Settings,
    policy: Gossip,
    place: str,
    folder: Path,
    key: bytes | None,
    allow: frozenset[str],
) -> Start:
    """Return the states of all nodes; refuse a state that does not fit the settings."""
    with _refusing(place):
        files = Files(folder, key)
        changes_of(settings, place, files.data, allow)
        states: dict[WorkerId, NodeState] = {}
        for node, own in node_files(files, policy.graph.nodes, key).items():
            check_coordinator(policy, settings.learner.batch_size, own)
            check_server(settings.server(), own)
            snapshot, server = own.snapshot(), settings.server()
            server.load(snapshot.server)
            check_model(server, own)
            states[node] = NodeState(snapshot.server, snapshot.coordinator)
    return Start(files.snapshot(), place, states)


def _compare_engine(settings: Settings, snapshot: Snapshot, server: Server, files: Files) -> None:
    """Open a copy of the engine with the saved state; refuse it if the copy saves another."""
    assert snapshot.engine is not None
    at = Ledger()
    at.version = snapshot.step
    job = replace(settings.job(server, frozenset(), at), skip_limit=0)
    engines = [copy.copy(settings.engine), copy.copy(settings.engine)]
    for engine, saved in zip(engines, (None, snapshot.engine), strict=True):
        engine.open(job, saved)
    fresh, restored = (engine.save() for engine in engines)
    assert fresh is not None and restored is not None
    check_engine(fresh, restored, files)
