"""Files that a URL of fsspec names, as s3://bucket/costs.npy: copied to this machine to be read, and back when written.

A copy is made once for each version of a file, and lasts as long as the process. fsspec tells versions apart: by size
and time for most kinds of URLs, not at all for http.
"""

import functools
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(://|::)")
FOLDERS = list[tempfile.TemporaryDirectory[str]]()  # of copies; removed at exit
NAMES = dict[str, str]()  # the URL of each copy
F = TypeVar("F", bound=Callable[..., Any])


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
    try:
        version = files.ukey(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{name} does not exist") from error
    return copied(name, version)


def naming_urls(function: F) -> F:
    """Decorate a function that reads copies, so that its errors name the URLs."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except (OSError, TypeError, ValueError) as error:
            text = str(error)
            for copy, name in NAMES.items():
                text = text.replace(copy, name)
            if text == str(error) or type(error).__module__ != "builtins":
                raise
            raise type(error)(text) from error

    return call  # type: ignore[return-value]


@functools.cache
def copied(name: str, version: str) -> Path:
    files, path = opened_url(name, "")
    folder = tempfile.TemporaryDirectory(prefix="mapuot-")
    FOLDERS.append(folder)
    target = Path(folder.name, Path(path).name)
    NAMES[str(target)] = name
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
    try:
        return url_to_fs(name)  # type: ignore[no-any-return]
    except (ImportError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error
