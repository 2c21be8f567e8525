"""Accuracy against bytes, decentralized: 8 nodes in a ring, and a central coordinator beside them.

An MLP trains in simulated time with real arithmetic, on handwritten digits (`--quick`) or on
Fashion-MNIST. Each node has its own pace: a step takes 0.9 s plus an exponential tenth. Accuracy is
reported for the mean of all models, for single models on average, and for the worst model. There
are two controls: no communication (models are averaged once, at the end), and shards sorted by
label. Bytes are the sum over all nodes and servers. All methods use the same number of samples.

Every method, controls included, gets the same number of trials of its learning rate and of its own
knob, for each kind of shards (_tuning.py). A quick run has no trials.

    python benchmarks/messages.py --only gossip [--quick]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import paceline as pl
from _report import Lines, interval, told
from _tuning import SEED, Trial, Tuned, tune
from messages_star import AVERAGE, KINDS, NESTEROV, Task, digits, fashion, pool
from paceline.codecs.base import Codec
from paceline.core.policy import Policy
from paceline.gossip.metrics import GossipMeter
from paceline.learners.optimize import MakeOptimizer

NODES = 8
REFERENCE, DENSE = "D-PSGD", "a central coordinator, dense"
BOUNDS = {"points": 0.5, "bytes_saved": 0.9, "bytes_saved_top_k": 0.97, "bytes_saved_sorted": 0.6}
CONTROL = "no communication"
EVENT_TOP = "EventGraD, top 10 %"  # as published: of each tensor


@dataclass(frozen=True)
class Method:
    """The settings of a run."""

    policy: Policy = field(default_factory=pl.sync)
    codec: Codec | None = None
    model_codec: Codec | None = None
    outer: MakeOptimizer | None = None
    momentum: float = 0.9
    lr: float = 1.0  # times that of the dense method


KNOBS = {  # beside the usual value of `methods`
    "EventGraD": (0.9, 0.97),  # its horizon
    EVENT_TOP: (0.9, 0.97),
    "ours, int8": (0.025, 0.1),  # thresholds
    "ours, top 10 %": (0.1, 0.4),
    "ours, top 10 % + int8": (0.1, 0.4),
    "CHOCO, top 10 %": (0.2, 0.6),  # gamma
    "SPARQ, top 10 %, 5 local steps": (0.2, 1.0),  # a threshold
}


def methods(
    steps: int,
    scales: tuple[float, float] = (0.05, 0.2),
    knob: float | None = None,
    sizes: tuple[int, ...] | None = None,
) -> dict[str, Method]:
    """Return all methods, for runs of `steps` steps per node.

    scales: of the trigger's threshold, with int8 and with top 10 % + int8.
    knob: the value for a method of KNOBS; None: the usual one.
    sizes: of the model's tensors.
    """
    ring, difference, change, top = (
        pl.gossip.ring(NODES),
        pl.gossip.Difference,
        pl.gossip.OnChange,
        pl.codecs.TopK,
    )
    gossip = partial(pl.gossip.Gossip, ring)
    return {
        REFERENCE: Method(gossip(pl.gossip.Averaging())),
        CONTROL: Method(pl.local_sgd(steps), outer=AVERAGE),
        "EventGraD": Method(gossip(pl.gossip.Averaging(), pl.gossip.EventGrad(knob or 1.0))),
        EVENT_TOP: Method(
            gossip(pl.gossip.Averaging(), pl.gossip.EventGrad(knob or 1.0)), top(0.1, sizes)
        ),
        "ours, int8, at every step": Method(gossip(difference(1.0)), pl.codecs.Int8()),
        "ours, int8": Method(
            gossip(difference(1.0), change(knob or scales[0], every=100)), pl.codecs.Int8()
        ),
        "ours, top 10 %": Method(
            gossip(difference(0.4), change(knob or scales[1], every=100)), top(0.1)
        ),
        "ours, top 10 % + int8": Method(
            gossip(difference(0.4), change(knob or scales[1], every=100)),
            pl.codecs.Chain(top(0.1), pl.codecs.Int8()),
        ),
        "CHOCO, top 10 %": Method(gossip(difference(knob or 0.4)), top(0.1)),
        "SPARQ, top 10 %, 5 local steps": Method(
            gossip(difference(0.4), change(knob or 0.5), local_steps=5), top(0.1)
        ),
        DENSE: Method(),
        "a central coordinator, top 1 % + int8, feedback": Method(
            codec=pl.codecs.Feedback(pl.codecs.Chain(top(0.01), pl.codecs.Int8())),
            model_codec=top(0.1), momentum=0.0, lr=8.0,
        ),
        "DiLoCo, 10 local steps, int8": Method(
            pl.local_sgd(10), pl.codecs.Int8(), pl.codecs.Int8(), NESTEROV
        ),
    }  # fmt: skip


QUICK = (REFERENCE, CONTROL, "ours, int8, at every step", "ours, top 10 % + int8")
ARMS = (
    *(REFERENCE, CONTROL, "EventGraD", EVENT_TOP, "ours, int8, at every step"),
    *("ours, top 10 %", "ours, top 10 % + int8"),
    *("CHOCO, top 10 %", "SPARQ, top 10 %, 5 local steps", DENSE),
)


def run(make: Callable[[], Task], trial: Trial, kind: str, seed: int) -> dict[str, float]:
    """Train once; a pool calls this in its own process."""
    task = make()
    sizes = tuple(parameter.numel() for parameter in task.model().parameters())
    method = methods(task.steps, task.scales, trial.knob, sizes)[trial.arm]
    torch.manual_seed(seed)
    lr = task.lr * method.lr * trial.rate
    sgd = partial(torch.optim.SGD, lr=lr, momentum=method.momentum)
    learner = pl.TorchLearner(
        task.model(), task.loss, sgd, task.train, task.batch, outer=method.outer
    )
    parts = pl.partition.by_label(task.labels, NODES) if kind == "sorted" else (
        pl.partition.stratified(task.labels, NODES, seed=seed)
    )  # fmt: skip
    made = pl.Trainer(
        learner, method.policy, pl.Simulator(NODES, pl.delays.ShiftedExponential(0.9, 0.1)),
        seed=seed, progress=False, codec=method.codec, model_codec=method.model_codec,
        placement=pl.policies.Placed(parts, move=False),
    )  # fmt: skip
    local = max((work.steps for work in method.policy.works()), default=1)
    result = made.fit(steps=max(task.steps // local, 1))
    each = [task.accuracy(model) for model in result.models.values()]
    sent = result.meter.up_bytes
    if isinstance(result.meter, GossipMeter):
        messages = float(result.meter.tensors_sent)
    else:
        tensors = sum(1 for p in task.model().parameters())
        sent += result.meter.down_bytes
        messages = float(2 * result.meter.started * tensors)
    return {
        "mean model": task.accuracy(result.model), "mean": statistics.mean(each),
        "worst": min(each), "bytes": float(sent), "messages": messages,
    }  # fmt: skip


def tune_arms(
    runs: Executor, make: Callable[[], Task], names: Sequence[str], kind: str
) -> dict[str, Tuned]:
    """Return the settings of each method with the highest accuracy of the mean model."""

    def scores(trials: Sequence[Trial]) -> list[float]:
        coming = [runs.submit(run, make, each, kind, SEED) for each in trials]
        return [one.result()["mean model"] for one in coming]

    return tune(names, scores, KNOBS)


def compare(
    make: Callable[[], Task], names: Sequence[str], seeds: Sequence[int], tuned: bool
) -> dict[str, Any]:
    """Train by each method on both kinds of shards; print each row as it completes."""
    figures: dict[str, Any] = {}
    wide = ["mean model", "mean", "worst"]
    with pool() as runs:
        chosen = {kind: tune_arms(runs, make, names, kind) for kind in KINDS if tuned}
        coming: dict[str, dict[str, list[Future[dict[str, float]]]]] = {
            name: {
                kind: [
                    runs.submit(
                        run, make, chosen[kind][name].best if tuned else Trial(name), kind, seed
                    )
                    for seed in seeds
                ]
                for kind in KINDS
            }
            for name in names
        }
        lines = Lines(["8 nodes", *wide, "sorted:", "mean", "worst", "bytes saved", "messages"], 37)
        for name, kinds in coming.items():
            found = {kind: [one.result() for one in each] for kind, each in kinds.items()}
            figures[name] = {
                kind: {key: round(statistics.mean(one[key] for one in each), 2) for key in each[0]}
                for kind, each in found.items()
            }
            for kind, each in figures[name].items():
                reference = figures[REFERENCE][kind]
                each["saved"] = round(1 - each["bytes"] / reference["bytes"], 4)
                each["messages_saved"] = round(1 - each["messages"] / reference["messages"], 4)
                if len(seeds) > 1:
                    each |= {
                        f"{key} half": round(interval([one[key] for one in found[kind]])[1], 2)
                        for key in wide
                    }
                each |= chosen[kind][name].report() if tuned else {}
            cells = [told([one[key] for one in found[kind]]) for kind in KINDS for key in wide]
            both = [figures[name][kind] for kind in KINDS]
            lines.add([
                name, *cells,
                ", ".join(f"{each['saved']:.1%}" for each in both),
                ", ".join(f"{each['messages_saved']:.0%}" for each in both),
            ])  # fmt: skip
    return figures


def measure(quick: bool, only: Sequence[str] | None = None) -> dict[str, Any]:
    make, seeds = (digits, [0]) if quick else (fashion, [0, 1, 2])
    names = only or (QUICK if quick else ARMS)
    name = "digits" if quick else "Fashion-MNIST"
    print(f"\ngossip: {name}, {make().steps} steps, {len(seeds)} seeds", flush=True)
    return compare(make, names, seeds, tuned=not quick)


def saved(
    figures: dict[str, Any], kind: str, only: str = "", points: float = BOUNDS["points"]
) -> float:
    """Return the largest fraction of bytes that one of our methods saves.

    It counts methods whose mean model is within `points` of the accuracy of D-PSGD.
    """
    reference = figures[REFERENCE][kind]
    good = [
        f[kind]["saved"]
        for name, f in figures.items()
        if name.startswith("ours") and only in name
        and f[kind]["mean model"] >= reference["mean model"] - points
    ]  # fmt: skip
    return max(good, default=0.0)


def holds(figures: dict[str, Any]) -> bool:
    """Return whether our methods reach the bounds, and the control is clearly worse."""
    reference, control = figures[REFERENCE]["sorted"], figures[CONTROL]["sorted"]
    return (
        saved(figures, "mixed") >= BOUNDS["bytes_saved"]
        and saved(figures, "mixed", "top") >= BOUNDS["bytes_saved_top_k"]
        and saved(figures, "sorted") >= BOUNDS["bytes_saved_sorted"]
        and control["mean model"] < reference["mean model"] - 10
    )
