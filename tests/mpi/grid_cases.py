"""What the ranks of a grid must do together; run as cases.py is, on 2, 3, 4 and 6 ranks."""

import functools
import tempfile
from pathlib import Path

import numpy as np
from common import (
    COMM,
    FLOAT64,
    RANK,
    SIZE,
    check_forbidden,
    check_masks,
    check_penalties,
    check_references,
    compare,
    main,
    refused,
)
from problems import clouds

import mapuot
from mapuot.ranks import own_block, process_grid

GRIDS = [(SIZE // C, C) for C in range(2, SIZE + 1) if SIZE % C == 0]
R, C = process_grid("grid", SIZE)


def block(case, split="grid"):
    """The same problem with the own rows and columns only."""
    i0, i1, j0, j1 = own_block(len(case.a), len(case.b), RANK, SIZE, split)
    rho = case.reg_m if isinstance(case.reg_m, tuple) else (case.reg_m, case.reg_m)
    rho = tuple(x[k0:k1] if np.ndim(x) else x for x, k0, k1 in zip(rho, (i0, j0), (i1, j1), strict=True))
    c = case.reference if isinstance(case.reference, str) else case.reference[i0:i1, j0:j1]
    return case.replace(M=case.M[i0:i1, j0:j1], a=case.a[i0:i1], b=case.b[j0:j1], reg_m=rho, reference=c)


def check(case, split="grid", within=1e-12, passes=1, M=None, **options):
    options = options or FLOAT64
    mine = block(case, split)
    mine = mine if M is None else mine.replace(M=M)
    i0, i1, j0, j1 = own_block(len(case.a), len(case.b), RANK, SIZE, split)
    result = mine.solve(comm=COMM, split=split, **options)
    compare(result, case.solve(**options), i0, i1, within, passes, columns=(j0, j1))
    return result


# ---- the same answer ----


def case_shapes():
    for grid in GRIDS:
        for shape in [(37, 29), (2, 40), (1, 64), (50, 6)][: 4 if SIZE < 6 else 2]:
            check(clouds(*shape, ratio=1.3), split=grid)
    check(clouds(37, 29), split=(SIZE, 1))


def case_points():
    """Costs of points, which each rank makes of its own, as those of their matrix."""
    points = np.random.default_rng(3).random((70, 2))
    x, y = points[:37], points[37:]
    for split in [(SIZE, 1), *GRIDS]:
        i0, i1, j0, j1 = own_block(37, 33, RANK, SIZE, split)
        for reg in (0.3, 0.01):
            case = clouds(37, 33, reg=reg).replace(M=np.asarray(mapuot.PointCloud(x, y)))
            own = mapuot.PointCloud(x[i0:i1], y[j0:j1])
            check(case, split, 1e-9, 3, own)
    i0, i1, j0, j1 = own_block(37, 33, RANK, SIZE, GRIDS[0])
    own = mapuot.PointCloud(x[i0:i1], y[j0:j1], truncate=5.0)
    case = clouds(37, 33)
    case = case.replace(M=own, a=case.a[i0:i1], b=case.b[j0:j1])
    refused(NotImplementedError, "truncate is not for a grid of ranks", case, split=GRIDS[0])


def case_penalties():
    check_penalties(check)


def case_one_rho_a_point():
    case = clouds(33, 21)
    check(case.replace(reg_m=(np.linspace(0.5, 2.0, 33), 1.0)))
    check(case.replace(reg_m=(1.0, np.linspace(0.5, 2.0, 21))))
    check(case.replace(reg_m=(1.0, np.where(np.arange(21) < 21 // C, 1.0, 2.0))))  # one value in each block


def case_references():
    check_references(check)


def case_masks():
    for split in GRIDS:
        check_masks(functools.partial(check, split=split))


def case_zeros_and_forbidden_pairs():
    check_forbidden(check)
    case = clouds(33, 21)
    case.b[: 21 // C] = 0.0  # no mass in the first columns of the grid
    check(case)


def case_small_reg():
    """K is rebuilt, and reg is lowered in steps."""
    check(clouds(40, 31, reg=0.004), within=1e-10, passes=8)
    case = clouds(40, 31, reg=0.001)
    result = block(case).solve(comm=COMM, split="grid", precision="float64", tol=1e-6)
    assert result.converged
    np.testing.assert_allclose(result.objective, case.solve(precision="float64", tol=1e-6).objective, rtol=1e-9)


def case_methods_and_precisions():
    case = clouds(70, 50)
    for method in ("sinkhorn", "translation_invariant"):
        check(case.replace(reg=0.2), method=method, precision="float64", tol=1e-9)
    for precision in ("mixed", "bfloat16"):  # bfloat16: exact passes, straight from M
        check(case, within=1e-4, passes=5, precision=precision)
        check(case.replace(M=case.M.astype(np.float32)), within=1e-4, passes=5, precision=precision, threads=2)


def case_uniform_weights():
    case = clouds(33, 21)
    i0, i1, j0, j1 = own_block(33, 21, RANK, SIZE, "grid")
    one = mapuot.solve(case.M, None, None, 0.05, 1.0, **FLOAT64)
    result = mapuot.solve(case.M[i0:i1, j0:j1], None, None, 0.05, 1.0, comm=COMM, split="grid", **FLOAT64)
    compare(result, one, i0, i1, columns=(j0, j1))


def case_function_and_files():
    case, asked = clouds(33, 21), []
    own = own_block(33, 21, RANK, SIZE, "grid")

    def entries(i0, i1, j0, j1):
        asked.append((i0, i1, j0, j1))
        return case.M[i0:i1, j0:j1]

    check(case, M=entries)
    assert all(own[0] <= i0 <= i1 <= own[1] and (j0, j1) == own[2:] for i0, i1, j0, j1 in asked)
    check(case, M=entries, within=1e-4, passes=5, precision="bfloat16")
    folder = Path(COMM.bcast(tempfile.mkdtemp() if RANK == 0 else None))
    names = ["C.npy", "F.npy", "M.npz", "packed.npz"]
    if RANK == 0:
        np.save(folder / names[0], case.M)
        np.save(folder / names[1], np.asfortranarray(case.M))
        np.savez(folder / names[2], M=case.M)
        np.savez_compressed(folder / names[3], M=case.M)
    COMM.Barrier()
    for name in names:
        check(case, M=folder / name)
    if RANK == 0:
        np.save(folder / "wide.npy", np.resize(case.M, (3, 8000)))
    COMM.Barrier()
    for name, grid in [("C.npy", (SIZE, 1)), ("wide.npy", (1, SIZE))]:
        result = mapuot.solve(folder / name, None, None, 0.05, 1.0, comm=COMM, split="auto")
        assert result.converged
        assert result.problem.ranks.grid == grid
    in_place = mapuot.solve(folder / "wide.npy", None, None, 0.5, 1.0, comm=COMM, split="auto", method="map-uot")
    assert in_place.problem.ranks.grid == (SIZE, 1)


def case_warm_start_and_checkpoint():
    case = clouds(33, 21, reg=0.01)
    folder = Path(COMM.bcast(tempfile.mkdtemp() if RANK == 0 else None))
    first = block(case).solve(comm=COMM, split="grid", checkpoint=folder / "state.npz", **FLOAT64)
    again = block(case).solve(comm=COMM, split="grid", warm_start=first, **FLOAT64)
    assert again.n_passes <= 2
    COMM.Barrier()
    log_v = mapuot.files.load_checkpoint(folder / "state.npz", 33, 21, case.reg)[1]
    np.testing.assert_allclose(log_v, case.solve(**FLOAT64).log_v, atol=1e-10)


def case_far_starts():
    """Translations that K absorbs, and blocks of which some need a balanced K."""
    case, near = clouds(33, 21), np.full(21, 130.0)
    near[: 21 // C] = np.linspace(60, 200, 21 // C)
    i0, i1, j0, j1 = own_block(33, 21, RANK, SIZE, "grid")
    for start in (near, np.linspace(60, 250, 21)):
        for options, within in ((FLOAT64, 1e-11), ({"precision": "mixed"}, 1e-4)):
            one = case.solve(warm_start=(np.zeros(33), start), **options)
            mine = np.zeros(i1 - i0), start[j0:j1]
            result = block(case).solve(comm=COMM, split="grid", warm_start=mine, **options)
            compare(result, one, i0, i1, within, 5, columns=(j0, j1))


def case_communicators():
    """The parts of a communicator are made once, and go with it."""
    case = clouds(20, 15)
    for _ in range(3):
        comm = COMM.Dup()
        for _ in range(2):
            result = block(case).solve(comm=comm, split="grid", **FLOAT64)
        assert result.converged
        comm.Free()


# ---- errors ----


def case_one_bad_block():
    last, case = SIZE - 1, block(clouds(33, 21))

    def spoil(array, value, where=(last,)):
        array = array.copy()
        if RANK in where:
            array.flat[-1] = value
        return array

    split = {"split": "grid"}
    refused(ValueError, f"rank {last}: M must not hold NaN", case.replace(M=spoil(case.M, np.nan)), **split)
    row = [r for r in range(SIZE) if r // C == R - 1]
    name = f"rank {row[0]} (and {C - 1} more): " if R > 1 else ""
    refused(ValueError, name + "a must be >= 0", case.replace(a=spoil(case.a, -1.0, row)), **split)
    group = f"ranks {', '.join(map(str, row))}" if R > 1 else "every rank"
    refused(ValueError, f"a must be the same on {group}", case.replace(a=spoil(case.a, 0.5)), **split)
    column = ", ".join(str(r) for r in range(SIZE) if r % C == C - 1)
    if R > 1:
        refused(ValueError, f"b must be the same on ranks {column}", case.replace(b=spoil(case.b, 0.5)), **split)
    short = case.replace(a=None, b=None, M=case.M[:-1] if last == RANK else case.M)
    refused(ValueError, f"the number of rows of M must be the same on {group}", short, **split)
    refused(ValueError, "split must be the same on every rank", case, split=(R, C) if RANK else (SIZE, 1))


def case_what_a_grid_cannot():
    case = block(clouds(33, 21))
    refused(NotImplementedError, "method 'map-uot' keeps whole rows", case, split="grid", method="map-uot")
    refused(NotImplementedError, "needs backend='cpu', got 'reference'", case, split="grid", backend="reference")
    refused(ValueError, "M must be a non-empty matrix", block(clouds(33, 1)), split="grid")


def case_errors_under_way():
    """In a callback, and where the others wait in the sums of a row, of a column, of a sweep."""
    case, last = block(clouds(33, 21)), RANK == SIZE - 1
    i0, _, j0, _ = own_block(33, 21, RANK, SIZE, "grid")

    def fail(stats):
        if last and stats.n_pass == 3:
            raise KeyError("mine")

    refused(KeyError, "mine", case, callback=fail if last else None, split="grid", **FLOAT64)
    for good in range(1, 8):  # 4 and 6: K v, 5 and 7: K^T u
        calls = [0]

        def entries(k0, k1, l0, l1, calls=calls, good=good):
            calls[0] += 1
            if last and calls[0] > good:
                raise OSError("the disk is gone")
            return case.M[k0 - i0 : k1 - i0, l0 - j0 : l1 - j0]

        refused(OSError, "the disk is gone", case.replace(M=entries), split="grid", precision="bfloat16")


if __name__ == "__main__":
    main(globals())
