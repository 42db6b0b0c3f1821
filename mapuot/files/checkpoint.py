"""Checkpoints: one process writes the potential of one side at intervals, so that a killed solve can resume.

One side is enough: a pass computes the other. The file is in units of M (reg log x), so it serves another reg, too.
"""

import math
import os
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..annotations import FilePath
from ..errors import shown
from .read import check_regular, open_member, reading
from .write import complete, refuse_folder


class Checkpoint:
    def __init__(self, path: Any) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"checkpoint must be a path, got {shown(path)}")
        self.path = Path(path)
        self.last = time.monotonic()
        self.every = seconds(os.environ.get("MAPUOT_CHECKPOINT_SECONDS", "60"))
        refuse_folder(self.path)
        folder = self.path.absolute().parent
        if not folder.is_dir():
            raise FileNotFoundError(f"checkpoint {self.path}: the folder {folder} does not exist")
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"checkpoint {self.path}: the folder {folder} cannot be written")

    @property
    def due(self) -> bool:
        return time.monotonic() - self.last >= self.every

    def save(self, side: str, log_x: Any, reg: float, n_pass: int) -> None:
        """Write the potential; after a disk error warn, and continue the solve."""
        self.last = time.monotonic()
        potential = reg * np.where(np.isfinite(log_x), log_x, 0.0)
        try:
            with complete(self.path) as part, part.open("wb") as file:
                np.savez(file, side=side, potential=potential, n_pass=n_pass)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            warnings.warn(f"checkpoint {self.path} could not be written: {error}", RuntimeWarning, stacklevel=2)


def seconds(text: Any) -> float:
    with suppress(ValueError):
        if float(text) >= 0:
            return float(text)
    raise ValueError(f"MAPUOT_CHECKPOINT_SECONDS must be a number of seconds >= 0, got {shown(text)}")


def load_checkpoint(path: FilePath, m: int, n: int, reg: float) -> tuple[Any, Any]:
    """Read the checkpoint of a solve, to resume it.

    Parameters
    ----------
    path : path
        File that ``solve(..., checkpoint=path)`` wrote.
    m, n, reg : int, int, float
        Rows and columns of the problem, and the reg of the resumed solve, in units of M; it may differ from the first.

    Returns
    -------
    log_u, log_v : (m,), (n,) float64 arrays
        For ``warm_start=`` of `mapuot.solve`.

    Raises
    ------
    ValueError
        The file is no checkpoint, or belongs to a problem of another shape.

    See Also
    --------
    mapuot.solve : writes it

    Examples
    --------
    >>> import os, tempfile, numpy as np, mapuot, mapuot.files
    >>> M, path = np.random.rand(30, 20), os.path.join(tempfile.mkdtemp(), "state.npz")
    >>> result = mapuot.solve(M, reg=0.05, reg_m=1.0, checkpoint=path)
    >>> start = mapuot.files.load_checkpoint(path, 30, 20, reg=0.05)
    >>> mapuot.solve(M, reg=0.05, reg_m=1.0, warm_start=start).n_passes <= result.n_passes
    True
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be that of a checkpoint, got {shown(path)}")
    path = Path(path)
    start = {"a": np.zeros(m), "b": np.zeros(n)}
    check_regular(path, "checkpoint")
    try:
        side, potential = (member(path, name, kinds) for name, kinds in (("side", "U"), ("potential", "f")))
    except ValueError as error:
        raise ValueError(f"{path} is not a checkpoint of mapuot: {error}") from error
    side = str(side[0])
    if side not in start or potential.shape != start[side].shape:
        raise ValueError(f"{path} is the checkpoint of another problem: {side} has {len(potential)} points there")
    start[side] = potential / reg
    return start["a"], start["b"]


def member(path: Path, name: str, kinds: str) -> Any:
    """Return a finite array of a checkpoint; a text is an array of one entry."""
    with reading(path, "npz"):
        array = open_member(path, name, kinds)
        if array is None:
            raise ValueError(f"it holds no {name}")
        whole = array[0 : math.prod(array.shape[:1])]
        if kinds == "f" and not np.isfinite(whole).all():
            raise ValueError(f"{name} is not finite")
    return whole
