"""Matrices and vectors in files, read on demand.

A matrix opens as ``Streamed``: first only its shape is read, later its blocks, so that a process holds at most one
block. Each format has an opener, which returns an object with shape, dtype and slices: .npy and .npz by plain reads of
the requested bytes, HDF5 and Zarr by their libraries. The default names are M, and a and b beside it.

A file may come from anyone (SECURITY.md). The size claimed in a header is compared with the file size before memory is
allocated, members of an .npz are compared with their checksum, and every error becomes a ValueError with the file name.
"""

import csv
import gzip
import io
import itertools
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from ..annotations import FilePath
from ..errors import cut, warn
from ..problem.cost import Streamed
from ..problem.sparse import Sparse
from .formats import library, split_answer, split_local, split_name, suffix_of
from .pairs import PairsFile
from .remote import local_copy, naming_urls

MOST_HEADER = 1 << 16  # bytes of the header of an .npy file; numpy writes 128 and reads no more than 10,000
MOST_INFLATED = 1032  # largest ratio of deflate compression
DEFAULTS = ("M", "a", "b", "c")  # default names of arrays
MOST_NAMES = 8  # names in a message
DECIMAL_COMMA = re.compile(r"[-+]?\d*,\d+([eE][-+]?\d+)?")  # neither a number for NumPy nor a name
COMPRESSED = ("data", "indices", "indptr")  # arrays of compressed rows or columns
ANNDATA = {"M": "X", "a": "obs/a", "b": "var/b"}
POINT_GROUPS = ("obsm", "varm")  # of AnnData, in HDF5 and in Zarr
REDUCE_GENES = "scanpy.pp.pca(data) makes 50 components of X and stores them as obsm/X_pca"
NUMBER_KINDS = "biufc"  # kinds of dtype
CHECKED_BYTES = 1 << 20  # bytes of a member in one read


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Turn every error from a damaged file into a ValueError that names the file."""
    try:
        yield
    except (MemoryError, ImportError):
        raise
    except Exception as error:
        if isinstance(error, (ValueError, OSError)):
            what = ""
        else:
            what = f"{type(error).__name__}: "
        raise ValueError(f"{path} cannot be read as {kind}: {what}{cut(str(error))}") from error


@naming_urls
def open_matrix(text: FilePath, name: str = "M") -> Streamed:
    """Open a matrix in a file: read its shape now, and its rows on demand.

    Parameters
    ----------
    text : path
        The file: .npy, .npz, CSV, HDF5, Zarr or .h5ad; ``file.h5:name`` names an array in it.
    name : str
        Array to open if ``text`` names none.

    Returns
    -------
    Streamed
        A cost that `solve` takes as M.

    Raises
    ------
    ValueError, FileNotFoundError
        There is no such matrix; the text names the file.

    See Also
    --------
    read_vector, mapuot.solve

    Examples
    --------
    >>> import os, tempfile, numpy as np, mapuot, mapuot.files
    >>> path = os.path.join(tempfile.mkdtemp(), "cost.npy")
    >>> np.save(path, np.eye(3))
    >>> M = mapuot.files.open_matrix(path)
    >>> M.shape, mapuot.solve(M, np.full(3, 1 / 3), np.full(3, 1 / 3), reg=0.1, reg_m=1.0).converged
    ((3, 3), True)
    """
    is_table = split_name(text, "")[1] == "csv"  # all columns are read, even if one has this name
    blocks = Matrix(*split_local(text, "" if is_table else name))
    return Streamed(blocks, blocks.array.shape, blocks.array.dtype)


@naming_urls
def open_cost(text: Any) -> Streamed | Sparse | PairsFile:
    """Open the rows of a matrix in a file, or the stored pairs of a sparse matrix."""
    path, kind, inside = split_local(text, "")
    if kind == "h5ad" and not inside:
        refuse_cells(path)
    if inside.partition("/")[0] in POINT_GROUPS and inside in names_in(path, kind):
        raise ValueError(
            f"{path}: {inside} holds the coordinates of points, one point a row, no matrix of costs. For costs between "
            f"points give two files, as in --points {path}:{inside} OTHER; in Python two arrays, as in PointCloud(x, y)"
        )
    pairs = open_pairs(*split_local(text, "M"))
    if pairs is None:
        return open_matrix(text)
    return pairs


def refuse_cells(path: Path) -> None:
    """Refuse X of an AnnData with cell names as a cost, unless obs has masses a or var has b: X is expression data."""
    check_regular(path, "h5ad")
    with reading(path, "h5ad"), library("h5ad").File(path, "r") as file:
        has_names = "obs" in file and "_index" in file["obs"].attrs
        cells = has_names and "obs/a" not in file and "var/b" not in file
        points = cell_points(file)
        costs = next((f"obsp/{name}" for name in file.get("obsp", ())), "X")
    if cells:
        if points:
            cure = f"as in --points {path}:{points} OTHER"
        else:
            cure = f"with few columns each ({REDUCE_GENES})"
        raise ValueError(
            f"{path}: X of an AnnData is cells x genes, no matrix of costs. For costs between points give two files, "
            f"{cure}; if these are costs, name them, as in {path}:{costs}"
        )


def cell_points(file: Any) -> str:
    """Return the name of a dense array of an open AnnData that may hold points of cells; "" if there is none."""
    found = list(file.get("obsm", ()))
    if found:
        return "obsm/" + ("X_pca" if "X_pca" in found else found[0])
    return "X" * hasattr(file.get("X"), "shape")  # compressed rows or columns are a group


def opened(source: Any) -> Any:
    """Return the cost in a file if ``source`` is a file name; return anything else unchanged."""
    if isinstance(source, (str, os.PathLike)):
        return open_cost(source)
    return source


def open_pairs(path: Path, kind: str, inside: str) -> Sparse | PairsFile | None:
    """Open a sparse matrix, an .npz of ``scipy.sparse.save_npz`` or a group of AnnData; None for any other array.

    Of compressed rows or columns only the offsets are read now; a matrix of coordinates is read as a whole.
    """
    if kind not in ("npz", "hdf5", "h5ad"):
        return None
    check_regular(path, kind)
    with reading(path, kind):
        if kind == "npz":
            names = set(found_names(path, kind))
            if not {"format", "shape", "data"} <= names or inside in names:
                return None
            if "format" in names:
                form = bytes(whole_member(path, "format", "US")).decode()
            else:
                form = ""
            shape = whole_member(path, "shape")
            if form == "coo":
                from scipy.sparse import coo_array  # noqa: PLC0415 - rarely needed

                data, *places = (whole_member(path, name) for name in ("data", "row", "col"))
                return Sparse.of_matrix(coo_array((data, tuple(places)), shape=tuple(int(k) for k in shape)))
            arrays: Any = {name: open_member(path, name) for name in names & set(COMPRESSED)}
        else:
            group = library(kind).File(path, "r").get(ANNDATA.get(inside, inside) if kind == "h5ad" else inside)
            if group is None or hasattr(group, "shape") or "indptr" not in group:
                return None
            form = str(group.attrs.get("encoding-type", "csr_matrix")).removesuffix("_matrix")
            arrays = group
            shape = group.attrs["shape"]
        if form not in ("csr", "csc"):
            raise ValueError(f"its format is {cut(form)!r}, and must be csr, csc or coo")
        return PairsFile({name: arrays[name] for name in COMPRESSED}, form, shape, partial(reading, path, kind))


class Matrix:
    """A matrix in a file, as a function that reads blocks; a pickle holds only its name."""

    def __init__(self, path: Path, kind: str, inside: str) -> None:
        self.name = (path.absolute(), kind, inside)
        self.array = open_array(path, kind, inside)
        if len(self.array.shape) != 2:
            raise ValueError(f"{path}: {inside or 'it'} must be a matrix, got shape {self.array.shape}")

    def __call__(self, i0: int, i1: int) -> Any:
        with reading(*self.name[:2]):
            return self.array[i0:i1]

    def __reduce__(self) -> tuple[Any, ...]:
        return Matrix, self.name


@naming_urls
def read_vector(text: FilePath, name: str) -> Any:
    """Read a vector from a file.

    Parameters
    ----------
    text : path
        As in `open_matrix`.
    name : str
        Array, or column of a CSV file, to read if ``text`` names none.

    Returns
    -------
    (n,) array

    Raises
    ------
    ValueError, FileNotFoundError
        There is no such vector; the text names the file.

    See Also
    --------
    open_matrix : costs from a file

    Examples
    --------
    >>> import os, tempfile, numpy as np, mapuot.files
    >>> path = os.path.join(tempfile.mkdtemp(), "masses.npz")
    >>> np.savez(path, a=[0.25, 0.75])
    >>> mapuot.files.read_vector(path, "a")
    array([0.25, 0.75])
    """
    path, kind, inside = split_local(text, name)
    array = open_array(path, kind, inside)
    if len(array.shape) != 1 and (len(array.shape) != 2 or 1 not in array.shape):  # one line of a table is a vector
        raise ValueError(f"{path}: {inside} must be a vector, got shape {array.shape}")
    with reading(path, kind):
        return np.asarray(array[0 : array.shape[0]]).ravel()


@naming_urls
def find_vector(matrix: Any, name: str) -> Any | None:
    """Read the array ``name`` beside a matrix, in the same file and group; None if there is none."""
    path, kind, inside = split_local(matrix, "M")
    group = inside.rpartition("/")[0]
    if group:
        inside = f"{group}/{name}"
    else:
        inside = name
    if inside in names_in(path, kind):
        return read_vector(f"{path}:{inside}", name)
    return None


@naming_urls
def names_along(text: Any) -> tuple[Any, Any]:
    """Read the names of rows and columns of a matrix in an AnnData file; None for other files."""
    path, kind, inside = split_local(text, "X")
    if kind != "h5ad":
        return None, None
    group = inside.rpartition("/")[0]
    sides = {"obsm": ("obs", None), "obsp": ("obs", "obs"), "varm": ("var", None), "varp": ("var", "var")}
    rows, cols = sides.get(group, ("obs", "var"))
    with reading(path, kind), library(kind).File(path, "r") as file:
        return index_of(file, rows), index_of(file, cols)


def index_of(file: Any, side: str | None) -> Any:
    """Return the index of a table in an AnnData file, as words; None if there is none."""
    if side:
        frame: Any = file.get(side)
    else:
        frame = None
    if hasattr(frame, "keys") and "_index" in frame.attrs:
        return frame[frame.attrs["_index"]].asstr()[()]
    return None


@naming_urls
def read_values(text: Any, names: Iterable[str]) -> dict[str, Any]:
    """Read the arrays, numbers and texts with these names from a file of `write`, if they exist."""
    name, kind = split_answer(text)
    path = local_copy(name, kind)
    check_regular(path, kind)
    with reading(path, kind):
        if kind == "h5ad":
            with library(kind).File(path, "r") as file:
                places = [file[group] for group in ("obs", "var", "uns") if group in file]
                nodes = {name: place[name] for name in names for place in places if name in place}
                values = {name: node[()] for name, node in nodes.items() if hasattr(node, "shape")}
            return {name: x.decode() if isinstance(x, bytes) else x for name, x in values.items()}
        if kind == "npz":
            there = set(found_names(path, kind))
            return {name: whole_member(path, name) for name in names if name in there}
        if kind == "hdf5":
            node: Any = library(kind).File(path, "r")
        else:
            node = library(kind).open(path, mode="r")
        attributes = dict(node.attrs)
        values = {name: attributes[name] for name in names if name in attributes}
        return values | {name: np.asarray(node[name][:]) for name in names if name in node}


def whole_member(path: Path, name: str, kinds: str = NUMBER_KINDS + "U") -> Any:
    """Read an array of an archive; an array without dimensions becomes a number or a text."""
    array = open_member(path, name, kinds)
    assert array is not None
    values = array[0 : math.prod(array.shape[:1])]
    if array.shape:
        return values
    return values[0].item()


def open_array(path: Path, kind: str, name: str) -> Any:
    """Open an array: an object with shape, dtype and slices of rows."""
    check_regular(path, kind)
    with reading(path, kind):
        array = OPENERS[kind](path, name)
        shape = getattr(array, "shape", None)
        if shape is not None and array.dtype.kind not in NUMBER_KINDS:
            raise ValueError(f"dtype {cut(str(array.dtype))} is none of numbers")
    if shape is None:  # there is no such name, or it is a group
        there = names_in(path, kind)
        if name in there and any(other.startswith(f"{ANNDATA.get(name, name)}/indptr") for other in there):
            dense = [other for other in there if other.startswith("obsm/")]
            if dense:
                cure = f"name one, as in {path}:{dense[0]}"
            else:
                cure = REDUCE_GENES
            raise ValueError(f"{path}: {name} is sparse, where a dense array is wanted: {cure}")
        arrays = arrays_in(path, kind)
        near = [other for other in arrays if other.rpartition("/")[2] == name.rpartition("/")[2] and other != name]
        some = [*near, *(other for other in arrays if other not in near)][:MOST_NAMES]
        if len(arrays) > len(some):
            more = f" and {len(arrays) - len(some)} more"
        else:
            more = ""
        if some:
            hint = f"but {', '.join(some)}{more}: name one of them, as in {path}:{some[0]}"
        else:
            hint = "and no other of numbers"
        raise ValueError(f"{path} holds no array {name!r}, {hint}")
    return array


def check_regular(path: Path, kind: str) -> None:
    """Refuse pipes and devices: reading them might never end."""
    with reading(path, kind):
        there = path.exists()
        fits = path.is_file() or (path.is_dir() and kind == "zarr")
    if not there:
        raise FileNotFoundError(f"{path} does not exist")
    if not fits:
        raise ValueError(f"{path} cannot be read as {kind}: it is no regular file")


def open_h5ad(path: Path, name: str) -> Any:
    """Open an array of an AnnData file: M is X, a is the column a of obs, b is the column b of var."""
    found = library("h5ad").File(path, "r").get(ANNDATA.get(name, name))
    if found is None or hasattr(found, "shape"):
        return found
    if "codes" in found and "categories" in found:  # a categorical column, perhaps of numbers
        codes = found["codes"][:]
        categories = found["categories"][:]
        if categories.dtype.kind in NUMBER_KINDS:
            return np.where(codes < 0, np.nan, np.asarray(categories, np.float64)[codes])
        raise ValueError(f"{name} holds words")
    if "values" in found and "mask" in found:  # a nullable column
        return np.where(found["mask"][:], np.nan, found["values"][:])
    if name == "M":
        raise ValueError("X is sparse: name a dense array, as in layers/NAME")
    return found


def open_csv(path: Path, name: str) -> Any:
    """Read a table of numbers, or its column ``name``, without the names of columns and rows.

    NumPy reads the numbers. A first line with a word behind its first field, or with an empty first field, names the
    columns, as does a line that begins with #. Rows have names if their first field is a word, or if the name of
    the first column is empty (pandas) or missing (R).
    """
    packed = suffix_of(path.name).endswith(".gz")
    with (gzip.open if packed else open)(path, "rt", encoding="utf-8-sig", newline="") as file:
        names, first, delimiter = header_of(file, ".txt" in path.suffixes)
        row = fields(first, delimiter)
        if names and len(names) == len(row) - 1:
            names = ["", *names]
        has_names = names[:1] == [""] or not (is_number(row[0]) or DECIMAL_COMMA.fullmatch(row[0]))
        lines = itertools.chain([first], file)
        read = partial(np.loadtxt, lines, delimiter=delimiter, ndmin=2, quotechar='"', comments=None)
        if name and name in names:
            return read(usecols=[names.index(name)])[:, 0]
        if name and name not in DEFAULTS:
            raise ValueError(f"it has no column {name!r}, but {cut(', '.join(names)) or 'columns without names'}")
        words = [k for k in range(has_names, len(row)) if not is_number(row[k])]
        if words:
            if names:
                column = names[words[0]]
            else:
                column = f"{words[0] + 1}"
            raise ValueError(f"its column {cut(column)!r} holds words: name the column to read, as in {path.name}:NAME")
        if has_names:
            return read(converters={0: lambda text: 0.0})[:, 1:]
        table = read()
        if not names and counts(row) and len(table) != len(row):  # a square table may hold distances along a line
            text = f"the first line of {path.name} counts its columns, and is read as numbers"
            warn(f"{text}: put # before it if it names the columns")
        return table


def counts(row: list[str]) -> bool:
    """Tell whether the fields count the columns, from 0 or from 1."""
    n = len(row)
    return n > 2 and row in ([*map(str, range(n))], [*map(str, range(1, n + 1))])


def header_of(file: Any, spaced: bool) -> tuple[list[str], str, str | None]:
    """Return (names of the columns, perhaps none; first line of numbers; delimiter) of a table."""
    told = ""
    first = file.readline()
    while first.startswith("#"):
        told = first.lstrip("# ")
        first = file.readline()
    if not first.strip():
        raise ValueError("its first line is empty")
    delimiter = next((c for c in "\t,;" if c in first), None if spaced else ",")
    if told:
        return fields(told, delimiter), first, delimiter
    found = fields(first, delimiter)
    counted = found[1:] == [str(k) for k in range(len(found) - 1)]  # pandas' default names
    no_words = all(map(is_number, found[1:])) and (is_number(found[0]) or (len(found) > 1 and not counted))
    if no_words and found[0]:
        return [], first, delimiter
    first = file.readline()
    if not first.strip():
        raise ValueError("it holds no line of numbers")
    return found, first, delimiter


def fields(line: str, delimiter: str | None) -> list[str]:
    if delimiter is None:
        return line.split()
    return [field.strip() for field in next(csv.reader([line], delimiter=delimiter))]


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def open_zarr(path: Path, name: str) -> Any:
    node: Any = library("zarr").open(path, mode="r")
    if hasattr(node, "shape"):
        array = node
    else:
        array = node.get(name)
    if hasattr(array, "shape"):
        told = array.metadata.to_dict()
    else:
        told = {}
    if any("pickle" in str(told.get(key)) for key in ("codecs", "filters", "compressor")):
        raise ValueError(f"{name} is packed by pickle, which could run any code")
    return array


def names_in(path: Path, kind: str) -> list[str]:
    """List the arrays and groups of a file; [] if the file is one array."""
    check_regular(path, kind)
    with reading(path, kind):
        return sorted(found_names(path, kind))


def arrays_in(path: Path, kind: str) -> list[str]:
    """List the arrays of numbers of a file, with AnnData's columns of two arrays; [] if the file is one array."""
    if kind not in ("hdf5", "h5ad", "zarr"):
        return names_in(path, kind)
    found: list[str] = []

    def add(name: str, node: Any) -> None:
        if hasattr(node, "shape"):
            fits = node.dtype.kind in NUMBER_KINDS
        else:
            fits = "mask" in node or "codes" in node  # a nullable column, or a categorical one
        if fits:
            found.append(name)

    with reading(path, kind):
        if kind == "zarr":
            for name, node in library("zarr").open(path, mode="r").members(max_depth=None):
                add(name, node)
        else:
            with library(kind).File(path, "r") as file:
                file.visititems(add)
    return sorted(name for name in found if name.rpartition("/")[0] not in found)


