"""Imports point downwards, and the core imports nothing but the standard library."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent

# What each layer may import of the project, itself always included.
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "policies": {"core", "codes", "data"},
    "data": {"core"},
    "delays": {"core"},
    "codes": {"core"},
    "codecs": {"core", "policies"},
    "ddp": {"core", "codecs", "data", "policies"},
    "learners": {"core", "data", "codes"},
    "engines": {"core", "codecs", "codes", "data", "delays", "learners"},
    "planner": {
        "core",
        "codecs",
        "codes",
        "data",
        "policies",
        "delays",
        "learners",
        "engines",
        "report",
    },
    "report": {"core"},
    "callbacks": {"core", "learners", "report"},
    "live": {"core", "report", "callbacks"},
    "checkpoint": {"core", "learners"},
    "combine": {"core", "codecs", "callbacks", "checkpoint", "data", "learners", "policies"},
    "run": {"core", "callbacks", "live", "policies", "report", "swarm"},
    "trainer": {
        "combine",
        "run",
        "core",
        "codecs",
        "data",
        "policies",
        "learners",
        "engines",
        "planner",
        "report",
        "callbacks",
        "live",
        "checkpoint",
        "swarm",
    },
    "swarm": {"core", "codecs", "data", "engines", "learners", "policies", "report", "callbacks"},
    "testing": {
        "core",
        "callbacks",
        "checkpoint",
        "codecs",
        "codes",
        "data",
        "engines",
        "learners",
        "policies",
        "report",
        "run",
        "trainer",
    },
    "trackers": {"core", "report", "callbacks"},
    # "": the package itself, whose names are looked up when they are used.
    "cli": {
        "",
        "core",
        "engines",
        "learners",
        "live",
        "planner",
        "policies",
        "report",
        "run",
        "trainer",
    },
    "__main__": {"cli"},
}
# Which packages beyond the standard library each layer may import.
PACKAGES: dict[str, set[str]] = {
    "core": set(),
    "policies": {"numpy"},
    "data": {"numpy"},
    "delays": {"numpy", "scipy"},
    "codes": {"numpy"},
    "codecs": {"numpy", "torch"},
    "ddp": {"numpy", "torch"},
    "learners": {"numpy", "torch"},
    "engines": {"grpc", "numpy", "ray"},  # grpc comes with ray[default]
    "planner": {"numpy", "scipy", "torch"},
    "report": {"jinja2", "markupsafe", "numpy"},
    "callbacks": set(),
    "checkpoint": {"fsspec", "numpy", "safetensors"},
    "combine": set(),
    "run": {"numpy"},
    "trainer": {"numpy"},
    "swarm": {"numpy"},
    "live": {"rich"},
    "trackers": {"mlflow", "ray", "torch", "wandb"},
    "testing": {"hypothesis", "numpy", "ray", "safetensors"},
    "cli": {"click"},
    "__main__": set(),
}
# One file each, so that the rest works without them.
ONLY_IN = {
    "torch": {
        f"learners/{name}.py"
        for name in (
            *("torch", "flat", "optimize", "transforms", "remade", "configured", "lightning"),
        )
    }
    | {f"ddp/{name}.py" for name in ("sampler", "exchange", "hooks")}
    | {"planner/curvature.py", "trackers/tensorboard.py"}
    | {path.relative_to(ROOT).as_posix() for path in (ROOT / "codecs").glob("*.py")},
    "hypothesis": {"testing/histories.py"},
    "fsspec": {"checkpoint/store.py"},
    "grpc": {"engines/ray/probe.py"},
    "ray": {path.relative_to(ROOT).as_posix() for path in (ROOT / "engines/ray").glob("*.py")}
    | {"trackers/prometheus.py", "testing/storms/processes.py", "testing/storms/simulated.py"},
    "wandb": {"trackers/wandb.py"},
    "mlflow": {"trackers/mlflow.py"},
    "jinja2": {"report/page.py"},
    # And where a decision is about thousands of workers at a time.
}
# A store may never answer, so it is waited for from outside; who looks on reads figures meanwhile.
WAITS = {"checkpoint/store.py": {"threading"}, "report/columns.py": {"threading"}}
# Below the engines nothing reads a clock or module-level randomness.
NO_CLOCK = {
    *("core", "policies", "data", "delays", "codes", "codecs", "learners", "report", "checkpoint"),
}


def layer(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            names.add(node.module or "")
    return names


def sources() -> list[Path]:
    return [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]


def test_every_layer_is_known() -> None:
    assert {layer(path) for path in sources()} == set(ALLOWED)


def test_imports_go_down() -> None:
    for path in sources():
        mine = layer(path)
        for name in imports(path):
            top, _, rest = name.partition(".")
            if top == "paceline":
                other = rest.partition(".")[0]
                assert other == mine or other in ALLOWED[mine], f"{path} imports {name}"
            elif top not in sys.stdlib_module_names:
                assert top in PACKAGES[mine], f"{path} imports {name}"
                allowed = ONLY_IN.get(top)
                assert allowed is None or path.relative_to(ROOT).as_posix() in allowed, path


def test_no_clock_below_the_engines() -> None:
    for path in sources():
        names = imports(path)
        if layer(path) in NO_CLOCK:
            forbidden = {"time", "datetime", "threading", "asyncio"}
            forbidden -= WAITS.get(path.relative_to(ROOT).as_posix(), set())
            assert not names & forbidden, path
        if layer(path) in {"core", "policies"}:
            assert "random" not in names or path.name == "state.py", path  # which saves it


def test_what_takes_long_to_import_is_left_for_later() -> None:
    """Torch takes seconds and scipy half of one, and a run on the simulator needs neither."""
    code = (
        "import sys, paceline; paceline.Trainer; assert not {'scipy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there() -> None:
    assert set(paceline.__all__) == set(paceline._LAZY) | set(paceline._LAZY_MODULES)
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = paceline.nothing
