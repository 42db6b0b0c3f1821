"""A Result's numbers, computed without the plan, match dense numpy on the plan; its printed and stored forms."""

import pickle
import subprocess
import sys
import tracemalloc

import matrix
import numpy as np
import pytest
from problems import clouds, with_forbidden, with_zeros

import mapuot
from mapuot.answer import store
from mapuot.problem.settings import BLOCKS


def test_nothing_of_the_size_of_the_plan_is_held():
    """cost, marginals, apply and the barycentric map of a 2000 x 2000 problem need memory for m + n numbers only."""
    case = clouds(2000, 2000, reg=0.05)
    result = case.solve(tol=1e-3, precision="mixed")
    tracemalloc.start()
    _ = result.cost, result.objective, result.apply(case.b), result.barycentric_map(np.ones((2000, 3)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * 2000 * 8  # the plan would be 2000 x 2000 x 8
    assert "plan" not in vars(result)


@pytest.mark.parametrize("reg_m", [1.0, (1.0, np.inf)])
def test_the_dual_value_is_summed_in_float64(reg_m):
    """`dual` is the formula at the answer's potentials: passes over a float32 K know 8 digits of it."""
    case = clouds(150, 140, reg=0.05, ratio=1.3).replace(reg_m=reg_m)
    result = case.solve(precision="mixed", tol=1e-5)
    (f, g) = (x.astype(np.longdouble) for x in result.potentials)
    (rho, sigma) = np.broadcast_to(reg_m, 2)
    plan = np.outer(case.a, case.b) * np.exp((f[:, None] + g - case.M) / case.reg)
    total = rho * (case.a @ -np.expm1(-f / rho)) + case.reg * (case.a.sum() * case.b.sum() - plan.sum())
    total += case.b @ g if np.isinf(sigma) else sigma * (case.b @ -np.expm1(-g / sigma))
    assert 0 <= total - result.dual <= 1e-12


@pytest.mark.parametrize("n", [9, 700])
def test_plan_in_the_callers_memory(n, backend):
    """A plan is written to the caller's memory by the short path and by the ordinary one."""
    if backend == "reference" and n > 9:
        pytest.skip("slow")
    case = clouds(n, n + 1, reg=0.1)
    out = np.full(case.M.shape, np.nan)
    result = case.solve(out=out, backend=backend, schedule="static")
    assert result.plan is out
    again = case.solve(backend=backend, schedule="static").plan
    np.testing.assert_allclose(out, again, rtol=1e-5 if backend == "cuda" else 0)  # a GPU adds in any order
    single = np.empty(case.M.shape, np.float32)
    assert case.replace(M=case.M.astype("f4")).solve(out=single, backend=backend).plan is single
    np.testing.assert_allclose(single, out, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("method", ["independent", "systematic", "rows"])
@pytest.mark.parametrize("entries", [3 * 70, 1 << 22])
def test_pairs_are_drawn_from_the_plan(entries, method, backend, using):
    using(BLOCKS, plan_entries=entries)
    # 70 columns: five runs
    case = with_forbidden(with_zeros(clouds(11, 70, reg=0.2, ratio=1.5)))
    size = 200_000
    result = case.solve(backend=backend, callback=None if entries > 210 else lambda stats: None)  # not the short way
    i, j = result.sample(size, seed=1, method=method)
    plan = result.plan
    r = result.plan.sum(1)
    rows = np.bincount(i, minlength=11)
    used = np.flatnonzero(r)
    if method == "rows":
        assert (np.diff(i) >= 0).all()
        assert (np.abs(rows[used] - size / len(used)) <= 1).all()
        plan = plan / np.where(r > 0, r, 1.0)[:, None]
    if method == "systematic":
        assert (np.abs(rows - size * r / r.sum()) <= 1).all()
    count = np.zeros(case.M.shape)
    np.add.at(count, (i, j), 1)
    share = plan / plan.sum()
    assert (count[share == 0] == 0).all()
    used = share > 0
    spread = np.sqrt(share[used] * (1 - share[used]) * size)
    assert (np.abs(count[used] - share[used] * size) <= 5 * spread + 1).all()
    assert np.abs(((count[used] - share[used] * size) / spread) ** 2).mean() < 1.2  # chi-square of some 500 pairs
    again = result.sample(size, seed=np.random.default_rng(1), method=method)
    np.testing.assert_array_equal(again, (i, j))
    if method != "rows":
        assert abs(np.corrcoef(i[:-1], i[1:])[0, 1]) < 0.02  # in the order of the draws, not of the rows


def test_rows_too_light_for_float32_are_drawn():
    """A row with all entries below float32's smallest number has a plan in float64."""
    M = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    a = np.array([1.0, 1e-60, 1.0])
    result = mapuot.solve(M, a, np.full(4, 0.5), reg=0.1, reg_m=1.0, callback=lambda stats: None)
    i, j = result.sample(3000, 0, method="rows")
    share = np.bincount(j[i == 1], minlength=4) / 1000
    want = result._wide.plan(1, 2)[0]
    np.testing.assert_allclose(share, want / want.sum(), atol=0.06)


WORDS = (
    "potentials", "marginals", "cost", "objective", "dual", "mass", "gap", "error_bound", "status", "converged", "how",
    "n_passes",
)  # fmt: skip


def test_all_results_have_the_same_words():
    x = np.linspace(0, 1, 9)
    M = (x[:, None] - x) ** 2
    one = mapuot.solve(M, reg=0.1, reg_m=1.0)
    many = mapuot.solve_batch(M, np.ones((3, 9)), reg=0.1, reg_m=1.0)
    three = mapuot.multimarginal({(0, 1): M, (1, 2): M}, [np.ones(9)] * 3, reg=0.1, reg_m=1.0)
    for result in (one, many, three):
        assert result
        for word in WORDS:
            assert not callable(getattr(result, word)), word
        assert [x.shape[-1] for x in result.potentials] == [x.shape[-1] for x in result.marginals]
    assert many.plan.shape == (3, 9, 9)
    np.testing.assert_allclose(many.plan[1], many[1].plan)
    middle = mapuot.barycenter(M, np.eye(9)[[0, 8]] + 0.01, reg=0.1, reg_m=1.0)
    assert middle.status == "converged"
    assert middle.how == "dense K"
    np.testing.assert_allclose(middle.potentials[0], 0.1 * middle.log_u)


def test_methods_have_the_names_that_they_are_called_by():
    """Methods that a class takes from another file's functions can be sent to other processes by name."""
    result = mapuot.solve(mapuot.PointCloud(np.eye(4)), reg=0.1, reg_m=1.0)
    for name in dir(type(result)):
        if callable(method := getattr(type(result), name)) and not name.startswith("_"):
            assert method.__name__ == name
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(result.map))(np.eye(4)), result.map(np.eye(4)))


# ---- answers in files


PLAIN = clouds(23, 31, reg=0.05, reg_m=(0.7, 2.0), ratio=1.4)
KL = ("kl", "kl")
FORMATS = {".npz": "numpy", ".h5": "h5py", ".zarr": "zarr"}  # and the arguments that each needs
KINDS = [
    ("dense", KL, {}), ("dense", ("range", "tv"), {"rho": "one a point"}),
    ("dense", ("kl", "balanced"), {"masses": "zeros", "pairs": "forbidden"}), ("dense", KL, {"reference": "given"}),
    ("dense", KL, {"mask": "mask", "reference": "given"}), ("dense", KL, {"mask": "mask"}),
    ("pairs", KL, {"pairs": "forbidden"}), ("points", KL, {}), ("grid", KL, {}), ("boxes", KL, {"shape": "boxes"}),
]  # fmt: skip


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(("kind", "pair", "traits"), KINDS)
def test_a_file_gives_the_answer_again(kind, pair, traits, suffix, tmp_path):
    pytest.importorskip(FORMATS[suffix])
    M, case, options = matrix.posed(kind, pair, matrix.PLAIN._replace(**traits))
    result = matrix.solve(M, case, **options)
    path = tmp_path / f"answer{suffix}"
    result.save(path)
    again = mapuot.load(path, M, reference=options.get("reference"))
    for one in (mapuot.load(path), again):
        assert repr(one) == repr(result)
        for name in ("log_u", "log_v", "row_marginal", "col_marginal", "f", "g"):
            np.testing.assert_array_equal(getattr(one, name), getattr(result, name), err_msg=name)
        for name in ("cost", "objective", "dual", "mass", "gap", "error_bound", "status", "n_passes"):
            assert getattr(one, name) == getattr(result, name), name
        assert store.trace_table(one.trace).tolist() == store.trace_table(result.trace).tolist()
        for side in ("rows", "cols"):
            found = getattr(one.problem, side)
            right = getattr(result.problem, side)
            assert (found.penalty, found.name) == (right.penalty, right.name)
            np.testing.assert_array_equal([found.rho, found.weight], [right.rho, right.weight])
    assert again._repr_html_() == result._repr_html_()
    skipped = 1e-30 if kind == "boxes" else 0.0  # of the mass, by pairs that the solve skipped: a file has no mask
    np.testing.assert_allclose(matrix.array_of(again.plan), matrix.array_of(result.plan), rtol=0, atol=skipped)
    assert (f"% of its pairs kept, seed {matrix.MASK.seed}" in result._repr_html_()) == ("mask" in traits)


def test_what_needs_m_says_so(tmp_path):
    case = PLAIN
    path = tmp_path / "answer.npz"
    case.solve().save(path)
    bare = mapuot.load(path)
    assert case.solve(warm_start=bare).n_passes <= 2
    for ask in (lambda: bare.plan, lambda: bare.rows(0, 2), lambda: bare.top_k(2), lambda: bare.sparse(0.1),
                lambda: bare.apply(case.b), lambda: bare.push(np.arange(23) % 2)):  # fmt: skip
        with pytest.raises(ValueError, match=r"M must be given .*mapuot.load\(path, M\)"):
            ask()
    with pytest.raises(ValueError, match=r"M must have the answer's shape \(23, 31\), got \(22, 31\)"):
        mapuot.load(path, case.M[:-1])
    inner = np.argsort(case.M.ravel())[5:6]  # neither the least nor the largest
    without = case.M.copy()
    np.put(without, inner, np.inf)
    for other in (2 * case.M, case.M * (1 + 2e-6), without):
        with pytest.raises(ValueError, match="M must be the matrix that was solved, whose finite entries lie in"):
            mapuot.load(path, other)
    assert mapuot.load(path, case.M * (1 + 1e-7)).plan.shape == (23, 31)
    case.replace(reference=case.M + 1).solve().save(path)
    with pytest.raises(ValueError, match="reference must be given"):
        mapuot.load(path, case.M)


@pytest.mark.parametrize(("change", "text"),
                         [({"log_u": np.zeros(3)}, "log_u must be 23 numbers"), ({"log_v": None}, "it lacks 'log_v'"),
                          ({"format": 7}, "format must be 1, 2 or 3, got 7"),
                          ({"a": np.full(23, np.nan)}, "a must be 23 numbers"),
                          ({"penalty_b": "magic"}, "penalty_b must be one of"),
                          ({"trace": np.zeros((2, 3))}, "trace must have 9 columns"),
                          ({"reg": -1.0}, "reg must be > 0"), ({"cost": "dear"}, "could not convert"),
                          ({"dual": np.nan}, "dual must be a number, got NaN"), ({"mass": -1.0}, "mass must be >= 0"),
                          ({"b": np.full(31, -0.1)}, "b must be finite and have some mass"),
                          ({"a": np.r_[np.ones(22), -0.1]}, "a must be >= 0"),
                          ({"row_marginal": np.full(23, -1e-9)}, "row_marginal must be >= 0"),
                          ({"rho_a": np.full(23, -2.0)}, "rho_a must be >= 0"),
                          ({"trace": np.zeros((0, 9))}, "trace must end in a pass"),
                          ({"trace": np.full((1, 9), [1, 0, np.nan, 0, 1, 0, 0, 1, 0])},
                           "trace must end in a pass")])  # fmt: skip
def test_what_is_no_answer(change, text, tmp_path):
    values = store.contents(PLAIN.solve()) | change
    np.savez(tmp_path / "x.npz", **{name: value for name, value in values.items() if value is not None})
    with pytest.raises(ValueError, match=f"x.npz holds no answer of mapuot: {text}"):
        mapuot.load(tmp_path / "x.npz")


def test_a_threshold_beyond_float32(recwarn):
    result = clouds(5, 4).replace(M=np.ones((5, 4), np.float32)).solve()
    assert result.sparse(1e300).nnz == 0
    assert result.sparse(-1e300).nnz == 20
    assert not recwarn.list


def test_import_takes_no_heavy_library():
    """Importing mapuot loads no heavy library: modules that need one are loaded on first use."""
    code = """
import sys, numpy as np, mapuot
heavy = {"scipy.special", "scipy.sparse", "scipy.spatial", "tqdm", "sklearn", "matplotlib", "click", "h5py", "torch"}
print(sorted(heavy & set(sys.modules)))
mapuot.solve(np.ones((3, 4)), reg=0.1, reg_m=1.0).plan
print(sorted(heavy & set(sys.modules)))
mapuot.plot
print("matplotlib" in sys.modules, mapuot.da.__name__)
mapuot.no_such_door
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[]", "[]", "False mapuot.da"]
    assert "AttributeError: module 'mapuot' has no attribute 'no_such_door'" in done.stderr
    assert {*mapuot.__all__, "groups", "torch", "jax", "moscot", "plot"} == {*dir(mapuot)}
    assert all(f"``mapuot.{name}``" in mapuot.__doc__ for name in mapuot.DOORS)


def test_a_function_that_is_read_shows_a_bar(capsys):
    case = PLAIN
    mapuot.solve(lambda i0, i1: case.M[i0:i1], case.a, case.b, reg=0.05, reg_m=1.0, progress=True)
    shown = capsys.readouterr().err
    assert "mapuot: reading M: 100%" in shown
    assert shown.index("reading M") < shown.index("passes")
    mapuot.solve(case.M, case.a, case.b, reg=0.05, reg_m=1.0, progress=True)
    assert "reading" not in capsys.readouterr().err
