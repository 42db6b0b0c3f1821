"""Matrices and vectors of files, read where they are needed.

A matrix opens as ``Streamed``: only its shape is read, then block by block, so that no process ever holds more of it
than a block. Each format has an opener, which gives something with shape, dtype and slices; .npy and .npz by plain
reads of the bytes asked for, HDF5 and Zarr by their libraries. M is looked for, and a and b beside it, where no array
is named.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from ..cost import Streamed
from .formats import library, split_name


def open_matrix(text: Any, name: str = "M") -> Streamed:
    """The rows of a matrix in a file; nothing is read but its shape."""
    blocks = Matrix(*split_name(text, name))
    return Streamed(blocks, blocks.array.shape, blocks.array.dtype)


def opened(source: Any) -> Any:
    """The rows of a file where ``source`` is its name; whatever else M may be as it is."""
    return open_matrix(source) if isinstance(source, (str, os.PathLike)) else source


class Matrix:
    """A matrix of a file as the function of its blocks; pickled by its name."""

    def __init__(self, path: Path, kind: str, inside: str) -> None:
        self.name, self.array = (path.absolute(), kind, inside), open_array(path, kind, inside)
        if len(self.array.shape) != 2:
            raise ValueError(f"{path}: {inside} must be a matrix, got shape {self.array.shape}")

    def __call__(self, i0: int, i1: int, j0: int = 0, j1: int | None = None) -> Any:
        return self.array[i0:i1, j0:j1]

    def __reduce__(self) -> tuple[Any, ...]:
        return Matrix, self.name


def read_vector(text: Any, name: str) -> Any:
    """The array ``name`` of a file, or the one that ``text`` names, or that the file is."""
    path, kind, inside = split_name(text, name)
    array = open_array(path, kind, inside)
    if len(array.shape) != 1:
        raise ValueError(f"{path}: {inside} must be a vector, got shape {array.shape}")
    return np.asarray(array[0 : array.shape[0]])


def find_vector(matrix: Any, name: str) -> Any | None:
    """The array ``name`` beside a matrix, in the same file and group; None where there is none."""
    path, kind, inside = split_name(matrix, "M")
    group = inside.rpartition("/")[0]
    inside = f"{group}/{name}" if group else name
    return read_vector(f"{path}:{inside}", name) if inside in names_in(path, kind) else None


def open_array(path: Path, kind: str, name: str) -> Any:
    """Something with shape, dtype and slices of rows, of a matrix also of columns."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        array = OPENERS[kind](path, name)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read as {kind}: {error}") from error
    if not hasattr(array, "shape"):  # nothing, or a group
        raise ValueError(f"{path} holds no array {name!r}, but {', '.join(names_in(path, kind)) or 'none'}")
    return array


def open_hdf5(path: Path, name: str) -> Any:
    return library("hdf5").File(path, "r").get(name)


def open_zarr(path: Path, name: str) -> Any:
    node: Any = library("zarr").open(path, mode="r")
    return node if hasattr(node, "shape") else node.get(name)


def names_in(path: Path, kind: str) -> list[str]:
    """What arrays and groups a file has; none where it is one array."""
    names: list[str] = []
    if kind == "npz":
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
    elif kind == "hdf5":
        with library("hdf5").File(path, "r") as file:
            file.visit(names.append)
    elif kind == "zarr":
        node: Any = library("zarr").open(path, mode="r")
        names = [] if hasattr(node, "shape") else [name for name, _ in node.members(max_depth=None)]
    return sorted(names)


def npy_header(file: Any) -> tuple[tuple[int, ...], bool, Any]:
    """(shape, Fortran order, dtype); the file stands at its data then."""
    version = npy.read_magic(file)
    found = npy.read_array_header_1_0(file) if version == (1, 0) else npy.read_array_header_2_0(file)
    if found[2].hasobject:
        raise ValueError(f"dtype {found[2]} is none of numbers")
    return found


class NpyFile:
    """An .npy file, or a member of an archive that is stored as it is, by plain reads: no page stays mapped."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path = path
        with path.open("rb") as file:
            file.seek(start)
            self.shape, self.fortran, self.dtype = npy_header(file)
            self.offset = file.tell()
            end, size = self.offset + math.prod(self.shape) * self.dtype.itemsize, path.stat().st_size
        if size < end:
            raise ValueError(f"cut off at byte {size} of {end}")

    def __getitem__(self, key: Any) -> Any:
        i0, i1, j0, j1, width = block_of(key, self.shape)
        if self.fortran and len(self.shape) > 1:
            whole = np.memmap(self.path, self.dtype, "r", self.offset, self.shape, "F")
            return np.array(whole[i0:i1, j0:j1], order="C")
        steps = [(i0, i1)] if j1 - j0 == width else [(i, i + 1) for i in range(i0, i1)]  # what lies in one piece
        parts = [np.empty(0, self.dtype)]
        with self.path.open("rb") as file:
            for k0, k1 in steps:
                file.seek(self.offset + (k0 * width + j0) * self.dtype.itemsize)
                parts.append(np.fromfile(file, self.dtype, (k1 - k0) * (j1 - j0)))
        block = parts[-1] if len(steps) == 1 else np.concatenate(parts)
        return block.reshape(i1 - i0, j1 - j0) if len(self.shape) > 1 else block


def block_of(key: Any, shape: tuple[int, ...]) -> tuple[int, int, int, int, int]:
    """(i0, i1, j0, j1, row length) of one slice or two."""
    rows, columns = key if isinstance(key, tuple) else (key, slice(None))
    width = shape[1] if len(shape) > 1 else 1
    return *rows.indices(shape[0])[:2], *columns.indices(width)[:2], width


def open_member(path: Path, name: str) -> Any | None:
    with zipfile.ZipFile(path) as archive:
        if name + ".npy" not in archive.namelist():
            return None
        info = archive.getinfo(name + ".npy")
    if info.compress_type != zipfile.ZIP_STORED:
        return PackedMember(path, name)
    with path.open("rb") as file:  # the local header: 30 bytes, the name, an extra field
        file.seek(info.header_offset)
        head = file.read(30)
    lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    return NpyFile(path, info.header_offset + 30 + lengths)


class PackedMember:
    """A compressed member of an .npz: rows in order are read once, going back starts anew."""

    def __init__(self, path: Path, name: str) -> None:
        self.stream = zipfile.ZipFile(path).open(name + ".npy")  # noqa: SIM115  read on until the end
        self.shape, fortran, self.dtype = npy_header(self.stream)
        self.offset = self.stream.tell()
        if fortran and len(self.shape) > 1:
            raise ValueError(f"{name} is compressed in Fortran order, which cannot be read by rows")

    def __getitem__(self, key: Any) -> Any:
        i0, i1, j0, j1, width = block_of(key, self.shape)
        self.stream.seek(self.offset + i0 * width * self.dtype.itemsize)
        data = self.stream.read((i1 - i0) * width * self.dtype.itemsize)
        whole = np.frombuffer(data, self.dtype)
        return whole.reshape(i1 - i0, width)[:, j0:j1] if len(self.shape) > 1 else whole


OPENERS: dict[str, Callable[[Path, str], Any]] = {
    "npy": lambda path, name: NpyFile(path), "npz": open_member, "hdf5": open_hdf5, "zarr": open_zarr,
}  # fmt: skip
