"""Write answers into files: one process writes, and receives the other processes' rows of the plan block by block.

A file appears under its name when it is complete: it is written beside it and renamed. Numbers and texts are arrays of
an .npz, attributes of HDF5 and Zarr.
"""

import glob
import gzip
import os
import platform
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from .formats import library, split_name, suffix_of
from .remote import written

ROW_VECTORS = ("a", "row_marginal", "log_u", "rho_a", "upper_a")
COLUMN_VECTORS = ("b", "col_marginal", "log_v", "rho_b", "upper_b")


def refuse_folder(path: Path) -> None:
    if path.is_dir() and not any((path / name).exists() for name in ("zarr.json", ".zgroup", ".zarray")):
        raise IsADirectoryError(f"{path} is a folder: name a file in it")


@contextmanager
def complete(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside ``path``; rename the file to ``path`` on success, remove it on failure."""
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
    """Tell whether no process of this host has this number: a killed process leaves its temporary file."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, OverflowError):  # another user's process, or no number
        return False
    return False


def remove(part: Path) -> None:
    if part.is_dir():
        shutil.rmtree(part)
    else:
        part.unlink(missing_ok=True)


class Blocks:
    """A matrix to write, as blocks of rows."""

    def __init__(self, shape: tuple[int, int], dtype: Any, blocks: Iterable[Any]) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.blocks = blocks


def write(text: Any, values: dict[str, Any]) -> None:
    """Write arrays, ``Blocks``, numbers and texts into one file; its name determines the format."""
    name, kind, _ = split_name(text, "")
    writers: dict[str, Callable[[Path, dict[str, Any]], None]] = {
        "npy": write_plan, "npz": write_npz, "hdf5": write_hdf5, "zarr": write_zarr,
        "csv": partial(write_table, suffix=suffix_of(name)), "h5ad": write_h5ad,
    }  # fmt: skip
    try:
        with written(name, kind) as path, complete(path) as part:
            writers[kind](part, values)
    finally:
        for value in values.values():  # after a failure the other processes still send their rows
            for _ in value.blocks if isinstance(value, Blocks) else ():
                pass


def write_rows(file: Any, value: Blocks) -> None:
    header = {"descr": npy.dtype_to_descr(value.dtype), "fortran_order": False, "shape": value.shape}
    npy.write_array_header_2_0(file, header)
    for block in value.blocks:
        file.write(np.ascontiguousarray(block, value.dtype).data)


def write_plan(path: Path, values: dict[str, Any]) -> None:
    """Write the one matrix of blocks as an .npy file."""
    (value,) = (x for x in values.values() if isinstance(x, Blocks))
    with path.open("wb") as file:
        write_rows(file, value)


def write_table(path: Path, values: dict[str, Any], suffix: str) -> None:
    """Write the one matrix of blocks as a table, separated by tabs unless ``suffix`` is .csv."""
    (value,) = (x for x in values.values() if isinstance(x, Blocks))
    with (gzip.open if suffix.endswith(".gz") else open)(path, "wb") as file:
        for block in value.blocks:
            np.savetxt(file, block, "%.17g", "," if suffix.startswith(".csv") else "\t")


def write_h5ad(path: Path, values: dict[str, Any]) -> None:
    """Write AnnData: the plan, dense or CSR, as X; vectors of rows as obs, of columns as var, the rest as uns.

    ``row_names`` and ``col_names`` name both; without them they are numbered.
    """
    m = len(values["a"])
    n = len(values["b"])
    values = dict(values)  # the caller keeps his
    row_names = values.pop("row_names", None)
    col_names = values.pop("col_names", None)
    with library("h5ad").File(path, "w") as file:
        encoded(file, "anndata", "0.1.0")
        if "plan" in values:
            plan = values.pop("plan")
            fill(encoded(file.create_dataset("X", plan.shape, plan.dtype), "array", "0.2.0"), plan)
        elif "plan_indptr" in values:
            X = encoded(file.create_group("X"), "csr_matrix", "0.1.0")
            X.attrs["shape"] = (m, n)
            for part in ("data", "indices", "indptr"):
                X[part] = values.pop("plan_" + part)
        write_frame(file, "obs", range(m) if row_names is None else row_names, ROW_VECTORS, values)
        write_frame(file, "var", range(n) if col_names is None else col_names, COLUMN_VECTORS, values)
        uns = encoded(file.create_group("uns"), "dict", "0.1.0")
        for name, value in values.items():
            if np.ndim(value):
                kind = "array"
            elif isinstance(value, str):
                kind = "string"
            else:
                kind = "numeric-scalar"
            encoded(uns.create_dataset(name, data=value), kind, "0.2.0")


def encoded(node: Any, kind: str, version: str) -> Any:
    """Mark a node of an AnnData file with its encoding, and return it."""
    node.attrs.update({"encoding-type": kind, "encoding-version": version})
    return node


def write_frame(file: Any, side: str, ids: Iterable[Any], names: Iterable[str], values: dict[str, Any]) -> None:
    """Write the table of a side, indexed by ``ids``; move its vectors from ``values`` there."""
    frame = encoded(file.create_group(side), "dataframe", "0.2.0")
    columns = [name for name in names if name in values]
    frame.attrs.update({"_index": "_index", "column-order": columns})
    words = [str(x) for x in ids]
    index = frame.create_dataset("_index", data=words, dtype=library("h5ad").string_dtype())
    encoded(index, "string-array", "0.2.0")
    for name in columns:
        encoded(frame.create_dataset(name, data=values.pop(name)), "array", "0.2.0")


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
            else:
                (file if np.ndim(value) else file.attrs)[name] = value


def write_zarr(path: Path, values: dict[str, Any]) -> None:
    group = library("zarr").open_group(path, mode="w")
    for name, value in values.items():
        if np.ndim(value) == 0 and not isinstance(value, Blocks):
            if isinstance(value, np.generic):
                group.attrs[name] = value.item()
            else:
                group.attrs[name] = value
            continue
        m = value.shape[0]
        chunks = tuple(max(1, min(size, 1024)) for size in value.shape)
        array = group.create_array(name, shape=value.shape, dtype=value.dtype, chunks=chunks)
        if isinstance(value, Blocks):
            fill(array, value)
        elif m:
            array[:] = value
