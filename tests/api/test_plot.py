"""Plots show the numbers of the result; the report is one page that loads no other file."""

import html
import re

import numpy as np
import pytest
from problems import clouds
from scipy.sparse import csr_array

import mapuot

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")

from matplotlib import pyplot as plt  # noqa: E402

from mapuot import plot, report  # noqa: E402
from mapuot.answer import store, summary  # noqa: E402


@pytest.fixture(autouse=True)
def no_figure_stays():
    yield
    plt.close("all")


@pytest.fixture
def solved():
    rng = np.random.default_rng(0)
    x, y = rng.random((30, 2)), rng.random((23, 2))
    M = ((x[:, None] - y) ** 2).sum(-1)
    return mapuot.solve(M, np.full(30, 1 / 30), np.full(23, 2 / 23), reg=0.02, reg_m=0.3), x, y


@pytest.mark.parametrize("nodes", [(7, 6), (5, 4, 3), (30,), (9, 2, 2)], ids=str)
@pytest.mark.parametrize("most", [400, 8, 3])
def test_the_plan_of_a_grid_is_added_up_by_slices(monkeypatch, nodes, most):
    rng, target = np.random.default_rng(0), tuple(n + 1 for n in nodes)
    a, b = rng.random(nodes), rng.random(target)
    a.flat[3] = 0.0
    result = mapuot.solve(mapuot.Grid(nodes, 0.2, target=target), a, b, reg=0.05, reg_m=1.0)
    plan = result.plan
    monkeypatch.setattr(type(result), "_blocks", None)  # no block of the plan is made
    sums = plot.coarse_plan(result, most)
    whole = plan.shape if max(plan.shape) <= most else sums.shape
    assert sums.shape == whole
    lead = next(k for k in (3, 2, 1) if k == 1 or np.prod(target[:k]) <= most)
    slices = [np.arange(int(np.prod(x))) // int(np.prod(x[lead:])) for x in (nodes, target)]
    cells = [s if s[-1] < most else np.searchsorted(plot.cells(s[-1] + 1, most), s, side="right") - 1 for s in slices]
    want = np.zeros_like(sums)
    np.add.at(want, np.ix_(*cells), plan)
    np.testing.assert_allclose(sums, want, rtol=1e-12, atol=1e-300)


def test_convergence_draws_the_trace(solved):
    result = solved[0]
    ax = plot.convergence(result)
    lines = {line.get_label(): line for line in ax.get_lines()}
    np.testing.assert_array_equal(lines["bound of the plan's error"].get_xdata(), [s.n_pass for s in result.trace])
    np.testing.assert_array_equal(lines["bound of the plan's error"].get_ydata(), [s.error for s in result.trace])
    assert ax.get_yscale() == "log"
    late = mapuot.solve(clouds(30, 30).M, reg=1e-4, reg_m=9.0, max_passes=60)
    (marks,) = (line for line in plot.convergence(late).get_lines() if line.get_label() == "step dropped")
    np.testing.assert_array_equal(marks.get_xdata(), [s.n_pass for s in late.trace if s.rejected])


def test_the_plans_picture_has_its_mass(solved):
    result = solved[0]
    np.testing.assert_allclose(plot.coarse_plan(result), result.plan, rtol=1e-12)
    coarse = plot.coarse_plan(result, 7)
    assert coarse.shape == (7, 7)
    np.testing.assert_allclose(coarse.sum(), result.mass, rtol=1e-9)
    np.testing.assert_allclose(coarse[0, 0], result.plan[:4, :3].sum(), rtol=1e-12)
    stored = mapuot.solve(csr_array(result.problem.M), reg=0.02, reg_m=0.3)
    np.testing.assert_allclose(plot.coarse_plan(stored, 7).sum(), stored.mass, rtol=1e-9)
    ax = plot.plan(result, most=7)
    np.testing.assert_array_equal(np.asarray(ax.get_images()[0].get_array()), coarse)
    assert len(ax.child_axes) == 2


def test_arrows_links_and_dots_are_those_of_the_plan(solved):
    result, x, y = solved
    (quiver,) = (c for c in plot.arrows(result, x, y, most=10).collections if hasattr(c, "U"))
    order, P = np.argsort(-result.row_marginal, kind="stable")[:10], result.plan
    image = (P @ y) / P.sum(1)[:, None]
    np.testing.assert_allclose(np.column_stack([quiver.U, quiver.V]), (image - x)[order], atol=1e-9)
    lines = plot.links(result, x, y, keep=0.5).collections[-1].get_segments()
    assert len(lines) == result.sparse(keep=0.5).nnz
    i, j = np.unravel_index(np.argmax(P), P.shape)
    np.testing.assert_allclose(lines[0], [x[i], y[j]])
    dots = plot.masses(result, x).collections[0]
    np.testing.assert_allclose(dots.get_array(), result.row_marginal * 30)
    assert plot.masses(result, side="cols").get_ylabel() == "moved / given"


def test_path_draws_what_changes():
    case = clouds(20, 20)
    regs = [0.1, 0.05]
    ax = plot.path(mapuot.path(case.M, case.a, case.b, regs=regs, reg_ms=1.0))
    assert ax.get_xlabel() == "reg"
    np.testing.assert_array_equal(ax.get_lines()[0].get_xdata(), regs)
    ax = plot.path(list(mapuot.path(case.M, case.a, case.b, regs=[0.1] * 2, reg_ms=[1.0, 2.0])))
    assert ax.get_xlabel() == "reg_m"
    with pytest.raises(ValueError, match="results must hold a Result"):
        plot.path([])


def test_a_report_loads_nothing_and_escapes_names(solved):
    """A report of an unconverged solve shows the first and the last of its 60 passes."""
    result = solved[0]
    name = "<script>alert(1)</script>.npz"
    text = report.page(
        result, summary.as_table(result), name, {"problem": name, "a": "x&y"}, store.contents(result), {"mapuot": "0"}
    )
    assert "<script" not in text.lower()
    assert html.escape(name) in text
    sources = re.findall(r"""\s(?:src|href|data|action)\s*=\s*["']?([^"'>]*)""", text)
    assert len(sources) == text.count("<img ") == 4
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|url\(|@import", text)
    assert "converged" in text
    assert f"{result.objective:.6g}" in text
    with pytest.warns(mapuot.ConvergenceWarning):
        late = mapuot.solve(clouds(30, 30).M, reg=1e-4, reg_m=9.0, max_passes=60, method="sinkhorn")
    text = report.page(late, summary.as_table(late), "x", {}, store.contents(late), {})
    assert "not converged: max_passes" in text
    assert "..." in text
