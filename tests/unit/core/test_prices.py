"""Prices: for all or by worker, in the books and in saved data."""

from __future__ import annotations

import json
from math import inf, nan
from pathlib import Path

import pytest

from paceline.core.coordinator import Coordinator, replay
from paceline.core.journal import Header, Journal
from paceline.core.protocol import Joined, Prices
from paceline.core.state import decode, encode
from paceline.policies.named import k_sync

PRICES = Prices({"w0": 3.6, "w1": 7.2}, 0.09, idle=True)


def test_one_price_is_for_everyone() -> None:
    prices = Prices(7.2, 0.09)
    assert prices.second("w0") == prices.second("anyone") == pytest.approx(0.002)
    assert prices.byte("w0") == prices.byte("anyone") == pytest.approx(9e-11)


def test_prices_by_worker() -> None:
    prices = Prices({"w0": 3.6, "w1": 7.2}, {"w0": 0.0, "w1": 5.0})
    assert (prices.second("w0"), prices.second("w1")) == pytest.approx((0.001, 0.002))
    assert (prices.byte("w0"), prices.byte("w1")) == pytest.approx((0.0, 5e-9))


def test_nothing_costs_anything_unless_told() -> None:
    assert (Prices().second("w0"), Prices().byte("w0"), Prices().idle) == (0.0, 0.0, False)


def test_a_worker_without_a_price_is_named() -> None:
    told = r"per_hour names no price for 'w2'; it has \['w0', 'w1'\]"
    with pytest.raises(ValueError, match=told):
        PRICES.second("w2")
    with pytest.raises(ValueError, match=r"per_gigabyte names no price for 'w0'; it has \[\]"):
        Prices(per_gigabyte={}).byte("w0")


@pytest.mark.parametrize("price", [-1.0, nan, inf])
@pytest.mark.parametrize("name", ["per_hour", "per_gigabyte"])
def test_a_price_is_a_finite_number(name: str, price: float) -> None:
    for given in (price, {"w0": 1.0, "w1": price}):
        with pytest.raises(ValueError, match=rf"{name}=.*: a price must be finite and >= 0"):
            Prices(**{name: given})  # type: ignore[arg-type]


def test_prices_are_plain_data() -> None:
    for prices in (PRICES, Prices(), Prices(1, {"w0": 2})):
        assert decode(json.loads(json.dumps(encode(prices)))) == prices


def test_the_books_have_the_prices_of_the_journal(tmp_path: Path) -> None:
    header = Header("Gather(k=1)", 8, message_bytes=400, prices=PRICES)
    coordinator = Coordinator(k_sync(1), 8, Journal(header))
    assert (coordinator.ledger.message_bytes, coordinator.ledger.prices) == (400, PRICES)
    coordinator.handle(0.0, Joined("w0"))
    coordinator.journal.save(tmp_path / "run.jsonl")
    loaded = Journal.load(tmp_path / "run.jsonl")
    assert (loaded.header.message_bytes, loaded.header.prices) == (400, PRICES)
    assert replay(k_sync(1), loaded).header.prices == PRICES
    other = Coordinator(k_sync(1), 8)
    other.load(coordinator.state())
    assert (other.ledger.message_bytes, other.ledger.prices) == (400, PRICES)
