"""Messages as bytes and back, what is refused, and what holds for every codec."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.codecs.base import (
    Codec,
    Message,
    Stateless,
    generator,
    header_length,
    pack,
    unpack,
)
from paceline.codecs.chain import Chain
from paceline.codecs.feedback import DeepGradient, Feedback
from paceline.codecs.lowrank import LowRank
from paceline.codecs.quantize import BFloat16, Half, Int8, Sign, TwoBit
from paceline.codecs.sparse import RandomK, TopK

# What each codec sends for a vector of n numbers, for instance all matrices of 10 columns.
CODECS: dict[str, Callable[[int], Codec]] = {
    "top": lambda n: TopK(0.1),
    "top all": lambda n: TopK(1.0),
    "top by tensor": lambda n: TopK(0.1, (n // 3, n - n // 3)),
    "random": lambda n: RandomK(0.3),
    "random scaled": lambda n: RandomK(0.3, scaled=True),
    "int8": lambda n: Int8(64),
    "int8 nearest": lambda n: Int8(64, stochastic=False),
    "sign": lambda n: Sign(64),
    "two bits": lambda n: TwoBit(64),
    "fading feedback": lambda n: Feedback(TopK(0.1), decay=0.9),
    "half": lambda n: Half(),
    "bfloat16": lambda n: BFloat16(),
    "low rank": lambda n: LowRank(2, ((n // 10, 10), (n % 10,))),
    "chain": lambda n: Chain(TopK(0.1), Int8()),
    "chain of three": lambda n: Chain(RandomK(0.5), Chain(TopK(0.2), Half())),
    "feedback": lambda n: Feedback(Chain(TopK(0.1), Int8())),
    "feedback low rank": lambda n: Feedback(LowRank(2, ((n // 10, 10), (n % 10,)))),
    "deep gradient": lambda n: DeepGradient(0.1),
}
every_codec = pytest.mark.parametrize("make", CODECS.values(), ids=CODECS.keys())
TYPES = [
    *(torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]


def normal(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def same(left: Message, right: Message) -> bool:
    return (
        left.rate == right.rate
        and [part.dtype for part in left.parts] == [part.dtype for part in right.parts]
        and all(torch.equal(a, b) for a, b in zip(left.parts, right.parts, strict=True))
    )


messages = st.builds(
    lambda parts, rate: Message(
        tuple(torch.arange(length).to(dtype) for dtype, length in parts), rate
    ),
    st.lists(st.tuples(st.sampled_from(TYPES), st.integers(0, 20)), max_size=5),
    st.floats(0, 1e3),
)


@given(messages)
def test_packed_messages_are_read_again(message: Message) -> None:
    packed = pack(message)
    assert packed.dtype == np.uint8
    assert packed.size == header_length(len(message.parts)) + message.nbytes
    assert same(unpack(packed), message)


@given(messages, st.data())
def test_a_header_with_a_wrong_bit_is_refused(message: Message, data: st.DataObject) -> None:
    packed = pack(message).copy()
    bit = data.draw(st.integers(0, 8 * header_length(len(message.parts)) - 1))
    packed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match="no message"):
        unpack(packed)


@given(messages, st.data())
def test_a_message_cut_short_is_refused(message: Message, data: st.DataObject) -> None:
    packed = pack(message)
    with pytest.raises(ValueError, match="no message"):
        unpack(packed[: data.draw(st.integers(0, packed.size - 1))])
    with pytest.raises(ValueError, match="no message"):
        unpack(np.append(packed, np.uint8(0)))


@given(st.binary(max_size=200), st.booleans())
def test_foreign_bytes_are_refused(content: bytes, marked: bool) -> None:
    content = b"PLM1" + content if marked else content
    with pytest.raises(ValueError, match="no message"):
        unpack(np.frombuffer(content, np.uint8))


def test_arrays_of_other_kinds_are_refused() -> None:
    packed = pack(Message((torch.zeros(4),)))
    for array in (packed.view(np.int8), packed.reshape(1, -1), np.repeat(packed, 2)[::2]):
        with pytest.raises(ValueError, match="flat, contiguous array of uint8"):
            unpack(array)


def test_parts_are_views_where_they_are_aligned() -> None:
    message = Message((torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.uint8)))
    packed = pack(message)
    for part in unpack(packed).parts:
        assert np.shares_memory(part.view(torch.uint8).numpy(), packed)
    crooked = pack(Message((torch.ones(1, dtype=torch.uint8), torch.full((3,), 0.25))))
    assert not np.shares_memory(unpack(crooked).parts[1].numpy(), crooked)
    shifted = np.empty(packed.size + 1, np.uint8)[1:]
    shifted[:] = packed
    assert same(unpack(shifted), message)


def test_read_only_arrays_are_read_without_a_warning() -> None:
    packed = pack(Message((torch.ones(5),)))
    packed.flags.writeable = False
    assert unpack(packed).parts[0].tolist() == [1.0] * 5


def test_a_message_has_flat_parts_of_known_types() -> None:
    for part in (torch.zeros(2, 2), torch.zeros(2, dtype=torch.complex64)):
        with pytest.raises(ValueError, match="use flat parts"):
            Message((part,))
    assert Message((torch.zeros(3), torch.zeros(5, dtype=torch.int8))).nbytes == 17


def test_keys_that_differ_in_any_bit_give_other_numbers() -> None:
    device = torch.device("cpu")
    drawn = {
        float(torch.rand(1, generator=generator(key, device)))
        for key in (0, 1, 2**32, 2**32 + 1, 2**62, 2**63 - 1)
    }
    assert len(drawn) == 6
    for key in (-1, 2**63):
        with pytest.raises(ValueError, match="whole number from 0"):
            generator(key, device)


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [0, 1, 2, 9, 640, 1003])
def test_every_codec_reads_what_it_wrote(
    make: Callable[[int], Codec], dtype: torch.dtype, n: int
) -> None:
    codec, vector = make(n), normal(n, dtype=dtype)
    before = vector.clone()
    message = codec.encode(vector, 7)
    assert torch.equal(vector, before)
    assert same(message, codec.encode(vector, 7))
    read = codec.decode(message, n)
    assert read.shape == (n,) and read.dtype in (torch.float32, dtype)
    assert torch.equal(read, codec.decode(unpack(pack(message)), n))
    assert not any(np.shares_memory(read.numpy(), part.numpy()) for part in _numpy_parts(message))
    assert message.nbytes == pack(message).size - header_length(len(message.parts))


@every_codec
def test_senders_are_deterministic_and_can_be_saved(make: Callable[[int], Codec]) -> None:
    n = 1003
    codec = make(n)
    first, second = codec.sender(n), codec.sender(n)
    second.load_state_dict(first.state_dict())  # before anything was sent
    for step in range(3):
        vector = normal(n, step)
        sent = first.send(vector, step, 0.1)
        assert torch.equal(vector, normal(n, step))
        assert same(sent, second.send(vector, step, 0.1))
        assert sent.rate == 0.1
    state = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    third = make(n).sender(n)
    third.load_state_dict(state)
    message = first.send(normal(n, 5), 5, 0.05)
    assert same(message, third.send(normal(n, 5), 5, 0.05))
    for sender in (first, third):
        sender.refund(message)
    assert same(first.send(normal(n, 6), 6), third.send(normal(n, 6), 6))
    second.load_state_dict(state)  # which later messages have left as it was
    assert same(message, second.send(normal(n, 5), 5, 0.05))


@every_codec
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_and_spoils_no_memory(
    make: Callable[[int], Codec], wrong: float
) -> None:
    n = 1003
    codec = make(n)
    sender = codec.sender(n)
    sender.send(normal(n), 0)
    spoiled = normal(n, 1)
    spoiled[::2] = wrong
    message = sender.send(spoiled, 1)
    assert not codec.decode(message, n).isfinite().all()
    sender.refund(message)
    assert codec.decode(sender.send(normal(n, 2), 2), n).isfinite().all()


@every_codec
def test_other_vectors_and_messages_are_refused(make: Callable[[int], Codec]) -> None:
    n = 1003
    codec = make(n)
    for vector in (torch.zeros(17, 59), torch.zeros(n, dtype=torch.float16)):
        with pytest.raises(ValueError, match="flat vectors of float32 or float64"):
            codec.encode(vector, 0)
        with pytest.raises(ValueError, match="flat vectors of float32 or float64"):
            codec.sender(n).send(vector, 0)
    message = codec.encode(normal(n), 0)
    with pytest.raises(ValueError):
        codec.decode(message, 501)
    with pytest.raises(ValueError):
        codec.decode(Message((*message.parts, torch.zeros(1))), n)
    with pytest.raises(ValueError):
        codec.decode(Message(()), n)


@every_codec
def test_vectors_need_not_lie_in_one_piece(make: Callable[[int], Codec]) -> None:
    vector = normal(2006)[::2]
    assert same(make(1003).encode(vector, 3), make(1003).encode(vector.clone(), 3))


def test_a_sender_without_memory_has_nothing_to_load() -> None:
    sender = Stateless(Half())
    sender.refund(sender.send(normal(4), 0))
    assert sender.state_dict() == {}
    with pytest.raises(ValueError, match="has no state"):
        sender.load_state_dict({"error": torch.zeros(4)})


def _numpy_parts(message: Message) -> list[Tensor]:
    return [part for part in message.parts if part.dtype != torch.bfloat16]
