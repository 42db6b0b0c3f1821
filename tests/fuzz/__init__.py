"""Arbitrary bytes as files, as arguments of calls and as the numbers that the C core gets: ``targets.py``."""

from pathlib import Path

import numpy as np

CORPUS = Path(__file__).parent / "corpus"


def mutated(data, other, rng):
    """Return the bytes with a few of them exchanged, put in, taken out or taken from another input, or cut off."""
    data = bytearray(data)
    for _ in range(rng.integers(1, 9)):
        at, kind = int(rng.integers(len(data) + 1)), rng.integers(6)
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


def inputs(target, seed):
    """Yield the corpus of a target, then mutations of it without end; any bytes are numbers for the core."""
    rng, folder = np.random.default_rng(seed), CORPUS / target
    known = [path.read_bytes() for path in sorted(folder.iterdir())] if folder.exists() else []
    known = known or [rng.bytes(300) for _ in range(100)]
    yield from known
    while True:
        yield mutated(known[rng.integers(len(known))], known[rng.integers(len(known))], rng)


def judge(function, data):
    """Call the function on one input; an exception tells the bytes."""
    try:
        function(data)
    except BaseException as error:
        error.add_note(f"input {data!r}")
        raise
