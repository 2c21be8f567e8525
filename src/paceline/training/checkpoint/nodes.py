"""Checkpoints of decentralized runs: in the folder of a step, one folder for each node.

The folder itself is a checkpoint of the mean model, and has the hash of each node's manifest.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import CheckpointError
from paceline.core.logs import logger_of
from paceline.core.protocol import WorkerId
from paceline.gossip.job import NodeState
from paceline.learners.base import Learner, Saved, Server
from paceline.training.checkpoint import Checkpoints, Snapshot, flush, put_in_place
from paceline.training.checkpoint.files import MANIFEST, Files, digest, fill

logger = logger_of(__name__)


class NodeSaving:
    """Saves the states of all nodes of a run.

    about: the settings that a resumed run must share with this one.
    """

    def __init__(
        self, checkpoints: Checkpoints, learner: Learner, about: Mapping[str, Any]
    ) -> None:
        self._checkpoints, self._learner, self._about = checkpoints, learner, about
        self._last = -1  # the last step that was saved
        checkpoints.check(learner.server().export())

    def is_due(self, step: int) -> bool:
        return step % self._checkpoints.every == 0

    def save(self, step: int, states: Mapping[WorkerId, NodeState], mean: Server) -> None:
        """Save a checkpoint; log a failure, so that a full disk does not end a run."""
        if step == self._last:
            return
        try:
            self._write(self._checkpoints.folder(step), step, states, mean)
            self._last = step
            logger.info("saved %s", self._checkpoints.place(step))
            self._checkpoints.prune()
        except (CheckpointError, OSError) as error:
            logger.warning("the checkpoint of step %d failed: %s", step, error)

    def _write(
        self, folder: Path, step: int, states: Mapping[WorkerId, NodeState], mean: Server
    ) -> None:
        """Write a checkpoint; a crash at any moment leaves no checkpoint or a complete one."""
        partial, key = folder.with_name(f".{folder.name}.partial"), self._checkpoints.key
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            hashes = {}
            for node, state in states.items():
                server = self._learner.server()
                server.load(state.server)
                own = partial / node
                own.mkdir()
                version = version_of(state)
                snapshot = Snapshot(version, self._about, state.coordinator, state.server, None)
                fill(own, snapshot, server.export(), key)
                hashes[node] = digest(own / MANIFEST)
            snapshot = Snapshot(step, self._about, {"nodes": hashes}, Saved({}, {}), None)
            fill(partial, snapshot, mean.export(), key)
            for file in [*partial.rglob("*"), partial]:
                flush(file)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)  # the disk may be full
            raise
        put_in_place(partial, folder)


def version_of(state: NodeState) -> int:
    """Return the steps that a node has taken."""
    version: int = state.coordinator["ledger"]["state"]["version"]
    return version


def node_files(files: Files, nodes: tuple[WorkerId, ...], key: bytes | None) -> dict[str, Files]:
    """Return the files of each node in a checkpoint, after checking their hashes."""
    hashes = files.data["coordinator"].get("nodes")
    if not isinstance(hashes, dict) or set(hashes) != set(nodes):
        raise CheckpointError(
            f"{files.folder} does not have the nodes {nodes[0]} to {nodes[-1]}; use another "
            "checkpoint, or the graph of the saved run"
        )
    for node in nodes:
        manifest = files.folder / node / MANIFEST
        if not manifest.is_file() or digest(manifest) != hashes[node]:
            raise CheckpointError(
                f"{manifest} is missing or differs from its hash; use another checkpoint"
            )
    return {node: Files(files.folder / node, key) for node in nodes}
