"""Checkpoints that were damaged or forged in many ways: the last good one is used, never another.

Damage is found by its hash. A forgery has hashes that are right, and says what cannot be.
"""

from __future__ import annotations

import json
import logging
import pickle
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import paceline as pl
from paceline.data.partition.base import Partition
from paceline.training.checkpoint.files import FORMAT, digest
from tests.conftest import cross_entropy, make_learner

FILES = ("manifest.json", "model.safetensors", "state.json", "state.safetensors")
NEWEST, OLDER = 9, 6
Change = Callable[[Path, random.Random], None]


def learner() -> pl.TorchLearner:
    plain = make_learner(hidden=4)
    return pl.TorchLearner(
        plain.model,
        cross_entropy,
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        plain.dataset,
        64,
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=4),
    )


def make(folder: Path | None = None, **more: Any) -> pl.Trainer:
    if folder is not None:
        more["checkpoints"] = pl.Checkpoints(folder, every=3, keep=3)
    tiles = pl.policies.Placed(Partition(np.arange(512) % 12, 12))
    return pl.Trainer(
        learner(), pl.k_sync(2), pl.Simulator(3), placement=tiles, progress=False, **more
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    make(folder).fit(steps=NEWEST)
    assert len(list(folder.iterdir())) == 3
    return folder


@pytest.fixture(scope="module")
def known(saved: Path) -> dict[int, bytes]:
    """What resuming from each leads to, three steps later."""
    places = {step: saved / f"step-{step:08d}" for step in (3, OLDER, NEWEST)}
    states = {step: state(make().resume(place)) for step, place in places.items()}
    assert len(set(states.values())) == 3
    return states


def state(trainer: pl.Trainer) -> bytes:
    """All that a trainer would go on with."""
    snapshot = trainer._start.snapshot
    assert snapshot is not None and snapshot.engine is not None
    server = snapshot.server
    arrays = {**server.arrays, **snapshot.engine.arrays}
    told = [server.data, snapshot.coordinator, snapshot.engine.data]
    content = b"".join(arrays[name].tobytes() for name in sorted(arrays))
    return content + json.dumps(told, sort_keys=True).encode()


# --- damage --------------------------------------------------------------------------------------


def flip(name: str, share: float, folder: Path, rng: random.Random) -> None:
    file = folder / name
    content = bytearray(file.read_bytes())
    content[min(int(share * len(content)) + rng.randrange(9), len(content) - 1)] ^= (
        1 << rng.randrange(7)
    )
    file.write_bytes(content)


def truncate(name: str, folder: Path, rng: random.Random) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: rng.randrange(len(content))])


def append(name: str, folder: Path, rng: random.Random) -> None:
    with open(folder / name, "ab") as file:
        file.write(rng.randbytes(rng.randint(1, 40)))


def empty(name: str, folder: Path, rng: random.Random) -> None:
    (folder / name).write_bytes(b"")


def delete(name: str, folder: Path, rng: random.Random) -> None:
    (folder / name).unlink()


def zero(name: str, folder: Path, rng: random.Random) -> None:
    """A stretch that the disk never wrote."""
    content = bytearray((folder / name).read_bytes())
    start = rng.randrange(len(content) - 1)
    content[start : start + 64] = bytes(len(content[start : start + 64]))
    (folder / name).write_bytes(content)


def swap(one: str, other: str, folder: Path, rng: random.Random) -> None:
    first, second = (folder / one).read_bytes(), (folder / other).read_bytes()
    (folder / one).write_bytes(second)
    (folder / other).write_bytes(first)


def from_older(name: str, folder: Path, rng: random.Random) -> None:
    shutil.copy(folder.with_name(f"step-{OLDER:08d}") / name, folder / name)


def pickled(name: str, folder: Path, rng: random.Random) -> None:
    (folder / name).write_bytes(pickle.dumps(Bomb(), protocol=rng.randint(0, 5)))
    if name != "manifest.json":
        seal(folder)


class Bomb:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("was-executed"),)


# --- forgery -------------------------------------------------------------------------------------


def seal(folder: Path, **more: Any) -> None:
    """Make the hashes right again."""
    manifest = json.loads((folder / FILES[0]).read_text())
    manifest["sha256"] = {name: digest(folder / name) for name in FILES[1:]}
    (folder / FILES[0]).write_text(json.dumps(manifest | more))


def forge(change: Callable[[Any], None], folder: Path, rng: random.Random) -> None:
    data = json.loads((folder / "state.json").read_text())
    change(data)
    (folder / "state.json").write_text(json.dumps(data))
    seal(folder)


