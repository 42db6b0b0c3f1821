"""What a Result gives without the plan, against dense numpy on the plan."""

import pickle

import numpy as np
import pytest
from problems import clouds, with_forbidden, with_zeros

import mapuot


def test_nothing_of_the_size_of_the_plan_is_held():
    """cost, marginals, apply and the barycentric map of a 2000 x 2000 problem, in memory for m + n."""
    import tracemalloc

    case = clouds(2000, 2000, reg=0.05)
    result = case.solve(tol=1e-3, precision="mixed")
    tracemalloc.start()
    _ = result.cost, result.objective, result.apply(case.b), result.barycentric_map(np.ones((2000, 3)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * 2000 * 8  # the plan would be 2000 x 2000 x 8
    assert "plan" not in vars(result)


@pytest.mark.parametrize("n", [9, 700])
def test_plan_in_the_callers_memory(n, backend):
    """By the short way and by the ordinary one."""
    if backend == "reference" and n > 9:
        pytest.skip("slow")
    case = clouds(n, n + 1, reg=0.1)
    out = np.full(case.M.shape, np.nan)
    result = case.solve(out=out, backend=backend, schedule="static")
    assert result.plan is out
    again = case.solve(backend=backend, schedule="static").plan
    np.testing.assert_allclose(out, again, rtol=1e-5 if backend == "cuda" else 0)  # its sums have no order
    single = np.empty(case.M.shape, np.float32)
    assert case.replace(M=case.M.astype("f4")).solve(out=single, backend=backend).plan is single
    np.testing.assert_allclose(single, out, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("method", ["independent", "systematic", "rows"])
@pytest.mark.parametrize("entries", [3 * 70, 1 << 22])
def test_pairs_are_drawn_from_the_plan(entries, method, backend, monkeypatch):
    monkeypatch.setattr(mapuot.backends.draw, "BLOCK_ENTRIES", entries)
    case, size = with_forbidden(with_zeros(clouds(11, 70, reg=0.2, ratio=1.5))), 200_000  # 70 columns: five runs
    result = case.solve(backend=backend, callback=None if entries > 210 else lambda stats: None)  # not the short way
    i, j = result.sample(size, seed=1, method=method)
    plan, r = result.plan, result.plan.sum(1)
    rows, used = np.bincount(i, minlength=11), np.flatnonzero(r)
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
    """A row whose entries are all below float32's least number has a plan in float64."""
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
    """Those that are functions of another file, too: processes are sent methods by name."""
    result = mapuot.solve(mapuot.PointCloud(np.eye(4)), reg=0.1, reg_m=1.0)
    for name in dir(type(result)):
        if callable(method := getattr(type(result), name)) and not name.startswith("_"):
            assert method.__name__ == name
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(result.map))(np.eye(4)), result.map(np.eye(4)))
