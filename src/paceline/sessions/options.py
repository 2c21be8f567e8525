"""The settings of a run that processes join, from several sides: `paceline serve`, each session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from paceline.core.policy import Policy
from paceline.core.protocol import Prices
from paceline.core.state import describe
from paceline.policies.placement.base import Placement

if TYPE_CHECKING:  # which need torch
    from paceline.codecs.base import Codec
    from paceline.training.checkpoint import Checkpoints

DEFAULT_MOST = 64
"""Workers at a time, if the user names no number."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings that a run has once; None: not given.

    workers: how many must join before training begins, and how many may take part at a time.
    """

    policy: Policy | None = None
    batch_size: int | None = None
    workers: tuple[int, int] | None = None
    steps: int | None = None
    epochs: float | None = None
    seed: int | None = None
    timeout: float | None = None
    journal: str | None = None
    checkpoints: Checkpoints | None = None
    resume: bool | None = None
    prices: Prices | None = None
    placement: Placement | None = None
    codec: Codec | None = None
    model_codec: Codec | None = None

    def merged(self, other: Options) -> Options:
        """Return both together; raise ValueError where they differ."""
        found: dict[str, Any] = {}
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if mine is None:
                found[each.name] = theirs
            elif theirs is not None and _text(mine) != _text(theirs):
                raise ValueError(
                    f"this run has {each.name}={_text(mine)}, and this session asks for "
                    f"{_text(theirs)}; give the same, leave {each.name}= out, or name another run="
                )
        return replace(self, **found)

    def check_unchanged(self, merged: Options) -> None:
        """Raise ValueError if a session gives a setting that the run has begun without."""
        names = [each.name for each in fields(self)]
        if new := [name for name in names if getattr(self, name) != getattr(merged, name)]:
            raise ValueError(
                f"the run has begun without {new[0]}=, and this session gives it; leave it out, "
                "give it in every process, or name another run="
            )


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, int | float | str | tuple) else describe(value)


def workers_given(given: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the least and the most workers; raise ValueError for numbers that cannot be."""
    if given is None:
        return None
    pair = (given, given) if isinstance(given, int) else tuple(given)
    if len(pair) != 2 or not all(isinstance(n, int) for n in pair) or not 1 <= pair[0] <= pair[1]:
        raise ValueError(
            f"workers={given!r}: use a number from 1 on, or (least, most), such as (2, 8)"
        )
    return pair[0], pair[1]


@dataclass(frozen=True)
class Hello:
    """What a client says of itself when it dials in: it must fit the run.

    model: the shape of each trained parameter, by name.
    rules: the optimizer, its schedule and clipping, in words.
    examples: the samples of one epoch.
    """

    model: Mapping[str, tuple[int, ...]]
    rules: Mapping[str, str]
    examples: int
    note: str = ""
    options: Options = field(default_factory=Options)

    def check(self, first: Hello) -> None:
        """Raise ValueError if this client trains another model, or with other rules or data."""
        if dict(self.model) != dict(first.model):
            raise ValueError(
                "this session's model has other parameters than that of the run; start all "
                "processes with the same script, or name another run="
            )
        for name, text in first.rules.items():
            if self.rules.get(name) != text:
                raise ValueError(
                    f"this session has {name}={self.rules.get(name)}, and the run has {text}; "
                    "start all processes with the same script, or name another run="
                )
        if self.examples != first.examples:
            raise ValueError(
                f"this session has {self.examples} samples, and the run has {first.examples}; give "
                "every process the whole dataset: the run decides who computes which samples"
            )
