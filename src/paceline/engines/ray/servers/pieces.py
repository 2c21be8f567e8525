"""The pieces of results that meet a slice, however the results were cut."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, TypeAlias

from paceline.codes.blocks import covering
from paceline.core.protocol import Coefficients
from paceline.engines.ray.servers.slices import NodeSum, Pieces, Result, Slot, Step
from paceline.learners.base import Span

Entries: TypeAlias = (
    "tuple[list[Coefficients], list[Result], list[list[int]] | None, dict[int, NodeSum]]"
)
"""Weights and results, the groups among them that are added up first, and the sums by place."""


def pieces_of(step: Step, slot: Slot) -> Pieces:
    """Return the pieces of a step's results that meet a slice.

    A sum over a node's results comes in their place, if there is one for this slice.
    """
    within = slot.span
    weights, results, groups, sums = _entries(step, slot.index)
    at: list[list[Span]] = []
    refs: list[Any] = []
    cuts: dict[tuple[int, int], tuple[list[Span], int, int]] = {}
    fitting = True
    for index, result in enumerate(results):
        if index in sums:
            at.append([(0, within[1] - within[0])])
            refs.append(sums[index].sums[slot.index].ref)
            continue
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
    entries = [index for index, each in enumerate(at) for _ in each]
    of = [results[index] for index in entries]
    return Pieces(
        weights,
        None if fitting else at,
        refs,
        of,
        [result.slices for result in of],
        groups,
        {place: sums[index] for place, index in enumerate(entries) if index in sums},
    )


def _entries(step: Step, slot: int) -> Entries:
    """Return what a server adds up for a slot, node by node if the step asks for it."""
    if step.nodes is None:
        return step.weights, step.results, None, {}
    weights: list[Coefficients] = []
    results: list[Result] = []
    groups: list[list[int]] = []
    sums: dict[int, NodeSum] = {}
    for node in step.nodes:
        first = len(results)
        if slot in node.sums:
            sums[first] = node
            weights.append(1.0)
            results.append(step.results[node.members[0]])
        else:
            weights += [step.weights[index] for index in node.members]
            results += [step.results[index] for index in node.members]
        groups.append(list(range(first, len(results))))
    return weights, results, groups, sums


def _stop(span: Span) -> int:
    return span[1]
