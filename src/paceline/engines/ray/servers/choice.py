"""How many servers keep the model of a job, and what they cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from paceline.engines.base import Job

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec

Servers: TypeAlias = 'Literal["driver", "spread"] | int | None'
"""The processes that keep the model: see `Ray`."""

SPREAD_BYTES = 2**20
"""From this size on, servers keep the model if workers are on several nodes; see docs/scale.md."""


def server_count(given: Servers, job: Job, nodes: int) -> int:
    """Return the number of servers for workers on some nodes, 0 for the driver alone.

    Raise ValueError if the user wants servers with what only the driver can do.
    """
    count = _wanted(given, job, nodes)
    if count and (why := _only_driver(job)) is not None:
        if given is not None:
            raise ValueError(why)
        return 0
    if count > job.server.layout.size:
        raise ValueError(
            f"{count} servers for a model of {job.server.layout.size} values: use fewer, or "
            "servers='driver'"
        )
    if count:
        job.server.recipe((0, 1))  # raises before the start if the optimizer cannot be cut
    return count


def _wanted(given: Servers, job: Job, nodes: int) -> int:
    if given is None:
        given = "spread" if job.learner.message_bytes >= SPREAD_BYTES and nodes > 1 else "driver"
    if given == "driver":
        return 0
    return nodes if given == "spread" else given


def _only_driver(job: Job) -> str | None:
    """Return why servers cannot keep the model of a job."""
    if job.model_codec is not None:
        return (
            f"model_codec={job.model_codec}: servers publish slices of the model as they "
            "are; use Ray(servers='driver') with it, or leave it out"
        )
    if _is_two_ended(job.codec):
        return (
            f"codec={job.codec}: servers see the results that a step uses, and would miss "
            "the others' messages; use Ray(servers='driver') with it, or another codec"
        )
    return None


def _is_two_ended(codec: Codec | None) -> bool:
    """Return whether a codec needs the receiver to read every message."""
    if codec is None:
        return False
    from paceline.codecs.base import TwoEnded

    return isinstance(codec, TwoEnded)
