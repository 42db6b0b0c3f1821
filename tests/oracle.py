"""oracle.c, compiled once and called: the reference answer, and how far it can be trusted.

A problem is a ``problems.Case``. Nothing here calls the library.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LONG = np.longdouble
SOURCE = Path(__file__).with_suffix(".c")
CACHE = Path(tempfile.gettempdir()) / f"mapuot-oracle-{os.getuid()}"
KINDS = {"kl": 0, "tv": 1, "l2": 2, "range": 3}
OWN_GAP = 1e-14  # relative: beyond it an answer is no reference
OWN_STEP = 1e-13  # relative change of the plan by one more Newton step, likewise
OWN_KL = 1e-6  # of reg times the mass, of its gap: farther off a Newton step tells nothing, however large all terms are


@dataclass(frozen=True)
class Answer:
    """The optimum, in long double; ``error`` bounds |P - P*|_1 / mass of the answer itself."""

    log_u: Any
    log_v: Any
    plan: Any
    primal: float
    dual: float
    gap: float
    error: float
    violation: float  # |hard marginals missed|_1 / mass
    scale: float  # the sum of the sizes of all terms of the objective
    mass: float
    kl: float  # gap / (reg mass)

    @property
    def good(self) -> bool:
        """Return whether the gap that it certifies is small enough for a reference."""
        if self.scale > 0:
            own = self.gap / self.scale + self.violation
        else:
            own = np.inf
        return bool(
            np.isfinite([own, self.error, self.dual]).all()
            and own <= OWN_GAP
            and self.error <= OWN_STEP
            and self.kl <= OWN_KL
        )


def spread(M: Any) -> float:
    """Return range(M) of the finite entries, 1 where they are all one number."""
    finite = np.asarray(M, float)[np.isfinite(M)]
    if finite.size:
        return float(np.ptp(finite)) or 1.0
    return 1.0


def compiler() -> str | None:
    """Return a C compiler, where long double is longer than double."""
    if np.finfo(LONG).eps < 2e-19:
        return next(filter(shutil.which, ("gcc", "cc")), None)
    return None


@functools.cache
def library(quad: bool) -> Any:
    """Return the compiled function, in __float128 if ``quad``; None where this compiler has none."""
    command = compiler()
    if command is None:
        return None
    key = hashlib.sha256(SOURCE.read_bytes() + bytes([quad])).hexdigest()[:24]
    path = CACHE / f"{key}.so"
    if not path.exists():
        CACHE.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            built = Path(folder, "oracle.so")
            if quad:
                flags = ["-DQUAD", "-lquadmath"]
            else:
                flags = []
            words = [command, "-std=gnu11", "-O2", "-shared", "-fPIC", "-o", built, SOURCE, *flags, "-lm"]
            if subprocess.run(words, check=not quad, capture_output=quad).returncode:
                return None
            built.rename(path)
    return ctypes.CDLL(str(path)).oracle


def call(problem: Any, start: Any, quad: bool) -> Answer | None:
    """Return one answer, good or not; None where no plan with mass is feasible."""
    function = library(quad)
    m, n = np.shape(problem.M)
    kinds, weights, rhos = zip(*(problem.side(k) for k in (0, 1)), strict=True)
    M = np.ascontiguousarray(problem.M, float)
    c = problem.reference
    if isinstance(c, str):
        number = {"product": 0, "uniform": 1}[c]
    else:
        number = 2
    if isinstance(c, str):
        c = np.zeros(1)
    else:
        c = np.ascontiguousarray(c, float)
    weights = [np.ascontiguousarray(t, float) for t in weights]
    rhos = [np.ascontiguousarray(r) for r in rhos]
    log_u = np.full(m, -np.inf, LONG)
    log_v = np.full(n, -np.inf, LONG)
    plan = np.zeros((m, n), LONG)
    out = np.zeros(8)
    if start is None:
        start = None
    else:
        start = np.ascontiguousarray(start, float)
    at = lambda x: None if x is None else ctypes.c_void_p(x.ctypes.data)  # noqa: E731
    real = ctypes.c_double
    status = function(
        m, n, at(M), at(c), number, real(problem.reg), KINDS[kinds[0]], KINDS[kinds[1]], at(weights[0]), at(weights[1]),
        at(rhos[0]), at(rhos[1]), at(start), real(0.3 * spread(M)), at(log_u), at(log_v), at(plan), at(out),
    )  # fmt: skip
    if status:
        return None
    primal, dual, gap, step, violation, scale, _, mass = map(float, out)
    unit = 1e-19 if not quad else 1e-33
    exponent = sum(float(np.abs(x[np.isfinite(x)]).max(initial=0)) for x in (log_u, log_v, M / problem.reg))
    error = 2 * step + 8 * unit * (8 + exponent) + 1e-18  # the rounding of exponents, and of the plan in long double
    if mass > 0:
        kl = gap / problem.reg / mass
    else:
        kl = 0.0
    return Answer(log_u, log_v, plan, primal, dual, gap, error, violation, scale, mass, kl)


def answer(problem: Any, start: Any = None, quad: bool = False) -> Answer | None:
    """Return the optimum; None where there is none or no answer is good enough. ``start``: a log v to begin with."""
    if quad:
        found = None
    else:
        found = call(problem, start, quad=False)
    if quad or (found is not None and not found.good and library(True) is not None):
        near = found is not None and found.error < 1e-3 and bool((np.abs(found.log_v) < 1e300).any())
        found = call(problem, np.asarray(found.log_v, float) if near and found is not None else start, quad=True)
    if found is not None and found.good:
        return found
    return None
