"""Trains one PyTorch model on machines that are unequal, unreliable and far apart."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.callbacks import Callback, Progress
from paceline.checkpoint import CheckpointError, Checkpoints
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
from paceline.engines.simulator import Link, Simulator
from paceline.learners.arrays import LeastSquares, Logistic, Quadratic, Timing
from paceline.planner.coding import Advice, coded
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
from paceline.trainer import Run, Trainer

if TYPE_CHECKING:
    from paceline.codecs.chain import Chain
    from paceline.codecs.feedback import DeepGradient, Feedback
    from paceline.codecs.lazy import Lazy
    from paceline.codecs.lowrank import LowRank
    from paceline.codecs.quantize import BFloat16, Half, Int8, Sign
    from paceline.codecs.sparse import RandomK, TopK
    from paceline.engines.ray.engine import Ray
    from paceline.learners.torch import TorchLearner
    from paceline.learners.transforms import ClipNorm, TrustRatio
    from paceline.planner.asynchrony import largest_rate
    from paceline.planner.auto import Auto
    from paceline.planner.choose import Plan, plan
    from paceline.planner.forecast import Forecast, forecast
    from paceline.planner.probe import plain_rate, profile, profile_of, surface_of
    from paceline.planner.profile import Profile, Surface, WorkerProfile

__version__ = "0.1.0"

# Heavy packages are imported when first used, so that `import paceline` is quick.
_LAZY = {
    "Ray": "paceline.engines.ray.engine",
    "TorchLearner": "paceline.learners.torch",
    "ClipNorm": "paceline.learners.transforms",
    "TrustRatio": "paceline.learners.transforms",
    **dict.fromkeys(("TopK", "RandomK"), "paceline.codecs.sparse"),
    **dict.fromkeys(("Int8", "Sign", "Half", "BFloat16"), "paceline.codecs.quantize"),
    **dict.fromkeys(("Feedback", "DeepGradient"), "paceline.codecs.feedback"),
    "Lazy": "paceline.codecs.lazy",
    "LowRank": "paceline.codecs.lowrank",
    "largest_rate": "paceline.planner.asynchrony",
    "Auto": "paceline.planner.auto",
    **dict.fromkeys(("Plan", "plan"), "paceline.planner.choose"),
    **dict.fromkeys(("Forecast", "forecast"), "paceline.planner.forecast"),
    **dict.fromkeys(
        ("plain_rate", "profile", "profile_of", "surface_of"), "paceline.planner.probe"
    ),
    **dict.fromkeys(("Profile", "Surface", "WorkerProfile"), "paceline.planner.profile"),
    "Chain": "paceline.codecs.chain",
}

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
    "Chain",
    "Changed",
    "CheckpointError",
    "Checkpoints",
    "ClipNorm",
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
    "Int8",
    "Joined",
    "Journal",
    "Lag",
    "Lazy",
    "LeastSquares",
    "Left",
    "Link",
    "LogNormal",
    "Logistic",
    "LowRank",
    "MinWorkers",
    "Mixture",
    "OnChange",
    "Pareto",
    "PerWorker",
    "Placed",
    "Plan",
    "PolicyError",
    "Prices",
    "Profile",
    "Progress",
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
    "Thompson",
    "Timing",
    "TopK",
    "TorchLearner",
    "Trace",
    "Trainer",
    "TrustRatio",
    "Until",
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
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
