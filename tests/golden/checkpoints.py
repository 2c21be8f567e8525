"""Makes the golden checkpoints anew: `python -m tests.golden.checkpoints`, after a new version.

A format may change only together with its version: in `Schema` for the state of a class, in
`checkpoint.FORMAT` for everything else.
"""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

import paceline as pl
from paceline.core.policy import Policy
from paceline.core.schema import Schema
from paceline.learners.base import Learner
from paceline.training.checkpoint import FORMAT
from paceline.training.checkpoint.files import STATE
from tests.golden.make import QUADRATIC, TILES, unequal

FOLDER = Path(__file__).parent / "checkpoints"
SCHEMAS = Path(__file__).parent / "schemas.json"
ROOT = Path(pl.__file__).parent
STEPS = 4


@dataclass(frozen=True)
class Saved:
    """A small run that is saved after a few steps, with work in flight."""

    policy: Callable[[], Policy]
    codec: Callable[[], Any] = lambda: None
    learner: Learner = QUADRATIC


SHARDED = pl.learners.TimingOnly(batch_size=8, examples=len(TILES))

CASES: dict[str, Saved] = {
    "sync": Saved(pl.sync),
    "k_async": Saved(lambda: pl.k_async(2)),
    "ringleader": Saved(pl.policies.ringleader),
    "k_by_noise": Saved(lambda: pl.k_sync(pl.policies.GrowOnNoise(1, 3, memory=2), samples=2)),
    "k_by_sign": Saved(
        lambda: pl.k_sync(pl.policies.GrowWhenStationary(1, 3, threshold=1, burn_in=1), samples=2)
    ),
    "k_by_schedule": Saved(lambda: pl.k_sync(pl.policies.Schedule({0: 1, 2: 3}))),
    "bandit": Saved(lambda: pl.bandit(1, 1, index=pl.selection.Thompson(), window=3)),
    "ata": Saved(lambda: pl.ata(6, discount=0.9)),
    "by_speed": Saved(lambda: pl.policies.Gather(placement=pl.BySpeed())),
    "shards": Saved(
        lambda: pl.policies.Gather(2, placement=pl.policies.Placed(TILES, bound=1.0)),
        learner=SHARDED,
    ),
    "coded": Saved(lambda: pl.coded(1, 2)),
    "deadline": Saved(lambda: pl.deadline(1.0)),
    "among": Saved(lambda: pl.policies.OnlyWorkers(["w0", "w2"], pl.sync())),
    "backups": Saved(lambda: pl.policies.Backups(pl.sync(), factor=1.0, floor=0.1)),
    "lazy": Saved(pl.sync, lambda: pl.codecs.Lazy(pl.codecs.OnChange(0.1, every=3))),
}


def trainer(name: str, saves: pl.Checkpoints | None = None) -> pl.Trainer:
    case = CASES[name]
    return pl.Trainer(
        *(case.learner, case.policy(), unequal()),
        **{"codec": case.codec(), "seed": 1, "progress": False, "checkpoints": saves},
    )


def save(name: str, folder: Path) -> None:
    """Train a few steps, and have the checkpoint in a folder."""
    with TemporaryDirectory() as made:
        saves = pl.Checkpoints(made)
        trainer(name, saves).fit(steps=STEPS)
        copytree(saves.folder(STEPS), folder)


def declared() -> dict[str, type[Any]]:
    """Return every class of the library that declares a schema, by the name in files."""
    found: dict[str, type[Any]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        if "core.schema import" not in text:
            continue
        name = ".".join(["paceline", *path.relative_to(ROOT).with_suffix("").parts])
        classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
        for node in classes:
            kind = getattr(importlib.import_module(name), node.name)
            if isinstance(vars(kind).get("schema"), Schema):
                assert found.setdefault(kind.schema.name, kind) is kind
    return found


def versions(data: Any) -> Iterator[tuple[str, int]]:
    """Yield name and version of every schema in saved data."""
    if isinstance(data, dict):
        if "schema" in data:
            yield data["schema"], data["version"]
        for item in data.values():
            yield from versions(item)


def add_schemas() -> None:
    """Add the names of new versions; those of an old version never change."""
    known: dict[str, dict[str, list[str]]] = json.loads(SCHEMAS.read_text())
    for name, kind in sorted(declared().items()):
        version, names = str(kind.schema.version), kind.schema.names
        if known.setdefault(name, {}).setdefault(version, names) != names:
            raise SystemExit(f"{name} has other names than version {version}; raise its version")
    SCHEMAS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def replace(name: str) -> None:
    """Make a checkpoint anew; refuse one that differs and has the versions of before."""
    folder = FOLDER / name
    with TemporaryDirectory() as made:
        save(name, Path(made) / name)
        new = json.loads((Path(made) / name / STATE).read_text())
        if (folder / STATE).exists():
            old = json.loads((folder / STATE).read_text())
            manifest = json.loads((folder / "manifest.json").read_text())
            before = {*versions(old), ("checkpoint", manifest["format"])}
            if new != old and before == {*versions(new), ("checkpoint", FORMAT)}:
                raise SystemExit(f"{name} is written in another way; raise a version first")
        folder.mkdir(parents=True, exist_ok=True)
        for file in (Path(made) / name).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())


if __name__ == "__main__":
    add_schemas()
    for name in CASES:
        replace(name)
        print(f"{name}: {sum(file.stat().st_size for file in (FOLDER / name).iterdir())} bytes")
