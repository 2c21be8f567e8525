"""Settings of a run from several sides."""

from __future__ import annotations

import pytest

import paceline as pl
from paceline.sessions.options import Hello, Options, workers_given


def test_settings_come_together() -> None:
    served = Options(policy=pl.k_sync(2), batch_size=64)
    found = served.merged(Options(batch_size=64, steps=10)).merged(Options(policy=pl.k_sync(2)))
    assert found.batch_size == 64 and found.steps == 10 and found.policy == pl.k_sync(2)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (Options(batch_size=32), "this run has batch_size=64, and this session asks for 32"),
        (Options(policy=pl.sync()), "policy="),
    ],
)
def test_settings_that_differ(more: Options, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Options(policy=pl.k_sync(2), batch_size=64).merged(more)


def test_a_setting_that_comes_too_late() -> None:
    begun = Options(batch_size=64)
    begun.check_unchanged(begun.merged(Options(batch_size=64)))
    with pytest.raises(ValueError, match="begun without steps="):
        begun.check_unchanged(begun.merged(Options(steps=10)))


def test_numbers_of_workers() -> None:
    assert workers_given(None) is None
    assert workers_given(4) == (4, 4)
    assert workers_given((2, 8)) == (2, 8)
    for wrong in (0, (3, 2), (1, 2, 3), ("a", 2)):
        with pytest.raises(ValueError, match="workers="):
            workers_given(wrong)  # type: ignore[arg-type]


def test_a_client_that_does_not_fit() -> None:
    first = Hello({"weight": (2, 3)}, {"optimizer": "SGD(lr=1)"}, 100)
    first.check(first)
    wrong = {
        "other parameters": Hello({"weight": (2, 4)}, first.rules, 100),
        "optimizer=Adam": Hello(first.model, {"optimizer": "Adam"}, 100),
        "has 99 samples": Hello(first.model, first.rules, 99),
    }
    for told, each in wrong.items():
        with pytest.raises(ValueError, match=told):
            each.check(first)
