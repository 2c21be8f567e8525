"""What a release needs agrees: version, changelog, dependencies, workflows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[>=<]", each)[0] for each in requirements}


def test_the_changelog_opens_with_the_version_to_come() -> None:
    titles = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    first = re.fullmatch(r"(\d+\.\d+\.\d+) \((not released yet|\d{4}-\d\d-\d\d)\)", titles[0])
    assert first is not None, titles[0]
    assert PROJECT["tool"]["hatch"]["version"]["fallback-version"] == f"{first[1]}.dev0"


def test_ray_is_an_extra() -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    assert "ray" not in names(project["dependencies"])
    assert names(extras["ray"]) == {"ray"}
    for extra in ("dev", "docs"):  # which import all of the package
        assert re.search(r"paceline\[[\w,]*\bray\b", extras[extra][0])


def test_each_workflow_calls_targets_that_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    called = set()
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for step in job.get("steps", ()):
                for line in re.findall(r"^make (.*)$", step.get("run", ""), re.M):
                    called |= set(line.split())
    assert called <= targets
    assert {"lint", "types", "test", "docs", "coverage", "release-check"} <= called


def test_the_matrix_has_every_version_that_is_claimed() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    tested = set(workflow["jobs"]["test"]["strategy"]["matrix"]["python"])
    claims = PROJECT["project"]["classifiers"]
    claimed = {each.rpartition(" ")[2] for each in claims if re.search(r":: 3\.\d+$", each)}
    assert claimed and claimed <= tested