def found_names(path: Path, kind: str) -> list[str]:
    names: list[str] = []
    if kind == "npz":
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
    elif kind in ("hdf5", "h5ad"):
        with library(kind).File(path, "r") as file:
            file.visit(names.append)
        names += [name for name, full in ANNDATA.items() if kind == "h5ad" and full in names]
    elif kind == "zarr":
        node: Any = library("zarr").open(path, mode="r")
        if hasattr(node, "shape"):
            names = []
        else:
            names = [name for name, _ in node.members(max_depth=None)]
    return names


def npy_header(file: Any, kinds: str) -> tuple[tuple[int, ...], bool, Any]:
    """Read (shape, Fortran order, dtype) from a header; leave the file position at the data."""
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"format version {version}")
    length = file.read(2 if version == (1, 0) else 4)
    size = int.from_bytes(length, "little")
    if size > MOST_HEADER:
        raise ValueError(f"its header claims {size} bytes")
    text = io.BytesIO(length + file.read(size))
    if version == (1, 0):
        found = npy.read_array_header_1_0(text)
    else:
        found = npy.read_array_header_2_0(text)
    if found[2].kind not in kinds:
        raise ValueError(f"dtype {cut(str(found[2]))} is none of numbers")
    if min(found[0], default=0) < 0:
        raise ValueError(f"its header claims the shape {cut(str(found[0]))}")
    return found


