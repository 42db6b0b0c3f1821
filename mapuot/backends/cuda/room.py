"""Vectors of the host and their copies on the device, for work that goes there and back in each pass."""

from itertools import accumulate

import cupy as cp

from ...penalties import F64
from .arrays import pinned


class Room:
    """Vectors one behind the other on the device, and as many numbers of the host that copies are quick from and to."""

    def __init__(self, sizes: dict[str, int]) -> None:
        ends = dict(zip(sizes, accumulate(sizes.values()), strict=True))
        self.at = {name: slice(end - sizes[name], end) for name, end in ends.items()}
        total = sum(sizes.values())
        self.there = cp.zeros(total)
        self.here = pinned(total)

    def __getitem__(self, name: str) -> F64:
        part: F64 = self.here[self.at[name]]
        return part

    def send(self, **vectors: F64) -> None:
        """Vectors that lie one behind the other here; of one that is shorter than its room, its first numbers.

        They are on their way until something is brought.
        """
        for name, x in vectors.items():
            self[name][: len(x)] = x
        part = self.span(*vectors)
        self.there[part].set(self.here[part], stream=cp.cuda.get_current_stream())

    def bring(self, *names: str) -> None:
        """Return vectors in pinned memory, once the device has filled them."""
        part = self.span(*names)
        self.there[part].get(out=self.here[part])

    def span(self, *names: str) -> slice:
        return slice(self.at[names[0]].start, self.at[names[-1]].stop)

    def address(self, name: str) -> int:
        return int(self.there[self.at[name]].data.ptr)
