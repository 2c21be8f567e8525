"""What the journals of a decentralized run say of its nodes."""

from __future__ import annotations

import paceline as pl
from paceline.core.protocol import Finished, Start


def offsets(run: pl.Run, node: str) -> list[int]:
    """Return the offsets of a node's finished tasks in its shard."""
    entries = list(run.journals[node])
    tasks = {c.task.id: c.task for e in entries for c in e.commands if isinstance(c, Start)}
    done = [tasks[e.event.task] for e in entries if isinstance(e.event, Finished)]
    return [offset for task in done for _, offset, _ in task.stretches()]