def at(*path: Any, to: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for name in path[:-1]:
            data = data[name]
        assert path[-1] in data or isinstance(data, list)
        data[path[-1]] = to

    return change


def more_in(*path: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for name in path:
            data = data[name]
        data["more"] = 1

    return change


def without(*path: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for name in path[:-1]:
            data = data[name]
        del data[path[-1]]

    return change


def text(old: str, new: str, folder: Path, rng: random.Random) -> None:
    content = (folder / "state.json").read_text()
    assert old in content
    (folder / "state.json").write_text(content.replace(old, new, 1))
    seal(folder)


def arrays(name: str, change: Callable[[dict[str, Any]], None], folder: Path, _: Any) -> None:
    found = load_file(folder / name)
    change(found)
    save_file(found, folder / name)
    seal(folder)


def reshape(key: str, **how: Any) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        array = found[key]
        found[key] = np.zeros(how.get("shape", array.shape), how.get("dtype", array.dtype))

    return change


def header(described: Any, folder: Path, rng: random.Random) -> None:
    """A safetensors file that claims something."""
    told = described if isinstance(described, bytes) else json.dumps(described).encode()
    (folder / "state.safetensors").write_bytes(len(told).to_bytes(8, "little") + told + bytes(64))
    seal(folder)


def lie(length: int, folder: Path, rng: random.Random) -> None:
    file = folder / "state.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    seal(folder)


def manifest(folder: Path, rng: random.Random, **more: Any) -> None:
    data = json.loads((folder / FILES[0]).read_text())
    (folder / FILES[0]).write_text(json.dumps(data | more))


LEDGER = ("coordinator", "ledger", "state")
POLICY = ("coordinator", "policy", "state")
BUFFER = "server/optimizer.0.momentum_buffer"
DEEP = "[" * 100_000 + "]" * 100_000
CODE = {"type": "Path", "items": ["was-executed"]}


def changes() -> Iterator[tuple[str, Change]]:
    more: dict[str, Any]
    where: tuple[str | int, ...]
    described: Any
    for name in FILES:
        for place in range(21):
            yield f"flip {name} {place}", partial(flip, name, place / 21)
        for damage in (truncate, append, zero, pickled):
            for turn in range(3):
                yield f"{damage.__name__} {name} {turn}", partial(damage, name)
        yield f"empty {name}", partial(empty, name)
        yield f"delete {name}", partial(delete, name)
        yield f"older {name}", partial(from_older, name)
        for other in FILES:
            if name < other:
                yield f"swap {name} {other}", partial(swap, name, other)
    for more in (
        {"step": 8}, {"step": "9"}, {"step": None}, {"step": 10**30}, {"format": 1},
        {"sha256": {}}, {"sha256": []}, {"sha256": None}, {"format": None},
    ):  # fmt: skip
        yield f"manifest {more}", partial(manifest, **more)
    for part in ("step", "about", "coordinator", "server", "engine"):
        yield f"no {part}", partial(forge, without(part))
        yield f"{part} is text", partial(forge, at(part, to="text"))
        yield f"{part} is code", partial(forge, at(part, to=[CODE]))
    for where in (
        (*LEDGER, "version"), (*LEDGER, "workers"), (*LEDGER, "running"), (*POLICY, "k"),
        (*POLICY, "placement", "state", "owner"), ("coordinator", "policy", "version"),
        ("coordinator", "policy"), ("coordinator", "ledger"), ("server", "groups"),
        ("server", "scheduler"), ("server", "scheduler", "last_epoch"), ("server", "scalars"),
        ("engine", "rng"), ("engine", "queue"), ("engine", "tasks"), ("engine", "workers"),
        ("server", "groups", 0, "lr"), ("engine", "workers", "w0", "run"),
    ):  # fmt: skip
        yield f"no {where}", partial(forge, without(*where))
    for where, to in (
        ((*LEDGER, "version"), 8), ((*LEDGER, "version"), "9"),
        ((*LEDGER, "version"), 9.0), ((*LEDGER, "next_task"), 0),
        ((*LEDGER, "next_task"), -1), ((*LEDGER, "now"), -1.0),
        ((*LEDGER, "now"), {"type": "float", "value": "inf"}),
        ((*LEDGER, "now"), {"type": "float", "value": "much"}),
        ((*LEDGER, "workers"), CODE), ((*LEDGER, "workers"), [1, 2]),
        ((*LEDGER, "workers"), {"w0": "x"}),
        ((*LEDGER, "running"), {"type": "OrderedDict", "items": [[1, 2]]}),
        ((*LEDGER, "held"), {"type": "OrderedDict", "items": [[1, "x"]]}),
        ((*LEDGER, "lost"), {"type": "os.system", "items": ["true"]}),
        ((*POLICY, "k"), CODE), ((*POLICY, "k"), {"object": {"class": "int"}}),
        (("coordinator", "policy", "schema"), "gossip"), (("coordinator", "policy", "schema"), 5),
        (("coordinator", "policy", "version"), 2), (("coordinator", "policy", "version"), "1"),
        ((*POLICY, "placement"), None), ((*POLICY, "placement", "version"), 0),
        ((*POLICY, "placement", "state", "carry"), "much"), ((*POLICY, "select"), None),
        (("server", "groups"), []), (("server", "groups", 0, "lr"), "fast"),
        (("server", "scheduler"), 7), (("server", "scheduler", "last_epoch"), "x"),
        (("server", "scalars"), {"99": {"x": 1}}), (("server", "scalars"), CODE),
        (("engine", "now"), "late"), (("engine", "version"), 8), (("engine", "tasks"), [1]),
        (("engine", "queue"), [[1.0, 2]]), (("engine", "queue"), [["x", 2, 3]]),
        (("engine", "rng"), {"bit_generator": "MT19937"}), (("engine", "rng"), CODE),
        (("step",), 8), (("step",), True), (("step",), 9.5),
    ):  # fmt: skip
        yield f"{where} = {to}", partial(forge, at(*where, to=to))
    for where in ((*LEDGER,), (*POLICY,), (*POLICY, "placement", "state"), ("coordinator",)):
        yield f"more in {where}", partial(forge, more_in(*where))
    for old, new in (
        ('"step": 9', '"step": ' + "9" * 5000), ('"step": 9', '"step": 1e999'),
        ('"step": 9', '"step": NaN'), ('"step": 9', '"step": 9, "step": 9'),
        ('"step": 9', '"step": ' + DEEP), ('"scalars": {}', '"scalars": {"0": ' + DEEP + "}"),
    ):  # fmt: skip
        yield f"{old} -> {new[:24]}", partial(text, old, new)
    for key in ("server/values", BUFFER):
        yield f"no {key}", partial(arrays, FILES[3], without(key))
        for how in ({"shape": (2,)}, {"dtype": np.float64}, {"shape": ()}, {"shape": (0, 3)}):
            yield f"{key} {how}", partial(arrays, FILES[3], reshape(key, **how))
    for other in ("0.weight", "2.bias"):
        yield f"no {other}", partial(arrays, FILES[1], without(other))
        yield f"zero {other}", partial(arrays, FILES[1], reshape(other))
        yield f"wide {other}", partial(arrays, FILES[1], reshape(other, dtype=np.float64))
    yield "more", partial(arrays, FILES[3], lambda f: f.update({"server/x": np.zeros(1)}))
    yield "stray", partial(arrays, FILES[3], lambda f: f.update({"x": np.zeros(1)}))
    yield "model", partial(arrays, FILES[1], lambda f: f.update({"x": np.zeros(1)}))
    big = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}
    none = {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}
    for described in (
        {"server/values": big}, {"server/values": big | {"data_offsets": [0, 64]}},
        {"server/values": none}, {}, [], b"{", b"\x80\x04." * 9, DEEP.encode(),
        {"server/values": {"dtype": "F99", "shape": [1], "data_offsets": [0, 64]}},
        {"server/values": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 64]}},
        {"server/values": {"dtype": "F32", "shape": [2**63, 2**63], "data_offsets": [0, 64]}},
    ):  # fmt: skip
        yield f"header {str(described)[:60]}", partial(header, described)
    for length in (0, 7, 2**31, 2**63, 2**64 - 1):
        yield f"header of {length}", partial(lie, length)


