"""Checkpoints in slices: written beside training, read as the others are, refused as the others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_tensors
from torch import nn

import paceline as pl
from paceline.engines.base import Writing
from paceline.training import saving
from paceline.training.checkpoint import read
from paceline.training.checkpoint.files import digest, signature
from tests.conftest import cross_entropy, flat, make_learner
from tests.unit.training.checkpoint.sliced import Sliced

KEY = b"0123456789abcdef"


@pytest.fixture(autouse=True)
def small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "LEAST_BYTES", 0)


class Tied(nn.Module):
    """Tied and frozen parameters, buffers of several dtypes, and rows that slices cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 20)
        self.norm = nn.BatchNorm1d(20)
        self.second = nn.Linear(20, 20)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(20, 3)
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)
        self.frozen.to(torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("wide", torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
        self.register_buffer("flag", torch.tensor([True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.norm(self.first(x)).relu()) * self.scale
        found: torch.Tensor = self.frozen(hidden.to(torch.bfloat16)).float()
        return found


def tied_learner() -> pl.TorchLearner:
    torch.manual_seed(3)
    plain = make_learner()
    adam = partial(torch.optim.AdamW, lr=1e-3)
    return pl.TorchLearner(Tied(), cross_entropy, adam, plain.dataset, 64)


def conv_learner() -> pl.TorchLearner:
    """Tensors of four dimensions, which slices cut in the middle of a kernel."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 4, 5)), nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(18, 3)
    )
    return pl.TorchLearner(
        model, cross_entropy, partial(torch.optim.SGD, lr=0.1), make_learner().dataset, 64
    )


LEARNERS: dict[str, Callable[[], pl.TorchLearner]] = {
    "momentum": make_learner,
    "tied, frozen, buffers, Adam": tied_learner,
    "convolution": conv_learner,
}


def trainer(
    engine: Any, saves: pl.Checkpoints | None = None, learner: Any = make_learner
) -> pl.Trainer:
    return pl.Trainer(learner(), pl.sync(), engine, checkpoints=saves, progress=False)


def saved(folder: Path, count: int = 3, learner: Any = make_learner, **more: Any) -> Path:
    """Save step 4 in slices."""
    saves = pl.Checkpoints(folder, every=4, **more)
    trainer(Sliced(2, count), saves, learner).fit(steps=6)
    assert json.loads((saves.folder(4) / "manifest.json").read_text())["format"] == 4
    return saves.folder(4)


# --- what is right -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_slices_have_the_state_and_the_model_that_one_file_has(
    name: str, count: int, tmp_path: Path
) -> None:
    learner = LEARNERS[name]
    sliced = saved(tmp_path / "a", count, learner)
    trainer(pl.Simulator(2), pl.Checkpoints(tmp_path / "b", every=4), learner).fit(steps=6)
    one = tmp_path / "b" / "step-00000004"
    ours, theirs = read(sliced), read(one)
    assert ours.server.data == theirs.server.data and ours.coordinator == theirs.coordinator
    assert ours.server.arrays.keys() == theirs.server.arrays.keys()
    for key, array in theirs.server.arrays.items():
        assert ours.server.arrays[key].dtype == array.dtype
        assert np.array_equal(ours.server.arrays[key].ravel(), array.ravel())
    model, whole = (
        load_tensors(sliced / "model.safetensors"),
        load_tensors(one / "model.safetensors"),
    )
    assert model.keys() == whole.keys()
    for key, tensor in whole.items():
        assert model[key].dtype == tensor.dtype and torch.equal(model[key], tensor)
    assert sorted(path.name for path in sliced.iterdir()) == sorted(
        [
            *("manifest.json", "model.safetensors", "state.json"),
            *(f"state-{i:05d}-of-{count:05d}.safetensors" for i in range(count)),
        ]
    )


@pytest.mark.parametrize("name", LEARNERS)
def test_a_run_goes_on_from_slices_with_the_same_bits(name: str, tmp_path: Path) -> None:
    learner = LEARNERS[name]
    folder = saved(tmp_path, 3, learner)
    whole = trainer(pl.Simulator(2), learner=learner).fit(steps=9)
    again = trainer(pl.Simulator(2), learner=learner).resume(folder).fit(steps=9)
    assert torch.equal(flat(again.model), flat(whole.model))


@pytest.mark.parametrize("name", LEARNERS)
def test_torch_distributed_reads_the_model(name: str, tmp_path: Path) -> None:
    """Cut in mid-row or not: the model is one file, and its tensors are whole."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    learner = LEARNERS[name]
    folder = saved(tmp_path, 7, learner)
    state = {key: torch.full_like(tensor, 1) for key, tensor in learner().server().export().items()}
    with pytest.warns(UserWarning, match="to load in a single process"):
        load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    run = trainer(pl.Simulator(2), learner=learner).fit(steps=4)
    frozen = {key for key, p in run.model.named_parameters() if not p.requires_grad}
    assert state.keys() == run.model.state_dict().keys() - frozen
    for key, tensor in state.items():
        assert torch.equal(run.model.state_dict()[key], tensor), key


def test_the_last_and_the_kept_ones(tmp_path: Path) -> None:
    """The last checkpoint has one state file, and old ones are deleted, whichever layout."""
    saves = pl.Checkpoints(tmp_path, every=4, keep=1)
    trainer(Sliced(2, 2), saves).fit(steps=6)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006"]
    assert (saves.folder(6) / "state.safetensors").is_file()


def test_slices_that_were_copied_to_a_store_are_read_and_deleted(tmp_path: Path) -> None:
    import fsspec

    folder, url = saved(tmp_path), "memory://sliced/run"
    system = fsspec.filesystem("memory")
    try:
        system.put(str(folder), "/sliced/run/step-00000004", recursive=True)
        whole = trainer(pl.Simulator(2)).fit(steps=9)
        saves = pl.Checkpoints(url, every=100, keep=1)
        again = trainer(pl.Simulator(2), saves).resume(saves).fit(steps=9)
        assert torch.equal(flat(again.model), flat(whole.model))
        assert not [file for file in system.find("/sliced/run") if "00000004" in file]
    finally:
        system.store.clear()


# --- what is refused -----------------------------------------------------------------------------


def rewrite(folder: Path, key: bytes | None = None, **changes: Any) -> None:
    """Make a manifest whose hashes are right."""
    old = json.loads((folder / "manifest.json").read_text())
    names = [path.name for path in folder.iterdir() if path.name != "manifest.json"]
    manifest = {**old, "sha256": {name: digest(folder / name) for name in names}, **changes}
    manifest.pop("hmac", None)
    if key is not None:
        manifest["hmac"] = signature(manifest, key)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def refused(folder: Path, told: str, **more: Any) -> None:
    with pytest.raises(pl.errors.CheckpointError, match=told):
        trainer(pl.Simulator(2), **more).resume(folder)


SLICE = "state-00001-of-00003.safetensors"


def test_a_slice_that_is_missing_or_cut_short_or_changed_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    content = (folder / SLICE).read_bytes()
    for changed in (content[:-4], content[:-1] + b"\x7f", b""):
        (folder / SLICE).write_bytes(changed)
        refused(folder, f"{SLICE} is missing or differs from the hash")
    (folder / SLICE).unlink()
    refused(folder, f"{SLICE} is missing or differs from the hash")
    rewrite(folder)
    refused(folder, "and some are missing")
    for path in folder.glob("state-*"):
        path.unlink()
    rewrite(folder)
    refused(folder, "there are no slices")


def test_a_slice_that_claims_more_than_it_contains_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    content = (folder / SLICE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["server/values"]["shape"] = [2**50]
    header["server/values"]["data_offsets"] = [0, 2**52]
    text = json.dumps(header).encode()
    (folder / SLICE).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    rewrite(folder)
    refused(folder, "cannot be read")


def shorter(arrays: dict[str, Any]) -> None:
    arrays["server/values"] = arrays["server/values"][1:]


def of_another_dtype(arrays: dict[str, Any]) -> None:
    arrays["server/values"] = arrays["server/values"].astype(np.float64)


def one_more(arrays: dict[str, Any]) -> None:
    arrays["server/more"] = np.zeros(3, np.float32)


def another_scalar(arrays: dict[str, Any]) -> None:
    """The first tensor with a scalar is cut, so that the slice before has the scalar too."""
    name = min(name for name in arrays if name.endswith(".step"))
    arrays[name] = np.array(arrays[name] + 1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (shorter, "'server/values' is|'values' is F32"),
        (of_another_dtype, "have different types"),
        (one_more, "has 'more', which this learner does not"),
        (another_scalar, "has several values"),
    ],
)
def test_forged_slices_do_not_fit(
    change: Callable[[dict[str, Any]], None], told: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path, learner=tied_learner)
    arrays = load_file(folder / SLICE)
    change(arrays)
    save_file(arrays, folder / SLICE)
    rewrite(folder)
    refused(folder, told, learner=tied_learner)


def test_slices_in_another_order_differ_from_the_model(tmp_path: Path) -> None:
    folder = saved(tmp_path, 2, conv_learner)
    first, second = sorted(folder.glob("state-*"))
    shutil.move(first, tmp_path / "kept")
    shutil.move(second, first)
    shutil.move(tmp_path / "kept", second)
    rewrite(folder)
    refused(folder, "differs from", learner=conv_learner)


def test_slices_are_signed_as_the_rest_is(tmp_path: Path) -> None:
    folder = saved(tmp_path, key=KEY)
    signed = pl.Checkpoints(folder, key=KEY)
    trainer(pl.Simulator(2)).resume(signed)
    rewrite(folder)
    with pytest.raises(pl.errors.CheckpointError, match="is not signed with this key"):
        trainer(pl.Simulator(2)).resume(signed)
    rewrite(folder, KEY)
    trainer(pl.Simulator(2)).resume(signed)


def test_names_that_lead_out_of_the_folder_are_no_slices(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    hashes = json.loads((folder / "manifest.json").read_text())["sha256"]
    outside = {"../state-00003-of-00004.safetensors": hashes[SLICE]}
    rewrite(folder, sha256={**hashes, **outside})
    trainer(pl.Simulator(2)).resume(folder)  # it is not looked at


def test_a_format_without_slices_has_no_use_for_them(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    rewrite(folder, format=3)
    refused(folder, "state.safetensors is missing")


# --- what fails while it is written --------------------------------------------------------------


def fail(writing: Writing) -> None:
    raise OSError("No space left on device")


def test_the_driver_writes_at_the_next_step_what_servers_did_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(Sliced(2, 2, fail), pl.Checkpoints(tmp_path, every=4, keep=9)).fit(steps=7)
    assert "step 4 is not saved: No space left on device; the driver writes" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000005", "step-00000007"]
    whole = trainer(pl.Simulator(2)).fit(steps=9)
    again = trainer(pl.Simulator(2)).resume(tmp_path / "step-00000005").fit(steps=9)
    assert torch.equal(flat(again.model), flat(whole.model))


def test_servers_that_fail_three_times_in_a_row_write_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(Sliced(2, 2, fail), pl.Checkpoints(tmp_path, every=4, keep=9)).fit(steps=22)
    assert "servers write no more checkpoints of this run" in caplog.text
    steps = sorted(int(path.name[-8:]) for path in tmp_path.iterdir())
    assert steps == [5, 9, 13, 16, 20, 22]


def test_a_slice_that_changes_before_it_is_read_fails_that_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def cut(writing: Writing) -> None:
        path = writing.folder / "state-00001-of-00002.safetensors"
        path.write_bytes(path.read_bytes()[:-9])

    trainer(Sliced(2, 2, cut), pl.Checkpoints(tmp_path, every=4)).fit(steps=4)
    assert "does not contain 'server/values'" in caplog.text
    assert (tmp_path / "step-00000004" / "state.safetensors").is_file()  # by the driver, at the end


def test_servers_that_do_not_answer_do_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Sliced(2, 2, answers=False)
    run = trainer(engine, pl.Checkpoints(tmp_path, every=4, keep=9)).fit(steps=9)
    assert run.steps == 9 and engine.given_up == [4]
    assert "step 4 is not saved: the servers did not answer in time" in caplog.text
    assert "a checkpoint is skipped, since that of step 4 is still being written" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000009"]


def test_a_deadline_ends_it_and_the_driver_writes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves = pl.Checkpoints(tmp_path, every=4, keep=9, timeout=1e-9)
    trainer(Sliced(2, 2, answers=False), saves).fit(steps=6)
    assert "it took longer than Checkpoints(timeout=1e-09)" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000005", "step-00000006"]


def test_an_error_of_training_leaves_the_checkpoint_under_way(tmp_path: Path) -> None:
    class Mine(pl.Callback):
        def stepped(self, progress: pl.Progress) -> None:
            if progress.step == 5:
                raise ZeroDivisionError("mine")

    saves = pl.Checkpoints(tmp_path, every=4, keep=9)
    failing = pl.Trainer(
        make_learner(), pl.sync(), Sliced(2, 2), checkpoints=saves, callbacks=[Mine()],
        progress=False,
    )  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        failing.fit(steps=9)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]


class Derived(nn.Sequential):
    """Its state_dict has a tensor that a hook makes."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(20, 3))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}norm"] = next(self.parameters()).detach().abs().sum()


def test_a_model_with_tensors_of_a_hook_is_gathered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def learner() -> pl.TorchLearner:
        torch.manual_seed(3)
        plain = make_learner()
        return pl.TorchLearner(Derived(), cross_entropy, plain.optimizer, plain.dataset, 64)

    trainer(Sliced(2, 2), pl.Checkpoints(tmp_path, every=4), learner).fit(steps=5)
    assert "a hook makes tensors of the state_dict" in caplog.text
    assert (tmp_path / "step-00000004" / "state.safetensors").is_file()


def test_a_small_model_is_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "LEAST_BYTES", 2**20)
    trainer(Sliced(2, 2), pl.Checkpoints(tmp_path, every=4)).fit(steps=5)
    assert (tmp_path / "step-00000004" / "state.safetensors").is_file()
