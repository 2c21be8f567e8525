"""Measures how alike the parts of a partition are, compared with a random split.

The distance of a part from the whole is the maximum mean discrepancy (MMD; Gretton et al., 2012),
|mean of phi in the part - mean of phi|. The random Fourier features phi differ from those that
made the partition, so that the check is independent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log, nan, sqrt

import numpy as np
from numpy.typing import ArrayLike

from paceline.data.partition.base import Floats, Indices, Partition, normalized
from paceline.data.partition.features import Fourier, Rows, add_by_key, as_rows
from paceline.data.seeding import generator

_FEATURES = 2048
_CHUNK = 4096  # samples; their features are 32 MB
_PROBED = 500  # samples for the spread of the features' variance over directions
_OTHER_SEED = 0x5EED  # the certificate's features are not those of `balanced` with the same seed
# A random split causes at most one false alarm in this many certificates.
_CONFIDENCE = 1000
# All workers wait for a part that is larger than planned; rounding alone changes less than this.
_SIZE_TOLERANCE = 0.01
_ROUNDED = 2
_EXACT = 1e-6  # distances below it are rounding
_MOST_TOLD = 16  # the longest table with all parts


@dataclass(frozen=True)
class Certificate:
    """The quality of a partition; a part without samples has the distance nan.

    `predicted` is the root mean square distance of a random split into parts of these sizes, by
    class if labels are known. `predicted_plain` is that of a random split that ignores classes.
    """

    sizes: tuple[int, ...]
    targets: tuple[float, ...]
    class_distances: tuple[float, ...] | None
    distances: tuple[float, ...] | None
    rms: float | None
    predicted: float | None
    predicted_plain: float | None
    warnings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the parts are about as alike as those of a random split, or more."""
        return not self.warnings

    @property
    def ratio(self) -> float | None:
        """The measured distance over the predicted one: below 1 is better than random."""
        if self.rms is None or not self.predicted:
            return None
        return self.rms / self.predicted

    def __str__(self) -> str:
        bad = "some parts are empty" if 0 in self.sizes else "the parts are not alike"
        lines = ["OK: the parts are alike" if self.ok else f"NOT OK: {bad}"]
        if self.ok and self.ratio is None:
            lines = ["OK: as far as sizes and labels tell"]
        if self.ratio is not None:
            lines[0] += f", at {self.ratio:.2f} times the distance of a random split"
        lines += [f"  ! {warning}" for warning in self.warnings]
        lines.append(f"{'part':>6} {'samples':>10} {'planned':>12} {'class mix':>9} {'MMD':>10}")
        planned = tuple(map(float, self.sizes)) != self.targets
        for part in self._told():
            size, target = self.sizes[part], self.targets[part]
            classes = "-" if self.class_distances is None else f"{self.class_distances[part]:.4f}"
            distance = "-" if self.distances is None else f"{self.distances[part]:.2e}"
            plan = f"{target:.1f}" if planned else "-"
            lines.append(f"{part:>6} {size:>10} {plan:>12} {classes:>9} {distance:>10}")
        if (rest := len(self.sizes) - len(self._told())) > 0:
            lines.append(f"   and {rest} others")
        if self.rms is not None:
            chance = f"a random split has {self.predicted_plain:.2e}"
            if self.class_distances is not None:
                chance = f"a stratified random split has {self.predicted:.2e}, and {chance}"
            lines.append(f"root mean square MMD {self.rms:.2e}; {chance}")
        return "\n".join(lines)

    def _told(self) -> list[int]:
        """Return all parts, or if there are many, the parts with the largest distance."""
        parts = range(len(self.sizes))
        if len(parts) <= _MOST_TOLD:
            return list(parts)
        off = self.distances or self.class_distances or [0.0 for _ in parts]
        return sorted(sorted(parts, key=lambda part: -off[part])[: _MOST_TOLD // 2])


def certify(
    partition: Partition,
    features: Rows | None = None,
    labels: ArrayLike | None = None,
    shares: int | Iterable[float] | None = None,
    *,
    seed: int = 0,
) -> Certificate:
    """Compare a partition with its shares, if given, and with the expectation of a random split.

    A random part of n_j of n samples has E|mean_j - mean|^2 = (1/n_j - 1/n) tr Cov(phi). For a part
    drawn by class, Cov is the mean covariance inside the classes.

    >>> print(str(certify(Partition([0, 1, 1, 0]), labels=[0, 0, 1, 1])).splitlines()[0])
    OK: as far as sizes and labels tell
    """
    if not isinstance(partition, Partition):
        raise ValueError(
            f"{type(partition).__name__} is no partition; call certify(partition, features, labels)"
        )
    sizes = partition.sizes
    targets = sizes.astype(np.float64)
    if shares is not None:
        portions = normalized(shares)
        if len(portions) != partition.parts:
            raise ValueError(
                f"{len(portions)} shares for {partition.parts} parts; give one for each"
            )
        targets = len(partition) * portions
    warnings = _size_warnings(sizes, targets, shares is not None)
    classes = np.zeros(len(partition), np.int64)
    class_distances = distances = rms = predicted = plain = None
    if labels is not None:
        given = np.asarray(labels)
        _check(given.shape, partition, "labels")
        classes = np.unique(given, return_inverse=True)[1].astype(np.int64)
        off, most = _class_distances(partition, classes)
        class_distances = tuple(off.tolist())
        warnings += _alarm(off, most, "a mixture of classes that is not that of the whole")
        warnings += _rare_classes(partition, classes, np.unique(given).tolist())
    if features is not None:
        features = as_rows(features)
        _check(features.shape[:1], partition, "features")
        fourier = Fourier.fit(features, _FEATURES, seed + _OTHER_SEED)
        squares, inside, total = _squares(partition, features, classes, fourier)
        chance = np.divide(1, sizes, out=np.full(len(sizes), nan), where=sizes > 0)
        chance -= 1 / len(partition)
        distances = tuple(np.sqrt(squares).tolist())
        rms = sqrt(np.nanmean(squares))
        predicted, plain = sqrt(np.nanmean(chance) * inside), sqrt(np.nanmean(chance) * total)
        most = np.sqrt(chance * total * _tail(features, fourier, seed, partition.parts))
        # A few outliers may add this to a small part (Bernstein's last term; no two features are
        # farther apart than 2).
        most += 2 * log(_CONFIDENCE * partition.parts) / (3 * np.maximum(sizes, 1))
        warnings += _alarm(np.sqrt(squares), most, "contents that are not those of the whole")
    return Certificate(
        sizes=tuple(sizes.tolist()),
        targets=tuple(targets.tolist()),
        class_distances=class_distances,
        distances=distances,
        rms=rms,
        predicted=predicted,
        predicted_plain=plain,
        warnings=tuple(warnings),
    )


def _check(shape: tuple[int, ...], partition: Partition, name: str) -> None:
    if shape != (len(partition),):
        raise ValueError(
            f"{name} of shape {shape} for a partition of {len(partition)} samples; give one for "
            "each sample of the same data"
        )


def _size_warnings(sizes: Indices, targets: Floats, planned: bool) -> list[str]:
    """Return warnings about parts that are empty or not of the planned size."""
    off = np.abs(sizes - targets)
    wrong = np.flatnonzero(off > np.maximum(_ROUNDED, _SIZE_TOLERANCE * targets))
    found = []
    if wrong.size:
        worst = int(off.argmax())
        found.append(
            f"{wrong.size} of {len(sizes)} parts are not of the planned size; part {worst} has "
            f"{sizes[worst]} samples instead of {targets[worst]:.1f}"
        )
    if (empty := np.flatnonzero((sizes == 0) & ((targets >= 1) | (not planned)))).size:
        found.append(f"{empty.size} of {len(sizes)} parts are empty, the first is {empty[0]}")
    return found


def _alarm(off: Floats, most: Floats, what: str) -> list[str]:
    """Return a warning if parts are farther off than chance explains."""
    wrong = np.flatnonzero(off > most + _EXACT)
    if not wrong.size:
        return []
    worst = int(wrong[(off[wrong] / (most[wrong] + _EXACT)).argmax()])
    return [
        f"{wrong.size} of {len(off)} parts have {what}; part {worst} is off by {off[worst]:.3g}, "
        f"by chance it is at most {most[worst]:.3g}; is the data sorted? use balanced or stratified"
    ]


def _class_distances(partition: Partition, classes: Indices) -> tuple[Floats, Floats]:
    """Return each part's total variation distance of classes, and its bound under chance.

    Its mean is at most half the sum of the standard deviations of the classes' fractions. One
    sample more or less changes it by 1/n_j, which bounds the effect of chance (McDiarmid, 1989).
    """
    sizes, kinds = np.maximum(partition.sizes, 1), int(classes.max()) + 1
    cells = np.bincount(classes * partition.parts + partition.of, minlength=kinds * partition.parts)
    fractions = cells.reshape(kinds, -1) / sizes
    whole = np.bincount(classes) / len(classes)
    off = np.abs(fractions - whole[:, None]).sum(0) / 2
    off[partition.sizes == 0] = nan
    mean = np.sqrt(whole * (1 - whole)).sum() * np.sqrt(1 / sizes - 1 / len(classes)) / 2
    return off, mean + np.sqrt(log(_CONFIDENCE * partition.parts) / (2 * sizes))


def _rare_classes(partition: Partition, classes: Indices, names: list[object]) -> list[str]:
    """Return a warning if a part has improbably many or few samples of a class.

    A class has m samples, and a part has the fraction p of all samples. The part has x m or more
    of the class with probability at most exp(-m KL(x, p)), and also x m or fewer (Hoeffding, 1963).
    """
    parts, counts = partition.parts, np.bincount(classes)
    cells = np.bincount(classes * parts + partition.of, minlength=len(counts) * parts)
    x = cells.reshape(-1, parts) / counts[:, None]
    p = np.broadcast_to(partition.sizes / len(partition), x.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        gathered = np.where(x > 0, x * np.log(x / p), 0.0)
        missing = np.where(x < 1, (1 - x) * np.log((1 - x) / (1 - p)), 0.0)
    unlikely = counts[:, None] * (gathered + missing)
    unlikely[:, partition.sizes == 0] = 0.0  # `_size_warnings` reports empty parts
    kind, part = np.unravel_index(int(np.nanargmax(unlikely)), x.shape)
    if unlikely[kind, part] <= log(2 * _CONFIDENCE * x.size):
        return []
    has, of = int(cells[kind * parts + part]), int(counts[kind])
    return [
        f"part {part} has {has} of the {of} samples of class {names[kind]!r}, where its size calls "
        f"for {of * p[kind, part]:.1f}; is the data sorted? use balanced or stratified"
    ]


def _squares(
    partition: Partition, features: Rows, classes: Indices, fourier: Fourier
) -> tuple[Floats, float, float]:
    """Return each part's squared distance, and the variance inside the classes and in all."""
    counts = np.bincount(classes)
    # A class with fewer samples than parts cannot be divided by share: all such classes count as
    # one, the last.
    common = counts >= partition.parts
    kinds = int(common.sum()) + 1
    classes = np.where(common, np.cumsum(common) - 1, kinds - 1)[classes]
    counts = np.bincount(classes, minlength=kinds)
    parts, inner = np.zeros((partition.parts, fourier.size)), np.zeros((kinds, fourier.size))
    for start in range(0, len(partition), _CHUNK):
        here = slice(start, start + _CHUNK)
        phi = fourier(features[here])
        add_by_key(parts, partition.of[here], phi)
        add_by_key(inner, classes[here], phi)
    mean = parts.sum(0) / len(partition)
    with np.errstate(invalid="ignore"):  # an empty part has no mean
        squares = ((parts / partition.sizes[:, None] - mean) ** 2).sum(1)

    def variance(sums: Floats, counts: Indices) -> Floats:
        """Return the trace of the covariance, given that each phi has norm 1."""
        spread = 1 - ((sums / np.maximum(counts, 1)[:, None]) ** 2).sum(1)
        spread = np.where(spread > _EXACT, spread, 0)
        result: Floats = spread * counts / np.maximum(counts - 1, 1)
        return result

    inside = float(counts @ variance(inner, counts)) / len(partition)
    total = variance(parts.sum(0, keepdims=True), np.array([len(partition)]))
    return squares, inside, float(total[0])


def _tail(features: Rows, fourier: Fourier, seed: int, parts: int) -> float:
    """Return a bound of a random part's squared distance, as a multiple of its mean.

    The squared distance is about a sum of squares of normal variables, whose variances are the
    covariance's eigenvalues l. It exceeds |l|_1 + 2 |l|_2 sqrt(x) + 2 max(l) x with a probability
    of at most exp(-x) (Laurent and Massart, 2000, lemma 1).
    """
    chosen = generator(seed, _OTHER_SEED).permutation(len(features))[:_PROBED]
    some = np.concatenate([fourier(features[i : i + 1]) for i in np.sort(chosen).tolist()])
    some -= some.mean(0)
    values = np.maximum(np.linalg.eigvalsh((some @ some.T).astype(np.float64)), 0)
    if not values.sum() > 0:
        return 1.0
    values /= values.sum()
    x = log(_CONFIDENCE * parts)
    return float(1 + 2 * sqrt((values**2).sum() * x) + 2 * values.max() * x)
