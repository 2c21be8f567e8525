"""Columns are lists of numbers, wherever these are."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline as pl
from paceline.report.columns import BLOCK, Columns
from paceline.report.metrics import KINDS, Meter


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, 2 * BLOCK - 1, 2 * BLOCK, 5 * BLOCK + 3])
def test_a_column_in_a_file_is_the_list_that_it_was_made_of(count: int, tmp_path: Path) -> None:
    columns = Columns({"loss": "d", "step": "q"}, tmp_path)
    expected = [0.1 * i for i in range(count)]
    for i, value in enumerate(expected):
        columns.add((value, i))
    loss, step = columns["loss"], columns["step"]
    assert list(tmp_path.iterdir()) == []  # whoever dies leaves nothing behind
    for _ in range(2):
        assert loss == expected and list(step) == list(range(count)) and len(loss) == count
        assert loss[-1:] == expected[-1:] and bool(loss) == bool(count)
        assert loss[3:-2:7] == expected[3:-2:7] and loss[-60:] == expected[-60:]
        assert [loss[i] for i in range(-count, count)] == 2 * expected
        arrays = columns.arrays()
        assert (arrays["loss"].dtype, arrays["step"].dtype) == (
            np.dtype(np.float64),
            np.dtype(np.int64),
        )
        assert arrays["loss"].tolist() == expected
        columns.close()  # and the second time all is in memory
    assert pickle.loads(pickle.dumps(dict(columns)))["loss"] == expected  # noqa: S301 (our own)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 3 * BLOCK), st.integers(-900, 900), st.integers(-900, 900), st.integers(1, 300)
)
def test_slices_are_those_of_lists(
    tmp_path_factory: pytest.TempPathFactory, count: int, begin: int, end: int, step: int
) -> None:
    columns = Columns({"step": "q"}, tmp_path_factory.getbasetemp())
    for i in range(count):
        columns.add((i,))
    assert columns["step"][begin:end:step] == list(range(count))[begin:end:step]
    columns.close()


def test_what_a_column_refuses(tmp_path: Path) -> None:
    columns = Columns({"step": "q"}, tmp_path)
    with pytest.raises(IndexError, match=r"column\[0\]: there are 0 values"):
        columns["step"][0]
    with pytest.raises(ValueError, match="use reversed"):
        columns["step"][::-1]
    columns.add((4,))
    assert list(reversed(columns["step"])) == [4] and columns["step"] != "4"


def test_a_run_has_the_same_figures_with_a_journal_on_disk(tmp_path: Path) -> None:
    def run(journal: Path | None) -> pl.Run:
        learner = pl.learners.Quadratic((1.0, 0.3), noise=0.3, lr=0.1, batch_size=8)
        engine = pl.Simulator(3, pl.delays.Exponential(1.0))
        trainer = pl.Trainer(learner, pl.k_sync(2), engine, journal=journal, progress=False)
        return trainer.fit(steps=2 * BLOCK + 10)

    on_disk, in_memory = run(tmp_path / "run.jsonl"), run(None)
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]
    assert set(on_disk.metrics) == set(KINDS)
    for name, values in in_memory.metrics.items():
        assert values.tolist() == on_disk.metrics[name].tolist()
        assert values.dtype == on_disk.metrics[name].dtype
    assert on_disk.summary() == f"{in_memory.summary()}\n  journal   {tmp_path / 'run.jsonl'}"
    assert on_disk.meter.columns == in_memory.meter.columns
    assert isinstance(pickle.loads(pickle.dumps(on_disk.meter)), Meter)  # noqa: S301 (our own)
