"""Checkpoints on disk: what is written comes back, and what is damaged is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import paceline as pl
from paceline.core.errors import CheckpointError
from paceline.learners.base import Array, Saved
from paceline.training import checkpoint
from paceline.training.checkpoint import Checkpoints, Snapshot, newest, read, write

FILES = ("manifest.json", "model.safetensors", "state.json", "state.safetensors")


def snapshot(step: int = 3, engine: bool = True) -> Snapshot:
    server = Saved({"values": np.arange(4.0), "count": np.array(5)}, {"lr": 0.1})
    arrays: dict[str, Array] = {"model.0": np.ones((2, 3), dtype=np.float32), "values": np.zeros(0)}
    return Snapshot(
        step,
        {"seed": 1, "policy": "Gather()"},
        {"policy": {"class": "Gather", "fields": {}}, "ledger": {}},
        server,
        Saved(arrays, {"now": 1.5, "queue": [[1, None]]}) if engine else None,
    )


def saved(folder: Path, step: int = 3) -> Path:
    path = Checkpoints(folder).folder(step)
    write(path, snapshot(step), {"weight": np.full((2, 2), float(step))})
    return path


def assert_same(one: Saved | None, other: Saved | None) -> None:
    assert one is not None
    assert other is not None
    assert one.data == other.data
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in one.arrays.items():
        assert array.dtype == other.arrays[name].dtype
        assert array.shape == other.arrays[name].shape
        assert np.array_equal(array, other.arrays[name])


# --- what comes back -----------------------------------------------------------------------------


def test_a_snapshot_comes_back(tmp_path: Path) -> None:
    back, expected = read(saved(tmp_path)), snapshot()
    assert (back.step, back.about, back.coordinator) == (
        expected.step,
        expected.about,
        expected.coordinator,
    )
    assert_same(back.server, expected.server)
    assert_same(back.engine, expected.engine)


def test_an_engine_may_have_nothing_to_save(tmp_path: Path) -> None:
    write(tmp_path / "step-1", snapshot(engine=False), {})
    assert read(tmp_path / "step-1").engine is None


def test_scalars_stay_scalars_and_orders_do_not_matter(tmp_path: Path) -> None:
    turned = np.arange(6.0).reshape(2, 3).T
    server = Saved({"scalar": np.array(2.5), "turned": turned, "strided": np.arange(9)[::2]}, {})
    write(tmp_path / "step-1", Snapshot(1, {}, {}, server, None), {"count": np.array(7)})
    assert_same(read(tmp_path / "step-1").server, server)
    assert load_file(tmp_path / "step-1" / "model.safetensors")["count"].shape == ()


def test_the_files_are_safetensors_and_json_alone(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    assert sorted(file.name for file in folder.iterdir()) == list(FILES)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    for name in FILES:
        content = (folder / name).read_bytes()
        if name.endswith(".json"):
            json.loads(content)
        else:  # a length, then a header in JSON that says what the rest is
            length = int.from_bytes(content[:8], "little")
            described = json.loads(content[8 : 8 + length])
            ends = [tensor["data_offsets"][1] for tensor in described.values()]
            assert max(ends, default=0) == len(content) - 8 - length
    assert load_file(folder / "model.safetensors")["weight"].tolist() == [[3.0] * 2] * 2


def test_the_manifest_names_every_file(tmp_path: Path) -> None:
    manifest = json.loads((saved(tmp_path) / "manifest.json").read_text())
    assert sorted(manifest["sha256"]) == list(FILES[1:])
    assert (manifest["format"], manifest["step"]) == (3, 3)


def test_writing_again_replaces(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "stray").touch()
    write(folder, snapshot(engine=False), {})
    assert read(folder).engine is None
    assert not (folder / "stray").exists()


# --- what is refused -----------------------------------------------------------------------------


def flipped(file: Path) -> None:
    """Flip a bit in the middle; of the manifest, in a hash."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


