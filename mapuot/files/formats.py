"""Names of files: ``file`` or ``file:array``, the format by the suffix, and the library that reads it."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import shown
from .remote import is_url, local_copy

FORMATS = {
    ".npy": "npy", ".npz": "npz", ".h5": "hdf5", ".hdf5": "hdf5", ".zarr": "zarr", ".h5ad": "h5ad",
    **{table + packed: "csv" for table in (".csv", ".tsv", ".txt") for packed in ("", ".gz")},
}  # fmt: skip
ANSWERS = ("npz", "hdf5", "zarr", "h5ad")  # formats of an answer
LIBRARIES = {"hdf5": "h5py", "h5ad": "h5py", "zarr": "zarr"}


def suffix_of(name: str) -> str:
    """Return the suffix that determines the format, in lower case; a packed table has two, as .csv.gz.

    Of a chain of URLs, as zip://M.npy::costs.zip, the first with a known suffix counts.
    """
    if is_url(name) and "::" in name:
        found = [suffix_of(part) for part in name.split("::")]
        return next((suffix for suffix in found if suffix in FORMATS), found[-1])
    path = Path(name.lower())
    if path.suffix == ".gz":
        return Path(path.stem).suffix + path.suffix
    return path.suffix


def split_name(text: Any, default: str) -> tuple[str, str, str]:
    """Split ``file`` or ``file:array`` into (file, its format, the array in it); a file may be a URL."""
    whole = os.fspath(text)
    inside = default
    head, colon, tail = whole.rpartition(":")
    if colon and suffix_of(head) in FORMATS:
        whole = head
        inside = tail.strip("/") or default
    kind = FORMATS.get(suffix_of(whole))
    if kind is None:
        raise ValueError(f"{whole}: the name must end in one of {sorted(FORMATS)}")
    return whole, kind, inside


def split_local(text: Any, default: str) -> tuple[Path, str, str]:
    """Split a name like `split_name`; the file is on this machine, for a URL a copy of it."""
    name, kind, inside = split_name(text, default)
    return local_copy(name, kind), kind, inside


def split_answer(text: Any) -> tuple[str, str]:
    """Split the name of a file with an answer into (file, its format)."""
    try:
        path, kind, _ = split_name(text, "")
    except ValueError:
        path, kind = "", ""
    if kind not in ANSWERS:
        raise ValueError(f"path must end in .npz, .h5, .zarr or .h5ad, got {shown(text)}")
    return path, kind


def library(kind: str) -> Any:
    name = LIBRARIES[kind]
    try:
        module = import_module(name)
    except ImportError as error:
        raise ImportError(f"{kind} files need {name}: pip install 'mapuot[files]'") from error
    if name == "zarr" and not hasattr(module, "create_array"):
        raise ImportError(f"zarr files need zarr 3, which needs Python 3.11, got zarr {module.__version__}")
    return module
