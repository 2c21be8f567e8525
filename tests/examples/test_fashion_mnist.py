"""IDX files that the tests write themselves, whole and damaged, and the real Fashion-MNIST."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fashion_mnist import FASHION_MNIST, Element, fashion_mnist, read_idx

CODES = {"uint8": 0x08, "int8": 0x09, "int16": 0x0B, "int32": 0x0C, "float32": 0x0D}
CODES["float64"] = 0x0E

# The four bytes 1, 2, 254, 255 as a 2 x 2 matrix, spelled out so that the format, and not the
# reader's own idea of it, decides.
MATRIX = bytes.fromhex("00 00 08 02 00000002 00000002 01 02 fe ff")


def idx(values: NDArray[Element]) -> bytes:
    """Return the array as the bytes of an IDX file."""
    header = struct.pack(">HBB", 0, CODES[values.dtype.name], values.ndim)
    sizes = struct.pack(f">{values.ndim}I", *values.shape)
    return header + sizes + values.astype(values.dtype.newbyteorder(">")).tobytes()


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "values"
    path.write_bytes(content)
    return path


def test_reads_the_bytes_of_the_format(tmp_path: Path) -> None:
    values = read_idx(written(tmp_path, MATRIX))
    assert values.tolist() == [[1, 2], [254, 255]]
    assert values.dtype == np.uint8


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("shape", [(7,), (2, 3), (2, 3, 4), (1, 2, 1, 3), (0, 28, 28)])
def test_round_trip(tmp_path: Path, name: str, shape: tuple[int, ...], packed: bool) -> None:
    random = np.random.default_rng(0).integers(0, 255, shape)
    values: NDArray[Element] = (random - (0 if name == "uint8" else 128)).astype(name)
    content = idx(values)
    path = written(tmp_path, gzip.compress(content) if packed else content)
    for given in (path, str(path)):
        read = read_idx(given)
        np.testing.assert_array_equal(read, values, strict=True)
        assert read.dtype.isnative
        assert read.flags.writeable


@pytest.mark.parametrize("length", range(len(MATRIX)))
def test_every_truncation_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(ValueError, match=r"is truncated|is not an IDX file"):
        read_idx(written(tmp_path, MATRIX[:length]))


def test_every_truncation_of_a_gzip_file_is_refused(tmp_path: Path) -> None:
    packed = gzip.compress(MATRIX)
    for length in range(len(packed)):
        with pytest.raises(ValueError, match=r"is a damaged gzip file|is not an IDX file"):
            read_idx(written(tmp_path, packed[:length]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (MATRIX + b"\x00", r"longer than its header says: it holds 17 bytes, .*\(2, 2\) take 16"),
        (MATRIX[:-1], r"truncated: it holds 15 bytes, but uint8 values of shape \(2, 2\) take 16"),
        (b"\x89PNG\r\n", r"not an IDX file: it begins with 89 50 4e 47"),
        (b"", r"not an IDX file: it begins with nothing"),
        (b"\x00\x00\x0a\x01\x00\x00\x00\x00", r"type code 0x0A; IDX files have 0x08 uint8, "),
        (b"\x00\x00\x08\x00\x01", r"announces 0 dimensions; 1 to 32 are allowed"),
        (b"\x00\x00\x08\xff" + bytes(2000), r"announces 255 dimensions"),
        (b"\x00\x00\x08\x03" + b"\xff" * 12, r"truncated: it holds 16 bytes"),
        (gzip.compress(MATRIX, mtime=0) + b"rest", r"damaged gzip file"),
        (gzip.compress(MATRIX, mtime=0)[:-8] + bytes(8), r"damaged gzip file: CRC check failed"),
        (b"\x1f\x8b\x08" + b"\xff" * 40, r"damaged gzip file"),
    ],
)
def test_damage_is_refused_with_its_reason(tmp_path: Path, content: bytes, message: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ValueError, match=message) as refusal:
        read_idx(path)
    assert str(path) in str(refusal.value)


def write_dataset(root: Path, train: int = 5, labels: int = 5, suffix: str = ".gz") -> None:
    """Write a small dataset under the names of the real one."""
    random = np.random.default_rng(1)
    for name, shape in {
        "train-images-idx3-ubyte": (train, 4, 3),
        "train-labels-idx1-ubyte": (labels,),
        "t10k-images-idx3-ubyte": (2, 4, 3),
        "t10k-labels-idx1-ubyte": (2,),
    }.items():
        content = idx(random.integers(0, 255, shape).astype(np.uint8))
        (root / (name + suffix)).write_bytes(gzip.compress(content) if suffix else content)


@pytest.mark.parametrize("suffix", [".gz", ""])
def test_a_folder_of_four_files_is_a_dataset(tmp_path: Path, suffix: str) -> None:
    write_dataset(tmp_path, suffix=suffix)
    images = fashion_mnist(tmp_path)
    assert [part.shape for part in images] == [(5, 4, 3), (5,), (2, 4, 3), (2,)]
    assert all(part.dtype == np.uint8 for part in images)


def test_a_missing_dataset_names_the_package(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"apt install dataset-fashion-mnist") as refusal:
        fashion_mnist(tmp_path)
    assert str(tmp_path) in str(refusal.value)


def test_images_without_their_labels_are_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path, labels=4)
    with pytest.raises(ValueError, match=r"5 train images but 4 train labels"):
        fashion_mnist(tmp_path)


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    labels = np.zeros(5, dtype=np.int32)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(idx(labels))
    with pytest.raises(ValueError, match=r"int32 values in 1 dimensions, .* uint8 in 1"):
        fashion_mnist(tmp_path)


@pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason="apt install dataset-fashion-mnist")
def test_the_real_fashion_mnist() -> None:
    images = fashion_mnist()
    assert images.train_images.shape == (60_000, 28, 28)
    assert images.test_images.shape == (10_000, 28, 28)
    # Ten classes of equal size, as its paper says.
    assert np.bincount(images.train_labels).tolist() == [6000] * 10
    assert np.bincount(images.test_labels).tolist() == [1000] * 10
    assert images.train_images.max() == 255
