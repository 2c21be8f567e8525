"""Checkpoints that were written once are read today, and are written today as they were then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.checkpoints import (
    CASES,
    FOLDER,
    SCHEMAS,
    STEPS,
    declared,
    save,
    trainer,
    versions,
)

FILES = ("manifest.json", "model.safetensors", "state.json", "state.safetensors")


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_from_the_file(name: str) -> None:
    whole = trainer(name).fit(steps=STEPS + 4)
    resumed = trainer(name).resume(FOLDER / name).fit(steps=STEPS + 4)
    assert resumed.steps == STEPS + 4
    after = list(resumed.journal)
    assert after == list(whole.journal)[-len(after) :]
    assert repr(resumed.model) == repr(whole.model)


@pytest.mark.parametrize("name", CASES)
def test_the_format_changes_with_its_version_only(name: str, tmp_path: Path) -> None:
    """If this fails, raise the version of what changed and make the files anew."""
    save(name, tmp_path / name)
    state = json.loads((tmp_path / name / "state.json").read_text())
    assert state == json.loads((FOLDER / name / "state.json").read_text())
    for file in FILES:
        assert (tmp_path / name / file).read_bytes() == (FOLDER / name / file).read_bytes(), file


def test_every_version_has_the_names_that_it_had() -> None:
    """If this fails, raise the version of the schema and make the files anew."""
    known = json.loads(SCHEMAS.read_text())
    assert known.keys() == declared().keys()
    for name, kind in declared().items():
        assert kind.schema.names == known[name].get(str(kind.schema.version)), name


def test_the_files_are_small_and_have_the_state_of_every_policy() -> None:
    assert {folder.name for folder in FOLDER.iterdir()} == CASES.keys()
    assert max(file.stat().st_size for file in FOLDER.rglob("*.*")) < 20_000
    found = {
        schema
        for name in CASES
        for schema, _ in versions(json.loads((FOLDER / name / "state.json").read_text()))
    }
    elsewhere = {"until", "min_workers"}  # which the trainer puts around a policy for each fit
    decentralized = {"gossip"}  # such a run has no checkpoints
    triggers = {"always", "on_change", "event_grad", "event_grad_static", "lag"}  # within a codec
    assert found == declared().keys() - elsewhere - decentralized - triggers - {"auto"}
