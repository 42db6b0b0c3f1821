"""Problems and answers in files: .npy, .npz, HDF5 and Zarr, rows at a time.

A matrix opens as ``Streamed``, read block by block where it is needed, so that no process ever holds more of it than a
block; an answer is written by one process, to which the others hand their rows block by block. Files appear under
their name when they are complete. ``file.h5:group/M`` names an array inside a file; without, M is looked for, and a and
b beside it.
"""

from __future__ import annotations

import math
import os
import shutil
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from .cost import Streamed

FORMATS = {".npy": "npy", ".npz": "npz", ".h5": "hdf5", ".hdf5": "hdf5", ".zarr": "zarr"}
LIBRARIES = {"hdf5": "h5py", "zarr": "zarr"}
CHECKPOINT_SECONDS = float(os.environ.get("MAPUOT_CHECKPOINT_SECONDS", "60"))


def split_name(text: Any, default: str) -> tuple[Path, str, str]:
    """(file, its format, array in it) of ``file`` or ``file:array``."""
    whole, inside = os.fspath(text), default
    head, colon, tail = whole.rpartition(":")
    if colon and Path(head).suffix.lower() in FORMATS:
        whole, inside = head, tail.strip("/") or default
    kind = FORMATS.get(Path(whole).suffix.lower())
    if kind is None:
        raise ValueError(f"{whole}: the name must end in one of {sorted(FORMATS)}")
    return Path(whole), kind, inside


# ---- reading ----


def library(kind: str) -> Any:
    """The module that reads and writes a format."""
    name = LIBRARIES[kind]
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{kind} files need {name}: pip install 'mapuot[files]'") from error


def open_matrix(text: Any, name: str = "M") -> Streamed:
    """The rows of a matrix in a file; nothing is read but its shape."""
    blocks = Matrix(*split_name(text, name))
    return Streamed(blocks, blocks.array.shape, blocks.array.dtype)


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


# ---- writing ----


def refuse_folder(path: Path) -> None:
    """What is written takes the place of a file or of a Zarr store, never of another folder."""
    if path.is_dir() and not any((path / name).exists() for name in ("zarr.json", ".zgroup", ".zarray")):
        raise IsADirectoryError(f"{path} is a folder: name a file in it")


@contextmanager
def complete(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path``, which takes its place on success and goes on failure."""
    refuse_folder(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        if path.is_dir():  # Zarr
            shutil.rmtree(path)
        part.replace(path)
    finally:
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink(missing_ok=True)


class Blocks:
    """A matrix that comes as row blocks, to be written."""

    def __init__(self, shape: tuple[int, int], dtype: Any, blocks: Iterable[Any]) -> None:
        self.shape, self.dtype, self.blocks = shape, np.dtype(dtype), blocks


def write(text: Any, values: dict[str, Any]) -> None:
    """Arrays, ``Blocks``, numbers and texts into one file of the format that its name says."""
    path, kind, _ = split_name(text, "")
    writer: Callable[[Path, dict[str, Any]], None] = {
        "npy": write_npy, "npz": write_npz, "hdf5": write_hdf5, "zarr": write_zarr,
    }[kind]  # fmt: skip
    try:
        with complete(path) as part:
            writer(part, values)
    finally:
        for value in values.values():  # after a failure the other processes still give their rows
            for _ in value.blocks if isinstance(value, Blocks) else ():
                pass


def write_rows(file: Any, value: Blocks) -> None:
    header = {"descr": npy.dtype_to_descr(value.dtype), "fortran_order": False, "shape": value.shape}
    npy.write_array_header_2_0(file, header)
    for block in value.blocks:
        file.write(np.ascontiguousarray(block, value.dtype).data)


def write_npy(path: Path, values: dict[str, Any]) -> None:
    (value,) = (x for x in values.values() if isinstance(x, Blocks))
    with path.open("wb") as file:
        write_rows(file, value)


def write_npz(path: Path, values: dict[str, Any]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, value in values.items():
            with archive.open(name + ".npy", "w", force_zip64=True) as file:
                if isinstance(value, Blocks):
                    write_rows(file, value)
                else:
                    npy.write_array(file, np.asarray(value), allow_pickle=False)


def fill(array: Any, value: Blocks) -> None:
    i0 = 0
    for block in value.blocks:
        array[i0 : i0 + len(block)] = block
        i0 += len(block)


def write_hdf5(path: Path, values: dict[str, Any]) -> None:
    with library("hdf5").File(path, "w") as file:
        for name, value in values.items():
            if isinstance(value, Blocks):
                fill(file.create_dataset(name, value.shape, value.dtype), value)
            elif np.ndim(value) == 0:
                file.attrs[name] = value
            else:
                file[name] = value


def write_zarr(path: Path, values: dict[str, Any]) -> None:
    group = library("zarr").open_group(path, mode="w")
    for name, value in values.items():
        if np.ndim(value) == 0 and not isinstance(value, Blocks):
            group.attrs[name] = value.item() if isinstance(value, np.generic) else value
            continue
        m = value.shape[0]
        chunks = tuple(max(1, min(size, 1024)) for size in value.shape)
        array = group.create_array(name, shape=value.shape, dtype=value.dtype, chunks=chunks)
        if isinstance(value, Blocks):
            fill(array, value)
        elif m:
            array[:] = value


# ---- checkpoints ----


class Checkpoint:
    """The potential of one side, enough to go on from, written now and then by one process."""

    def __init__(self, path: Any) -> None:
        self.path, self.last = Path(path), time.monotonic()
        refuse_folder(self.path)

    @property
    def due(self) -> bool:
        return time.monotonic() - self.last >= CHECKPOINT_SECONDS

    def save(self, side: str, log_x: Any, reg: float, n_pass: int) -> None:
        """Trouble with the disk is a warning, the solve goes on."""
        self.last = time.monotonic()
        potential = reg * np.where(np.isfinite(log_x), log_x, 0.0)
        try:
            with complete(self.path) as part, part.open("wb") as file:
                np.savez(file, side=side, potential=potential, n_pass=n_pass)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            warnings.warn(f"checkpoint {self.path} could not be written: {error}", RuntimeWarning, stacklevel=2)


def load_checkpoint(path: Any, m: int, n: int, reg: float) -> tuple[Any, Any]:
    """(log u, log v) to start a problem of m rows and n columns from; ValueError where the file is of another."""
    try:
        with np.load(path, allow_pickle=False) as file:
            side, potential = str(file["side"]), np.asarray(file["potential"], np.float64)
    except (KeyError, TypeError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path} is not a checkpoint of mapuot: {error}") from error
    start = {"a": np.zeros(m), "b": np.zeros(n)}
    if side not in start or potential.shape != start[side].shape:
        raise ValueError(f"{path} is the checkpoint of another problem: {side} has {len(potential)} points there")
    start[side] = potential / reg
    return start["a"], start["b"]
