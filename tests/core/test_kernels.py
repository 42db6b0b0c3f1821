"""Every C kernel matches numpy through Python: instruction sets, storage, threads, odd sizes, odd layouts.

tests/core/check_kernels.c compares these kernels with scalar ones, behind guard bytes; here the oracle is numpy.
"""

import mmap
import os

import numpy as np
import pytest
from installed import best_isa
from mapuot._core import ffi, lib
from numpy.lib.stride_tricks import as_strided
from problems import clouds, plan_of, with_forbidden, with_zeros

from mapuot.backends import Options
from mapuot.backends.cpu import backend as cpu
from mapuot.backends.cpu import native
from mapuot.backends.reference import backend as reference
from mapuot.problem.mask import MaskedReference, SeededMask
from mapuot.problem.problem import Problem
from mapuot.route.options import make_options

SIZES = [*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 257]
SHAPES = [(7, n) for n in SIZES] + [(m, 18) for m in SIZES] + [(31, 513), (64, 64), (257, 97), (2, 1100)]
DTYPES = {"float64": 1e-12, "float32": 2e-6}  # error that the storage of K may leave


def make_problem(case):
    return Problem.from_arrays(
        case.M, case.a, case.b, case.reg, case.reg_m, case.penalty, case.reference, reference
    )  # fmt: skip


def options(dtype="float64", threads=1, translate=True, anderson_depth=5, in_place=False):
    return Options(translate, anderson_depth, in_place, dtype, tol=1e-300, tol_gap=-1.0, threads=threads)


def compare_passes(case, passes, tol, **keywords):
    """Compare the CPU workspace's state after some passes with the oracle's."""
    problem = make_problem(case)
    wanted = options(**keywords)
    start = np.random.default_rng(5).normal(0, 0.3, case.M.shape[1])
    ours = cpu.workspace(problem, wanted)
    oracle = reference.workspace(problem, wanted)
    for workspace in (ours, oracle):
        workspace.absorb(start)
        stats = [workspace.iterate(1)[0] for _ in range(passes)]
        if workspace is ours:
            given = stats
    for got, right in zip(ours.potentials(), oracle.potentials(), strict=True):
        np.testing.assert_allclose(got, right, rtol=0, atol=tol)
    for got, right in zip(ours.marginals(), oracle.marginals(), strict=True):
        np.testing.assert_allclose(got, right, rtol=tol, atol=1e-300)
    with np.errstate(invalid="ignore"):
        ahead = ours.next_log_v - oracle.next_log_v
    if passes > 1 and wanted.translate:  # Anderson's constant part is free: the next translation takes it out
        ahead -= np.median(ahead[np.isfinite(ahead)])
    assert np.abs(ahead[np.isfinite(ahead)]).max(initial=0.0) < 20 * tol
    np.testing.assert_array_equal(np.isneginf(ours.next_log_v), np.isneginf(oracle.next_log_v))
    scale = max(abs(s.dual) for s in stats) + case.reg * problem.c_mass
    for got, right in zip(given, stats, strict=True):
        np.testing.assert_allclose(got.mass, right.mass, rtol=tol)
        sums = 1e-6 * (wanted.precision == "float32")
        below = sums * (got.mass * (case.reg + ours.limits.rho_kl) + ours.limits.dual_scale)
        assert -below - tol * scale <= got.dual - right.dual <= tol * scale
        if ours.progress.narrow and right.gap < np.inf:  # the margin of the gap of float32 sums
            root = np.sqrt(right.gap) + 1e-6 * np.sqrt(got.mass * ours.limits.rho_kl)
            right.gap = root**2 * (1 + 3e-6)
        np.testing.assert_allclose(got.gap, right.gap, atol=tol * scale, rtol=tol)


