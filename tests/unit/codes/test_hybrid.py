"""The exact code for any number of workers."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.codes import generators as make
from paceline.codes.base import NotDecodable
from paceline.codes.dual import Placed, cyclic
from paceline.codes.groups import Grouped
from paceline.codes.hybrid import Beside, hybrid
from tests.unit.codes.exchange import error, gradients, messages, worst


@pytest.mark.parametrize(("n", "d", "m", "bound"), [(10, 4, 2, 1e-6), (20, 6, 3, 5e-6)])
def test_exact_from_every_set(n: int, d: int, m: int, bound: float) -> None:
    code = hybrid(n, d, m)
    assert isinstance(code, Beside)
    assert (code.first.n, code.second.n) == (n - d - n % d, d + n % d)
    assert (code.n, code.parts, code.stragglers, code.load, code.messages) == (n, n, d - m, d, m)
    assert worst(code) < 1e-13
    assert worst(code, np.float32) < bound


@pytest.mark.parametrize("n", range(2, 14))
def test_any_number_of_workers(n: int) -> None:
    for d in range(1, min(n, 4) + 1):
        for m in range(1, d + 1):
            code = hybrid(n, d, m)
            assert (code.n, code.stragglers, code.load, code.messages) == (n, d - m, d, m)
            assert {part for i in range(n) for part in code.row(i)} == set(range(code.parts))
            assert {len(code.row(i)) for i in range(n)} == {d}
            assert worst(code, length=7) < 1e-12


def test_which_code_it_is() -> None:
    assert hybrid(12, 4, 2) == Grouped(12, make.best(4, 2))
    assert isinstance(hybrid(7, 4, 2), Placed)
    assert hybrid(10, 4, 2) == hybrid(10, 4, 2)


def test_each_side_needs_its_own_answers() -> None:
    code = hybrid(10, 4, 2)
    g = gradients(code, 40)
    sent = messages(code, g)
    assert error(code, g, sent, {0, 3, 5, 9}) < 1e-13  # two of each
    for missing in ({0, 1, 2}, {4, 5, 6}):
        with pytest.raises(NotDecodable):
            code.decode(set(range(10)) - missing)
    collector = code.collector()
    assert [collector.add(row) for row in (4, 5, 6, 7, 0, 0)] == [False] * 6
    assert not collector.ready
    assert collector.add(3) and collector.ready


def test_support() -> None:
    code = hybrid(10, 4, 2)
    g = gradients(code, 30)
    before = messages(code, g)
    for part in range(10):
        changed = g.copy()
        changed[part] -= 1.0
        after = messages(code, changed)
        for row in range(10):
            assert bool((before[row] == after[row]).all()) == (part not in code.row(row))


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="n=3, d=4, m=2: use 1 <= m <= d <= n"):
        hybrid(3, 4, 2)
    with pytest.raises(ValueError, match="use codes of the same m"):
        Beside(Grouped(4, make.best(4, 2)), cyclic(5, 4, 1))
