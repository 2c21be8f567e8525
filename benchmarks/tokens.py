"""Losses over tokens: how far the mean over samples is from the mean over tokens, per step.

Rows of tokens have very different lengths. Each worker averages over the tokens of its rows, and
a step weighs the workers by their rows; or losses return (sum, count), and it weighs by tokens.
Both gradients of one step are compared with that of one process on the whole batch, in float64.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch

import paceline as pl
from _report import finish, machine, parser, table
from tests import ragged

BOUNDS = {"largest_error_with_counts": 1e-5}  # float32
PLACEMENTS: dict[str, Any] = {"equal shares": None, "shares 1 : 1 : 2 : 4": pl.BySpeed()}


def error(loss: Any, batch: int, placement: Any, seed: int) -> float:
    """Return the relative error of the gradient of the second step, where shares differ."""
    recipe = ragged.learner(loss=loss, batch_size=batch, optimizer=partial(torch.optim.SGD, lr=1.0))
    given: dict[str, Any] = {"seed": seed, "progress": False, "placement": placement}
    before, run = (
        pl.Trainer(recipe, pl.sync(), ragged.engine(), **given).fit(steps=steps) for steps in (1, 2)
    )
    total, count = ragged.flat_gradient(before.model, ragged.rows_of(run, seed)[-1])
    pairs = zip(before.model.parameters(), run.model.parameters(), strict=True)
    ours = torch.cat([(old.double() - new.double()).detach().flatten() for old, new in pairs])
    return float((ours - total / count).norm() / (total / count).norm())


def measure(quick: bool) -> dict[str, Any]:
    seeds = range(3 if quick else 20)
    figures: dict[str, Any] = {}
    rows = []
    for batch in (16, 48):
        for name, placement in PLACEMENTS.items():
            cells = [f"{batch} rows, {name}"]
            for way, loss in (("samples", ragged.mean_loss), ("counts", ragged.token_loss)):
                found = [error(loss, batch, placement, seed) for seed in seeds]
                figures[f"{cells[0]}, {way}"] = found
                cells.append(
                    f"{statistics.median(found):.2g} ({min(found):.2g} to {max(found):.2g})"
                )
            rows.append(cells)
    lengths = ragged.LENGTHS
    print(
        f"\ntokens: rows of {lengths.min()} to {lengths.max()} tokens, error of a step's gradient"
    )
    table(["batch", "weighed by samples", "weighed by tokens"], rows)
    return figures


def main() -> None:
    arguments = parser(__doc__).parse_args()
    figures = measure(arguments.quick)
    bound = BOUNDS["largest_error_with_counts"]
    ok = all(max(found) < bound for name, found in figures.items() if name.endswith("counts"))
    finish("tokens", figures, BOUNDS, ok, machine("numpy", "torch"), arguments)


if __name__ == "__main__":
    main()