class NpyFile:
    """An .npy file, or an uncompressed member of an archive, by plain reads: no page stays mapped."""

    def __init__(self, path: Path, start: int = 0, stop: int | None = None, kinds: str = NUMBER_KINDS) -> None:
        self.path = path
        with path.open("rb") as file:
            file.seek(start)
            self.shape, self.fortran, self.dtype = npy_header(file, kinds)
            self.offset = file.tell()
        check_size(self, path.stat().st_size if stop is None else stop)

    def __getitem__(self, rows: slice) -> Any:
        i0, i1, height, width = block_of(rows, self.shape)
        by_columns = self.fortran and len(self.shape) > 1
        apart = by_columns and i1 - i0 < height  # else the block is contiguous
        if apart:
            starts = range(i0, i0 + width * height, height)
            count = i1 - i0
        else:
            starts = range(i0 * width, i0 * width + 1)
            count = (i1 - i0) * width
        blocks = [np.empty(0, self.dtype)]
        with self.path.open("rb") as file:
            for start in starts:
                file.seek(self.offset + start * self.dtype.itemsize)
                blocks.append(np.fromfile(file, self.dtype, count))
        if len(starts) == 1:
            values = blocks[-1]
        else:
            values = np.concatenate(blocks)
        if by_columns:
            return np.ascontiguousarray(values.reshape(width, i1 - i0).T)
        if len(self.shape) > 1:
            return values.reshape(i1 - i0, width)
        return values


