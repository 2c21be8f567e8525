"""Codecs of the arms that send few numbers, as in sparse_local.py: of results, and of models."""

from __future__ import annotations

from typing import Any

from paceline.codecs import Chain, Feedback, Int8, TopK, TwoBit

_MODELS = Chain(TopK(0.06), TwoBit())
CODECS: dict[str, tuple[Any, Any]] = {
    "sync + top 1 %": (Feedback(Chain(TopK(0.01), Int8())), _MODELS),
    "local_sgd + few numbers": (Feedback(Chain(TopK(0.02), TwoBit()), decay=0.95), _MODELS),
}
