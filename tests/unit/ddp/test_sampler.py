"""Shares by speed: the law, every sample once whatever changes meanwhile, and the right gradient.

The ranks are threads that meet at a barrier, their clocks move when a test says so.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

import pytest
import torch
from torch.utils.data import DataLoader

from paceline.data.sampling import Stream
from paceline.ddp import ProportionalSampler

Result = TypeVar("Result")
ZERO = torch.tensor(0.0)


class Ranks:
    """Runs a function once for each rank, at the same time, and lets them exchange rows."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=30)
        self._rows: dict[int, list[float]] = {}

    def gather(self, rank: int) -> Callable[[Sequence[float]], list[list[float]]]:
        def exchange(row: Sequence[float]) -> list[list[float]]:
            self._rows[rank] = [*row]
            self._barrier.wait()
            rows = [self._rows[each] for each in range(self.count)]
            self._barrier.wait()
            return rows

        return exchange

    def run(self, work: Callable[[int], Result]) -> list[Result]:
        with ThreadPoolExecutor(self.count) as pool:
            return [future.result() for future in [pool.submit(work, r) for r in range(self.count)]]


class Clock:
    def __init__(self) -> None:
        self.now, self.read = 0.0, 0

    def __call__(self) -> float:
        self.read += 1
        return self.now


class Loader:
    """Draws as torch's DataLoader with workers does: so many batches ahead, one more for each."""

    def __init__(self, sampler: ProportionalSampler, ahead: int) -> None:
        self.batch_sampler, self._ahead = sampler, ahead

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.batch_sampler)
        waiting = deque(batch for _, batch in zip(range(self._ahead), indices, strict=False))
        for batch in indices:
            waiting.append(batch)
            yield waiting.popleft()
        yield from waiting


Pace = Callable[[int, int], float]  # samples per second of a rank at a step


def trained(
    ranks: int,
    samples: int,
    batch_size: int,
    pace: Pace,
    ahead: Sequence[int] | None = None,
    epochs: int = 2,
    load: Any = None,
    save: int = -1,
    waste: float = 0.0,
    overhead: float = 0.0,
    **options: Any,
) -> list[tuple[list[list[int]], list[tuple[int, ...]], Any]]:
    """Return each rank's batches, the shares after each step, and its state after step `save`."""
    meeting = Ranks(ranks)

    def work(rank: int) -> tuple[list[list[int]], list[tuple[int, ...]], Any]:
        clock, gather = Clock(), meeting.gather(rank)
        sampler = ProportionalSampler(
            samples, batch_size, rank=rank, world_size=ranks, gather=gather, clock=clock, **options
        )
        if load is not None:
            sampler.load_state_dict(load)
        loader = Loader(sampler, ahead[rank] if ahead else 0)
        batches, shares, state = list[list[int]](), [], None
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for batch in sampler.measured(loader):
                clock.now += overhead + len(batch) / pace(rank, len(batches))
                sampler.scale(ZERO)
                clock.now += waste * rank  # the backward pass, and waiting for others in it
                batches.append(batch)
                shares.append(sampler.shares)
                if len(batches) == save:
                    state = json.loads(json.dumps(sampler.state_dict()))
        return batches, shares, state

    return meeting.run(work)


def batches_of(runs: Sequence[tuple[list[list[int]], Any, Any]]) -> list[list[int]]:
    """Return the global batches, the parts of the ranks put together in their order."""
    return [[*chain(*parts)] for parts in zip(*(run[0] for run in runs), strict=True)]


def stretches(samples: int, batch_size: int, epochs: int) -> list[list[int]]:
    stream = Stream(samples, seed=0)
    return [
        stream.indices(epoch * samples + at, min(batch_size, samples - at)).tolist()
        for epoch in range(epochs)
        for at in range(0, samples, batch_size)
    ]


def speeds(*values: float) -> Pace:
    return lambda rank, step: values[rank]


# Every sample once


