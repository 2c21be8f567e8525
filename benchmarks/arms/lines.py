"""Counts the lines of the function that trains in each arm."""

from __future__ import annotations

import ast
from pathlib import Path

FUNCTIONS = {
    "ddp": "ddp",
    "ddp + shares": "ddp_with_shares",
    "diloco": "diloco",
    "session + shares": "session",
    "local_steps": "local_steps",
    "local_steps + overlap": "local_steps",
    "torchft": "per_step",
    "torchft diloco": "diloco",
}


def user_lines(module: str, arm: str) -> int | None:
    """Return the lines of code of an arm's function, without docstring, comments and empty ones."""
    file = Path(__file__).with_name(module.rpartition(".")[2] + ".py")
    if not file.exists():
        return None
    source = file.read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == FUNCTIONS.get(arm, "train"):
            lines = source.splitlines()[node.body[1].lineno - 1 : node.end_lineno]
            return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)
    return None
