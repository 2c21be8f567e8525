"""The inputs of a plan: the workers' delays and links, the prices, and the loss surface."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from math import inf, isfinite, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.protocol import Prices, WorkerId
from paceline.core.state import decode, encode
from paceline.delays import compound, models
from paceline.delays.links import Link
from paceline.delays.models import Delay
from paceline.engines.simulator import Simulator
from paceline.planner.measure.curvature import NoCurvature, Spectrum
from paceline.planner.measure.stale_training import Curve, StaleTraining

FORMAT = 2
SGD = "SGD"
_OLDER = (
    "this profile is of an older version and does not name its optimizer; plans and forecasts "
    "from it assume SGD: profile again if the script trains with another"
)
_DELAYS = {
    kind.__name__: kind
    for kind in (
        *(models.Fixed, models.Exponential, models.ShiftedExponential, models.Erlang),
        *(models.LogNormal, models.Pareto, models.Trace),
        *(compound.Bursts, compound.Mixture, compound.Scaled, compound.Changed),
    )
}  # the only classes that loading a file may build


@dataclass(frozen=True)
class WorkerProfile:
    """One worker: the seconds of computing one sample, and its connection.

    observations: the number of tasks that the law was fitted to; 0: the law is known.
    autocorrelation: of the ranks of consecutive tasks, as in `Fit`; above 0 if slow tasks come in
        bursts.
    """

    compute: Delay
    link: Link = Link()
    observations: int = 0
    autocorrelation: float = 0.0

    def seconds(self, samples: float, got: float, sent: float) -> float:
        """Return the mean response time of a task that gets `got` bytes and sends `sent` bytes."""
        way = 2 * self.link.latency + got / self.link.down + sent / self.link.up
        return self.compute.mean * samples + way


@dataclass(frozen=True)
class Surface:
    """The measured loss, gradient, noise and curvature at the start of training.

    loss, gradient_norm: at the first model, on all data.
    noise: the trace of the covariance of one sample's gradient.
    spectrum: curvatures, each with the share of all directions that have it.
    parameters: the number of directions.
    floor: the loss of the best model.
    sharpest: the largest curvature measured after some training, at which learning rates must be
        stable; 0 if it was not measured.
    trained: observed training: its learning rate, momentum included, and pairs of a number of
        steps and the loss after them.
    pull: curvatures, each with its share of the squared gradient; empty if unknown.
    plain: whether noise is equal in all directions and at all models, as that of `Quadratic`.
        Otherwise it is in proportion to curvature, and to the loss. This is exact in a least
        squares problem whose residuals are independent of the data. It is nearly so in problems
        that can be interpolated.
    """

    loss: float
    gradient_norm: float
    noise: float
    spectrum: Spectrum
    parameters: int = 1
    floor: float = 0.0
    pull: Spectrum = ()
    plain: bool = False
    sharpest: float = 0.0
    trained: tuple[float, Curve] | None = None

    def __post_init__(self) -> None:
        if not self.floor < self.loss < inf:
            raise ValueError(
                f"the loss is {self.loss} and its floor {self.floor}: give as floor= the loss of "
                "the best model, below the first loss"
            )
        if not any(value > 0 for value, _ in self.spectrum):
            raise NoCurvature(
                "no curvature is above 0 here, so that a quadratic says nothing of this loss; "
                "train for some steps, and measure the curvature there"
            )

    def lowered(self, loss: float) -> Surface:
        """Return the surface as assumed once the loss has fallen to this value."""
        if not self.floor < loss < self.loss:
            return self
        left = sqrt((loss - self.floor) / (self.loss - self.floor))
        base = self.floor - max(self.floor, 0.0)
        fading = 1.0 if self.plain else (loss - base) / (self.loss - base)
        noise = self.noise * fading
        norm = self.gradient_norm * left
        return replace(self, loss=loss, gradient_norm=norm, noise=noise, trained=None)

    @property
    def top(self) -> float:
        """The largest measured curvature, at the start or later."""
        return max(self.sharpest, *(value for value, _ in self.spectrum))


@dataclass(frozen=True)
class Profile:
    """Workers, messages, prices and the loss surface, the inputs of a plan.

    >>> profile = Profile({"w0": WorkerProfile(models.Fixed(0.1))}, batch_size=8)
    >>> Profile.from_json(profile.to_json()) == profile
    True
    """

    workers: Mapping[WorkerId, WorkerProfile]
    batch_size: int
    message_bytes: int = 0
    prices: Prices = Prices()
    surface: Surface | None = None
    notes: tuple[str, ...] = ()
    interruptible: bool = True  # whether cancelled work ends at once
    local_steps: bool = True  # whether the learner can take local steps
    codes: bool = True  # whether it can compute parts of a batch separately
    optimizer: Mapping[str, Any] | None = None
    """Its name and settings, and under "outer" those of the outer optimizer; None: SGD. With "kept"
    workers keep its state between tasks of local steps."""
    stale_training: StaleTraining | None = None
    """Training with fresh and with stale gradients; None if it was not measured."""

    def __post_init__(self) -> None:
        if not self.workers:
            raise ValueError("workers are missing; a profile names those of its engine, in order")
        if self.batch_size < 1 or self.message_bytes < 0:
            raise ValueError(
                f"batch_size={self.batch_size}, message_bytes={self.message_bytes}: use a batch "
                ">= 1, and bytes >= 0"
            )

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.workers)

    @property
    def momentum(self) -> float:
        """The momentum of the server's steps: of the outer optimizer if there is one."""
        given = self.optimizer or {}
        return float((given.get("outer") or given).get("momentum", 0.0))

    @property
    def unknown(self) -> str:
        """Why the steps to a loss cannot be forecast; "" if they can."""
        given = self.optimizer or {}
        for each in (given, given.get("outer") or {}):
            if (name := each.get("name", SGD)) != SGD:
                return (
                    f"the learner's optimizer is {name}, and the number of steps is predicted for "
                    "SGD only, with or without momentum"
                )
        if keeps_momentum(given):
            return (
                "workers keep the momentum of their optimizer between tasks, and the number of "
                "steps is predicted only if each task starts without momentum"
            )
        if self.surface is None:
            return "the profile has no curvature of the loss"
        return ""

    def known(self) -> Surface:
        """Return the loss surface; raise `ValueError` if the profile has none."""
        if self.surface is None:
            raise ValueError(
                "this profile has no measurements of the model; use pl.profile(learner, engine), "
                "or profile_of(journal, learner=learner)"
            )
        return self.surface

    def engine(self, seed: int = 0, shrunk: float = 1.0) -> Simulator:
        """Return a simulator of these workers, whose results are `shrunk` by a codec.

        A `Trace` begins at a random position; otherwise all seeds would replay the same times.
        """
        rng = np.random.Generator(np.random.PCG64([seed, 1]))
        delays = [_turned(worker.compute, rng) for worker in self.workers.values()]
        links = [replace(w.link, up=w.link.up / shrunk) for w in self.workers.values()]
        return Simulator(
            self.size,
            delays,
            links,
            unit=1,
            interruptible=self.interruptible,
            names=[*self.workers],
        )

    def to_json(self) -> str:
        """Return the profile as JSON text."""
        workers = {
            name: {
                "compute": _dump(worker.compute),
                "link": encode(_values(worker.link)),
                "observations": worker.observations,
                "autocorrelation": worker.autocorrelation,
            }
            for name, worker in self.workers.items()
        }
        parts = {"surface": self.surface, "stale_training": self.stale_training}
        data = {
            "format": FORMAT,
            "workers": workers,
            **{name: part and encode(_values(part)) for name, part in parts.items()},
            "prices": encode(self.prices),
            "notes": list(self.notes),
            "optimizer": None if self.optimizer is None else dict(self.optimizer),
            **{name: getattr(self, name) for name in _PLAIN},
        }
        return json.dumps(data, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Invert `to_json`."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") not in (1, FORMAT):
            raise ValueError(f"this is no profile of format 1 or {FORMAT}; make one by to_json()")
        workers = {
            name: WorkerProfile(
                _load(each["compute"]),
                Link(**decode(each["link"])),
                int(each.get("observations", 0)),  # files of before lack these two
                float(each.get("autocorrelation", 0.0)),
            )
            for name, each in data["workers"].items()
        }
        surface = None if data["surface"] is None else Surface(**decode(data["surface"]))
        stale = data.get("stale_training")  # files of before lack it
        prices, notes = decode(data["prices"]), tuple(data["notes"])
        plain = {name: data[name] for name in _PLAIN}
        if data["format"] == FORMAT:
            plain["optimizer"] = _settings(data["optimizer"])
        else:
            notes += (_OLDER,)
        plain["stale_training"] = None if stale is None else StaleTraining(**decode(stale))
        return cls(workers, prices=prices, surface=surface, notes=notes, **plain)

    def save(self, path: Path | str) -> None:
        """Write the profile to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> Profile:
        """Read a profile from a file that `save` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