CHANGES = list(changes())


@pytest.fixture(autouse=True)
def nothing_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "was-executed").exists()


def test_there_are_at_least_two_hundred() -> None:
    assert len(CHANGES) >= 200


@pytest.mark.parametrize("number", range(len(CHANGES)), ids=[name for name, _ in CHANGES])
def test_the_last_good_one_is_used(
    number: int,
    saved: Path,
    known: dict[int, bytes],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(saved, folder)
    newest = folder / f"step-{NEWEST:08d}"
    CHANGES[number][1](newest, random.Random(number))
    trainer = make()
    with caplog.at_level(logging.WARNING):
        trainer.resume(folder)
    assert trainer.step == OLDER
    assert state(trainer) == known[OLDER]
    (told,) = caplog.messages
    assert told.startswith(f"{newest} is skipped: ")
    with pytest.raises(pl.errors.CheckpointError):
        make().resume(newest)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_white_space_does_not_matter(name: str, saved: Path, known: Any, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(saved, folder)
    file = folder / f"step-{NEWEST:08d}" / name
    file.write_text(json.dumps(json.loads(file.read_text()), indent=3) + "\n\n")
    if name == "state.json":
        seal(file.parent)
    assert state(make().resume(folder)) == known[NEWEST]


def test_if_none_is_good_all_are_named_and_nothing_has_changed(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(saved, folder)
    rng = random.Random(0)
    truncate(FILES[2], folder / "step-00000009", rng)
    forge(at(*LEDGER, "version", to=5), folder / "step-00000006", rng)
    arrays(FILES[1], reshape("2.bias"), folder / "step-00000003", rng)
    trainer = make()
    with pytest.raises(pl.errors.CheckpointError) as refusal:
        trainer.resume(folder)
    for step, why in (
        (9, "differs from the hash in its manifest"),
        (6, "the version is 5"),
        (3, "2.bias"),
    ):
        assert f"step-0000000{step}" in str(refusal.value)
        assert why in str(refusal.value)
    with pytest.raises(pl.errors.CheckpointError):
        trainer.resume(folder, missing_ok=True)
    assert trainer.step == 0
    fresh, run = make().fit(steps=2), trainer.fit(steps=2)
    assert run.journal == fresh.journal


def test_what_another_run_saved_is_an_error_at_once(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(saved, folder)
    forge(at("about", "seed", to=5), folder / "step-00000009", random.Random(0))
    with pytest.raises(pl.errors.CheckpointError, match="seed was 5 and is 0"):
        make().resume(folder)


def test_a_resumed_run_is_the_whole_one(saved: Path) -> None:
    whole, resumed = make().fit(steps=14), make().resume(saved).fit(steps=14)
    for one, other in zip(
        whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)


def test_a_key_tells_a_forgery_that_fits(tmp_path: Path) -> None:
    key = b"0123456789abcdef"
    saves = pl.Checkpoints(tmp_path / "saved", every=3, key=key)
    make(checkpoints=saves).fit(steps=6)
    assert make().resume(saves).step == 6
    assert make(checkpoints=saves).resume(tmp_path / "saved").step == 6
    newest = tmp_path / "saved" / "step-00000006"
    forge(at("server", "groups", 0, "lr", to=0.7), newest, random.Random(0))
    assert make().resume(tmp_path / "saved").step == 6
    assert make().resume(saves).step == 3
    with pytest.raises(pl.errors.CheckpointError, match="is not signed with this key"):
        make().resume(pl.Checkpoints(newest, key=key))
    other = pl.Checkpoints(tmp_path / "saved", key=b"another key of bytes")
    with pytest.raises(pl.errors.CheckpointError, match=r"no checkpoint at .* is usable"):
        make().resume(other)
    with pytest.raises(ValueError, match="at least 16 bytes"):
        pl.Checkpoints(tmp_path, key=b"short")
    assert "0123" not in repr(saves)


def test_one_that_was_to_be_replaced_is_found(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(saved, folder)
    (folder / "step-00000009").rename(folder / ".step-00000009.old")
    assert make().resume(folder).step == 9


def test_a_folder_that_cannot_be_written_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(pl.errors.CheckpointError, match="no checkpoint can be written to"):
        make(tmp_path / "file").fit(steps=3)


def test_a_save_that_fails_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "saved"

    class Break(pl.Callback):
        def stepped(self, progress: pl.Progress) -> None:
            if progress.step == 4:
                shutil.rmtree(folder)
                folder.touch()
            if progress.step == 7:
                folder.unlink()

    with caplog.at_level(logging.WARNING):
        run = make(folder, callbacks=[Break()]).fit(steps=9)
    assert run.steps == 9
    (told,) = caplog.messages
    assert told.startswith(f"step 6 is not saved: {folder / 'step-00000006'} cannot be written: ")
    assert FORMAT == 3 and [path.name for path in folder.iterdir()] == ["step-00000009"]


def test_a_disk_without_room_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Fill(pl.Callback):
        def stepped(self, progress: pl.Progress) -> None:
            if progress.step == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
            if progress.step == 3:
                (left,) = tmp_path.iterdir()  # and nothing half of a checkpoint
                assert left.name == "step-00000001"
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    learner = pl.learners.Quadratic(tuple(np.linspace(1, 0.1, 300_000)))
    saves = pl.Checkpoints(tmp_path, every=1)
    trainer = pl.Trainer(
        learner, pl.sync(), pl.Simulator(2), checkpoints=saves, progress=False, callbacks=[Fill()]
    )
    try:
        with caplog.at_level(logging.WARNING):
            trainer.fit(steps=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (told,) = caplog.messages
    assert told.startswith("step 2 is not saved: ")
    names = ["step-00000001", "step-00000003", "step-00000004"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    for name in (".step-00000001.partial", ".step-00000003.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").touch()
    make(tmp_path).fit(steps=3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
