"""PowerSGD: sends each matrix of a model as the product of two thin matrices.

Vogels, Karimireddy and Jaggi 2019 (arXiv 1905.13727) average P and Q over all workers on the way,
by two all-reduces. Here each worker computes both from its own matrix M: P = M Q with orthonormal
columns, then Q = M^T P. It sends P and Q in one message. A server adds up the products P Q^T,
whose sum has a higher rank than each of them. Use it inside of `Feedback`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from paceline.codecs.base import Message, Sender, State, checked, generator, parts_of


@dataclass(frozen=True)
class LowRank:
    """Sends matrices of n x m as (n + m) r numbers, in the vector's type.

    `shapes` are those of the tensors that make up the vector. A tensor of more than two dimensions
    is treated as a matrix of its first by all others. Tensors that would not be shorter, and those
    of fewer than two dimensions, are sent unencoded.
    """

    rank: int
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}: use 1 or more")

    @property
    def extras(self) -> int:
        return 0

    def count(self, size: int) -> int:
        return sum(layout.sent for layout in self._layouts(size))

    def encode(self, vector: Tensor, key: int) -> Message:
        """Return the message that starts from random matrices Q."""
        vector = checked(vector)
        return self._encode(vector, self._drawn(vector, key))[0]

    def decode(self, message: Message, size: int) -> Tensor:
        (values,) = parts_of(message, 1, self)
        if values.numel() != self.count(size):
            raise ValueError(
                f"{values.numel()} numbers, where these shapes send {self.count(size)} at rank "
                f"{self.rank}; decode with the codec that encoded it"
            )
        dense, at = values.new_empty(size), 0
        for layout in self._layouts(size):
            sent = values[at : at + layout.sent]
            if layout.rank:
                cut = layout.rows * layout.rank
                p, q = sent[:cut].view(-1, layout.rank), sent[cut:].view(-1, layout.rank)
                torch.mm(p, q.T, out=dense[layout.span].view(layout.rows, layout.columns))
            else:
                dense[layout.span] = sent
            at += layout.sent
        return dense

    def sender(self, size: int) -> Sender:
        self.count(size)  # raises for a wrong size
        return _WarmSender(self)

    def _layouts(self, size: int) -> Iterator[_Layout]:
        total = sum(prod(shape) for shape in self.shapes)
        if total != size:
            raise ValueError(
                f"the vector has {size} values and the shapes have {total}; give the shapes of "
                "the trained tensors"
            )
        low = 0
        for shape in self.shapes:
            yield _Layout.of(shape, low, self.rank)
            low += prod(shape)

    def _drawn(self, vector: Tensor, key: int) -> Tensor:
        """Return random matrices Q, flat and concatenated."""
        count = sum(layout.columns * layout.rank for layout in self._layouts(vector.numel()))
        random = generator(key, vector.device)
        return vector.new_empty(count).normal_(generator=random)

    def _encode(self, vector: Tensor, starts: Tensor) -> tuple[Message, Tensor]:
        """Return the message, and its matrices Q, the start of the next message."""
        values, ends, at = [vector.new_empty(0)], [vector.new_empty(0)], 0
        for layout in self._layouts(vector.numel()):
            if not layout.rank:
                values.append(vector[layout.span])
                continue
            matrix = vector[layout.span].view(layout.rows, layout.columns)
            start = starts[at : at + layout.columns * layout.rank].view(-1, layout.rank)
            at += start.numel()
            p = torch.linalg.qr(matrix @ start).Q
            q = matrix.T @ p
            values += [p.reshape(-1), q.reshape(-1)]
            ends.append(q.reshape(-1))
        return Message((torch.cat(values),)), torch.cat(ends)

    def _revived(self, starts: Tensor, fresh: Tensor, size: int) -> Tensor:
        """Return matrices Q with columns of scale 1, and a fresh column for each that has died.

        A zero column, as after a zero gradient, could stay zero forever. Columns with the scale of
        the gradient would give M Q the square of that scale, too small for float32.
        """
        revived, at = starts.clone(), 0
        for layout in self._layouts(size):
            span = slice(at, at + layout.columns * layout.rank)
            at = span.stop
            if layout.rank:
                columns, other = revived[span].view(-1, layout.rank), fresh[span]
                scale = columns.abs().amax(0)
                dead = ~(scale > 1e-6 * scale.max()) | ~scale.isfinite()
                columns /= scale
                columns[:, dead] = other.view(-1, layout.rank)[:, dead]
        return revived


@dataclass(frozen=True)
class _Layout:
    """The span of a tensor in the vector, and its rank; rank 0: sent unencoded."""

    span: slice
    rows: int
    columns: int
    rank: int
    sent: int

    @staticmethod
    def of(shape: tuple[int, ...], low: int, rank: int) -> _Layout:
        size = prod(shape)
        rows = shape[0] if len(shape) > 1 else 1
        columns = size // rows if rows else 0
        short = (rows + columns) * rank < size  # never true if min(rows, columns) <= rank
        sent = (rows + columns) * rank if short else size
        return _Layout(slice(low, low + size), rows, columns, rank if short else 0, sent)


class _WarmSender:
    """Starts from the Q of the last message, so that the error falls from message to message."""

    def __init__(self, codec: LowRank) -> None:
        self._codec = codec
        self._starts: Tensor | None = None

    def send(
        self, vector: Tensor, key: int, rate: float = 1.0, model: Tensor | None = None
    ) -> Message:
        vector = checked(vector)
        starts = self._codec._drawn(vector, key)
        if self._starts is not None:
            starts = self._codec._revived(self._starts.to(starts), starts, vector.numel())
        message, self._starts = self._codec._encode(vector, starts)
        return Message(message.parts, rate)

    def refund(self, message: Message) -> None:
        """Do nothing: an unused message does not make its Q a worse start."""

    def state_dict(self) -> State:
        return {} if self._starts is None else {"starts": self._starts.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._starts = state["starts"].clone() if "starts" in state else None
