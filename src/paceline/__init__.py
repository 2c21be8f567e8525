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
from paceline.policies.wrappers import MinWorkers, Until
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
    "Chain": "paceline.codecs.chain",
}

__all__ = [
    "KL",
    "LCB",
    "Advice",
    "Allocate",
    "Always",
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
    "PolicyError",
    "Prices",
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
    "Thompson",
    "Timing",
    "TopK",
    "TorchLearner",
    "Trace",
    "Trainer",
    "TrustRatio",
    "Until",
    "Work",
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
    "hierarchical",
    "k_async",
    "k_sync",
    "local_sgd",
    "mean",
    "partition",
    "random_regular",
    "rennala",
    "replay",
    "ring",
    "ringmaster",
    "sync",
    "torus",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
