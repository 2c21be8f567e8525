"""Nothing in the package runs what it reads: checked in the source, and with forged files."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import paceline as pl
from paceline.cli.app import app

ROOT = Path(pl.__file__).parent
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
FETCHING_MODULES = {"urllib", "http", "requests", "httpx", "aiohttp", "ftplib", "xmlrpc"}
BUILT_IN = {"eval", "exec", "compile", "__import__"}
CALLS = {
    **dict.fromkeys(("os.system", "os.popen", "subprocess.getoutput"), "a shell"),
    **dict.fromkeys(("yaml.load", "yaml.unsafe_load", "yaml.full_load"), "yaml that makes objects"),
    "subprocess.getstatusoutput": "a shell",
    "tempfile.mktemp": "a name that another may take first",
    "ray.cloudpickle.loads": "pickle",
}
# Who reads what others may have written: there -O must not take a check away.
READERS = {
    *(f"training/checkpoint/{name}.py" for name in ("__init__", "files", "validate", "store")),
    *("core/journal.py", "core/protocol.py", "cli/expressions.py"),
}
# Pickles to count bytes, and reads none of it.
WRITER = "engines/ray/pickled.py"
WRITES = {"imports pickle.PickleBuffer", "imports ray.cloudpickle"}
# Asks the metadata service of its own machine, if the user names a cloud.
ASKS = "engines/ray/clouds.py"
ASKED = {
    *("fetches with http.client.HTTPConnection", "fetches with http.client.HTTPException"),
    "fetches with urllib.parse.urlsplit",
}


def dotted(node: ast.expr) -> str:
    """Return a.b.c of such an expression, and what can be said of another."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def is_true(call: ast.Call, name: str) -> bool:
    given = [word.value for word in call.keywords if word.arg == name]
    return any(isinstance(value, ast.Constant) and value.value is True for value in given)


def faults(source: str, reader: bool = False) -> Iterator[str]:
    """Name what a source does and must not."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if set(name.split(".")) & UNSAFE_MODULES:
                yield f"imports {name}"
            if name.partition(".")[0] in FETCHING_MODULES:
                yield f"fetches with {name}"
            if name in CALLS:
                yield f"{name}: {CALLS[name]}"  # by the name that it has then, unseen below
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in BUILT_IN or name in CALLS:
                yield f"{name}: {CALLS.get(name, 'code from text')}"
            if name == "torch.load" and not is_true(node, "weights_only"):
                yield "torch.load without weights_only=True"
            for word in node.keywords:
                if word.arg == "allow_pickle" or (
                    word.arg == "shell"
                    and not (isinstance(word.value, ast.Constant) and word.value.value is False)
                ):
                    yield f"{name}({word.arg}=…)"
            for given in (*node.args, *(word.value for word in node.keywords)):
                text = str(given.value) if isinstance(given, ast.Constant) else ""
                if text.startswith(("http://", "https://")):
                    yield f"{name}({text})"
        if reader and isinstance(node, ast.Assert):
            yield f"line {node.lineno} asserts what a reader has to refuse"


def test_the_source_runs_nothing_that_it_reads() -> None:
    sources = list(ROOT.rglob("*.py"))
    assert len(sources) > 100
    assert {name for name in READERS if not (ROOT / name).exists()} == set()
    for path in sources:
        name = path.relative_to(ROOT).as_posix()
        found = list(faults(path.read_text(), name in READERS))
        assert {*found} == {WRITER: WRITES, ASKS: ASKED}.get(name, set()), path
    tree = ast.parse((ROOT / WRITER).read_text())
    called = {dotted(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute | ast.Name)}
    assert not [name for name in called if name.rpartition(".")[2] in ("load", "loads")]
    assert not [name for name in called if "Unpickler" in name]


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from ray import cloudpickle",
        "import torch.utils.dill as x",
        "from marshal import loads",
        "import urllib.request",
        "eval('1')",
        "exec(text)",
        "compile(text, '', 'exec')",
        "__import__(name)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "numpy.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "subprocess.run(text, shell=True)",
        "subprocess.Popen(text, shell=flag)",
        "os.system(text)",
        "from os import system",
        "tempfile.mktemp()",
        "from tempfile import mktemp",
        "open_anything('https://example.org/model')",
        "assert isinstance(data, dict)",
    ],
)
def test_what_is_planted_is_found(planted: str) -> None:
    assert len(list(faults(planted, reader=True))) >= 1


@pytest.mark.parametrize(
    "harmless",
    [
        "module.eval()",
        "re.compile('x')",
        "ast.literal_eval(text)",
        "torch.load(path, weights_only=True)",
        "subprocess.run([program], shell=False)",
        "tempfile.mkstemp()",
        "'see https://example.org'",
    ],
)
def test_what_is_harmless_is_let_be(harmless: str) -> None:
    assert list(faults(harmless, reader=True)) == []


def forged(folder: Path, policy: str = "sync()", event: object = None) -> Path:
    """Write a journal as nobody but an attacker does."""
    path = folder / "forged.jsonl"
    head = {"format": 2, "policy": policy, "batch": 8}
    entry = {"now": 0.0, "event": event or {"type": "Joined", "worker": "w0"}}
    path.write_text(f"{json.dumps(head)}\n{json.dumps(entry)}\n")
    return path


@pytest.mark.parametrize(
    "policy",
    [
        "__import__('pathlib').Path('SEEN').touch()",
        "sync(__import__('pathlib').Path('SEEN').touch())",
        "sync.__globals__['__builtins__']",
        "Until(open('SEEN', 'w'), steps=1)",
        "Until(MinWorkers(open('SEEN', 'w'), sync()), steps=1)",
    ],
)
def test_a_journal_cannot_name_code_as_its_policy(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for more in ([], ["--policy", "sync()"]):
        done = CliRunner().invoke(app, ["replay", str(forged(tmp_path, policy)), *more])
        assert done.exit_code != 0 or more, done.output
    assert [path.name for path in tmp_path.iterdir()] == ["forged.jsonl"]


@pytest.mark.parametrize(
    "event",
    [
        {"type": "Path", "worker": "SEEN"},
        {"type": "__import__", "name": "os"},
        {"type": "Joined", "worker": {"type": "open", "file": "SEEN", "mode": "w"}},
    ],
)
def test_a_journal_holds_events_and_nothing_else(
    event: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = forged(tmp_path, event=event)
    with pytest.raises((KeyError, ValueError, TypeError)):
        pl.Journal.load(path)
    assert [path.name for path in tmp_path.iterdir()] == ["forged.jsonl"]
