"""The pieces of results that meet a slice, however the results were cut."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from paceline.codes.blocks import covering
from paceline.engines.ray.servers.events import Pieces
from paceline.engines.ray.servers.slices import Step
from paceline.learners.base import Span


def pieces_of(step: Step, within: Span) -> Pieces:
    """Return the pieces of a step's results that meet a slice."""
    at: list[list[Span]] = []
    refs: list[Any] = []
    cuts: dict[tuple[int, int], tuple[list[Span], int, int]] = {}
    fitting = True
    for result in step.results:
        m = result.messages
        key = id(result.spans), m
        if key not in cuts:  # one for all results that were cut alike
            first = bisect_right(result.spans, within[0], key=_stop)
            after = first + 1
            while after < len(result.spans) and result.spans[after][0] < within[1]:
                after += 1
            start, stop = covering(within, m)
            found = [covering(span, m) for span in result.spans[first:after]]
            places = [(low - start, high - start) for low, high in found]
            cuts[key] = places, first, after
            fitting = fitting and places == [(0, stop - start)]
        places, first, after = cuts[key]
        at.append(places)
        refs += result.slices[first:after]
    results = [result for result, each in zip(step.results, at, strict=True) for _ in each]
    return Pieces(
        None if fitting else at,
        refs,
        results,
        [result.slices for result in results],
    )


def _stop(span: Span) -> int:
    return span[1]
