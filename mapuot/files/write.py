"""Answers into files, by one process, to which the others hand their rows of the plan block by block.

A file appears under its name when it is complete: it is written beside it and renamed. Numbers and texts are arrays of
an .npz, attributes of HDF5 and Zarr.
"""

from __future__ import annotations

import glob
import os
import platform
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from .formats import library, split_name


def refuse_folder(path: Path) -> None:
    """What is written takes the place of a file or of a Zarr store, never of another folder."""
    if path.is_dir() and not any((path / name).exists() for name in ("zarr.json", ".zgroup", ".zarray")):
        raise IsADirectoryError(f"{path} is a folder: name a file in it")


@contextmanager
def complete(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path``, which takes its place on success and goes on failure."""
    refuse_folder(path)
    for part in path.parent.glob(glob.escape(f".{path.name}.{platform.node()}.") + "*.part"):
        if dead(part.name.split(".")[-2]):
            remove(part)
    part = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.part")
    try:
        yield part
        if path.is_dir():  # Zarr
            shutil.rmtree(path)
        part.replace(path)
    finally:
        remove(part)


def dead(pid: str) -> bool:
    """Whether no process of this host has the number: it was killed before it could remove its part."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, OverflowError):  # of another user, or no number
        return False
    return False


def remove(part: Path) -> None:
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
