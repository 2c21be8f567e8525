"""Codecs that send every number, in fewer bits.

| codec | what travels for n numbers |
|---|---|
| `Int8` | n bytes, and a scale for each block in the vector's type |
| `TwoBit` | n/4 bytes, and two scales for each block in the vector's type |
| `Sign` | n/8 bytes, and a scale for each block in the vector's type |
| `Half`, `BFloat16` | 2 n bytes, read as float32 |

An infinity or NaN makes its whole block decode to infinities or NaN. In `Half` and `BFloat16` it
affects the number alone. So the fault stays visible after decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from paceline.codecs.base import Message, Sender, Stateless, checked, generator, parts_of
from paceline.codecs.places import packed_bits, unpacked_bits


@dataclass(frozen=True)
class Int8:
    """Sends round(127 x / s) with s the largest absolute value of x's block.

    Stochastic rounding goes up with the probability of the fraction, and is unbiased, as in QSGD
    (Alistarh et al. 2016, arXiv 1610.02132). The squared error is at most block / 254^2 of the
    vector's square, on average if stochastic.
    """

    block: int = 4096
    stochastic: bool = True

    def __post_init__(self) -> None:
        _check_block(self.block)

    def encode(self, vector: Tensor, key: int) -> Message:
        vector = checked(vector)
        codes = torch.empty_like(vector, dtype=torch.int8)
        scales = vector.new_empty(_blocks(vector.numel(), self.block))
        random = generator(key, vector.device)
        for rows, span, which in _rows(vector, self.block):
            scale = rows.abs().amax(1, keepdim=True) / 127
            scaled = rows / scale
            if self.stochastic:
                noise = torch.empty_like(scaled).uniform_(generator=random)
                scaled = scaled.add_(noise).floor_()
            else:
                scaled = scaled.round_()
            # 127 plus almost 1 is 128 once rounded to float32, and 0 / 0 is no number.
            codes[span] = scaled.clamp_(-127, 127).nan_to_num_(0).to(torch.int8).view(-1)
            scales[which] = scale.view(-1)
        return Message((codes, scales))

    def decode(self, message: Message, size: int) -> Tensor:
        codes, scales = parts_of(message, 2, self)
        _check_lengths(self, codes.numel(), scales, size, size, self.block)
        return _times_scales(codes.to(scales.dtype), scales, self.block)

    def sender(self, size: int) -> Sender:
        return Stateless(self)


@dataclass(frozen=True)
class Sign:
    """Sends a bit for each number, and for each block the mean absolute value.

    The scaled sign of Karimireddy et al. 2019 (arXiv 1901.09847): x is read as sign(x) |x|_1 / n,
    where the squared error is |x|_2^2 - |x|_1^2 / n. Biased: use it inside of error feedback.
    """

    block: int = 4096

    def __post_init__(self) -> None:
        _check_block(self.block)

    def encode(self, vector: Tensor, key: int) -> Message:
        vector = checked(vector)
        scales = vector.new_empty(_blocks(vector.numel(), self.block))
        for rows, _, which in _rows(vector, self.block):
            scales[which] = torch.linalg.vector_norm(rows, 1, dim=1) / rows.shape[1]
        return Message((packed_bits(vector >= 0), scales))

    def decode(self, message: Message, size: int) -> Tensor:
        bits, scales = parts_of(message, 2, self)
        _check_lengths(self, bits.numel(), scales, size, -(-size // 8), self.block)
        signs = unpacked_bits(bits, size).to(scales.dtype).mul_(2).sub_(1)
        return _times_scales(signs, scales, self.block)

    def sender(self, size: int) -> Sender:
        return Stateless(self)


@dataclass(frozen=True)
class TwoBit:
    """Sends two bits for each number: its sign, and whether it is larger than its block's mean.

    Larger and smaller here mean absolute values. Each block has the mean of its larger and of its
    smaller numbers, as which they are read. So the squared error is at most that of `Sign`, and
    less where some numbers stand out. Biased: use it inside of error feedback. After Top-K, as in
    SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706), whose two levels are chosen otherwise.
    """

    block: int = 4096

    def __post_init__(self) -> None:
        _check_block(self.block)

    def encode(self, vector: Tensor, key: int) -> Message:
        vector = checked(vector)
        large = torch.empty_like(vector, dtype=torch.bool)
        scales = vector.new_empty(2, _blocks(vector.numel(), self.block))
        for rows, span, which in _rows(vector, self.block):
            sizes = rows.abs()
            above = sizes > sizes.mean(1, keepdim=True)
            count = above.sum(1)
            total, most = sizes.sum(1), (sizes * above).sum(1)
            scales[0, which] = (total - most).clamp_(min=0) / (rows.shape[1] - count).clamp(min=1)
            scales[1, which] = most / count.clamp(min=1)
            large[span] = above.view(-1)
        return Message((packed_bits(vector >= 0), packed_bits(large), scales.view(-1)))

    def decode(self, message: Message, size: int) -> Tensor:
        bits, above, scales = parts_of(message, 3, self)
        halves = scales.view(2, -1) if scales.numel() % 2 == 0 else scales.view(1, -1)
        for given in (bits, above):
            _check_lengths(self, given.numel(), halves[-1], size, -(-size // 8), self.block)
        _check_lengths(self, halves.shape[0], halves[0], size, 2, self.block)
        signs = unpacked_bits(bits, size).to(scales.dtype).mul_(2).sub_(1)
        low = _times_scales(signs.clone(), halves[0], self.block)
        high = _times_scales(signs, halves[1], self.block)
        return torch.where(unpacked_bits(above, size).bool(), high, low)

    def sender(self, size: int) -> Sender:
        return Stateless(self)


@dataclass(frozen=True)
class _Cast:
    """Sends each number in a shorter type; finite numbers beyond its range become its largest."""

    def encode(self, vector: Tensor, key: int) -> Message:
        vector = checked(vector)
        sent = vector.to(self.dtype)
        low, high = map(float, sent.aminmax()) if sent.numel() else (0.0, 0.0)
        if not (isfinite(low) and isfinite(high)):
            beyond = sent.isinf() & vector.isfinite()
            largest = torch.finfo(self.dtype).max
            sent = torch.where(beyond, vector.sign().to(self.dtype) * largest, sent)
        return Message((sent,))

    def decode(self, message: Message, size: int) -> Tensor:
        (sent,) = parts_of(message, 1, self)
        if sent.dtype != self.dtype or sent.numel() != size:
            raise ValueError(
                f"{sent.numel()} numbers of {sent.dtype}, where {self} sends {size} of "
                f"{self.dtype}; decode with the size and the codec that encoded it"
            )
        return sent.to(torch.float32)

    def sender(self, size: int) -> Sender:
        return Stateless(self)

    @property
    def dtype(self) -> torch.dtype:
        raise NotImplementedError


@dataclass(frozen=True)
class Half(_Cast):
    """Sends float16: 11 significant bits, from 6e-8 to 65,504."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16


