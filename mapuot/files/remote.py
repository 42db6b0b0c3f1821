"""Files that a URL of fsspec names, as s3://bucket/costs.npy: copied to this machine to be read, and back when written.

A copy is made once for each version of a file, and lasts as long as the process.
"""

import functools
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(://|::)")
COPIES = list[tempfile.TemporaryDirectory[str]]()  # removed at exit


def is_url(name: str) -> bool:
    return URL.match(name) is not None


def local_copy(name: str, kind: str) -> Path:
    """Return the path of a file on this machine: of a URL, a copy.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ImportError
        fsspec, or its package for this kind of URL, is not installed.
    """
    if not is_url(name):
        return Path(name)
    files, path = opened_url(name, kind)
    return copied(name, files.ukey(path))


@functools.cache
def copied(name: str, version: str) -> Path:
    files, path = opened_url(name, "")
    COPIES.append(tempfile.TemporaryDirectory(prefix="mapuot-"))
    target = Path(COPIES[-1].name, Path(path).name)
    files.get_file(path, str(target))
    return target


@contextmanager
def written(name: str, kind: str) -> Iterator[Path]:
    """Yield the path to write; copy the file to its URL at the end."""
    if not is_url(name):
        yield Path(name)
        return
    files, path = opened_url(name, kind)
    with tempfile.TemporaryDirectory(prefix="mapuot-") as folder:
        target = Path(folder, Path(path).name)
        yield target
        files.put_file(str(target), path)


def opened_url(name: str, kind: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    if kind == "zarr":
        raise ValueError(f"{name}: Zarr is a folder of files: copy it to this machine, or name an .h5 or .npz file")
    try:
        from fsspec.core import url_to_fs  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ImportError(f"{name} needs fsspec: pip install fsspec, and its package for such URLs, as s3fs") from error
    return url_to_fs(name)  # type: ignore[no-any-return]
