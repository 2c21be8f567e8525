"""No call in the package waits without a deadline: checked in the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline as pl

ROOT = Path(pl.__file__).parent

# Calls that wait, and the place among their arguments at which a deadline may stand.
FUNCTIONS: dict[str, int | None] = {
    **dict.fromkeys(("ray.get", "ray.wait"), None),
    **dict.fromkeys(("subprocess.run", "subprocess.call"), None),
    **dict.fromkeys(("subprocess.check_call", "subprocess.check_output"), None),
    "socket.create_connection": 1,
    "select.select": 3,
}
METHODS: dict[str, int] = {
    **dict.fromkeys(("result", "exception", "wait", "poll", "join", "get"), 0),
    **dict.fromkeys(("wait_for", "acquire", "communicate"), 1),
}
# Of methods with these names some wait only if they are called without any argument.
BARE = {"join", "get", "poll", "wait", "result", "exception"}
# For which no deadline can be given.
ENDLESS = {"os.waitpid", "os.wait", "input", "sys.stdin.read", "sys.stdin.readline"}
WITH_POPEN = "with subprocess.Popen"

# Where a wait without a deadline of its own is right, and why.
REASONED: dict[tuple[str, str], str] = {
    ("ddp/hooks.py", "future.wait"): "it is done: `then` calls back when the group, whose timeout "
    "is init_process_group's, has answered",
    ("engines/ray/engine.py", "reducer.wait"): "each server has start_timeout, and few lives",
    ("engines/ray/cluster/probe.py", "sys.stdin.read"): "a process of ours, which is ended in time",
    ("sessions/hub.py", "event.wait"): "within asyncio.wait_for, which has the deadline",
    ("sessions/connection.py", "self._calls.get"): "`close` puts the last item, and at the end of "
    "the process its thread ends",
    ("cli/launch.py", "processes.wait"): "the user's processes may train for days",
    ("cli/launch.py", "process.poll"): "it only looks",
    ("cli/supervise.py", "driver.poll"): "it only looks",
    ("cli/supervise.py", "os.waitpid"): "WNOHANG: it only looks",
    ("cli/doctor.py", WITH_POPEN): "its group has been killed by then",
    ("testing/hosts.py", "with self.popen"): "it has ended, or has been killed",
    ("testing/slow.py", "child.__exit__"): "it has ended, or has been killed",
}


def dotted(node: ast.expr) -> str:
    """Return a.b.c of such an expression, and what can be said of another."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def has_deadline(call: ast.Call, place: int | None) -> bool:
    """Tell whether a call is given a deadline that is one; None is none."""
    given = [word.value for word in call.keywords if word.arg == "timeout"]
    if place is not None:
        given += call.args[place : place + 1]
    return any(not (isinstance(value, ast.Constant) and value.value is None) for value in given)


def endless(source: str) -> Iterator[str]:
    """Name the calls of a source that may wait for ever."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.With):
            for item in node.items:
                called = item.context_expr
                if isinstance(called, ast.Call) and dotted(called.func).lower().endswith(".popen"):
                    yield f"with {dotted(called.func)}"
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        popen = name == "child.__exit__"  # of a Popen
        if name in ENDLESS or popen:
            yield name
        elif name in FUNCTIONS:
            if not has_deadline(node, FUNCTIONS[name]):
                yield name
        elif method in METHODS and name != "select.poll":  # which makes one
            words = {word.arg for word in node.keywords}
            if method in BARE and (node.args or words - {"timeout"}) and "timeout" not in words:
                none = [a for a in node.args if isinstance(a, ast.Constant) and a.value is None]
                if not none or method == "get":  # str.join, dict.get, and what has a deadline
                    continue
            if not has_deadline(node, METHODS[method]):
                yield name


def test_every_wait_has_a_deadline() -> None:
    sources = list(ROOT.rglob("*.py"))
    assert len(sources) > 100
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in sources
        for name in endless(path.read_text())
    }
    assert found == set(REASONED)


@pytest.mark.parametrize(
    "planted",
    [
        "ray.get(ref)",
        "ray.get(refs, timeout=None)",
        "ray.wait(refs, num_returns=2)",
        "future.result()",
        "future.result(None)",
        "future.exception()",
        "thread.join()",
        "event.wait()",
        "process.wait(timeout=None)",
        "process.communicate()",
        "process.communicate(data)",
        "condition.wait_for(lambda: done)",
        "lock.acquire()",
        "lock.acquire(True)",
        "inbox.get()",
        "poll.poll()",
        "subprocess.run(command, check=True)",
        "subprocess.check_output(command)",
        "socket.create_connection(address)",
        "select.select(read, [], [])",
        "os.waitpid(pid, 0)",
        "input()",
        "with subprocess.Popen(command) as process: pass",
    ],
)
def test_what_is_planted_is_found(planted: str) -> None:
    assert len(list(endless(planted))) == 1


@pytest.mark.parametrize(
    "harmless",
    [
        "ray.get(ref, timeout=5)",
        "ray.get(refs, timeout=patience)",
        "future.result(timeout=0)",
        "future.result(3.0)",
        "thread.join(2.0)",
        "', '.join(words)",
        "known.get(name)",
        "known.get(name, None)",
        "inbox.get(timeout=1.0)",
        "process.communicate(timeout=9)",
        "condition.wait_for(lambda: done, 60.0)",
        "lock.acquire(timeout=1)",
        "select.select(read, [], [], 0.5)",
        "subprocess.run(command, timeout=9)",
        "socket.create_connection(address, 3.0)",
    ],
)
def test_what_has_a_deadline_is_let_be(harmless: str) -> None:
    assert list(endless(harmless)) == []
