"""The README and the documentation: every snippet and command runs, every link leads somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import paceline as pl
from paceline.engines.ray.cluster.settings import SETTINGS
from tests.console import Command, File, check, read, snippets

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts),
]
# What pages need beyond the package; in CI it must be there.
NEEDS = {
    "frameworks": ("lightning", "transformers"),
    "lora": ("peft", "transformers"),
    "trackers": ("tensorboard", "wandb", "mlflow"),
    "live": ("rich",),
}
QUESTIONS = ("placement", "waiting", "selection", "coding", "messages", "gossip", "planning")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=named)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for package in () if os.environ.get("CI") else NEEDS.get(page.stem, ()):
        pytest.importorskip(package)
    names: dict[str, Any] = {"__name__": "snippet"}
    for snippet in snippets(page):
        exec(compile(snippet, named(page), "exec"), names)


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_a_file_to_save_is_used_by_a_command_of_its_page() -> None:
    saved = 0
    for page in PAGES:
        steps = read(page)
        lines = [step.line for step in steps if isinstance(step, Command)]
        for step in steps:
            if isinstance(step, File):
                saved += 1
                assert any(step.name in line for line in lines), f"{page.name}: {step.name}"
    assert saved >= 3


def test_commands_are_on_pages_that_a_test_plays() -> None:
    pages = {named(page) for page in PAGES for step in read(page) if isinstance(step, Command)}
    others = {"docs/cli.md", "docs/start.md", "README.md"}  # unit/cli/test_page.py, tests/fresh
    assert pages <= {"docs/recipes.md", *others}


def test_the_commands_of_the_recipes(tmp_path: Path) -> None:
    ran = 0
    for step in read(DOCS / "recipes.md"):
        match step:
            case File(name, text):
                (tmp_path / name).write_text(text)
            case Command(line, shown):
                name, *args = shlex.split(line)
                assert name == "python"
                found = subprocess.run(
                    [sys.executable, *args], cwd=tmp_path, capture_output=True, text=True
                )
                assert found.returncode == 0, found.stderr
                check(shown, found.stdout.splitlines(), 0.02)
                ran += 1
    assert ran == 2


def test_the_landing_page_has_the_example_of_the_readme() -> None:
    assert snippets(DOCS / "index.md") == snippets(ROOT / "README.md")


def test_the_diff_of_the_readme_leads_from_one_script_of_the_ddp_page_to_the_other() -> None:
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    before, after = (
        [line.partition("  # changed")[0] for line in snippet.splitlines()]
        for snippet in snippets(DOCS / "ddp.md")[:2]
    )
    lines = diff.splitlines()
    shown = {sign: [line[1:] for line in lines if line[0] in (" ", sign)] for sign in "-+"}
    for script, part in ((before, shown["-"]), (after, shown["+"])):
        start = script.index(part[0])
        assert script[start : start + len(part)] == part


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_page_about_a_question_says_first_when_it_pays(name: str) -> None:
    opening = (DOCS / f"{name}.md").read_text().partition("\n## ")[0]
    assert re.search(r"\*\*It (pays|helps)\*\*", opening)
    assert re.search(r"\*\*It does not (pay|help)", opening)


def test_the_reference_has_every_public_name() -> None:
    text = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    listed = re.findall(r"^\.\. (?:auto|py:)\w+:: paceline\.([\w.]+)$", text, re.M)
    assert len(listed) == len(set(listed))
    names = {name: getattr(pl, name) for name in pl.__all__}
    spaces = {name: found for name, found in names.items() if isinstance(found, ModuleType)}
    assert set(names) - set(spaces) <= set(listed)
    last = {name.rpartition(".")[2] for name in listed}
    for space in spaces.values():
        public = {
            n
            for n in getattr(space, "__all__", ())
            if not isinstance(getattr(space, n), ModuleType)
        }
        assert public <= last, space


def test_every_benchmark_is_named() -> None:
    text = (DOCS / "benchmarks.md").read_text()
    for script in sorted((ROOT / "benchmarks").glob("[!_]*.py")):
        assert script.name in text, f"docs/benchmarks.md does not name {script.name}"
        if '__name__ == "__main__"' in script.read_text() and "_" not in script.stem:
            assert f"python benchmarks/{script.name}" in text


def test_the_kubernetes_file_has_unequal_workers_and_a_job_on_them() -> None:
    cluster, job = yaml.safe_load_all((DOCS / "kuberay.yaml").read_text())
    assert cluster["apiVersion"] == job["apiVersion"] == "ray.io/v1"
    assert (cluster["kind"], job["kind"]) == ("RayCluster", "RayJob")
    assert job["spec"]["clusterSelector"]["ray.io/cluster"] == cluster["metadata"]["name"]
    assert "backoffLimit" not in job["spec"]  # which KubeRay refuses together with a selector
    assert cluster["spec"]["authOptions"]["mode"] == "token"
    groups = cluster["spec"]["workerGroupSpecs"]
    (cpus, settings, images) = ([], [], [])
    for group in [cluster["spec"]["headGroupSpec"], *groups]:
        (container,) = group["template"]["spec"]["containers"]
        cpus.append(container["resources"]["limits"]["cpu"])
        images.append(container["image"])
        settings.append({each["name"]: each["value"] for each in container["env"]})
    assert len(set(cpus[1:])) == len(groups) == 2  # unequal machines
    assert len(set(images)) == 1
    assert all({**each, "RAY_AUTH_MODE": "token"} == SETTINGS for each in settings)
    assert sum(group["replicas"] for group in groups) == 8
    assert all(group["rayStartParams"]["num-cpus"] == "1" for group in groups)


def test_the_image_is_that_of_the_kubernetes_file() -> None:
    cluster, job = yaml.safe_load_all((DOCS / "kuberay.yaml").read_text())
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    steps = [line.split(maxsplit=1) for line in lines if re.match("[A-Z]+ ", line)]
    last = {name: rest for name, rest in steps}  # of several, the last one holds
    constraints = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    assert f"ray=={cluster['spec']['rayVersion']}" in constraints
    assert sum(".ci/constraints.txt" in line for line in lines if "pip install" in line) == 2
    assert job["spec"]["entrypoint"] == f"paceline train {last['WORKDIR']}/train.py"
    pod = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    assert last["USER"] == str(pod["securityContext"]["fsGroup"]) != "0"
    assert any(f"--uid {last['USER']} " in line for line in lines if line.startswith("RUN useradd"))


def test_the_image_gets_all_that_the_package_is_built_from() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines  # all but the following is left out
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / path).exists() for path in kept)
    project = (ROOT / "pyproject.toml").read_text()
    sources = re.findall(r'^(?:license-files = \[|path = )"(.+?)"', project, re.M)
    assert set(sources) == {"LICENSE", "README.md"}
    assert {"pyproject.toml", "src", ".ci/constraints.txt", *sources} <= kept


def test_docstrings_become_lists_tables_and_code() -> None:
    spec = importlib.util.spec_from_file_location("docstrings", DOCS / "docstrings.py")
    assert spec is not None and spec.loader is not None
    docstrings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(docstrings)
    lines = [
        "Sends when |x| > k * y.",
        "",
        "k: how often,",
        "    at most.",
        "other: is no argument.",
        "",
        "| a | b |",
        "|---|---|",
        "| 1 | `f(*x)` |",
        "",
        "    code = 1",
    ]
    assert docstrings.readable(lines, {"k"}) == [
        r"Sends when \|x\| > k \* y.",
        "",
        "",
        "- **k**: how often,",
        "  at most.",
        "",
        "other: is no argument.",
        "",
        *(".. list-table::", "   :header-rows: 1", ""),
        *("   * - a", "     - b", "   * - 1", "     - `f(*x)`", ""),
        *("::", "", "    code = 1", ""),
    ]
    fields = docstrings.commented(pl.Run, ["model: told already"])
    assert "policy: your policy with its state at the end." in fields
    assert not any(line.startswith("model:") for line in fields)
