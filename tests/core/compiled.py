"""Compile the rules of src_c/common one function at a time: records in, records out, numbers as they are.

The library exports few of them; here a C file of one line for each is compiled against the headers.
"""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import oracle
import pytest

from mapuot import penalties
from mapuot.backends.records import COMMON, put

SOURCE = Path(__file__).resolve().parents[2] / "src_c"
LIMITS, PROGRESS, STATS = (f"mapuot_{name} *{name[0]}" for name in ("limits", "progress", "stats"))
POINT = "int k, double x, double t, double rho, double upper"
RULES = {  # name: (arguments, call)
    "plan_error": ("double d", "plan_error(d)"),
    "exponent_growth": ("double x", "exponent_growth(x)"),
    "size_of_log": ("double x", "size_of_log(x)"),
    "log_ratio_of": ("double x, double y", "log_ratio_of(x, y)"),
    "gap_of_rounded": (f"{LIMITS}, double gap, double mass, double d, double e", "gap_of_rounded(l, gap, mass, d, e)"),
    "lost_mass": (f"{LIMITS}, double u, double v, double mass", "lost_mass(l, u, v, mass)"),
    "translation": (f"{LIMITS}, double log_ratio, double shift", "translation(l, log_ratio, shift)"),
    "next_translation": (f"{LIMITS}, double log_ratio", "next_translation(l, log_ratio)"),
    "left_of_rows": (f"{LIMITS}, double lam", "left_of_rows(l, lam)"),
    "outgrown": (f"{LIMITS}, {PROGRESS}, {STATS}, double scale", "outgrown(l, p, s, scale)"),
    "guard_slack": (f"{LIMITS}, {PROGRESS}, double mass", "guard_slack(l, p, mass)"),
    "settle": (f"{LIMITS}, {PROGRESS}, {STATS}", "(settle(l, p, s), s->rejected)"),
    "certify": (
        f"{LIMITS}, {PROGRESS}, {STATS}, double gap, double hard, double misfit, double scale",
        "(certify(l, p, s, gap, hard, misfit, scale), s->error)",
    ),
    "judge": (f"{LIMITS}, {PROGRESS}, {STATS}, double scale, double v", "(judge(l, p, s, scale, v), s->status)"),
    "column": (
        "int k, double e, double t, double rho, double upper, double reg, double x, double sum, double shift, "
        "double offset, int member",
        "({const mapuot_column c = {e, t, log(t), rho, upper, reg / rho, 1 / (1 + reg / rho), x, exp(x - e)};"
        " const mapuot_column_out out = column_values(k, &c, sum, log(fmax(sum, TINY)), shift, offset, reg);"
        " ((const double *)&out)[member];})",
    ),
    "prox": (f"{POINT}, double log_t, double reg", "prox_log(k, x, t, log_t, rho, upper, reg)"),
    "dual_term": (POINT, "dual_term(k, x, t, rho, upper)"),
    "violation": (POINT, "violation(k, x, t, rho, upper)"),
    "gap_term": (f"{POINT}, double r", "gap_term(k, x, r, t, rho, upper)"),
    "misfit": (f"{POINT}, double r", "misfit(k, x, r, t, rho, upper)"),
}


@functools.cache
def library():
    command = oracle.compiler()
    if command is None:
        pytest.skip("needs a C compiler")
    lines = [f"double rule_{name}({given}) {{ return {call}; }}" for name, (given, call) in RULES.items()]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "rules.c")
        out = Path(folder, "rules.so")
        text.write_text('#include "common/rules.h"\n#include "common/column.h"\n' + "\n".join(lines) + "\n")
        words = ["-std=gnu11", "-O1", "-shared", "-fPIC", "-D_GNU_SOURCE", f"-I{SOURCE}", "-o", out, text, "-lm"]
        subprocess.run([command, *words], check=True)
        return ctypes.CDLL(str(out))


def rule(name, *given):
    """Return the value of the rule of this name for numbers and records."""
    function = getattr(library(), "rule_" + name)
    function.restype = ctypes.c_double
    kinds = {int: ctypes.c_int, np.ndarray: lambda x: ctypes.c_void_p(x.ctypes.data)}
    return function(*(kinds.get(type(x), ctypes.c_double)(x) for x in given))


def record(name, **members):
    found = np.zeros((), COMMON["mapuot_" + name])
    put(found, members)
    return found


COLUMN = "marginal", "image", "gap", "hard", "dual", "misfit", "next"  # members of mapuot_column_out


class Penalties:
    """The functions of mapuot.penalties on arrays, made by src_c/common/penalty.h, which takes r last."""

    @staticmethod
    def each(name, kind, *numbers):
        call = np.vectorize(lambda *one: rule(name, penalties.NUMBERS[kind], *map(float, one)), otypes=[float])
        return call(*(0.0 if x is None else x for x in numbers))

    def prox(self, kind, log_s, t, rho, upper, reg):
        with np.errstate(divide="ignore"):
            return self.each("prox", kind, log_s, t, rho, upper, np.log(t), reg)

    def __getattr__(self, name):
        return lambda kind, f, *more: self.each(name, kind, f, *more[-3:], *more[:-3])
