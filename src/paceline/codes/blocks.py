"""Messages of 1/m of a vector: its m interleaved blocks, added up with a coefficient for each.

Block u of a vector has the elements u, u + m, u + 2m and so on. So any slice of the vector needs
one slice of the message: servers that own slices need not know about blocks.
Coefficients are float64. Messages keep the vectors' own type: each number is accumulated in
float64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.protocol import Coefficients

Array = NDArray[Any]
Span = tuple[int, int]

_CHUNK = 8192  # numbers of each message in one product
_ROWS = 16  # messages in one product: together 1 MiB of float64, which stays in the cache


def covering(span: Span, m: int) -> Span:
    """Return the slice of a message that a slice of the vector needs.

    >>> covering((3, 9), 2)
    (1, 5)
    """
    return span[0] // m, -(-span[1] // m)


def message_length(length: int, m: int) -> int:
    """Return the length of a message for a vector of this length.

    >>> message_length(600, 3), message_length(601, 3)
    (200, 201)
    """
    return covering((0, length), m)[1]


def split(vector: Array, m: int) -> Array:
    """Return the m blocks as rows: a view if m divides the length, else a copy padded with zeros.

    >>> split(np.arange(5.0), 2).tolist()
    [[0.0, 2.0, 4.0], [1.0, 3.0, 0.0]]
    """
    size = message_length(vector.size, m)
    if size * m != vector.size:
        padded = np.zeros(size * m, vector.dtype)
        padded[: vector.size] = vector
        vector = padded
    return vector.reshape(size, m).T


class Encoder:
    """Adds vectors up to one message: message[i] = sum of c[u] * vector[m i + u].

    Each vector is read once, in `add`, and need not be kept.
    """

    def __init__(self, length: int, m: int) -> None:
        self._length, self._m = length, m
        self._sum = np.zeros(message_length(length, m))

    def add(self, vector: Array, coefficients: Coefficients) -> None:
        factors = coefficients if isinstance(coefficients, tuple) else (coefficients,)
        m = self._m
        if len(factors) != m or vector.shape != (self._length,):
            raise ValueError(
                f"{len(factors)} coefficients for a vector of shape {vector.shape}; "
                f"use m={m} of them and vectors of shape ({self._length},)"
            )
        if m == 1:
            self._sum += np.multiply(vector, factors[0], dtype=np.float64)
            return
        column = np.array(factors)
        for low in range(0, self._sum.size, _CHUNK):
            piece = vector[m * low : m * (low + _CHUNK)].astype(np.float64)
            whole = piece.size // m
            self._sum[low : low + whole] += piece[: whole * m].reshape(whole, m) @ column
            if rest := piece.size % m:  # the last block ends before the others
                self._sum[low + whole] += piece[-rest:] @ column[:rest]

    def message(self, dtype: Any) -> Array:
        return self._sum.astype(dtype)


def encode(terms: Sequence[tuple[Coefficients, Array]], m: int) -> Array:
    """Return the message of some vectors, each with its coefficients.

    >>> encode([((1.0, 0.0), np.arange(4.0)), ((0.5, 2.0), np.ones(4))], 2).tolist()
    [2.5, 4.5]
    """
    if not terms:
        raise ValueError("a row without parts has no message; leave it out")
    encoder = Encoder(terms[0][1].size, m)
    for coefficients, vector in terms:
        encoder.add(vector, coefficients)
    return encoder.message(terms[0][1].dtype)


def combine(weights: Sequence[tuple[float, ...]], messages: Sequence[Array], span: Span) -> Array:
    """Return a slice of the vector: element m i + u is the sum over messages of w[u] * f[i].

    messages: the slices that cover `span`; each is read once.

    >>> combine([(1.0, 0.0), (0.5, 2.0)], [np.ones(2), np.ones(2)], (0, 3)).tolist()
    [1.5, 2.0, 1.5]
    """
    if not weights:
        raise ValueError("no row has a weight; nothing can be combined")
    m = len(weights[0])
    first, last = covering(span, m)
    for message in messages:
        if message.shape != (last - first,):
            raise ValueError(
                f"a message of shape {message.shape}; the elements {span[0]} to {span[1]} of a "
                f"vector, with m={m}, need messages of shape ({last - first},)"
            )
    blocks = np.empty((last - first, m), messages[0].dtype)
    factors = np.array(weights)
    for low in range(0, last - first, _CHUNK):
        total: Any = 0.0
        for at in range(0, len(messages), _ROWS):
            some = np.array([f[low : low + _CHUNK] for f in messages[at : at + _ROWS]], np.float64)
            total = total + some.T @ factors[at : at + _ROWS]
        blocks[low : low + _CHUNK] = total
    return blocks.reshape(-1)[span[0] - m * first : span[1] - m * first]


def combine_rows(
    weights: Mapping[int, tuple[float, ...]], messages: Mapping[int, Array], length: int
) -> Array:
    """Return the whole vector from messages by row, with the weights of `Code.decode`."""
    return combine(list(weights.values()), [messages[row] for row in weights], (0, length))


def decoded(
    weights: Sequence[Coefficients], messages: Sequence[Array], span: Span
) -> tuple[list[float], list[Array]]:
    """Return factors and vectors to add up: coded messages become one vector of factor 1."""
    coded = [weight for weight in weights if isinstance(weight, tuple)]
    if not coded or not messages:  # no messages: a run that simulates time only
        return [weight for weight in weights if not isinstance(weight, tuple)], list(messages)
    return [1.0], [combine(coded, messages, span)]


def sketch(message: Array, rng: np.random.Generator) -> float:
    """Return the product of a message with a random vector, which is linear in the message.

    If messages contradict each other, so do their sketches. The random vector is a pattern of
    1,024 normal numbers, repeated with a random sign each time.
    """
    size, total = 1024, 0.0
    pattern = rng.standard_normal(size)
    for low in range(0, message.size, size * size):
        piece = message[low : low + size * size]
        whole = piece.size // size
        signs = rng.choice([-1.0, 1.0], whole + 1)
        rest = piece[whole * size :]
        total += float(piece[: whole * size].reshape(whole, size) @ pattern @ signs[:-1])
        total += float(rest @ pattern[: rest.size] * signs[-1])
    return total
