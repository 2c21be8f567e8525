"""What a codec does to a forecast: the length of its messages, and its effect on the steps."""

from __future__ import annotations

from dataclasses import replace
from math import isnan, nan
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.state import describe
from paceline.planner.measure.profile import Profile

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec


def unknown_of(profile: Profile, codec: Codec | None) -> str:
    """Return why the steps to a loss cannot be forecast; "" if they can."""
    if profile.unknown or codec is None or not isnan(_kept(codec)):
        return profile.unknown
    from paceline.codecs.lazy import Lazy
    from paceline.codecs.triggers import Always

    text = f"the effect of {describe(codec)} on accuracy is unknown"
    if isinstance(codec, Lazy) and not isinstance(codec.trigger, Always):
        text += ", and each message counts as sent, so its time and bytes are upper bounds"
    return text


def shrinkage(codec: Codec | None, profile: Profile) -> tuple[float, float]:
    """Return the relative size of encoded results, and the share of the numbers that is sent.

    The share is nan if the effect of the codec on accuracy is unknown.
    """
    if codec is None:
        return 1.0, 1.0
    surface = profile.surface
    parameters = profile.message_bytes // 4 if surface is None else surface.parameters
    size = min(max(parameters, 1), 100_000)
    width = profile.message_bytes / max(parameters, 1) or 4.0  # bytes of an unencoded number
    return _length(codec, size, width) / (size * width), _kept(codec)


def _length(codec: Codec, size: int, width: float) -> float:
    """Return the bytes of an encoded result; a trigger is taken to fire always."""
    from paceline.codecs.lazy import Lazy
    from paceline.codecs.triggers import Always
    from paceline.codecs.uplink import Uplink

    if isinstance(codec, Lazy):
        codec = replace(codec, trigger=Always())
    kind = np.float64 if width == np.dtype(np.float64).itemsize else np.float32
    noise = np.random.Generator(np.random.PCG64(0)).standard_normal(size).astype(kind)
    return Uplink(codec, size).send(noise, 0, 1.0, [(0, size)])[0].nbytes


def _kept(codec: Codec) -> float:
    from paceline.codecs.feedback import Feedback
    from paceline.codecs.quantize import BFloat16, Half, Int8
    from paceline.codecs.sparse import TopK

    match codec:
        case Half() | BFloat16() | Int8() | Feedback(codec=Half() | BFloat16() | Int8()):
            return 1.0
        case Feedback(codec=TopK(fraction=fraction)):
            return float(fraction)
    return nan
