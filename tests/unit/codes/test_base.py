"""What all codes share: counting answers, and refusing rows they do not have."""

from __future__ import annotations

import pytest

from paceline.codes.base import Counted, check_rows


def test_rows_of_other_codes_are_refused() -> None:
    with pytest.raises(ValueError, match="row 7 is not of this code; its rows are 0 to 3"):
        check_rows({1, 7}, 4)


def test_a_count_ignores_repeats_and_strangers() -> None:
    counted = Counted([0, 2, 4], 2)
    assert [counted.add(row) for row in (0, 0, 1, 4)] == [False, False, False, True]
    assert counted.ready
