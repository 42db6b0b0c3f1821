"""Arbitrary bytes as files, as arguments of calls and as the numbers that the C core gets: ``targets.py``."""

import functools
from pathlib import Path

import numpy as np

from .targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"


def mutated(data, other, rng):
    """Return the bytes with a few of them exchanged, inserted, removed or taken from another input, or cut off."""
    data = bytearray(data)
    for _ in range(rng.integers(1, 9)):
        at = int(rng.integers(len(data) + 1))
        kind = rng.integers(6)
        if kind == 0:
            data[at : at + int(rng.integers(1, 20))] = b""
        elif kind == 1:
            data[at:at] = rng.bytes(int(rng.integers(1, 5)))
        elif kind == 2:
            data[at : at + 20] = other[at : at + 20]
        elif at < len(data):
            data[at] = rng.integers(256)
    if rng.random() < 0.1:
        del data[rng.integers(len(data) + 1) :]
    return bytes(data)


@functools.cache
def corpus(target):
    """Return the known inputs of a target; any bytes are numbers for the core."""
    rng = np.random.default_rng(0)
    folder = CORPUS / target
    if folder.exists():
        return [path.read_bytes() for path in sorted(folder.iterdir())]
    return [*map(rng.bytes, [300] * 99)]


def judge(target, data):
    """Try one input; an exception shows the bytes."""
    try:
        TARGETS[target](data)
    except BaseException as error:
        error.add_note(f"input {data!r}")
        raise


def trial(target, rng):
    known = corpus(target)
    judge(target, mutated(known[rng.integers(len(known))], known[rng.integers(len(known))], rng))
