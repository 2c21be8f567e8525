"""The public face of the contract, and that nobody asks a policy for anything outside it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch

import paceline
from paceline import protocol
from paceline.core.policy import Policy
from tests.console import snippets

ROOT = Path(paceline.__file__).parent
PROJECT = ROOT.parents[1]
ASKING = {"getattr", "hasattr"}
NAMES = ("policy", "policies", "inner", "innermost", "learned")
"""What policies are called in this code."""


def kinds(base: type[Policy] = Policy) -> Iterator[type[Policy]]:
    """Yield a class and all that derive from it in the package."""
    yield base
    for kind in base.__subclasses__():
        if kind.__module__.startswith("paceline."):
            yield from kinds(kind)


def members() -> set[str]:
    """Return what policies have: the contract, and the public fields of each."""
    importlib.import_module("paceline.planner.measure.probe")
    importlib.import_module("paceline.planner.auto")
    found = {
        name for kind in kinds() for name in (*vars(kind), *vars(kind).get("__annotations__", ()))
    }
    # core/schema.py saves any object, policies or not.
    saving = {"schema", "state_dict", "load_state_dict"}
    return {name for name in found if not name.startswith("_")} - saving


def asked(text: str, known: set[str]) -> list[str]:
    """Return the calls of getattr and hasattr that are about a policy, as far as names tell."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            thing, *rest = node.args
            words = {
                each.id if isinstance(each, ast.Name) else each.attr
                for each in ast.walk(thing)
                if isinstance(each, ast.Name | ast.Attribute)
            }
            names = {each.value for each in rest[:1] if isinstance(each, ast.Constant)}
            if node.func.id in ASKING and (
                words & {word for name in NAMES for word in (name, f"_{name}")} or names & known
            ):
                found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize(
    "text",
    [
        "getattr(policy, name)",
        "hasattr(self._policy, 'react')",
        "getattr(run.policy, 'changes', ())",
        "hasattr(innermost(x), 'code')",
        "check = getattr(each, 'check', None)",
    ],
)
def test_a_question_to_a_policy_is_found(text: str) -> None:
    assert asked(text, members()) != []


def test_a_question_to_something_else_is_none() -> None:
    assert asked("getattr(learner, 'outer', None)\nhasattr(item, '__dict__')", members()) == []


def test_nobody_asks_a_policy_by_getattr() -> None:
    known = members()
    assert {"check", "placement", "code", "k", "work", "wants"} <= known
    for path in sorted(ROOT.rglob("*.py")):
        if path.parent != ROOT / "policies":
            assert asked(path.read_text(), known) == [], path


def test_whatever_reacts_is_a_policy() -> None:
    reacting = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(
                isinstance(each, ast.FunctionDef) and each.name == "react" for each in node.body
            ):
                module = ".".join(["paceline", *path.relative_to(ROOT).with_suffix("").parts])
                kind = vars(importlib.import_module(module))[node.name]
                assert issubclass(kind, Policy), kind
                reacting.append(kind)
    assert len(reacting) >= 9


def test_all_events_and_commands_are_published() -> None:
    for kind in (*get_args(protocol.Event), *get_args(protocol.Command)):
        assert vars(protocol)[kind.__name__] is kind
        assert kind.__name__ in protocol.__all__
    assert set(protocol.__all__) == {n for n in vars(protocol) if not n.startswith("_")}


def test_the_page_about_policies_imports_the_public_contract_alone() -> None:
    names = set()
    for snippet in snippets(PROJECT / "docs/policy.md"):
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
    ours = {name for name in names if name.startswith("paceline")}
    assert ours == {"paceline", "paceline.protocol", "paceline.testing"}


def test_the_trainer_refuses_what_only_looks_like_a_policy() -> None:
    class Duck:
        wants = frozenset[object]()

        def react(self, view: object, event: object) -> Iterator[object]:
            return iter(())

    for given in (Duck(), paceline.policies.Gather, None):
        with pytest.raises(ValueError, match=r"derives from paceline\.protocol\.Policy"):
            paceline.Trainer(paceline.learners.TimingOnly(4), given, paceline.Simulator(2))  # type: ignore[arg-type]


def test_a_code_is_refused_for_a_learner_without_parts_before_it_starts() -> None:
    sgd = partial(torch.optim.SGD, lr=0.1)
    data = torch.utils.data.TensorDataset(torch.zeros(8, 2), torch.zeros(8, 1))
    learner = paceline.TorchLearner(
        torch.nn.Linear(2, 1), torch.nn.MSELoss(), sgd, data, 8, outer=sgd
    )
    with pytest.raises(ValueError, match="parts of a batch are gradients of one model"):
        paceline.Trainer(learner, paceline.coded(1), paceline.Simulator(4))