_PLAIN = ("batch_size", "message_bytes", "interruptible", "local_steps", "codes")


def keeps_momentum(optimizer: Mapping[str, Any]) -> bool:
    """Return whether workers keep a momentum between tasks of local steps."""
    return bool(optimizer.get("kept") and optimizer.get("momentum"))


def _settings(data: Any) -> dict[str, Any] | None:
    """Check the optimizer settings of a file, and return them."""
    if data is None:
        return None
    assert isinstance(data, dict) and isinstance(data["name"], str)
    _settings(data.get("outer"))
    return data


def _turned(delay: Delay, rng: np.random.Generator) -> Delay:
    if not isinstance(delay, models.Trace):
        return delay
    place = int(rng.integers(len(delay.seconds)))
    return models.Trace([*delay.seconds[place:], *delay.seconds[:place]])


def _values(item: Any) -> dict[str, Any]:
    values = {f.name: getattr(item, f.name) for f in fields(item) if f.init}
    return {name: v.item() if isinstance(v, np.generic) else v for name, v in values.items()}


def _dump(delay: Delay) -> dict[str, Any]:
    name = type(delay).__name__
    if name not in _DELAYS or not is_dataclass(delay):
        raise TypeError(f"{delay!r} cannot be saved; known are {', '.join(_DELAYS)}")
    found: dict[str, Any] = {}
    for key, value in _values(delay).items():
        if isinstance(value, Delay):
            found[key] = _dump(value)
        elif isinstance(value, Sequence):
            found[key] = [_dump(each) if isinstance(each, Delay) else each for each in value]
        else:
            found[key] = value
    return {"law": name, **found}


def _load(data: Mapping[str, Any]) -> Delay:
    if data.get("law") not in _DELAYS:
        raise ValueError(f"unknown law {data.get('law')!r}; known are {', '.join(_DELAYS)}")
    arguments = {key: _read(value) for key, value in data.items() if key != "law"}
    found: Delay = _DELAYS[data["law"]](**arguments)
    return found


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(each) for each in value]
    if isinstance(value, dict):
        return _load(value)
    assert isinstance(value, int | float) and isfinite(value)
    return value