DAMAGES: list[Callable[[Path], None]] = [flipped, truncated, emptied, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    folder = saved(tmp_path)
    read(folder)
    damage(folder / name)
    with pytest.raises(CheckpointError) as refusal:
        read(folder)
    told = str(refusal.value)
    if name != "manifest.json":
        assert told == (
            f"{folder / name} is missing or differs from the hash in its manifest; use another "
            "checkpoint"
        )
    elif damage in (truncated, emptied):
        assert told.startswith(f"{folder}/manifest.json cannot be read: ")


@pytest.mark.parametrize("name", FILES[1:])
def test_every_single_byte_counts(tmp_path: Path, name: str) -> None:
    file = saved(tmp_path) / name
    content = file.read_bytes()
    for place in {0, 7, 8, 20, len(content) // 3, len(content) - 1}:
        damaged = bytearray(content)
        damaged[place] ^= 0x10
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="differs from the hash in its manifest"):
            read(file.parent)
    file.write_bytes(content)
    read(file.parent)


@pytest.mark.parametrize("manifest", ["[]", "5", '{"format": 3}', "{", "\xff"])
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, manifest: str) -> None:
    folder = saved(tmp_path)
    (folder / "manifest.json").write_text(manifest, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read"):
        read(folder)


@pytest.mark.parametrize("format", [1, 5])
def test_another_format_is_refused(tmp_path: Path, format: int) -> None:
    folder = saved(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": format}))
    told = (
        f"has format {format}, and this paceline reads 3 and 4; use the paceline that saved it, or "
    )
    with pytest.raises(CheckpointError, match=told + "start a new run from model.safetensors"):
        read(folder)


def test_a_file_that_the_manifest_does_not_name_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]["state.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        CheckpointError, match=r"state.json is missing or differs from the hash in its manifest"
    ):
        read(folder)


def test_nothing_there_is_told(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match=r"no checkpoint at .*: no step-… folder with a"):
            read(path)


# --- which one -----------------------------------------------------------------------------------


def test_the_newest_is_picked(tmp_path: Path) -> None:
    for step in (9, 100, 20):  # as after a resume from an older one: the last written counts
        saved(tmp_path, step)
    assert read(tmp_path).step == 20
    assert newest(tmp_path).name == "step-00000020"
    assert read(tmp_path / "step-00000009").step == 9


def test_what_was_interrupted_in_writing_is_passed_over(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    shutil.copytree(saved(tmp_path, 7), tmp_path / ".step-00000008.partial")
    (tmp_path / "step-00000009").mkdir()  # as an older file system may leave it
    (tmp_path / "step-00000009" / "state.json").write_text("{}")
    assert read(tmp_path).step == 7
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        read(tmp_path / "step-00000009")
    saved(tmp_path, 8)  # over the leftover
    assert read(tmp_path).step == 8
    assert not (tmp_path / ".step-00000008.partial").exists()


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 10, 11, 3):
        saved(tmp_path, step)
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-00000000").mkdir()  # not a checkpoint
    Checkpoints(tmp_path, keep=2).prune()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes",
        "step-00000000",
        "step-00000003",
        "step-00000011",
    ]
    Checkpoints(tmp_path, keep=5).prune()
    assert read(tmp_path).step == 3


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="every=0: use at least 1"):
        Checkpoints("x", every=0)
    with pytest.raises(ValueError, match="keep=0: use at least 1"):
        Checkpoints("x", keep=0)


def test_a_run_keeps_as_many_as_it_was_told(tmp_path: Path) -> None:
    saves = pl.Checkpoints(tmp_path, every=4, keep=2)
    trainer = pl.Trainer(
        pl.learners.Quadratic(), pl.sync(), pl.Simulator(2), checkpoints=saves, progress=False
    )
    trainer.fit(steps=14)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000012", "step-00000014"]


def test_the_new_folder_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush, order = checkpoint.flush, list[tuple[str, bool]]()

    def noted(path: Path) -> None:
        flush(path)
        order.append((path.name, (tmp_path / "step-00000003").exists()))

    monkeypatch.setattr(checkpoint, "flush", noted)
    saved(tmp_path)
    names = [name for name, _ in order]
    assert sorted(names[:4]) == sorted(FILES)
    assert order[4:] == [(".step-00000003.partial", False), (tmp_path.name, True)]


@pytest.mark.parametrize("every", ["3", 2.5, None])
def test_intervals_are_whole_numbers(every: Any) -> None:
    with pytest.raises(ValueError, match=r"every=.*: use a whole number from 1 on"):
        Checkpoints("x", every=every)
    with pytest.raises(ValueError, match="path=3: use a folder, or the URL of a store"):
        Checkpoints(3)  # type: ignore[arg-type]