def changing(rank: int, step: int) -> float:
    """Speeds that turn around again and again."""
    return 10.0 if (step // 7 + rank) % 3 else 1.0


@pytest.mark.parametrize("ahead", [[0, 0, 0], [4, 4, 4], [0, 2, 6], [7, 0, 1]])
@pytest.mark.parametrize("every", [2, 5])
def test_every_epoch_has_every_sample_once_while_shares_change(
    ahead: list[int], every: int
) -> None:
    runs = trained(3, 1003, 24, changing, ahead, every=every, smoothing=0.0)
    assert batches_of(runs) == stretches(1003, 24, 2)
    assert runs[0][1] == runs[1][1] == runs[2][1]
    assert len(set(runs[0][1])) >= 3  # it did change


def test_new_shares_wait_for_what_any_rank_has_drawn() -> None:
    for ahead, first in (([0, 0], 5), ([3, 0], 8), ([0, 6], 11)):
        runs = trained(2, 400, 10, speeds(4.0, 1.0), ahead, epochs=1)
        for rank, (before, after) in enumerate(((5, 8), (5, 2))):
            sizes = [len(batch) for batch in runs[rank][0]]
            assert sizes == [before] * first + [after] * (40 - first)


def test_shares_learned_at_the_end_of_an_epoch_hold_from_the_beginning_of_the_next() -> None:
    runs = trained(2, 80, 10, speeds(4.0, 1.0), [0, 6])
    assert [len(batch) for batch in runs[0][0]] == [5] * 8 + [8] * 8


def test_ranks_share_an_order_that_changes_with_epoch_and_seed() -> None:
    def epoch_of(epoch: int, seed: int) -> list[int]:
        parts = []
        for rank in range(2):
            sampler = ProportionalSampler(12, 6, seed=seed, speeds=[1, 2], rank=rank, world_size=2)
            sampler.set_epoch(epoch)
            parts.append([*sampler])
        return [i for batches in zip(*parts, strict=True) for batch in batches for i in batch]

    orders = [epoch_of(0, 0), epoch_of(1, 0), epoch_of(0, 1)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert orders[0] == epoch_of(0, 0)


@pytest.mark.parametrize(
    ("samples", "drop_last", "sizes"),
    [(26, False, [8, 8, 8]), (27, False, [8, 8, 8, 3]), (31, False, [8, 8, 8, 7]),
     (31, True, [8, 8, 8]), (24, False, [8, 8, 8]), (5, False, [5])],
)  # fmt: skip
def test_a_last_smaller_batch_is_cut_too_unless_some_rank_had_none(
    samples: int, drop_last: bool, sizes: list[int]
) -> None:
    parts = []
    for rank in range(3):
        sampler = ProportionalSampler(
            samples, 8, speeds=[1, 1, 6], drop_last=drop_last, rank=rank, world_size=3
        )
        parts.append([*sampler])
        assert len(sampler) == len(sizes) == len(parts[-1])
    whole = [[*chain(*batch)] for batch in zip(*parts, strict=True)]
    assert whole == stretches(samples, 8, 1)[: len(sizes)]
    assert [len(batch) for batch in whole] == sizes
    assert all(batch for part in parts for batch in part)


# What is measured


def test_exchanges_come_soon_and_then_every_so_often() -> None:
    steps: list[int] = []
    done = 0

    def gather(row: Sequence[float]) -> list[list[float]]:
        steps.append(done)
        return [[*row], [*row]]

    sampler = ProportionalSampler(4000, 20, every=30, rank=0, world_size=2, gather=gather)
    for done, _ in enumerate(sampler.measured(Loader(sampler, 0)), start=1):
        sampler.scale(ZERO)
        if done == 100:
            break
    assert steps[1:] == [5, 15, 35, 65, 95]


def test_only_loading_and_forward_count() -> None:
    runs = trained(2, 400, 12, speeds(2.0, 1.0), waste=50.0)
    assert runs[0][1][-1] == (8, 4)


def test_a_second_loss_and_the_first_step_of_a_size_are_not_timed() -> None:
    meeting = Ranks(2)

    def work(rank: int) -> set[tuple[int, ...]]:
        clock, sizes, shares = Clock(), set[int](), set[tuple[int, ...]]()
        sampler = ProportionalSampler(
            600, 12, every=5, rank=rank, world_size=2, gather=meeting.gather(rank), clock=clock
        )
        for batch in sampler.measured(Loader(sampler, 1)):
            clock.now += len(batch) * (1 + rank) + (0 if len(batch) in sizes else 900 * rank)
            sizes.add(len(batch))
            sampler.scale(ZERO)
            clock.now += 70 * rank
            sampler.scale(ZERO)
            shares.add(sampler.shares)
        return shares

    assert meeting.run(work) == [{(6, 6), (8, 4)}] * 2


def test_a_difference_that_noise_could_make_moves_nothing() -> None:
    assert set(trained(2, 800, 100, speeds(1.04, 1.0))[0][1]) == {(50, 50)}
    assert set(trained(2, 800, 100, speeds(1.5, 1.0))[0][1]) == {(50, 50), (60, 40)}


def test_smoothing_keeps_some_of_what_was_known() -> None:
    def once_slow(rank: int, step: int) -> float:
        return 1.0 if rank or step < 5 or step >= 15 else 3.0

    lasting = trained(2, 1600, 100, once_slow, epochs=1, smoothing=0.0)[0][1]
    faded = trained(2, 1600, 100, once_slow, epochs=1, smoothing=0.5)[0][1]
    assert lasting[-1] == (75, 25)
    assert faded[-1] == (67, 33)  # twice as fast: between 1 and 3


def test_a_limit_of_memory_is_kept_while_measuring() -> None:
    runs = trained(3, 900, 30, speeds(9.0, 1.0, 1.0), max_samples=[14, 30, 30])
    assert runs[0][1][-1] == (14, 8, 8)


def test_a_fixed_cost_per_step_leads_to_equal_times() -> None:
    runs = trained(2, 60_000, 100, speeds(400.0, 100.0), overhead=0.2, epochs=1, smoothing=0.0)
    fast, slow = runs[0][1][-1]
    assert 0.2 + fast / 400 == pytest.approx(0.2 + slow / 100, rel=0.06)


def test_fixed_speeds_read_no_clock() -> None:
    clock = Clock()
    sampler = ProportionalSampler(60, 12, speeds=[1, 3], rank=1, world_size=2, clock=clock)
    for batch in sampler.measured(Loader(sampler, 2)):
        assert len(batch) == 9
        sampler.scale(ZERO)
    assert clock.read == 0
    assert sampler.shares == (3, 9)


def test_one_process_needs_no_group() -> None:
    data = list(range(10))
    sampler = ProportionalSampler(data, 4)
    loader = DataLoader(data, batch_sampler=sampler)  # type: ignore[arg-type, var-annotated]
    seen = []
    for batch in sampler.measured(loader):
        assert sampler.scale(torch.tensor(3.0)) == 3.0
        seen += batch.tolist()
    assert len(loader) == 3
    assert seen == Stream(10, 0).indices(0, 10).tolist()


# The gradient


def test_the_average_of_scaled_means_is_the_mean_of_the_batch() -> None:
    """Also of the last batch, and when the shares of a drawn batch are no longer the newest."""
    values = torch.arange(107.0).double() ** 2
    meeting = Ranks(3)

    def work(rank: int) -> list[torch.Tensor]:
        clock = Clock()
        sampler = ProportionalSampler(
            107, 10, every=3, rank=rank, world_size=3, gather=meeting.gather(rank), clock=clock
        )
        losses = []
        for batch in sampler.measured(Loader(sampler, 3)):
            clock.now += len(batch) * (1 + rank)
            losses.append(sampler.scale(values[batch].mean()))
        assert sampler.shares == (5, 3, 2)
        return losses

    means = [sum(parts) / 3 for parts in zip(*meeting.run(work), strict=True)]
    expected = [values[batch].mean() for batch in stretches(107, 10, 1)]
    assert len(means) == 11
    torch.testing.assert_close(means, expected)


# Resuming


@pytest.mark.parametrize("save", [3, 9, 14, 20, 27])
def test_a_resumed_run_goes_on_exactly(save: int) -> None:
    """From a state that all ranks have alike, in mid-epoch, with batches drawn ahead."""
    whole = trained(3, 203, 10, speeds(1.0, 2.0, 4.0), [0, 2, 4], save=save, every=5)
    states = [state for *_, state in whole]
    assert states[0] == states[1] == states[2]
    rest = trained(3, 203, 10, speeds(1.0, 2.0, 4.0), [0, 2, 4], load=states[0], every=5)
    for before, after in zip(whole, rest, strict=True):
        size = [len(batch) for batch in before[0][save : save + 4]]
        assert [len(batch) for batch in after[0][:4]] == size
    assert batches_of(rest) == stretches(203, 10, 2)[save:]


def test_another_number_of_ranks_takes_up_the_same_batches() -> None:
    state = trained(3, 200, 10, speeds(1.0, 2.0, 4.0), save=8)[0][2]
    assert len(state["schedule"]["shares"][-1][1]) == 3
    rest = trained(2, 200, 10, speeds(1.0, 1.0), load=state)
    assert batches_of(rest) == stretches(200, 10, 2)[8:]


def test_a_batch_counts_once_it_is_scaled() -> None:
    sampler = ProportionalSampler(40, 10)
    for step, _ in enumerate(sampler.measured(Loader(sampler, 2))):
        assert sampler.state_dict()["step"] == step
        sampler.scale(ZERO)
        assert sampler.state_dict()["step"] == step + 1
    again = ProportionalSampler(40, 10)
    again.load_state_dict(sampler.state_dict())
    assert [*again] == []  # the epoch was over
    again.set_epoch(1)
    assert len([*again]) == 4


def test_an_epoch_that_was_left_begins_anew() -> None:
    sampler = ProportionalSampler(40, 10)
    loader = Loader(sampler, 2)
    for _ in sampler.measured(loader):
        break
    assert len([*sampler.measured(loader)]) == 4


def test_another_order_of_samples_is_refused() -> None:
    state = ProportionalSampler(40, 10, seed=1).state_dict()
    with pytest.raises(ValueError, match="make it with seed=1"):
        ProportionalSampler(40, 10).load_state_dict(state)


# What users are told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 3}, "use batch_size >= 4"),
        ({"batch_size": 32, "max_samples": 7}, "together take 28"),
        ({"batch_size": 32, "max_samples": 0}, "each at least 1"),
        ({"batch_size": 32, "max_samples": [8, 8]}, "2 max_samples for 4 ranks"),
        ({"batch_size": 32, "speeds": [1, 1]}, "2 speeds for 4 ranks"),
        ({"batch_size": 32, "speeds": [1, 1, 1, 0]}, "finite numbers > 0"),
        ({"batch_size": 32, "speeds": None}, "init_process_group"),
        ({"batch_size": 32, "every": 0}, "every=0"),
        ({"batch_size": 32, "smoothing": 1.0}, "smoothing=1.0"),
        ({"batch_size": 32, "rank": 4}, "use 0 to 3"),
        ({"batch_size": 32, "rank": None}, "both rank and world_size"),
        ({"batch_size": 128, "drop_last": True}, "drop_last=False"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    given = {"speeds": [1, 1, 1, 1], "rank": 0, "world_size": 4, **arguments}
    with pytest.raises(ValueError, match=message):
        ProportionalSampler(100, **given)


def test_without_a_group_the_ranks_are_those_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    sampler = ProportionalSampler(90, 30)
    assert (sampler.rank, sampler.world_size) == (2, 3)
    assert next(iter(sampler)) == Stream(90, 0).indices(20, 10).tolist()
    with pytest.raises(RuntimeError, match=r"call init_process_group\(\) before the loop"):
        sampler.measured(DataLoader(range(90), batch_sampler=sampler))  # type: ignore[arg-type]
    alone = ProportionalSampler(90, 30, rank=0, world_size=1)
    assert len(next(iter(alone))) == 30
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match=r"RANK='first' and WORLD_SIZE='3'.*unset them"):
        ProportionalSampler(90, 30)
    monkeypatch.delenv("RANK")
    assert ProportionalSampler(90, 30).world_size == 1


def test_scale_needs_a_batch_and_one_number() -> None:
    sampler = ProportionalSampler(10, 5)
    loader = Loader(sampler, 0)
    for _ in loader:
        with pytest.raises(RuntimeError, match="call it inside"):
            sampler.scale(ZERO)
    for _ in sampler.measured(loader):
        with pytest.raises(ValueError, match="one number"):
            sampler.scale(torch.zeros(5))
    with pytest.raises(RuntimeError, match="call it inside"):
        sampler.scale(ZERO)


def test_a_loader_must_draw_from_the_sampler_in_order() -> None:
    data = list(range(10))
    sampler = ProportionalSampler(10, 5)
    with pytest.raises(ValueError, match="batch_sampler=sampler"):
        sampler.measured(DataLoader(data, batch_size=5))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_sampler=sampler"):
        sampler.measured(Loader(ProportionalSampler(10, 5), 0))
    with pytest.raises(ValueError, match="in_order"):
        sampler.measured(
            DataLoader(data, batch_sampler=sampler, num_workers=1, in_order=False)  # type: ignore[arg-type]
        )


def test_one_iteration_at_a_time() -> None:
    sampler = ProportionalSampler(40, 10)
    first = iter(sampler)
    next(first)
    next(iter(sampler))
    with pytest.raises(RuntimeError, match="one loader at a time"):
        next(first)
    for _ in sampler.measured(Loader(sampler, 0)):
        with pytest.raises(RuntimeError, match="call it before"):
            sampler.set_epoch(3)
        sampler.set_epoch(0)


@pytest.mark.parametrize("name", ["seed", "batch_size", "max_samples", "speeds", "epoch"])
def test_ranks_that_disagree_are_told_before_the_first_step(name: str) -> None:
    meeting = Ranks(2)
    options: dict[str, Any] = {"batch_size": 10, "seed": 0, "max_samples": 9, "speeds": None}
    other = {"batch_size": 12, "seed": 1, "max_samples": 8, "speeds": [1, 2]}

    def work(rank: int) -> str:
        mine = {**options, name: other[name]} if rank and name in other else options
        sampler = ProportionalSampler(
            60, rank=rank, world_size=2, gather=meeting.gather(rank), **mine
        )
        sampler.set_epoch(int(rank == 1 and name == "epoch"))
        with pytest.raises(RuntimeError, match=r"ranks \[1\] would split") as error:
            next(sampler.measured(Loader(sampler, 0)))
        return str(error.value)

    assert len(set(meeting.run(work))) == 2  # each tells its own


def test_shares_add_up_in_the_order_of_ranks() -> None:
    parts = [
        next(iter(ProportionalSampler(30, 15, speeds=[1, 2, 2], rank=rank, world_size=3)))
        for rank in range(3)
    ]
    order = Stream(30, 0).indices(0, 15).tolist()
    ends = [0, *accumulate(len(part) for part in parts)]
    assert ends == [0, 3, 9, 15]
    assert parts == [order[a:b] for a, b in pairwise(ends)]


def test_a_loss_that_is_not_scaled_is_told() -> None:
    sampler = ProportionalSampler(40, 10, speeds=[1, 5], rank=0, world_size=2)
    loader = DataLoader(list(range(40)), batch_sampler=sampler)  # type: ignore[arg-type, var-annotated]
    with pytest.raises(RuntimeError, match=r"write sampler.scale\(loss\).backward\(\)"):
        for _ in sampler.measured(loader):
            pass
