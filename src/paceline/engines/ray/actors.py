"""The actors of workers and servers: their options, and the room that they need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ray

from paceline.engines.kinds import Fleet, Kind
from paceline.engines.ray.reclaimed import Reclaimed
from paceline.engines.ray.worker import Worker

_ROUNDING = 1e-6  # of sums of CPUs


def make_workers(
    fleet: Fleet, gpus: Mapping[str, float], fixed: bool, actor: type = Worker
) -> Callable[[str], Any]:
    """Return a function that makes a worker's actor; raise if a fixed cluster lacks room."""
    size = len(fleet.workers)
    unused = ray.available_resources().get("CPU", 0.0)
    usual = min(1.0, int(unused / size * 1000) / 1000)
    if fixed:  # a cluster that will not grow
        _check_room(fleet, gpus, usual, ray.cluster_resources())
    made = actor_class(actor, scheduling_strategy="SPREAD")

    def make(name: str) -> Any:
        options = _options(fleet.kinds[name], usual)
        given: dict[str, Any] = {"gpus": gpus[name]}
        if issubclass(actor, Worker):
            given["reclaimed"] = partial(Reclaimed, fleet.kinds[name].cloud)
        return made.options(num_gpus=gpus[name], **options).remote(**given)

    return make


def _options(kind: Kind, cpus: float) -> dict[str, Any]:
    """Return the options of the actors of a kind, which may have no CPUs of its own."""
    wished = {
        "resources": dict(kind.resources),
        "label_selector": dict(kind.labels),
        "accelerator_type": kind.accelerator_type,
        "runtime_env": None if kind.runtime_env is None else dict(kind.runtime_env),
    }
    cpus = cpus if kind.cpus is None else kind.cpus
    return {"num_cpus": cpus, **{name: value for name, value in wished.items() if value}}


def _check_room(
    fleet: Fleet, gpus: Mapping[str, float], cpus: float, there: Mapping[str, float]
) -> None:
    """Raise if a cluster has no room for the workers that training begins with."""
    names = fleet.required()
    size = max(len(names), 1)
    wanted: defaultdict[str, float] = defaultdict(float)
    for name in names:
        kind = fleet.kinds[name]
        wanted["CPU"] += cpus if kind.cpus is None else kind.cpus
        wanted["GPU"] += gpus[name]
        for resource, amount in kind.resources.items():
            wanted[resource] += amount
    room = there.get("CPU", 0.0)
    if (need := wanted.pop("CPU", 0.0)) > room + _ROUNDING:
        raise ValueError(
            f"{size} workers with {need / size:g} CPUs each need {need:g}, and "
            f"this machine has {room:g}; use {room / size:.3g} or less"
        )
    room = there.get("GPU", 0.0)
    if (need := wanted.pop("GPU", 0.0)) > room:
        raise ValueError(
            f"{size} workers need {need:g} GPUs, and Ray sees {room:g} on this machine; use "
            f"gpus={room / size:.3g} or less, fewer workers, or "
            'TorchLearner(device="auto") to compute on the CPU where there is no GPU'
        )
    for name, need in wanted.items():
        if need > there.get(name, 0.0):
            raise ValueError(
                f"the fleet needs {need:g} of the resource {name}, and the Ray of this machine "
                f"has {there.get(name, 0.0):g}; start Ray on machines that have it, and give "
                'address="auto"'
            )


def actor_class(kind: type, **options: Any) -> Any:
    """Return the actor class of a worker or a server. Ray's own restarts and retries are off: they
    would apply a result twice or hide a fault. So are its task events, which cost CPU with every
    call: the journal has them all."""
    return ray.remote(
        enable_task_events=False,
        concurrency_groups={"control": 1, "report": 1, "notices": 1, "sums": 1, "copies": 4},
        max_restarts=0,
        max_task_retries=0,
        **options,
    )(kind)
