"""Trains one PyTorch model on machines that are unequal, unreliable and far apart."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.callbacks import Callback, Live, Progress
    from paceline.checkpoint import CheckpointError, Checkpoints
    from paceline.codecs.chain import Chain
    from paceline.codecs.feedback import DeepGradient, Feedback
    from paceline.codecs.lazy import Lazy
    from paceline.codecs.lowrank import LowRank
    from paceline.codecs.quantize import BFloat16, Half, Int8, Sign
    from paceline.codecs.sparse import RandomK, TopK
    from paceline.core.coordinator import Coordinator, StalledError, replay
    from paceline.core.journal import Journal
    from paceline.core.ledger import PolicyError
    from paceline.core.protocol import Joined, Left, Prices, Work
    from paceline.data import partition
    from paceline.delays.compound import Bursts, Changed, Mixture, PerWorker, Scaled
    from paceline.delays.models import (
        Erlang,
        Exponential,
        Fixed,
        LogNormal,
        Pareto,
        ShiftedExponential,
        Trace,
    )
    from paceline.engines.ray.engine import Ray
    from paceline.engines.ray.preflight import ClusterError, InsecureCluster
    from paceline.engines.simulator import Link, Simulator
    from paceline.learners.arrays import LeastSquares, Logistic, Quadratic, Timing
    from paceline.learners.lightning import lightning_learner
    from paceline.learners.robust import CenteredClip, MultiKrum, TrimmedMean
    from paceline.learners.torch import TorchLearner
    from paceline.learners.transforms import ClipNorm, TrustRatio
    from paceline.live import LiveView
    from paceline.planner.asynchrony import largest_rate
    from paceline.planner.auto import Auto
    from paceline.planner.choose import Plan, plan
    from paceline.planner.coding import Advice, coded
    from paceline.planner.forecast import Forecast, forecast
    from paceline.planner.probe import plain_rate, profile, profile_of, surface_of
    from paceline.planner.profile import Profile, Surface, WorkerProfile
    from paceline.policies.choosers import (
        GrowOnNoise,
        GrowWhenStationary,
        Schedule,
        bound_optimal,
    )
    from paceline.policies.coded import Coded, WrongGradients
    from paceline.policies.deadline import Deadline, deadline
    from paceline.policies.gather import Gather, faded, mean
    from paceline.policies.gossip import Gossip
    from paceline.policies.graphs import (
        Graph,
        complete,
        exponential,
        hierarchical,
        random_regular,
        ring,
        torus,
    )
    from paceline.policies.indices import (
        KL,
        LCB,
        Bounded,
        Greedy,
        Index,
        SubExponential,
        Thompson,
    )
    from paceline.policies.mixing import Averaging, Difference
    from paceline.policies.named import (
        asynchronous,
        ata,
        bandit,
        k_async,
        k_sync,
        local_sgd,
        rennala,
        ringmaster,
        sync,
    )
    from paceline.policies.placed import Placed
    from paceline.policies.placement import BySpeed
    from paceline.policies.selectors import Allocate, Bandit
    from paceline.policies.triggers import Always, EventGrad, EventGradStatic, Lag, OnChange
    from paceline.policies.wrappers import Among, MinWorkers, Until
    from paceline.run import Run
    from paceline.trackers.mlflow import MLflow
    from paceline.trackers.prometheus import Prometheus
    from paceline.trackers.tensorboard import TensorBoard
    from paceline.trackers.wandb import WandB
    from paceline.trainer import Trainer

__version__ = "0.1.0"

# Everything is imported when first used, so that `import paceline` and the command are quick.
_HOMES = {
    "paceline.callbacks": "Callback Live Progress",
    "paceline.checkpoint": "CheckpointError Checkpoints",
    "paceline.codecs.chain": "Chain",
    "paceline.codecs.feedback": "DeepGradient Feedback",
    "paceline.codecs.lazy": "Lazy",
    "paceline.codecs.lowrank": "LowRank",
    "paceline.codecs.quantize": "BFloat16 Half Int8 Sign",
    "paceline.codecs.sparse": "RandomK TopK",
    "paceline.core.coordinator": "Coordinator StalledError replay",
    "paceline.core.journal": "Journal",
    "paceline.core.ledger": "PolicyError",
    "paceline.core.protocol": "Joined Left Prices Work",
    "paceline.delays.compound": "Bursts Changed Mixture PerWorker Scaled",
    "paceline.delays.models": "Erlang Exponential Fixed LogNormal Pareto ShiftedExponential Trace",
    "paceline.engines.ray.engine": "Ray",
    "paceline.engines.ray.preflight": "ClusterError InsecureCluster",
    "paceline.engines.simulator": "Link Simulator",
    "paceline.learners.arrays": "LeastSquares Logistic Quadratic Timing",
    "paceline.learners.robust": "CenteredClip MultiKrum TrimmedMean",
    "paceline.learners.lightning": "lightning_learner",
    "paceline.learners.torch": "TorchLearner",
    "paceline.learners.transforms": "ClipNorm TrustRatio",
    "paceline.live": "LiveView",
    "paceline.planner.asynchrony": "largest_rate",
    "paceline.planner.auto": "Auto",
    "paceline.planner.choose": "Plan plan",
    "paceline.planner.coding": "Advice coded",
    "paceline.planner.forecast": "Forecast forecast",
    "paceline.planner.probe": "plain_rate profile profile_of surface_of",
    "paceline.planner.profile": "Profile Surface WorkerProfile",
    "paceline.policies.choosers": "GrowOnNoise GrowWhenStationary Schedule bound_optimal",
    "paceline.policies.coded": "Coded WrongGradients",
    "paceline.policies.deadline": "Deadline deadline",
    "paceline.policies.gather": "Gather faded mean",
    "paceline.policies.gossip": "Gossip",
    "paceline.policies.graphs": "Graph complete exponential hierarchical random_regular ring torus",
    "paceline.policies.indices": "Bounded Greedy Index KL LCB SubExponential Thompson",
    "paceline.policies.mixing": "Averaging Difference",
    "paceline.policies.named": (
        "asynchronous ata bandit k_async k_sync local_sgd rennala ringmaster sync"
    ),
    "paceline.policies.placed": "Placed",
    "paceline.policies.placement": "BySpeed",
    "paceline.policies.selectors": "Allocate Bandit",
    "paceline.policies.triggers": "Always EventGrad EventGradStatic Lag OnChange",
    "paceline.policies.wrappers": "Among MinWorkers Until",
    "paceline.trackers.mlflow": "MLflow",
    "paceline.trackers.prometheus": "Prometheus",
    "paceline.trackers.tensorboard": "TensorBoard",
    "paceline.trackers.wandb": "WandB",
    "paceline.run": "Run",
    "paceline.trainer": "Trainer",
}
_LAZY = {name: home for home, names in _HOMES.items() for name in names.split()}
_LAZY_MODULES = {"partition": "paceline.data.partition"}

__all__ = [
    "KL",
    "LCB",
    "Advice",
    "Allocate",
    "Always",
    "Among",
    "Auto",
    "Averaging",
    "BFloat16",
    "Bandit",
    "Bounded",
    "Bursts",
    "BySpeed",
    "Callback",
    "CenteredClip",
    "Chain",
    "Changed",
    "CheckpointError",
    "Checkpoints",
    "ClipNorm",
    "ClusterError",
    "Coded",
    "Coordinator",
    "Deadline",
    "DeepGradient",
    "Difference",
    "Erlang",
    "EventGrad",
    "EventGradStatic",
    "Exponential",
    "Feedback",
    "Fixed",
    "Forecast",
    "Gather",
    "Gossip",
    "Graph",
    "Greedy",
    "GrowOnNoise",
    "GrowWhenStationary",
    "Half",
    "Index",
    "InsecureCluster",
    "Int8",
    "Joined",
    "Journal",
    "Lag",
    "Lazy",
    "LeastSquares",
    "Left",
    "Link",
    "Live",
    "LiveView",
    "LogNormal",
    "Logistic",
    "LowRank",
    "MLflow",
    "MinWorkers",
    "Mixture",
    "MultiKrum",
    "OnChange",
    "Pareto",
    "PerWorker",
    "Placed",
    "Plan",
    "PolicyError",
    "Prices",
    "Profile",
    "Progress",
    "Prometheus",
    "Quadratic",
    "RandomK",
    "Ray",
    "Run",
    "Scaled",
    "Schedule",
    "ShiftedExponential",
    "Sign",
    "Simulator",
    "StalledError",
    "SubExponential",
    "Surface",
    "TensorBoard",
    "Thompson",
    "Timing",
    "TopK",
    "TorchLearner",
    "Trace",
    "Trainer",
    "TrimmedMean",
    "TrustRatio",
    "Until",
    "WandB",
    "Work",
    "WorkerProfile",
    "WrongGradients",
    "asynchronous",
    "ata",
    "bandit",
    "bound_optimal",
    "coded",
    "complete",
    "deadline",
    "exponential",
    "faded",
    "forecast",
    "hierarchical",
    "k_async",
    "k_sync",
    "largest_rate",
    "lightning_learner",
    "local_sgd",
    "mean",
    "partition",
    "plain_rate",
    "plan",
    "profile",
    "profile_of",
    "random_regular",
    "rennala",
    "replay",
    "ring",
    "ringmaster",
    "surface_of",
    "sync",
    "torus",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        found = getattr(importlib.import_module(_LAZY[name]), name)
    else:
        module = _LAZY_MODULES.get(name, f"paceline.{name}")
        if name.startswith("_") or importlib.util.find_spec(module) is None:
            raise AttributeError(f"module 'paceline' has no attribute {name!r}")
        found = importlib.import_module(module)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
