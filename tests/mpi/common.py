"""What the programs of this folder share: the problem in blocks, a Result against one process, the run of the cases.

Each function named ``case_*`` runs on every rank; the last line of rank 0 is a JSON object of the failures by name.
"""

import functools
import json
import sys
import time
import traceback
import warnings

import numpy as np
from mpi4py import MPI

import mapuot
from mapuot.ranks import own_rows

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
FLOAT64 = {"precision": "float64", "tol": 1e-12}


def bounds(m, split="even"):
    """The rows of this rank: as the library splits them, or all but a few on the last rank."""
    if split == "even":
        return own_rows(m, RANK, SIZE)
    ends = [0, *(min(3 * (r // 2), m) for r in range(1, SIZE)), m]
    return ends[RANK], ends[RANK + 1]


def block(case, split="even"):
    """The same problem with the own rows only."""
    i0, i1 = bounds(len(case.a), split)
    rho = case.reg_m
    if isinstance(rho, tuple) and np.ndim(rho[0]) == 1:
        rho = (rho[0][i0:i1], rho[1])
    c = case.reference if isinstance(case.reference, str) else case.reference[i0:i1]
    return case.replace(M=case.M[i0:i1], a=case.a[i0:i1], reg_m=rho, reference=c)


def same_everywhere(*arrays, among=0):
    """The same bits on all ranks with the same ``among``."""
    data = b"".join(np.ascontiguousarray(x).tobytes() for x in arrays)
    found = COMM.allgather((among, data))
    assert len(set(found)) == len({key for key, _ in found}), "the ranks differ"


def compare(result, one, i0, i1, tol=1e-12, passes=1):
    """Every member of a distributed Result against that of one process."""
    assert result.status == one.status
    assert abs(result.n_passes - one.n_passes) <= passes, (result.n_passes, one.n_passes)
    same_everywhere([s.error for s in result.trace], [result.objective, result.dual, result.mass])
    same_everywhere(result.log_v)
    same_everywhere(result.log_u, among=(i0, i1))
    np.testing.assert_allclose(result.log_u, one.log_u[i0:i1], atol=tol, rtol=tol)
    np.testing.assert_allclose(result.log_v, one.log_v, atol=tol, rtol=tol)
    close = functools.partial(np.testing.assert_allclose, rtol=100 * tol, atol=tol)
    close(result.plan, one.plan[i0:i1])
    close(result.rows(0, i1 - i0), one.plan[i0:i1])
    close(result.row_marginal, one.row_marginal[i0:i1])
    close(result.col_marginal, one.col_marginal)
    for name in ("mass", "cost", "objective", "dual"):
        close(getattr(result, name), getattr(one, name), err_msg=name)
    close(result.trace[0].residual, one.trace[0].residual)
    for name in ("mass", "dual"):
        close(getattr(result.trace[-1], name), getattr(result, name), err_msg="last pass: " + name)
    X, Y = np.random.default_rng(0).random((len(one.log_v), 2)), np.arange(len(one.log_u), dtype=float)
    close(result.apply(X), one.apply(X)[i0:i1])
    close(result.apply_transpose(Y[i0:i1]), one.apply_transpose(Y))
    close(result.barycentric_map(X), one.barycentric_map(X)[i0:i1])
    index, value = result.top_k(min(3, X.shape[0]))
    close(value, one.top_k(min(3, X.shape[0]))[1][i0:i1])
    close(np.take_along_axis(one.plan[i0:i1], index, 1), value)
    for root in {0, SIZE - 1}:
        whole = (
            result.gather_plan(root), result.gather(result.log_u, root), result.log_v if root == RANK else None
        )  # fmt: skip
        if root == RANK:
            for found, wanted in zip(whole, (one.plan, one.log_u, one.log_v), strict=True):
                close(found, wanted)
        else:
            assert whole == (None, None, None)


def refused(kind, text, case, **options):
    """The same error on every rank."""
    try:
        case.solve(comm=COMM, **options)
    except kind as error:
        message = str(error)
    else:
        message = "nothing raised"
    assert text in message, message
    same_everywhere(np.frombuffer(message.encode(), np.uint8))


def main(found):
    failures = {}
    for name, case in sorted(found.items()):
        if not name.startswith("case_") or (sys.argv[1:] and name[5:] not in sys.argv[1:]):
            continue
        if RANK == 0:
            print(name, flush=True)
        text, begin = "", time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", mapuot.ConvergenceWarning)
                case()
        except Exception:
            text = f"rank {RANK}: {traceback.format_exc()}"
        if RANK == 0:
            print(f"{time.perf_counter() - begin:.2f} s", flush=True)
        texts = [text for text in COMM.allgather(text) if text]
        failures[name[5:]] = texts[0] if texts else ""
    if RANK == 0:
        print(json.dumps({"size": SIZE, "failures": failures}), flush=True)
    sys.exit(any(failures.values()))