# ---- row_pass, finish_pass, plan_pass, build_kernel ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_pass_and_finish_pass(isa, dtype):
    """One pass and three passes are right on several threads, as is a pass that overwrites K."""
    for k, shape in enumerate(SHAPES):
        case = clouds(*shape, reg=0.3, reg_m=(0.8, 2.5), ratio=1.3)
        threads = (1, 2, 3, 40)[k // 3 % 4]
        one = (case, with_zeros(case), with_forbidden(case))[k % 3]
        keywords = {"dtype": dtype, "threads": threads, "translate": k % 2 == 0}
        compare_passes(one, 1 + 2 * (k % 4 == 0), 100 * DTYPES[dtype] if k % 4 == 0 else DTYPES[dtype], **keywords)
        keywords |= {"translate": False, "anderson_depth": 0, "in_place": True}
        compare_passes(case, 2, DTYPES[dtype], **keywords)


@pytest.mark.parametrize("penalty", ["kl", "balanced", "tv", "l2", "range", "mixed"])
def test_passes_by_penalty(isa, penalty):
    for shape in [(7, 5), (9, 33), (33, 9), (16, 64)]:
        for sides in (0, 1):
            reg_m = (0.4, 0.9)
            kind = (penalty, "kl")
            if penalty == "mixed":  # some points balanced, some not
                reg_m = (np.where(np.arange(shape[sides]) % 2, np.inf, 0.5), 0.9)
                kind = ("kl", "kl")
            case = clouds(*shape, reg=0.2, reg_m=reg_m[:: 1 - 2 * sides], penalty=kind[:: 1 - 2 * sides])
            compare_passes(with_zeros(case), 2, 1e-9, anderson_depth=0)


# ---- streams over M ----


def layouts(M):
    """Return a matrix in several memory layouts: C, Fortran, backwards, spread, and starting at an odd place."""
    m, n = M.shape
    spread = np.full((2 * m, 3 * n), np.nan, M.dtype)
    odd = np.full(m * n + 1, np.nan, M.dtype)
    spread[::2, ::3] = M
    odd[1:] = M.ravel()
    return {"C": np.ascontiguousarray(M), "Fortran": np.asfortranarray(M),
            "backwards": np.ascontiguousarray(M[::-1, ::-1])[::-1, ::-1], "spread": spread[::2, ::3],
            "odd start": odd[1:].reshape(m, n),
            "transposed backwards": np.ascontiguousarray(M.T[::-1])[::-1].T}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_streams(isa, threads, dtype):
    """plan, apply, apply_transpose, sums and extrema agree on every layout."""
    rng = np.random.default_rng(3)
    for k, shape in enumerate(SHAPES[:: 1 if threads == 1 else 4]):
        case = clouds(*shape, reg=0.1)
        case = (case, with_zeros(case), with_forbidden(case))[k % 3]
        log_u = rng.normal(0, 1, shape[0])
        log_v = rng.normal(0, 1, shape[1])
        log_u[case.a == 0], log_v[case.b == 0] = -np.inf, -np.inf
        M = case.M.astype(dtype)
        name = list(layouts(M))[k % 6]
        case = case.replace(M=layouts(M)[name])
        P = plan_of(case, log_u, log_v)
        stream = cpu.plan_of(make_problem(case), log_u, log_v, threads)
        plan = stream.plan(0, shape[0])
        assert plan.dtype == dtype
        np.testing.assert_allclose(plan, P, rtol=1e-13 if dtype == "float64" else 1.2e-7, err_msg=name)
        i0 = shape[0] // 3
        i1 = shape[0] // 2 + 1
        np.testing.assert_array_equal(stream.plan(i0, i1), plan[i0:i1])
        X = rng.normal(size=(shape[1], k % 4 + 1))
        Y = rng.normal(size=(shape[0], k % 3 + 1))
        np.testing.assert_allclose(stream.apply(X), P @ X, atol=1e-13 * P.sum())
        np.testing.assert_allclose(stream.apply(X[:, 0]), P @ X[:, 0], atol=1e-13 * P.sum())
        np.testing.assert_allclose(stream.apply_transpose(Y), P.T @ Y, atol=1e-13 * P.sum())
        cost, r, s = stream.sums()
        np.testing.assert_allclose(cost, (P[P > 0] * case.M[P > 0].astype(float)).sum(), rtol=1e-13)
        np.testing.assert_allclose(r, P.sum(1), rtol=1e-13)
        np.testing.assert_allclose(s, P.sum(0), rtol=1e-13)
        assert cpu.extrema(case.M) == reference.extrema(case.M)


def read_by_all_streams(M, c, vectors, threads):
    """Return, by name, the result of each call that reads M."""
    (m, n), (x, y, X, Y) = M.shape, vectors
    call = native.pool_for(threads, M.size), m, n, native.matrix(M), native.matrix(c), 0.1
    at = (*call, native.pointer(x), native.pointer(y))
    to = {}
    shift = np.where(np.isneginf(x), x, 0.0)
    for dtype in ("float64", "float32"):
        out = to["plan", dtype] = np.zeros((m, n), dtype)
        native.check(lib.mapuot_form_plan(*at, native.DTYPES[dtype], ffi.from_buffer("void *", out), n))
        ld = lib.mapuot_leading(n, out.itemsize)
        K = to["K", dtype] = np.ones((m, ld), dtype)
        native.check(lib.mapuot_build_kernel(*at, 0, native.DTYPES[dtype], ffi.from_buffer("void *", K), ld))
    names = "P X", "P^T Y", "sums", "r", "s", "extrema", "top"
    sizes = 2 * m, 2 * native.padded(n), 2, m, n, 4, n
    to |= {name: np.zeros(size) for name, size in zip(names, sizes, strict=True)}
    product, transposed, sums, r, s, extrema, top = (native.pointer(to[name]) for name in names)
    native.check(lib.mapuot_apply(*at, 2, native.pointer(X), product))
    native.check(lib.mapuot_apply_transpose(*at, 2, native.pointer(Y), transposed))
    native.check(lib.mapuot_plan_sums(*at, sums, r, s))
    native.check(lib.mapuot_extrema(*call[:4], extrema))
    native.check(lib.mapuot_balance(*call, native.pointer(y), native.pointer(shift), top))
    return to | {"balance": shift}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_no_bit_depends_on_how_costs_lie_in_memory(isa, threads, dtype):
    """Panels of 64 x 64 and of 8 x 512 are right, whole and cut off."""
    rng = np.random.default_rng(7)
    for m, n in [(1, 1), (66, 1), (67, 133), (130, 600)]:
        M = rng.normal(size=(m, n)).astype(dtype)
        c = rng.random((m, n))
        M[rng.random((m, n)) < 0.1], M[:, 0], c[rng.random((m, n)) < 0.1] = np.inf, np.inf, 0.0
        M[m // 2] = np.inf  # a row without an entry
        x = rng.normal(size=m)
        y = rng.normal(size=n)
        X = native.zeros(2 * native.padded(n))
        X.reshape(2, -1)[:, :n] = rng.normal(size=(2, n))
        x[m // 3], y[n // 3] = -np.inf, -np.inf
        vectors = x, y, X, rng.normal(size=(m, 2))
        masked = MaskedReference("uniform", SeededMask(0.5, 3), (m, n), 5, 2)
        for given in (None, c, masked):
            right = read_by_all_streams(M, given, vectors, threads)
            for name, other in layouts(M).items():
                if given is c and name != "backwards":
                    share = np.asfortranarray(c)
                else:
                    share = given
                for what, got in read_by_all_streams(other, share, vectors, threads).items():
                    np.testing.assert_array_equal(got, right[what], err_msg=f"{what}, {name}")


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_extrema_sees_a_single_odd_entry_anywhere(isa, value):
    for shape in [(1, 1), (3, 5), (9, 8), (17, 33)]:
        for dtype in ("float64", "float32"):
            M = np.random.default_rng(0).normal(size=shape).astype(dtype)
            for at in {0, M.size // 2, M.size - 1}:
                other = M.copy()
                other.flat[at] = value
                assert cpu.extrema(other) == reference.extrema(other)


def far_apart(rows, columns, stride, dtype):
    """Return a matrix with rows ``stride`` entries apart, in memory that is reserved but never touched."""
    no_reserve = 0x4000
    size = (rows - 1) * stride * np.dtype(dtype).itemsize + 4096
    try:
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    except (OSError, ValueError):
        pytest.skip("this machine lends no address space for it")
    flat = np.frombuffer(area, dtype)
    return as_strided(flat, (rows, columns), (stride * flat.itemsize, flat.itemsize))


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="needs MAP_NORESERVE")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_indices_beyond_2_to_the_31(isa, dtype):
    """M, K and the plan may have entries more than 2^31 entries apart."""
    case = clouds(3, 40, reg=0.1)
    stride = (1 << 30) + 16
    wide = far_apart(3, 40, stride, dtype)
    wide[:] = case.M
    K = far_apart(3, 48, stride, dtype)
    near = case.replace(M=case.M.astype(dtype))
    far = case.replace(M=wide)
    one, two = (cpu.workspace(make_problem(c), options(dtype)) for c in (near, far))
    two.state.ld, two.state.kernel = stride, ffi.from_buffer("void *", K[0])
    for workspace in (one, two):
        workspace.absorb(np.zeros(40))
        workspace.iterate(3)
    np.testing.assert_array_equal(K[2, :40], one.operator.matrix[2])
    for got, right in zip(two.potentials(), one.potentials(), strict=True):
        np.testing.assert_array_equal(got, right)
    streams = [cpu.plan_of(w.problem, *one.potentials()) for w in (one, two)]
    np.testing.assert_array_equal(streams[0].plan(0, 3), streams[1].plan(0, 3))
    np.testing.assert_array_equal(*(s.apply(np.ones(40)) for s in streams))


# ---- the table itself ----


def test_instruction_sets():
    assert native.isa() in ("scalar", "avx2", "avx512", "neon")
    with pytest.raises(ValueError, match="isa must be one that this machine has, got 'mmx'"):
        native.set_isa("mmx")
    native.set_isa("scalar")
    assert native.isa() == "scalar"
    native.set_isa("auto")
    assert native.isa() == best_isa()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("reg", [1.0, 1e-200])
def test_numbers_below_the_least_normal_one(isa, threads, reg):
    """A pass flushes subnormals to 0 unless reg is so small that they may count; the caller's arithmetic keeps them."""
    case = clouds(40, 9, reg=0.1)
    problem = Problem.from_arrays(case.M, case.a, case.b, 0.1, 1.0, "kl", "product", cpu)
    workspace = cpu.workspace(problem, make_options("auto", "float64", 1e-6, None, threads))
    workspace.absorb(np.zeros(9))
    workspace.operator.K[:], workspace.limits.reg = 1e-300, reg
    workspace.col_side["scale"][:9] = 1e-12
    native.check(lib.mapuot_row_dots(workspace.pool, workspace.state))
    want = 0.0 if reg == 1.0 else 9e-312
    np.testing.assert_allclose(workspace.row_side["marginal"][:40], want, rtol=1e-9)
    tiny = np.full(64, 1e-310)
    assert (0.5 * tiny == 5e-311).all()
    assert (tiny.astype(np.float32) + np.float32(1e-40) > 0).all()


@pytest.mark.parametrize("entry", [0.0, 1e308])
@pytest.mark.parametrize("penalty", ["kl", "balanced", "tv"])
def test_a_row_whose_sum_vanishes_or_overflows_leaves_no_bound(isa, threads, penalty, entry):
    """The mass of such a row is in no sum: K is rebuilt, and until then there is neither gap nor dual value."""
    case = clouds(21, 9, reg=0.1, reg_m=np.inf if penalty == "balanced" else 1.0, penalty=(penalty, "kl"))
    case = case.replace(reg_m=(case.reg_m, 1.0))
    workspace = cpu.workspace(make_problem(case), options(threads=threads))
    workspace.absorb(np.zeros(9))
    workspace.iterate(1)
    for row in (0, 13, 20):
        workspace.absorb(np.zeros(9))
        workspace.iterate(1)
        workspace.operator.matrix[row] = entry
        workspace.col_side["scale"][:9] *= 100.0
        workspace.col_side["log_scale"][:9] += np.log(100.0)
        stat = workspace.iterate(1)[0]
        assert (stat.dual, stat.error, stat.status) == (-np.inf, np.inf, "absorb")
