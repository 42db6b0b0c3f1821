"""Rows over ranks: the same error on every rank, whoever is at fault; run as cases.py is."""

import pickle

import numpy as np
import pytest
from common import COMM, RANK, SIZE, main
from problems import clouds
from scipy import sparse

import mapuot
from mapuot.backends.cpu import native


def case_one_bad_block(job):
    last = SIZE - 1
    name = f"rank {last}: " if SIZE > 1 else ""
    case = job.block(clouds(33, 21))

    def spoil(array, value):
        array = array.copy()
        if last == RANK:
            array.flat[-1] = value
        return array

    job.refused(ValueError, name + "M must not hold NaN", case.replace(M=spoil(case.M, np.nan)))
    job.refused(ValueError, name + "a must be >= 0", case.replace(a=spoil(case.a, -1.0)))
    job.refused(ValueError, name + "a must be finite", case.replace(a=spoil(case.a, np.inf)))
    bad = case.M.astype(object) if last == RANK else case.M
    job.refused(TypeError, name + "M must hold real numbers", case.replace(M=bad))
    short = case.a[:-1] if last == RANK else case.a
    job.refused(ValueError, name + "a must have shape", case.replace(a=short))
    rho = spoil(np.ones(len(case.a)), -1.0)
    job.refused(ValueError, name + "reg_m[0] must be > 0", case.replace(reg_m=(rho, 1.0)))


def case_bad_for_all(job):
    case = job.block(clouds(33, 21))
    job.refused(ValueError, "reg must be a positive finite number", case.replace(reg=-1.0))
    job.refused(ValueError, "a must have positive, finite mass", case.replace(a=0 * case.a))
    job.refused(
        ValueError, "M must be a non-empty matrix (m, n), got shape (0, 21)", case.replace(M=case.M[:0], a=None)
    )
    job.refused(mapuot.InfeasibleError, "equal masses", case.replace(a=2 * case.a, reg_m=np.inf))
    hard = case.replace(M=np.where(np.arange(21) == 0, np.inf, case.M), reg_m=(1.0, np.inf))
    job.refused(mapuot.InfeasibleError, "M forbids every pair of b[0]", hard)
    if SIZE > 1:
        job.refused(NotImplementedError, "'reference' runs in one process", case, backend="reference")


def case_stored_pairs(job):
    """A part that cannot be balanced is named alike on all ranks, its points counted through all blocks."""
    S = sparse.block_diag([np.ones((2, 2)), np.ones((7, 1))], "csr")
    i0, i1 = job.bounds(9)
    case = job.block(clouds(9, 3, reg_m=np.inf)).replace(M=S[i0:i1], a=np.ones(i1 - i0), b=np.array([1.0, 0.5, 7.5]))
    told = "M connects a[0], a[1] with b[0], b[1] only, where 2 must be transported and 1.5 may be"
    job.refused(mapuot.InfeasibleError, told, case)
    told = "M connects b[2] with a[2], a[3], a[4], a[5], a[6] and 2 others of a only, where 15 must be transported"
    wide = case.replace(b=np.array([0.9, 0.6, 15.0]), reg_m=(1.0, np.inf), penalty=("range", "balanced"))
    job.refused(mapuot.InfeasibleError, told, wide)
    if SIZE > 1:
        mixed = case.replace(M=case.M if RANK else case.M.toarray())
        job.refused(ValueError, "M must be the same on every rank, got 'an array' on rank 0, 'a sparse matrix'", mixed)
        result = case.replace(b=np.array([1.0, 1.0, 7.0])).solve(comm=COMM)
        with pytest.raises(NotImplementedError, match="result must be of one process"):
            mapuot.certify(result, np.ones((i1 - i0, 3)))
    bad = S[i0:i1].copy()
    if RANK == SIZE - 1:
        bad.data[-1] = np.nan
    job.refused(ValueError, "M must not hold NaN", case.replace(M=bad))


def case_arguments_that_differ(job):
    if SIZE == 1:
        return
    case, mine = job.block(clouds(33, 21)), 1.0 + (RANK == SIZE - 1)
    job.refused(ValueError, "reg must be the same on every rank, got 1.0 on rank 0", case.replace(reg=mine))
    job.refused(ValueError, "tol must be the same", case, tol=1e-6 * mine)
    job.refused(ValueError, "max_passes must be the same", case, max_passes=int(mine))
    job.refused(ValueError, "b must be the same", case.replace(b=case.b * mine))
    job.refused(ValueError, "reg_m[1] must be the same", case.replace(reg_m=(1.0, mine)))
    job.refused(ValueError, "reg_m[0] must be the same", case.replace(reg_m=(mine, 1.0)))
    job.refused(ValueError, "method must be the same", case, method="auto" if mine == 1 else "sinkhorn")
    source = (lambda i0, i1: case.M) if mine == 1 else case.M
    job.refused(
        ValueError, "M must be the same on every rank, got 'a function' on rank 0, 'an array'", case.replace(M=source)
    )
    if RANK == SIZE - 1:
        case = case.replace(M=case.M[:, :-1], b=case.b[:-1])
    job.refused(ValueError, "must be the same on every rank", case)


def case_instruction_sets_that_differ(job):
    best = native.isa()
    if SIZE == 1 or best == "scalar":
        return
    if RANK == SIZE - 1:
        native.set_isa("scalar")
    got = f"got '{best}' on rank 0, 'scalar' on {SIZE - 1}"
    try:
        job.refused(ValueError, "the instruction set (MAPUOT_ISA lowers it) must be the same on every rank, " + got,
                    job.block(clouds(33, 21)))  # fmt: skip
    finally:
        native.set_isa(best)


def case_a_function_that_fails_late(job):
    """In an exact pass, where the others wait in the sum."""
    case, calls = job.block(clouds(33, 21)), [0]
    M, i0 = case.M, job.bounds(33)[0]

    def rows(k0, k1):
        calls[0] += 1
        if RANK == SIZE - 1 and calls[0] > 6:
            raise OSError("the disk is gone")
        return M[k0 - i0 : k1 - i0]

    job.refused(OSError, "the disk is gone", case.replace(M=rows), precision="mixed", tol=1e-9)


def case_results_stay_where_they_are(job):
    if SIZE == 1:
        return
    result = job.block(clouds(33, 21)).solve(comm=COMM)
    with pytest.raises(TypeError, match="gather"):
        pickle.dumps(result)
    with pytest.raises(ValueError, match="root must be a rank"):
        result.gather_plan(SIZE)
    with pytest.raises(ValueError, match="root must be the same on every rank"):
        result.gather_plan(RANK % 2)
    with pytest.raises(ValueError, match="blocks must have as many columns on every rank"):
        result.gather(np.ones((2, 1 + RANK)))
    mixed = result.gather(np.full(1, RANK, np.float64 if RANK else np.float32))
    assert RANK or list(mixed) == list(range(SIZE))
    wrong = np.ones(len(result.log_u) + (RANK == SIZE - 1))
    with pytest.raises(ValueError, match=f"rank {SIZE - 1}: Y must have shape"):
        result.apply_transpose(wrong)


if __name__ == "__main__":
    main(globals())
