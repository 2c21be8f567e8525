"""Reads IDX files, the format of MNIST and its descendants, plain or gzipped.

An IDX file starts with two zero bytes, a byte for the type, and a byte for the number of
dimensions. Each dimension follows as a big-endian unsigned 32-bit integer. Then come the values,
big-endian; the last dimension runs fastest.
"""

from __future__ import annotations

import gzip
import zlib
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Element: TypeAlias = np.uint8 | np.int8 | np.int16 | np.int32 | np.float32 | np.float64

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts its files."""

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP_MAGIC = b"\x1f\x8b"  # RFC 1952, section 2.3.1
# NumPy 1 stops here; a larger number in a header is damage, not data.
_MOST_DIMENSIONS = 32


class Images(NamedTuple):
    """Labeled images: arrays of shape (count, height, width), and their labels (count,)."""

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.uint8]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.uint8]


def read_idx(path: Path | str) -> NDArray[Element]:
    """Read the one array of an IDX file as a new, writable array in native byte order."""
    content = _unpacked(Path(path))
    dtype, shape = _header(content, path)
    start = 4 + 4 * len(shape)
    expected = start + prod(shape) * dtype.itemsize
    if len(content) != expected:
        fault = "truncated" if len(content) < expected else "longer than its header says"
        raise ValueError(
            f"{path} is {fault}: it holds {len(content)} bytes, but {dtype.name} values of "
            f"shape {shape} take {expected}; fetch the file again"
        )
    values: NDArray[Element] = np.frombuffer(content, dtype, offset=start).reshape(shape)
    return values.astype(dtype.newbyteorder("="))


def fashion_mnist(root: Path | str = FASHION_MNIST) -> Images:
    """Read Fashion-MNIST (Xiao et al., 2017, arXiv:1708.07747) from a folder of IDX files."""
    train_images, train_labels = _labeled(Path(root), "train")
    test_images, test_labels = _labeled(Path(root), "t10k")
    return Images(train_images, train_labels, test_images, test_labels)


def _labeled(root: Path, part: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read the images and the labels of one part, and check that their numbers agree."""
    images = _bytes_of(_located(root, f"{part}-images-idx3-ubyte"), 3)
    labels = _bytes_of(_located(root, f"{part}-labels-idx1-ubyte"), 1)
    if len(images) != len(labels):
        raise ValueError(
            f"{root} has {len(images)} {part} images but {len(labels)} {part} labels; "
            f"use files of the same dataset"
        )
    return images, labels


def _located(root: Path, name: str) -> Path:
    """Return the path of a dataset's file, gzipped or plain."""
    for path in (root / f"{name}.gz", root / name):
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"there is neither {name}.gz nor {name} in {root}; on Debian and Ubuntu run "
        f"`apt install dataset-fashion-mnist`, elsewhere pass root= the folder that has the files"
    )


def _bytes_of(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an IDX file that must hold unsigned bytes in `dimensions` dimensions."""
    values = read_idx(path)
    if values.dtype != np.uint8 or values.ndim != dimensions:
        raise ValueError(
            f"{path} holds {values.dtype.name} values in {values.ndim} dimensions, where a "
            f"dataset of images has uint8 in {dimensions}; read it with read_idx instead"
        )
    return values.astype(np.uint8, copy=False)


def _unpacked(path: Path) -> bytes:
    """Return a file's bytes, decompressed if they are gzip, whatever the file's name is."""
    content = path.read_bytes()
    if not content.startswith(_GZIP_MAGIC):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is a damaged gzip file: {error}; fetch it again") from error


def _header(content: bytes, path: Path | str) -> tuple[np.dtype[Element], tuple[int, ...]]:
    """Return the type and the shape that an IDX header announces."""
    if len(content) < 4 or content[:2] != b"\x00\x00":
        raise ValueError(
            f"{path} is not an IDX file: it begins with {content[:4].hex(' ') or 'nothing'}, "
            f"not with 00 00, a type and a number of dimensions; give an IDX file, plain or .gz"
        )
    code, dimensions = content[2], content[3]
    if code not in _DTYPES:
        known = ", ".join(f"0x{known:02X} {np.dtype(name).name}" for known, name in _DTYPES.items())
        raise ValueError(f"{path} has the type code 0x{code:02X}; IDX files have {known}")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise ValueError(
            f"{path} announces {dimensions} dimensions; 1 to {_MOST_DIMENSIONS} are allowed; "
            f"fetch the file again"
        )
    if len(content) < 4 + 4 * dimensions:
        raise ValueError(
            f"{path} is truncated: it holds {len(content)} bytes, but a header of {dimensions} "
            f"dimensions takes {4 + 4 * dimensions}; fetch the file again"
        )
    shape = np.frombuffer(content, ">u4", count=dimensions, offset=4)
    return np.dtype(_DTYPES[code]), tuple(int(size) for size in shape)
