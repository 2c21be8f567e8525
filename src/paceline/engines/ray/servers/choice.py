"""How many servers keep the model of a job, and what they cannot do."""

from __future__ import annotations

from typing import Literal, TypeAlias

from paceline.engines.base import Job

Servers: TypeAlias = 'Literal["driver", "spread"] | int | None'
"""The processes that keep the model: see `Ray`."""

SPREAD_BYTES = 2**20
"""From this size on, servers keep the model if workers are on several nodes; see docs/scale.md."""


CHUNK_BYTES = 2**18
"""The least mean length of a slice if each server has several of them; see docs/design.md."""
MOST_CHUNKS = 4


def server_count(given: Servers, job: Job, nodes: int, sum_on_nodes: bool = False) -> int:
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
    if count and sum_on_nodes and job.codec is not None:
        raise ValueError(
            f"sum_on_nodes=True with codec={job.codec}: encoded results cannot be added up before "
            "they are sent; use one of the two"
        )
    if count:
        job.server.recipe((0, 1))  # raises before the start if the optimizer cannot be cut
    return count


def chunk_count(model_bytes: int, servers: int, direct: bool) -> int:
    """Return the number of chunks in which a step passes through the servers.

    direct: whether slices go from process to process. In Ray's stores every slice has a cost.
    """
    fitting = model_bytes // (servers * CHUNK_BYTES) if direct else 1
    return max(1, min(MOST_CHUNKS, fitting))


def _wanted(given: Servers, job: Job, nodes: int) -> int:
    if given is None:
        given = "spread" if job.learner.message_bytes >= SPREAD_BYTES and nodes > 1 else "driver"
    if given == "driver":
        return 0
    return nodes if given == "spread" else given


def _only_driver(job: Job) -> str | None:
    """Return why servers cannot keep the model of a job."""
    if job.codec is None and job.model_codec is None:
        return None  # without torch
    from paceline.codecs.base import Elementwise, TwoEnded

    if job.model_codec is not None and not isinstance(job.model_codec, Elementwise):
        return (
            f"model_codec={job.model_codec}: with servers a model travels as its values; use "
            "BFloat16() or Half(), or Ray(servers='driver') with this codec"
        )
    if isinstance(job.codec, TwoEnded):
        return (
            f"codec={job.codec}: servers see the results that a step uses, and would miss "
            "the others' messages; use Ray(servers='driver') with it, or another codec"
        )
    return None