def check_size(array: Any, stop: int) -> None:
    """Raise if a file is too short for the size claimed in its header."""
    end = array.offset + math.prod(array.shape) * array.dtype.itemsize
    if stop < end:
        raise ValueError(f"cut off at byte {stop} of {end}")


def block_of(rows: slice, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    height, width = (*shape, 1, 1)[:2]
    return *rows.indices(height)[:2], height, width


def open_member(path: Path, name: str, kinds: str = NUMBER_KINDS) -> Any | None:
    """Open a member of an archive, after one read for its checksum."""
    with zipfile.ZipFile(path) as archive:
        if name + ".npy" not in archive.namelist():
            return None
        info = archive.getinfo(name + ".npy")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{name} is compressed by method {info.compress_type}, not by deflate")
        if info.file_size > MOST_INFLATED * path.stat().st_size:
            raise ValueError(f"{name} claims {info.file_size} bytes")
        with archive.open(info) as member:
            while member.read(CHECKED_BYTES):
                pass
    if info.compress_type == zipfile.ZIP_DEFLATED:
        return PackedMember(path, name, info.file_size, kinds)
    with path.open("rb") as file:  # the local header: 30 bytes, the name, an extra field
        file.seek(info.header_offset)
        head = file.read(30)
    lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    start = info.header_offset + 30 + lengths
    return NpyFile(path, start, start + info.file_size, kinds)


class PackedMember:
    """A compressed member of an .npz: rows are read in order; going back restarts the stream."""

    def __init__(self, path: Path, name: str, size: int, kinds: str) -> None:
        self.stream = zipfile.ZipFile(path).open(name + ".npy")  # noqa: SIM115  read on until the end
        self.shape, fortran, self.dtype = npy_header(self.stream, kinds)
        self.offset = self.stream.tell()
        check_size(self, size)
        if fortran and len(self.shape) > 1:
            raise ValueError(f"{name} is compressed in Fortran order, which cannot be read by rows")

    def __getitem__(self, rows: slice) -> Any:
        i0, i1, _, width = block_of(rows, self.shape)
        self.stream.seek(self.offset + i0 * width * self.dtype.itemsize)
        found = np.frombuffer(self.stream.read((i1 - i0) * width * self.dtype.itemsize), self.dtype)
        if len(self.shape) > 1:
            return found.reshape(i1 - i0, width)
        return found


OPENERS: dict[str, Callable[[Path, str], Any]] = {
    "npy": lambda path, name: NpyFile(path), "npz": open_member, "zarr": open_zarr, "h5ad": open_h5ad, "csv": open_csv,
    "hdf5": lambda path, name: library("hdf5").File(path, "r").get(name),
}  # fmt: skip
