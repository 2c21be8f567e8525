"""Where things lie in the flat vector, and how a state is cut along it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline as pl
from paceline.core.protocol import Want
from paceline.learners.base import Direction, Layout, Saved, Span, add_up, statistics

LAYOUTS = st.builds(
    lambda tensors, buffers: Layout(sum(tensors) + buffers, tuple(tensors)),
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
    st.integers(0, 5),
)


@st.composite
def cuts(draw: st.DrawFn, layout: Layout) -> list[Span]:
    """Any cut of the whole vector; some slices may be empty."""
    points = draw(st.lists(st.integers(0, layout.size), max_size=6))
    return list(pairwise([0, *sorted(points), layout.size]))


@st.composite
def layouts_with_two_cuts(draw: st.DrawFn) -> tuple[Layout, list[Span], list[Span]]:
    layout = draw(LAYOUTS)
    return layout, draw(cuts(layout)), draw(cuts(layout))


def whole(layout: Layout) -> Saved:
    """A state in which every number is another."""
    rng = np.random.default_rng(layout.size)
    arrays: dict[str, Any] = {
        "values": rng.normal(size=layout.size).astype(np.float32),
        "previous": rng.normal(size=layout.trained),
    }
    for index, size in enumerate(layout.tensors):
        shape = (2, size // 2) if size % 2 == 0 else (size,)
        arrays[f"optimizer.{index}.exp_avg"] = rng.normal(size=shape)
        arrays[f"optimizer.{index}.step"] = np.array(index + 0.5, dtype=np.float32)
    scalars = {str(index): {"count": 10 + index} for index in range(len(layout.tensors))}
    return Saved(arrays, {"groups": [{"lr": 0.1}], "scalars": scalars})


def owners(layout: Layout) -> list[int]:
    """Of each value, the tensor it belongs to."""
    return [index for index, size in enumerate(layout.tensors) for _ in range(size)]


# --- spans and pieces ----------------------------------------------------------------------------


@given(st.integers(0, 200), st.integers(1, 50))
def test_spans_cover_the_vector_and_the_first_is_half_as_long(size: int, count: int) -> None:
    spans = Layout(size).spans(count)
    assert len(spans) == count
    assert [place for begin, end in spans for place in range(begin, end)] == list(range(size))
    first, *lengths = [end - begin for begin, end in spans]
    if lengths:
        assert 0 <= min(lengths) <= max(lengths) <= min(lengths) + 1
        assert first == 1 or 2 * first <= max(lengths) <= 2 * first + 2
    assert size < count or min([first, *lengths]) >= 1


def test_more_slices_than_values_leave_some_empty() -> None:
    assert Layout(2).spans(4) == [(0, 0), (0, 0), (0, 1), (1, 2)]
    assert Layout(7).spans(1) == [(0, 7)]


@given(LAYOUTS, st.data())
def test_pieces_are_the_tensors_within_a_slice(layout: Layout, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, layout.size))
    end = data.draw(st.integers(begin, layout.size))
    pieces = list(layout.pieces((begin, end)))
    found = [(place, index) for index, start, stop in pieces for place in range(start, stop)]
    expected = [(p, index) for p, index in enumerate(owners(layout)) if begin <= p < end]
    assert found == expected
    assert len({index for index, _, _ in pieces}) == len(pieces)


def test_the_trained_part_is_the_tensors_or_all() -> None:
    assert Layout(9, (2, 3)).trained == 5
    assert Layout(9).trained == 9
    assert list(Layout(9).pieces((0, 9))) == []


# --- cutting a state -----------------------------------------------------------------------------


@settings(deadline=None)
@given(layouts_with_two_cuts())
def test_a_state_cut_and_cut_again_is_whole_at_the_end(
    given: tuple[Layout, list[Span], list[Span]],
) -> None:
    layout, one, other = given
    start = whole(layout)
    all_of_it = (0, layout.size)
    parts = [(span, layout.cut([(all_of_it, start)], span)) for span in one]
    again = [(span, layout.cut(parts, span)) for span in other]
    end = layout.cut(again, all_of_it)
    assert end.arrays.keys() == start.arrays.keys()
    for name, array in start.arrays.items():
        assert end.arrays[name].dtype == array.dtype
        assert np.array_equal(end.arrays[name], array.reshape(-1) if array.ndim else array)
    assert end.data == start.data
    json.dumps(end.data)


@settings(deadline=None)
@given(layouts_with_two_cuts())
def test_a_slice_has_what_lies_in_it_and_nothing_else(
    given: tuple[Layout, list[Span], list[Span]],
) -> None:
    """By whichever way it was cut: from the whole, or from other slices."""
    layout, one, other = given
    start, owner = whole(layout), np.array(owners(layout))
    parts = [(span, layout.cut([((0, layout.size), start)], span)) for span in one]
    for begin, end in other:
        cut = layout.cut(parts, (begin, end))
        expected = {"values": start.arrays["values"][begin:end]}
        if begin < min(end, layout.trained):
            expected["previous"] = start.arrays["previous"][begin:end]
        held = sorted(set(owner[begin:end].tolist()))
        for index in held:
            name, places = f"optimizer.{index}", np.flatnonzero(owner == index)
            average = start.arrays[f"{name}.exp_avg"].reshape(-1)
            expected[f"{name}.exp_avg"] = average[(begin <= places) & (places < end)]
            expected[f"{name}.step"] = start.arrays[f"{name}.step"]
        assert cut.arrays.keys() == expected.keys()
        assert all(np.array_equal(cut.arrays[name], expected[name]) for name in expected)
        assert cut.data["groups"] == start.data["groups"]
        assert cut.data["scalars"] == {str(index): {"count": 10 + index} for index in held}


def test_a_cut_by_hand() -> None:
    layout = Layout(6, (2, 3))
    state = Saved({"values": np.arange(6), "optimizer.1.m": np.array([7, 8, 9])}, {"groups": []})
    left, right = (layout.cut([((0, 6), state)], span) for span in ((0, 3), (3, 6)))
    assert {name: array.tolist() for name, array in left.arrays.items()} == {
        "values": [0, 1, 2],
        "optimizer.1.m": [7],
    }
    assert {name: array.tolist() for name, array in right.arrays.items()} == {
        "values": [3, 4, 5],
        "optimizer.1.m": [8, 9],
    }
    middle = layout.cut([((0, 3), left), ((3, 6), right)], (1, 4))
    assert middle.arrays["values"].tolist() == [1, 2, 3]
    assert middle.arrays["optimizer.1.m"].tolist() == [7, 8]
    assert middle.data == {"groups": []}


def test_a_slice_out_of_one_part_is_not_copied() -> None:
    state = whole(Layout(8, (5,)))
    cut = Layout(8, (5,)).cut([((0, 8), state)], (2, 7))
    for name in ("values", "previous", "optimizer.0.exp_avg"):
        assert np.shares_memory(cut.arrays[name], state.arrays[name])


def test_a_copy_is_out_of_reach() -> None:
    state = Saved({"values": np.zeros(2)}, {"lr": 1.0})
    copy = state.copy()
    state.arrays["values"][:] = 5.0
    assert copy.arrays["values"].tolist() == [0.0, 0.0]
    assert copy.data == {"lr": 1.0}


# --- sums ----------------------------------------------------------------------------------------


def test_sums_add_up_by_name() -> None:
    assert add_up([{"norm": 1.0, "a": 2.0}, {"norm": 3.0}, {}, {"b": -1.0, "a": 0.5}]) == {
        "norm": 4.0,
        "a": 2.5,
        "b": -1.0,
    }
    assert add_up([]) == {}
    assert add_up(iter([{"norm": 1.0}])) == {"norm": 1.0}


def test_statistics_are_those_asked_for() -> None:
    totals = {"norm": 9.0, "dot": -2.0, "transform.clip": 5.0}
    assert statistics(totals, frozenset({"norm", "dot"})) == {"norm": 3.0, "dot": -2.0}
    assert statistics(totals, frozenset({"norm"})) == {"norm": 3.0}
    assert statistics({"dot": 1.0}, frozenset({"dot", "loss"})) == {"dot": 1.0}
    assert statistics({}, frozenset()) == {}


def test_a_direction_sums_squares_and_products() -> None:
    direction = Direction()
    both: frozenset[Want] = frozenset({"norm", "dot"})
    assert direction.sums(np.array([3.0, 4.0]), both) == {"norm": 25.0, "dot": 0.0}
    assert direction.sums(np.array([1.0, -1.0]), both) == {
        "norm": pytest.approx(2.0),
        "dot": -1.0,
    }
    other = Direction()
    other.load(direction.save())
    assert other.sums(np.array([2.0, 1.0]), frozenset({"dot"})) == {"dot": 1.0}
    other.load({})
    assert other.save() == {}


def test_what_a_direction_remembers_is_its_own() -> None:
    direction, given = Direction(), np.array([1.0, 2.0])
    direction.sums(given, frozenset({"dot"}))
    given[:] = 0.0
    kept = direction.save()["previous"]
    assert kept.tolist() == [1.0, 2.0]
    other = Direction()
    other.load({"previous": kept})
    kept[:] = 9.0
    assert other.sums(np.array([1.0, 1.0]), frozenset({"dot"})) == {"dot": 3.0}


def lagged(lag: int) -> frozenset[Want]:
    return frozenset({"norm", ("dot", lag)})


@pytest.mark.parametrize("lag", [1, 2, 3, 7])
def test_a_product_with_a_step_before_is_there_at_every_lag_th_step(lag: int) -> None:
    given = np.random.default_rng(0).normal(size=(20, 4))
    direction, found = Direction(), {}
    for place, vector in enumerate(given):
        sums = direction.sums(vector, lagged(lag))
        assert sums["norm"] == pytest.approx(vector @ vector)
        if "dot" in sums:
            found[place] = sums["dot"]
        direction = _saved_and_loaded(direction)
    if lag == 1:
        assert found.pop(0) == 0.0  # as "dot" has always had it
    places = range(lag, 20, lag)
    assert found == {place: pytest.approx(given[place] @ given[place - lag]) for place in places}


def _saved_and_loaded(direction: Direction) -> Direction:
    other = Direction()
    other.load(direction.save())
    return other


def test_without_a_lag_the_same_is_saved_as_ever() -> None:
    direction = Direction()
    for _ in range(3):
        direction.sums(np.ones(2), frozenset({"dot"}))
        assert direction.save().keys() == {"previous"}
    direction.sums(np.ones(2), lagged(3))
    age = direction.save()["age"]
    assert age.shape == () and age == 1


def test_what_is_too_old_for_a_shorter_lag_is_not_multiplied() -> None:
    direction = Direction()
    for _ in range(4):
        direction.sums(np.ones(2), lagged(5))
    assert direction.sums(np.ones(2), lagged(2)) == {"norm": pytest.approx(2.0)}
    assert "dot" not in direction.sums(np.ones(2), lagged(2))
    assert direction.sums(np.ones(2), lagged(2))["dot"] == 2.0


@pytest.mark.parametrize(
    ("wants", "message"),
    [
        ({"dot", ("dot", 3)}, r"several lags, \[1, 3\] .* use the same lag"),
        ({("dot", 2), ("dot", 3)}, r"several lags, \[2, 3\] .* use the same lag"),
        ({("dot", 0)}, r'\("dot", 0\) names no earlier step; .* lag >= 1'),
    ],
)
def test_impossible_lags_are_refused(wants: set[Want], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Direction().sums(np.ones(2), frozenset(wants))


def test_a_product_with_a_lag_is_a_statistic_where_it_is_there() -> None:
    assert statistics({"norm": 9.0, "dot": -2.0}, lagged(3)) == {"norm": 3.0, "dot": -2.0}
    assert statistics({"norm": 9.0}, lagged(3)) == {"norm": 3.0}
    assert statistics({"norm": 9.0, "dot": 1.0}, frozenset({"norm", "loss"})) == {"norm": 3.0}


@settings(deadline=None)
@given(layouts_with_two_cuts(), st.integers(2, 4), st.integers(1, 6))
def test_slices_multiply_at_the_steps_of_the_whole(
    given: tuple[Layout, list[Span], list[Span]], lag: int, stretch: int
) -> None:
    """Cut twice on the way; slices may be empty, or lie in what is not trained."""
    layout, *both = given
    rng, whole, steps = np.random.default_rng(layout.size), Direction(), []

    def state(direction: Direction, span: Span) -> Saved:
        return Saved({"values": np.zeros(span[1] - span[0]), **direction.save()}, {})

    spans, slices = [(0, layout.size)], [Direction()]
    for then in [*both, [(0, layout.size)]]:
        for _ in range(stretch):
            vector = rng.normal(size=layout.trained)
            expected = whole.sums(vector, lagged(lag))
            sums = add_up(
                each.sums(vector[begin:end], lagged(lag))
                for each, (begin, end) in zip(slices, spans, strict=True)
            )
            assert sums == pytest.approx(expected)  # and so the same names
            steps.append("dot" in sums)
        parts = [(span, state(each, span)) for each, span in zip(slices, spans, strict=True)]
        spans, slices = then, [Direction() for _ in then]
        for each, span in zip(slices, spans, strict=True):
            each.load(layout.cut(parts, span).arrays)
    assert [place for place, there in enumerate(steps) if there] == [*range(lag, len(steps), lag)]
    assert slices[0].save().keys() == whole.save().keys()


# --- the server of arrays, in slices -------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_arrays_step_in_slices_as_in_the_whole(count: int) -> None:
    """With seven slices of five values, two are empty."""
    server = pl.learners.Quadratic((1.0, 2.0, 3.0, 4.0, 5.0), lr=0.3).server()
    layout, rng = server.layout, np.random.default_rng(0)
    both: frozenset[Want] = frozenset({"norm", "dot"})
    server.step([1.0], [rng.normal(size=5)], both)
    spans = layout.spans(count)
    shards = [server.recipe(span)() for span in spans]
    for shard, span in zip(shards, spans, strict=True):
        assert not shard.needs_totals
        shard.load(layout.cut([((0, 5), server.save())], span))
    for _ in range(3):
        given = [rng.normal(size=5), rng.normal(size=5)]
        sums = [
            shard.reduce([0.5, 2.0], [vector[begin:end] for vector in given], both)
            for shard, (begin, end) in zip(shards, spans, strict=True)
        ]
        for shard in shards:
            shard.apply({})
        expected = server.step([0.5, 2.0], given, both)
        assert statistics(add_up(sums), both) == pytest.approx(expected, rel=1e-12)
        assert np.array_equal(np.concatenate([shard.vector for shard in shards]), server.vector)
    parts = [(span, shard.save()) for shard, span in zip(shards, spans, strict=True)]
    back = layout.cut(parts, (0, 5))
    assert np.array_equal(back.arrays["values"], server.vector)
    assert np.array_equal(back.arrays["previous"], server.save().arrays["previous"])


def test_nothing_can_be_cut_too() -> None:
    server = pl.learners.TimingOnly().server()
    cut = server.layout.cut([((0, 0), server.save())], (0, 0))
    shard = server.recipe((0, 0))()
    shard.load(cut)
    assert cut.arrays == {}
    assert shard.reduce([1.0], [np.empty(0)], frozenset()) == {}
