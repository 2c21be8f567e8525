"""Writes the places of the sent numbers in the fewest bytes.

For k places among n, in ascending order, the shortest of these forms is sent; its type names it:

- nothing (uint8, empty), if all n places are sent;
- uint8 or uint16: the gaps between places, that is how many are skipped before each. The largest
  number of the type skips that many and names no place, so that every gap can be written;
- int8: one bit for each of the n places, the lowest bit first;
- int32, or int64 where n exceeds 2^31: the places themselves.

At 1 % of places spread at random uint8 gaps need 1.08 bytes for each; at 0.1 % uint16 gaps need 2.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_LARGEST = {torch.uint8: 2**8 - 1, torch.uint16: 2**16 - 1}


def packed_bits(bits: Tensor) -> Tensor:
    """Return truth values as uint8, eight in each, the lowest bit first."""
    packed = np.packbits(bits.cpu().numpy(), bitorder="little")
    return torch.from_numpy(packed).to(bits.device)


def unpacked_bits(packed: Tensor, size: int) -> Tensor:
    """Return the `size` truth values in packed bits."""
    if packed.numel() != -(-size // 8):
        raise ValueError(
            f"{packed.numel()} bytes of bits, where a vector of {size} has {-(-size // 8)}; "
            "decode with the size that was encoded"
        )
    bits = np.unpackbits(packed.cpu().numpy(), count=size, bitorder="little")
    return torch.from_numpy(bits).view(torch.bool).to(packed.device)


def true_places(mask: Tensor) -> Tensor:
    """Return where a mask is true, in ascending order."""
    if mask.device.type == "cpu":  # numpy's is eight times as fast as torch's
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().squeeze(1)


def write_places(places: Tensor, size: int) -> Tensor:
    """Return the shortest form of ascending places in a vector of this size."""
    if places.numel() == size:
        return places.new_empty(0, dtype=torch.uint8)
    gaps = places.diff(prepend=places.new_tensor([-1])) - 1
    plain = torch.int32 if size <= 2**31 else torch.int64
    lengths = {
        dtype: dtype.itemsize * (gaps.numel() + int(gaps.div(largest, rounding_mode="floor").sum()))
        for dtype, largest in _LARGEST.items()
    }
    lengths |= {torch.int8: -(-size // 8), plain: plain.itemsize * places.numel()}
    dtype = min(lengths, key=lengths.__getitem__)
    if dtype in _LARGEST:
        return _write_gaps(gaps, dtype)
    if dtype == torch.int8:
        mask = places.new_zeros(size, dtype=torch.bool)
        mask[places] = True
        return packed_bits(mask).view(torch.int8)
    return places.to(dtype)


def read_places(written: Tensor, count: int, size: int) -> Tensor:
    """Return the `count` places that were written, in a vector of this size."""
    if written.dtype == torch.uint8 and written.numel() == 0 and count == size:
        return torch.arange(size, device=written.device)
    if written.dtype in _LARGEST:
        places = _read_gaps(written)
    elif written.dtype == torch.int8:
        places = true_places(unpacked_bits(written.view(torch.uint8), size))
    else:
        places = written.to(torch.int64)
    if places.numel() != count or (
        count and not 0 <= int(places.min()) <= int(places.max()) < size
    ):
        raise ValueError(
            f"{places.numel()} places for {count} numbers of a vector of {size}; "
            "decode with the size and the codec that encoded it"
        )
    return places


def _write_gaps(gaps: Tensor, dtype: torch.dtype) -> Tensor:
    largest = _LARGEST[dtype]
    skips = gaps.div(largest, rounding_mode="floor")
    before = skips.cumsum(0)
    total = gaps.numel() + int(skips.sum())
    written = gaps.new_full((total,), largest)
    written[torch.arange(gaps.numel(), device=gaps.device) + before] = gaps % largest
    return written.to(dtype)


def _read_gaps(written: Tensor) -> Tensor:
    gaps = written.to(torch.int64)
    named = gaps != _LARGEST[written.dtype]
    return ((gaps + named).cumsum(0) - 1)[named]
