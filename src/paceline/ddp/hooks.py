"""Communication hooks for DistributedDataParallel: send shorter gradients, or send them less often.

A hook keeps its state per parameter name, so it depends on neither `bucket_cap_mb` nor the buckets.
DDP rebuilds its buckets after the first step, and a resumed run begins with the first ones again.

All ranks take part in every exchange, in the same order. A hook saves bytes, not communication
rounds. It adds a short round for each bucket, in which the ranks announce what will follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeAlias
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.codecs.base import Codec, Message, Sender, pack, unpack, view
from paceline.codecs.triggers import Trigger
from paceline.core.protocol import Figure
from paceline.core.schema import load_state, save_state

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket  # untyped in torch.distributed

Rate: TypeAlias = float | Callable[[], float] | Optimizer
Recipe: TypeAlias = Codec | Callable[[torch.Size], Codec]


class _Hook(ABC):
    """Base of both hooks: registration, byte counts, and saved state.

    bytes_sent: the bytes that this rank has sent to the others, if all-gather sends a tensor n - 1
        times and all-reduce 2 (n - 1) / n times, as ring algorithms do (gloo uses rings).
    bytes_dense: the bytes that all-reduce would have sent for the same gradients.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.bytes_sent = self.bytes_dense = 0
        self._group = process_group
        self._rank, self._ranks = 0, 1
        self._names: dict[Tensor, str] = {}

    def register(self, model: DistributedDataParallel) -> Self:
        """Register the hook with a model, once, before the first step."""
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"a hook is for DistributedDataParallel, not {type(model).__name__}; "
                f"use hook.register(DistributedDataParallel(model))"
            )
        if self._names:
            raise RuntimeError(
                "this hook is already registered on a model; make another hook for this model"
            )
        self._group = model.process_group if self._group is None else self._group
        self._rank, self._ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        named = {
            name: parameter
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad
        }
        self._begin(named)
        self._names = {parameter: name for name, parameter in named.items()}
        # A lambda, since DDP compares annotations, which are strings in this file, with classes.
        model.register_comm_hook(None, lambda state, bucket: self._exchange(bucket))
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, tensors and plain data; every rank saves its own."""
        self._registered()
        return {
            **{"rank": self._rank, "ranks": self._ranks},
            **{"bytes_sent": self.bytes_sent, "bytes_dense": self.bytes_dense},
            "parameters": {name: self._saved(name) for name in self._names.values()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of this rank; call it after `register`."""
        self._registered()
        if (state["rank"], state["ranks"]) != (self._rank, self._ranks):
            raise ValueError(
                f"the state is of rank {state['rank']} of {state['ranks']} and this is rank "
                f"{self._rank} of {self._ranks}; save and load a state for each rank, or start "
                "without one"
            )
        others = state["parameters"].keys() ^ set(self._names.values())
        if others:
            raise ValueError(
                f"the state and the model differ in {sorted(others)}; use the model of the saved "
                "run"
            )
        for name, saved in state["parameters"].items():
            self._load(name, saved)
        self.bytes_sent, self.bytes_dense = state["bytes_sent"], state["bytes_dense"]

    def _registered(self) -> None:
        if not self._names:
            raise RuntimeError("this hook has no model yet; call hook.register(model) first")

    def _exchange(self, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise ValueError("this hook takes no sparse gradients; use Embedding(sparse=False)")
        self.bytes_dense += self._ring(buffer)
        # By length, not by shape: a gradient may have its numbers in another order than its shape.
        parameters = bucket.parameters()
        pieces = torch.split(buffer, [parameter.numel() for parameter in parameters])
        return self._reduce(buffer, [self._names[each] for each in parameters], pieces)

    def _ring(self, tensor: Tensor) -> int:
        """Return the bytes that a rank sends in an all-reduce."""
        return 2 * (self._ranks - 1) * tensor.numel() * tensor.element_size() // self._ranks

    @abstractmethod
    def _begin(self, named: Mapping[str, Tensor]) -> None:
        """Prepare for these parameters."""

    @abstractmethod
    def _reduce(self, buffer: Tensor, names: list[str], pieces: Sequence[Tensor]) -> Future[Tensor]:
        """Write the gradient for the step into the pieces of the buffer."""

    @abstractmethod
    def _saved(self, name: str) -> dict[str, Any]:
        """Return the state of a parameter."""

    @abstractmethod
    def _load(self, name: str, saved: Mapping[str, Any]) -> None:
        """Load the state of a parameter."""


@dataclass
class _Channel:
    """Sends the gradients of one parameter."""

    codec: Codec
    sender: Sender
    size: int
    group: int  # the optimizer's group, for its learning rate
    sent: int = 0


class CodecHook(_Hook):
    """Steps with the mean over ranks of D(C(g_r)), the gradients as a codec writes and reads them.

        hook = CodecHook(Feedback(TopK(0.01)), rate=optimizer).register(model)

    Each parameter is encoded by itself: `TopK(0.01)` sends 1 % of each tensor. With `Feedback` this
    is Top-K with error feedback (Stich et al. 2018, arXiv 1809.07599). With `DeepGradient` it is
    Deep Gradient Compression, for an optimizer without momentum. `codec` may also be a function of
    the shape: `lambda shape: Feedback(LowRank(2, (tuple(shape),)))`.

    rate: the learning rate, the unit of the codec's memory: a number, a function, or the
        optimizer. With a GradScaler use `lambda: rate / scaler.get_scale()`.
    dense_below: tensors with fewer numbers are sent uncompressed. Unless it is 0, so are all
        tensors with fewer than two dimensions: biases, normalization.
    seed: the seed of the codec's randomness; ranks, parameters and steps get different streams.

    A gradient that is zero throughout is not sent and does not change the memory. The reason: DDP
    drops the gradient of a parameter that no rank has used.
    """

    def __init__(
        self,
        codec: Recipe,
        process_group: dist.ProcessGroup | None = None,
        *,
        rate: Rate = 1.0,
        dense_below: int = 1024,
        seed: int = 0,
    ) -> None:
        super().__init__(process_group)
        if dense_below < 0 or seed < 0:
            raise ValueError(f"dense_below={dense_below}, seed={seed}: use numbers >= 0")
        self._recipe, self._rate, self._dense_below, self._seed = codec, rate, dense_below, seed
        self._channels: dict[str, _Channel] = {}

    def _begin(self, named: Mapping[str, Tensor]) -> None:
        groups: dict[Tensor, int] = {}
        if isinstance(self._rate, Optimizer):
            for index, each in enumerate(self._rate.param_groups):
                groups |= dict.fromkeys(each["params"], index)
            missing = [name for name, parameter in named.items() if parameter not in groups]
            if missing:
                raise ValueError(
                    f"rate= is an optimizer that does not have {missing}; give it all parameters "
                    f"that need gradients, or rate= a number or a function"
                )
        for name, parameter in named.items():
            size, group = parameter.numel(), groups.get(parameter, 0)
            if size < self._dense_below or (self._dense_below and parameter.dim() < 2):
                continue
            recipe = self._recipe
            codec = recipe(parameter.shape) if callable(recipe) else recipe
            self._channels[name] = _Channel(codec, codec.sender(size), size, group)

    def _reduce(self, buffer: Tensor, names: list[str], pieces: Sequence[Tensor]) -> Future[Tensor]:
        packed = view(pack(self._written(names, pieces))).to(buffer.device)
        # gloo gathers tensors of equal length only, so all are padded to the longest.
        length = torch.tensor([packed.numel()], device=buffer.device)
        lengths = [torch.empty_like(length) for _ in range(self._ranks)]
        dist.all_gather(lengths, length, group=self._group)
        sizes = [int(each) for each in torch.cat(lengths).tolist()]
        mine = packed.new_zeros(-(-max(sizes) // 8) * 8)  # so that numbers are aligned
        mine[: packed.numel()] = packed
        received = [torch.empty_like(mine) for _ in sizes]
        self.bytes_sent += (self._ranks - 1) * (length.element_size() + mine.numel())
        channels = [self._channels.get(name) for name in names]
        work = dist.all_gather(received, mine, group=self._group, async_op=True)

        # Must not reference self: a thread of the process group drops this function last, maybe
        # after the group was destroyed. With self it would destroy the group and wait for itself.
        def read(future: Future[Any]) -> Tensor:
            future.wait()
            rows = zip(received, sizes, strict=True)
            messages = [unpack(row[:size].cpu().numpy()) for row, size in rows]
            _put_mean(messages, channels, pieces)
            return buffer

        return work.get_future().then(read)  # type: ignore[no-any-return]

    def _written(self, names: list[str], pieces: Sequence[Tensor]) -> Message:
        """Return one message: the part counts of the tensors, all dense numbers, the parts."""
        counts, dense, parts = [], [pieces[0].new_empty(0)], list[Tensor]()
        for name, piece in zip(names, pieces, strict=True):
            channel, sent = self._channels.get(name), tuple[Tensor, ...]()
            if channel is None:
                dense.append(piece)
            elif piece.any():
                vector = piece if piece.dtype == torch.float64 else piece.float()
                key = self._key(name, channel.sent)
                sent = channel.sender.send(vector, key, self._rate_of(channel)).parts
            if channel is not None:
                channel.sent += 1
            counts.append(len(sent))
            parts.extend(sent)
        return Message((torch.tensor(counts, dtype=torch.uint8), torch.cat(dense), *parts))

    def _key(self, name: str, sent: int) -> int:
        entropy = [self._seed, self._rank, crc32(name.encode()), sent]
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 1

    def _rate_of(self, channel: _Channel) -> float:
        match self._rate:
            case Optimizer() as optimizer:
                return float(optimizer.param_groups[channel.group]["lr"])
            case float() | int() as rate:
                return float(rate)
            case rate:
                return float(rate())

    def _saved(self, name: str) -> dict[str, Any]:
        channel = self._channels.get(name)
        return {"sent": channel.sent, "sender": channel.sender.state_dict()} if channel else {}

    def _load(self, name: str, saved: Mapping[str, Any]) -> None:
        channel = self._channels.get(name)
        if bool(saved) != bool(channel):
            raise ValueError(
                f"{name} is dense in the saved state or in this hook, but not in both; use the "
                "dense_below= of the saved state"
            )
        if channel:
            channel.sent = saved["sent"]
            channel.sender.load_state_dict(saved["sender"])


def _put_mean(
    messages: Sequence[Message], channels: Sequence[_Channel | None], pieces: Sequence[Tensor]
) -> None:
    """Write the mean of the messages of all ranks into the pieces."""
    heads = [(message.parts[0].tolist(), message.parts[1]) for message in messages]
    ats, low = [2] * len(messages), 0
    for index, (channel, piece) in enumerate(zip(channels, pieces, strict=True)):
        total = torch.zeros_like(
            piece, dtype=None if piece.dtype == torch.float64 else torch.float32
        )
        for rank, (message, (counts, dense)) in enumerate(zip(messages, heads, strict=True)):
            if channel is None:
                total += dense[low : low + piece.numel()].to(total.device)
            elif counts[index]:
                at, ats[rank] = ats[rank], ats[rank] + counts[index]
                parts = tuple(part.to(total.device) for part in message.parts[at : ats[rank]])
                total += channel.codec.decode(Message(parts), channel.size)
        low += 0 if channel else piece.numel()
        piece.copy_(total.div_(len(messages)))


@dataclass
class _Kept:
    """The state of one parameter: the gradient last sent, and the mean of all ranks then."""

    trigger: Trigger
    mine: Tensor | None = None
    mean: Tensor | None = None
    step: int = 0
    since: int = 0  # steps since the last exchange


class TriggeredHook(_Hook):
    """Exchanges a gradient only when it has changed on some rank; otherwise reuses its last mean.

        hook = TriggeredHook(Lag(workers=1), every=20).register(model)

    Lazily aggregated gradients (LAG, Chen et al. 2018, arXiv 1805.09965), for collectives. Each
    rank has a copy of the trigger for each tensor. The trigger gets |g_r| and |g_r - ĝ_r|, where
    ĝ_r is the gradient that this rank sent last. As the `move` of the model it gets the norm of the
    mean of the last step. All are at rate 1: thresholds are in units of gradients. `Lag(workers=1)`
    is then LAG's rule for a model that moves by rate times mean, tensor by tensor:
    |g_r - ĝ_r|^2 > xi sum |move|^2.

    In LAG each worker uploads alone, and a server adds differences. Here the ranks exchange a byte
    for each tensor: whether any rank asks for it. If so, all ranks send theirs, since an all-reduce
    takes as long with zeros from some. Apart from that byte, this never sends more than all-reduce.
    The mean is one of gradients, not a sum of differences, whose rounding errors would add up.

    every: exchange a tensor at least every so many steps; None leaves it to the trigger.
    """

    def __init__(
        self,
        trigger: Trigger,
        process_group: dist.ProcessGroup | None = None,
        *,
        every: int | None = None,
    ) -> None:
        super().__init__(process_group)
        if every is not None and every < 1:
            raise ValueError(f"every={every}: a number of steps; use every >= 1, or None")
        self._trigger, self._every = trigger, every
        self._kept: dict[str, _Kept] = {}

    def _begin(self, named: Mapping[str, Tensor]) -> None:
        self._kept = {name: _Kept(deepcopy(self._trigger)) for name in named}

    def _reduce(self, buffer: Tensor, names: list[str], pieces: Sequence[Tensor]) -> Future[Tensor]:
        known = [self._kept[name] for name in names]
        asked = torch.tensor(
            [self._asks(kept, piece) for kept, piece in zip(known, pieces, strict=True)],
            dtype=torch.uint8,
            device=buffer.device,
        )
        dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._group)
        self.bytes_sent += self._ring(asked)
        sent = []
        for kept, piece, asks in zip(known, pieces, asked.tolist(), strict=True):
            if asks:
                kept.mine, kept.since = piece.clone(), 0
                sent.append((kept, piece))
            else:
                assert kept.mean is not None  # it was exchanged in the first step
                kept.since += 1
                piece.copy_(kept.mean)
        if not sent:
            done: Future[Tensor] = Future()
            done.set_result(buffer)
            return done
        joined = torch.cat([piece for _, piece in sent]).div_(self._ranks)
        self.bytes_sent += self._ring(joined)
        work = dist.all_reduce(joined, group=self._group, async_op=True)

        def read(future: Future[Any]) -> Tensor:
            future.wait()
            means = torch.split(joined, [piece.numel() for _, piece in sent])
            for (kept, piece), mean in zip(sent, means, strict=True):
                piece.copy_(mean)
                kept.mean = mean.clone()
            return buffer

        return work.get_future().then(read)  # type: ignore[no-any-return]

    def _asks(self, kept: _Kept, piece: Tensor) -> bool:
        kept.step += 1
        none = torch.zeros_like(piece[:0])
        seen: dict[Figure, Callable[[], Tensor]] = {
            "norm": lambda: piece,
            "change": lambda: piece if kept.mine is None else piece - kept.mine,
            "move": lambda: none if kept.mean is None else kept.mean,
        }
        figures: dict[Figure, list[float]] = {
            name: [float(torch.linalg.vector_norm(seen[name](), dtype=torch.float64))]
            for name in kept.trigger.wants
        }
        [fires] = kept.trigger.fires(kept.step, figures, [piece.numel()], 1.0)
        due = self._every is not None and kept.since + 1 >= self._every
        return fires or due or kept.mean is None

    def _saved(self, name: str) -> dict[str, Any]:
        kept = self._kept[name]
        tensors = {"mine": kept.mine, "mean": kept.mean}
        return {
            **{"step": kept.step, "since": kept.since, "trigger": save_state(kept.trigger)},
            **{key: each.clone() for key, each in tensors.items() if each is not None},
        }

    def _load(self, name: str, saved: Mapping[str, Any]) -> None:
        kept = self._kept[name]
        kept.step, kept.since = saved["step"], saved["since"]
        kept.mine, kept.mean = (
            saved[key].clone() if key in saved else None for key in ("mine", "mean")
        )
        load_state(kept.trigger, saved["trigger"])
