"""Codecs of the arms that send few numbers or few bits, also of sparse_local.py."""

from __future__ import annotations

from typing import Any

from paceline.codecs import BFloat16, Chain, Feedback, Int8, TopK, TwoBit

FEW = Feedback(Chain(TopK(0.02), TwoBit()), decay=0.95)  # of changes, as in SparseLoCo
TOP = Feedback(Chain(TopK(0.01), Int8()))  # of gradients
MODELS = Chain(TopK(0.06), TwoBit())
# By arm of peers.py: of results, and of models.
CODECS: dict[str, tuple[Any, Any]] = {
    "sync + top 1 %": (TOP, MODELS),
    "local_sgd + few numbers": (FEW, MODELS),
    "local_sgd + shares + bf16": (BFloat16(), BFloat16()),
}