@dataclass(frozen=True)
class BFloat16(_Cast):
    """Sends bfloat16: 8 significant bits, with the range of float32."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16


def _check_block(block: int) -> None:
    if block < 1:
        raise ValueError(f"block={block}: a block has one number at least")


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _rows(vector: Tensor, block: int) -> Iterator[tuple[Tensor, slice, slice]]:
    """Yield views with a block in each row, their span in the vector, and their block numbers.

    Each view is small enough to stay in the cache. The last block may be shorter.
    """
    size = vector.numel()
    together = max(1, 2**18 // block)
    whole = size // block
    for first in range(0, whole, together):
        last = min(first + together, whole)
        span = slice(first * block, last * block)
        yield vector[span].view(-1, block), span, slice(first, last)
    if size % block:
        span = slice(whole * block, size)
        yield vector[span].view(1, -1), span, slice(whole, whole + 1)


def _times_scales(numbers: Tensor, scales: Tensor, block: int) -> Tensor:
    for rows, _, which in _rows(numbers, block):
        rows *= scales[which].unsqueeze(1)
    return numbers


def _check_lengths(
    codec: object, given: int, scales: Tensor, size: int, expected: int, block: int
) -> None:
    if given != expected or scales.numel() != _blocks(size, block):
        raise ValueError(
            f"{given} bytes and {scales.numel()} scales, where {codec} sends {expected} and "
            f"{_blocks(size, block)} for {size} numbers; decode with the codec that encoded it"
        )
