"""Places in the fewest bytes: each way of writing them is read again, and the shortest is taken."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codecs.places import packed_bits, read_places, unpacked_bits, write_places


@settings(deadline=None)  # a busy machine is no fault
@given(st.integers(0, 300), st.data())
def test_places_are_read_again(size: int, data: st.DataObject) -> None:
    chosen = sorted(data.draw(st.sets(st.integers(0, max(size - 1, 0)), max_size=size)))
    if size == 0:
        chosen = []
    places = torch.tensor(chosen, dtype=torch.int64)
    written = write_places(places, size)
    assert read_places(written, len(chosen), size).tolist() == chosen
    assert written.nbytes <= min(4 * len(chosen), -(-size // 8))


@pytest.mark.parametrize(
    ("chosen", "size", "dtype", "nbytes"),
    [
        ([0, 1, 2], 3, torch.uint8, 0),
        ([], 5, torch.uint8, 0),
        ([0, 254, 510, 766], 1000, torch.uint8, 6),  # 0, 253, then twice 255 skipped and 0
        ([254, 10_000, 20_000, 90_000], 10**6, torch.uint16, 10),  # one gap of 65,535 and more
        ([65_534, 131_070, 200_000], 10**6, torch.uint16, 10),
        ([10**9, 2 * 10**9], 2**31, torch.int32, 8),
        ([10**9, 4 * 10**9], 2**32, torch.int64, 16),
        (list(range(0, 40, 2)), 40, torch.int8, 5),
    ],
)
def test_the_shortest_writing_is_taken(
    chosen: list[int], size: int, dtype: torch.dtype, nbytes: int
) -> None:
    written = write_places(torch.tensor(chosen, dtype=torch.int64), size)
    assert (written.dtype, written.nbytes) == (dtype, nbytes)
    assert read_places(written, len(chosen), size).tolist() == chosen


@pytest.mark.parametrize("seed", range(3))
def test_random_places_need_as_many_bytes_as_is_said(seed: int) -> None:
    size = 1_000_000
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    for count, nbytes in ((10_000, 10_850), (1_000, 2_002), (100_000, 100_100)):
        written = write_places(order[:count].sort().values, size)
        assert written.nbytes == pytest.approx(nbytes, rel=0.01)


@pytest.mark.parametrize(
    ("written", "count", "size"),
    [
        (torch.tensor([9], dtype=torch.uint8), 1, 9),
        (torch.tensor([3], dtype=torch.uint8), 2, 9),
        (torch.tensor([-1], dtype=torch.int32), 1, 9),
        (torch.tensor([9], dtype=torch.int32), 1, 9),
        (torch.tensor([1, 1], dtype=torch.int8), 1, 9),
        (torch.tensor([1, 1], dtype=torch.int8), 2, 17),
        (torch.empty(0, dtype=torch.uint8), 2, 9),
    ],
)
def test_places_that_cannot_be_are_refused(written: torch.Tensor, count: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"vector of {size}"):
        read_places(written, count, size)


@given(st.lists(st.booleans(), max_size=40))
def test_bits_are_read_again(bits: list[bool]) -> None:
    packed = packed_bits(torch.tensor(bits, dtype=torch.bool))
    assert packed.numel() == -(-len(bits) // 8)
    assert unpacked_bits(packed, len(bits)).tolist() == bits
    assert sum(bit << i for i, bit in enumerate(bits[:8])) == (int(packed[0]) if bits else 0)
