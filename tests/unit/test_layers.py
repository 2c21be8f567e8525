"""Imports point downwards, and the core imports nothing but the standard library."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import paceline

ROOT = Path(paceline.__file__).parent

# What each layer may import of the project, itself always included.
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "protocol": {"core"},  # for policies of others: nothing here imports it
    "data": {"core"},
    "delays": {"core"},
    "codes": {"core"},
    "codecs": {"core"},
    "learners": {"core", "data", "codes"},
    "policies": {"core", "codes", "data"},
    "report": {"core"},
    "engines": {"core", "codecs", "codes", "data", "delays", "learners"},
    "testing": {"core", "engines", "report"},
    "ddp": {"core", "codecs", "data", "policies"},
    "integrations": {"core", "learners", "report"},
}
BELOW = {"core", "codecs", "codes", "data", "delays", "engines", "learners", "policies", "report"}
ALLOWED["gossip"] = BELOW
ALLOWED["planner"] = BELOW | {"gossip"}
ALLOWED["training"] = BELOW | {"gossip", "integrations", "planner"}
# "": the package itself, whose names are looked up when they are used.
ALLOWED["sessions"] = BELOW | {"training"}
ALLOWED["cli"] = BELOW | {"", "gossip", "planner", "sessions", "training"}
ALLOWED["__main__"] = {"cli"}
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
    "report": {"jinja2", "markupsafe", "numpy", "rich"},
    "integrations": {"mlflow", "ray", "torch", "transformers", "wandb"},
    "protocol": set(),
    "training": {"fsspec", "numpy", "safetensors"},
    "gossip": {"numpy", "ray", "torch"},
    "testing": {"hypothesis"},
    "sessions": {"numpy", "ray", "torch"},
    "cli": {"click"},
    "__main__": set(),
}
# One file each, so that the rest works without them.
ONLY_IN = {
    "torch": {
        f"learners/{name}.py"
        for name in (
            *(
                "torch",
                "replica",
                "loss",
                "average",
                "feed",
                "flat",
                "frozen",
                "memory",
                "scale",
                "prepare",
                "early",
                "ahead",
            ),
            *("optimize", "transforms", "optimizer_recipe", "outer"),
        )
    }
    | {f"ddp/{name}.py" for name in ("sampler", "exchange", "hooks")}
    | {f"integrations/{name}.py" for name in ("configured", "lightning", "transformers")}
    | {"integrations/lightning_evaluation.py"}
    | {"integrations/trackers/tensorboard.py"}
    | {"gossip/messages.py", "planner/measure/curvature.py"}
    | {f"sessions/{n}.py" for n in ("batches", "gradients", "groups")}
    | {f"sessions/{n}.py" for n in ("learner", "local_steps", "session")}
    | {path.relative_to(ROOT).as_posix() for path in (ROOT / "codecs").glob("*.py")},
    "hypothesis": {"testing/histories.py"},
    "fsspec": {"training/checkpoint/store.py"},
    "grpc": {"engines/ray/cluster/probe.py"},
    "ray": {
        path.relative_to(ROOT).as_posix()
        for folder in ("engines/ray", "engines/ray/cluster", "gossip/ray")
        for path in (ROOT / folder).glob("*.py")
    }
    | {f"engines/ray/servers/{name}.py" for name in ("reducer", "server", "shell", "writer")}
    | {f"engines/ray/transport/{name}.py" for name in ("holder", "inbox", "incoming")}
    | {f"sessions/{name}.py" for name in ("cluster", "connection", "hub")}
    | {"integrations/trackers/prometheus.py"},
    "transformers": {"integrations/transformers.py"},
    "wandb": {"integrations/trackers/wandb.py"},
    "mlflow": {"integrations/trackers/mlflow.py"},
    "jinja2": {"report/html/page.py"},
    # And where a decision is about thousands of workers at a time.
}
# A store may never answer, so it is waited for from outside; who looks on reads figures meanwhile.
WAITS = {
    "report/callbacks.py": {"threading", "time"},
    "report/columns.py": {"threading"},
    "report/live.py": {"threading", "time"},
}
# Below the engines nothing reads a clock or module-level randomness.
NO_CLOCK = {
    *("core", "policies", "data", "delays", "codes", "codecs", "learners", "report"),
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
            elif top == "lazy_loader":
                assert path.name == "__init__.py", path
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


def test_the_recovery_machine_needs_no_ray_and_no_clock() -> None:
    code = "import sys, paceline.engines.ray.servers.machine; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    folder = ROOT / "engines/ray/servers"
    makes_calls = {"reducer.py", "server.py", "shell.py", "transfers.py", "writer.py"}
    pure = [path for path in folder.glob("*.py") if path.name not in makes_calls]
    assert {"machine.py", "recovery.py", "steps.py"} <= {path.name for path in pure}
    for path in pure:
        assert not imports(path) & {"ray", "time", "datetime", "threading", "random"}, path


def test_what_takes_long_to_import_is_left_for_later() -> None:
    """Torch takes seconds and scipy half of one, and a run on the simulator needs neither."""
    code = (
        "import sys, paceline; paceline.Trainer; assert not {'scipy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there() -> None:
    assert len(paceline.__all__) <= 40
    for name in paceline.__all__:
        found = getattr(paceline, name)
        if isinstance(found, ModuleType):
            assert all(getattr(found, each) is not None for each in getattr(found, "__all__", ()))
    with pytest.raises(AttributeError, match="nothing"):
        _ = paceline.nothing  # type: ignore[attr-defined]
