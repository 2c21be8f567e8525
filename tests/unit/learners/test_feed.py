"""Batches from the computing process and from the processes of a DataLoader."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate, get_worker_info

from paceline.learners.feed import LoaderFeed, Request, feed_of, seeded


class Noisy(Dataset[Tensor]):
    """Draws from all three generators for every sample."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Tensor:
        if index == 99:
            raise KeyError("sample 99 is broken")
        drawn = [torch.rand(()).item(), float(np.random.rand()), random.random()]
        where = get_worker_info()
        return torch.tensor([index, *drawn, -1 if where is None else where.id]).double()


def requests(*starts: int) -> list[Request]:
    return [Request(tuple(range(start, start + 4)), 1000 + start) for start in starts]


def taken(feed: Any, wanted: list[Request], likely: list[Request] | None = None) -> list[Tensor]:
    feed.begin(wanted, likely or [])
    return [feed.next() for _ in wanted]


def test_both_fetch_the_same_bits() -> None:
    own = feed_of(Noisy(), default_collate)
    loaded = feed_of(Noisy(), default_collate, num_workers=2)
    before = torch.get_rng_state()
    for starts in ((0, 4, 8, 12, 16, 20, 24), (0,), (28, 32)):
        mine, theirs = taken(own, requests(*starts)), taken(loaded, requests(*starts))
        for start, one, other in zip(starts, mine, theirs, strict=True):
            assert torch.equal(one[:, :4], other[:, :4])
            assert one[:, 0].tolist() == list(range(start, start + 4))
            assert (one[:, 4] == -1).all() and (other[:, 4] >= 0).all()
    assert torch.equal(torch.get_rng_state(), before)  # the model's numbers are not used up


def test_the_next_task_is_fetched_ahead_and_a_wrong_guess_is_dropped() -> None:
    feed = feed_of(Noisy(), default_collate, num_workers=2)
    assert isinstance(feed, LoaderFeed)
    taken(feed, requests(0, 4), requests(8, 12))
    assert {*requests(8, 12)} <= {*feed._given}
    right = taken(feed, requests(8, 12), requests(16, 20))
    wrong = taken(feed, requests(40, 44, 48, 52, 56), requests(60))
    expected = feed_of(Noisy(), default_collate)
    assert torch.equal(right[1][:, :4], taken(expected, requests(8, 12))[1][:, :4])
    again = taken(expected, requests(40, 44, 48, 52, 56))
    assert all(torch.equal(a[:, :4], b[:, :4]) for a, b in zip(wrong, again, strict=True))
    assert not feed._early


def test_a_task_that_ends_early() -> None:
    feed = feed_of(Noisy(), default_collate, num_workers=1)
    feed.begin(requests(*range(0, 40, 4)))
    feed.next()
    after = taken(feed, requests(60, 64))
    assert [each[0, 0].item() for each in after] == [60, 64]


def test_an_error_and_a_killed_process_fail_one_task_only() -> None:
    feed = feed_of(Noisy(), default_collate, num_workers=1)
    with pytest.raises(KeyError, match="sample 99 is broken"):
        taken(feed, [Request((98, 99), 0)])
    assert taken(feed, requests(4))[0][0, 0] == 4
    assert isinstance(feed, LoaderFeed) and feed._batches is not None
    os.kill(feed._batches._workers[0].pid, signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
        taken(feed, requests(*range(0, 80, 4)))
    assert taken(feed, requests(8))[0][0, 0] == 8


def test_tensors_are_indexed_at_once() -> None:
    data = TensorDataset(torch.arange(10.0), torch.arange(10))
    inputs, labels = taken(feed_of(data, default_collate), [Request((3, 1), 0)])[0]
    assert inputs.tolist() == [3.0, 1.0] and labels.tolist() == [3, 1]


def test_seeds_are_restored() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    with seeded(5):
        first = torch.rand(2), np.random.rand(), random.random()
    with seeded(5):
        second = torch.rand(2), np.random.rand(), random.random()
    assert torch.equal(first[0], second[0]) and first[1:] == second[1:]
    assert torch.equal(torch.rand(2), expected)
