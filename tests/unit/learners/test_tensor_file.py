"""Safetensors files in chunks: as the library has them, and nothing is read that is not there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paceline.learners import tensor_file
from paceline.learners.tensor_file import Ended, Entry, entry_of, places, read, write

ARRAYS: dict[str, Any] = {
    "b": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a": np.array(7, dtype=np.int64),
    "mask": np.array([True, False, True]),
    "empty": np.zeros((0, 3), np.float64),
    "half": np.ones(5, np.float16),
    "turned": np.arange(6, dtype=np.int32).reshape(2, 3).T,
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "CHUNK", 7)


def test_the_file_is_that_of_the_library(tmp_path: Path) -> None:
    sha = write(tmp_path / "mine", [entry_of(name, array) for name, array in ARRAYS.items()])
    content = (tmp_path / "mine").read_bytes()
    assert sha == hashlib.sha256(content).hexdigest()
    found = load_file(tmp_path / "mine")
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)
    save_file({n: np.asarray(a, order="C") for n, a in ARRAYS.items()}, tmp_path / "theirs")
    assert len((tmp_path / "theirs").read_bytes()) == len(content)


def test_a_part_of_a_tensor_is_read_in_chunks(tmp_path: Path) -> None:
    write(tmp_path / "file", [entry_of(name, array) for name, array in ARRAYS.items()])
    place = places(tmp_path / "file")["b"]
    assert (place.dtype, place.shape, place.nbytes) == ("F32", (3, 4), 48)
    chunks = [bytes(c) for c in read(tmp_path / "file", place.start + 8, place.start + 28)]
    assert [len(chunk) for chunk in chunks] == [7, 7, 6]
    assert np.frombuffer(b"".join(chunks), np.float32).tolist() == [2, 3, 4, 5, 6]


def test_what_a_file_does_not_contain_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write(file, [entry_of("b", ARRAYS["b"])])
    whole = file.read_bytes()
    place = places(file)["b"]
    file.write_bytes(whole[:-8])
    with pytest.raises(ValueError, match="does not contain 'b'"):
        places(file)
    with pytest.raises(ValueError, match="ends at byte"):
        list(read(file, place.start, place.start + place.nbytes))
    file.write_bytes((2**60).to_bytes(8, "little") + whole[8:])
    with pytest.raises(ValueError, match="has no header"):
        places(file)


def test_writing_ends_between_two_chunks(tmp_path: Path) -> None:
    asked: list[int] = []

    def ended() -> bool:
        asked.append(1)
        return len(asked) > 3

    with pytest.raises(Ended):
        write(tmp_path / "file", [entry_of("b", ARRAYS["b"])], ended)
    assert len(asked) == 4


def test_a_tensor_with_too_few_bytes_is_an_error(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"abc"

    with pytest.raises(ValueError, match="'x' has 3 bytes, not 4"):
        write(tmp_path / "file", [Entry("x", "F32", (1,), 4, chunks)])


def test_a_dtype_that_the_format_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="an array of complex128 cannot be saved"):
        entry_of("x", np.zeros(2, np.complex128))


def test_an_existing_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        write(tmp_path / "file", [])
