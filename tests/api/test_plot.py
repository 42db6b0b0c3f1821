"""Plots show the numbers of the result; the report is one page that loads no other file."""

import html
import re
import warnings

import numpy as np
import pytest
from problems import clouds
from scipy.sparse import csr_array

import mapuot

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")

from matplotlib import pyplot as plt  # noqa: E402

from mapuot import plot, report  # noqa: E402


@pytest.fixture(autouse=True)
def no_figure_stays():
    yield
    plt.close("all")


@pytest.fixture
def solved():
    rng = np.random.default_rng(0)
    x = rng.random((30, 2))
    y = rng.random((23, 2))
    M = ((x[:, None] - y) ** 2).sum(-1)
    return mapuot.solve(M, np.full(30, 1 / 30), np.full(23, 2 / 23), reg=0.02, reg_m=0.3), x, y


@pytest.mark.parametrize("nodes", [(7, 6), (5, 4, 3), (30,), (9, 2, 2)], ids=str)
@pytest.mark.parametrize("most", [400, 8, 3])
def test_the_plan_of_a_grid_is_added_up_by_slices(monkeypatch, nodes, most):
    rng = np.random.default_rng(0)
    target = tuple(n + 1 for n in nodes)
    a = rng.random(nodes)
    b = rng.random(target)
    a.flat[3] = 0.0
    result = mapuot.solve(mapuot.Grid(nodes, 0.2, target=target), a, b, reg=0.05, reg_m=1.0)
    plan = result.plan
    monkeypatch.setattr(type(result), "_blocks", None)  # no block of the plan is made
    sums = plot.coarse_plan(result, most)
    if max(plan.shape) <= most:
        whole = plan.shape
    else:
        whole = sums.shape
    assert sums.shape == whole
    lead = next(k for k in (3, 2, 1) if k == 1 or np.prod(target[:k]) <= most)
    slices = [np.arange(int(np.prod(x))) // int(np.prod(x[lead:])) for x in (nodes, target)]
    cells = [s if s[-1] < most else np.searchsorted(plot.cells(s[-1] + 1, most), s, side="right") - 1 for s in slices]
    want = np.zeros_like(sums)
    np.add.at(want, np.ix_(*cells), plan)
    np.testing.assert_allclose(sums, want, rtol=1e-12, atol=1e-300)


def test_slices_of_a_grid_keep_all_digits_of_a_large_translation():
    """From log scalings of 1e12 sums over slices were off by 7e-5."""
    a, b = np.random.default_rng(0).random((2, 12))
    found = mapuot.solve(mapuot.Grid((4, 3), spacing=0.3), a, 3 * b, reg=0.05, reg_m=(5e11, 5e10), tol=1e-5)
    assert abs(found.problem.translation) > 1e11
    right = found.plan.reshape(4, 3, 4, 3).sum((1, 3))
    np.testing.assert_allclose(plot.sums_of_slices(found, 4), right, rtol=1e-9)


def test_convergence_draws_the_trace(solved):
    result = solved[0]
    ax = plot.convergence(result)
    lines = {line.get_label(): line for line in ax.get_lines()}
    np.testing.assert_array_equal(lines["bound on the plan's error"].get_xdata(), [s.n_pass for s in result.trace])
    np.testing.assert_array_equal(lines["bound on the plan's error"].get_ydata(), [s.error for s in result.trace])
    assert ax.get_yscale() == "log"
    late = mapuot.solve(clouds(30, 30).M, reg=1e-4, reg_m=9.0, max_passes=60)
    (marks,) = (line for line in plot.convergence(late).get_lines() if line.get_label() == "step rejected")
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
    assert len(ax.child_axes) == 2  # the marginals
    assert "4.29 x 3.29 pairs" in " ".join(panel.get_ylabel() for panel in ax.figure.axes)


@pytest.fixture
def types():
    rng = np.random.default_rng(1)
    return np.array(["stem", "nerve", "skin"])[rng.integers(0, 3, 30)], np.array(["nerve", "skin"])[
        rng.integers(0, 2, 23)
    ]


@pytest.mark.parametrize("stored", [False, True])
def test_the_plan_by_types_has_them_side_by_side(solved, types, stored):
    result = solved[0]
    if stored:
        result = mapuot.solve(csr_array(result.problem.M), reg=0.02, reg_m=0.3)
        P = result.plan.toarray()
    else:
        P = result.plan
    ax = plot.plan(result, labels=types)
    rows, cols = (np.argsort(kind, kind="stable") for kind in types)
    np.testing.assert_allclose(ax.get_images()[0].get_array(), P[rows][:, cols], rtol=1e-12)
    assert [text.get_text() for text in ax.get_yticklabels()] == ["nerve", "skin", "stem"]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["nerve", "skin"]
    np.testing.assert_allclose(plot.coarse_plan(result, 7, [rows, cols])[0, 0], P[rows[:4]][:, cols[:3]].sum())


def test_the_plan_stays_within_axes_of_the_user(solved):
    """In a figure without a layout the colour bar and its label end before the right edge."""
    figure, ax = plt.subplots()
    plot.plan(solved[0], ax=ax)
    figure.canvas.draw()
    assert len(ax.child_axes) == 3
    edge = max(child.get_tightbbox().x1 for child in ax.child_axes)
    assert edge < figure.bbox.x1


def test_transitions_are_the_mass_between_types(solved, types):
    result = solved[0]
    ax = plot.transitions(result, types)
    table = np.array([[result.plan[types[0] == k][:, types[1] == e].sum() for e in ("nerve", "skin")]
                      for k in ("nerve", "skin", "stem")])  # fmt: skip
    shares = table / table.sum(1)[:, None]
    np.testing.assert_allclose(ax.get_images()[0].get_array(), shares, rtol=1e-7)
    moved = table[0].sum() / ((types[0] == "nerve").sum() / 30)
    assert ax.get_yticklabels()[0].get_text() == f"nerve\n{100 * moved:.0f} % moves"
    assert [text.get_text() for text in ax.texts] == [f"{share:.2f}" for share in shares.ravel()]


def quiver_of(ax):
    return next(c for c in ax.collections if hasattr(c, "U"))


def legend_of(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_arrows_are_a_sample_by_a_seed(solved):
    """The arrows of many rows are a random sample, not the rows that move the most, and the legend counts them."""
    result, x, y = solved
    P = result.plan
    step = (P @ y) / P.sum(1)[:, None] - x
    whole = plot.arrows(result, x, y)
    np.testing.assert_allclose(np.column_stack([quiver_of(whole).U, quiver_of(whole).V]), step, atol=1e-9)
    assert "arrows" in legend_of(whole)
    some = [plot.arrows(result, x, y, most=10, seed=seed) for seed in (0, 0, 1)]
    assert "10 of 30 arrows" in legend_of(some[0])
    first, again, other = (np.column_stack([quiver_of(ax).X, quiver_of(ax).Y]) for ax in some)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert {*map(tuple, first)} <= {*map(tuple, x)}
    assert {*map(tuple, first)} != {*map(tuple, x[np.argsort(-result.row_marginal)[:10]])}


def test_points_of_float32_are_drawn(solved):
    result, x, y = solved
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot.links(result, x.astype(np.float32), y.astype(np.float32))


def test_links_and_dots_are_those_of_the_plan(solved):
    result, x, y = solved
    ax = plot.links(result, x, y, keep=0.5)
    lines = ax.collections[-1].get_segments()
    assert len(lines) == result.sparse(keep=0.5).nnz
    i, j = np.unravel_index(np.argmax(result.plan), result.plan.shape)
    np.testing.assert_allclose(lines[0], [x[i], y[j]])
    assert "50 % of the mass" in legend_of(ax)
    assert f"3 of {len(lines)} pairs" in legend_of(plot.links(result, x, y, keep=0.5, most=3))
    dots = plot.masses(result, x).collections[0]
    np.testing.assert_allclose(dots.get_array(), result.row_marginal * 30)
    assert plot.masses(result, side="cols").get_ylabel() == "moved / given mass of a column"


def test_colours_of_shares_begin_at_0_and_have_1_in_the_middle(solved):
    result, x, y = solved
    for points, side in ((x, "rows"), (y, "cols")):
        norm = plot.masses(result, points, side).collections[0].norm
        assert [norm(share) for share in (0.0, 1.0)] == [0.0, 0.5]
        assert norm.vmax >= 2


def test_an_axis_of_shares_shows_its_data(solved):
    """Shares above .9 take up most of the axis, which begins near the least of them."""
    near = mapuot.solve(solved[0].problem.M, reg=0.05, reg_m=30.0)
    low, high = plot.masses(near).get_ylim()
    share = near.row_marginal * 30
    assert share.min() > 0.9
    assert share.max() - share.min() > 0.5 * (high - low)


def test_types_have_colours_and_names(solved, types):
    result, x, y = solved
    for ax in (plot.arrows(result, x, y, labels=types), plot.links(result, x, y, labels=types)):
        assert {"stem", "nerve", "skin"} <= set(legend_of(ax))
        colours = [tuple(c.get_facecolor()[0]) for c in ax.collections if c.get_label() in ("stem", "nerve", "skin")]
        assert len(set(colours)) == 3
    ticks = plot.masses(result, labels=types[0]).get_xticklabels()
    assert [text.get_text() for text in ticks] == ["nerve", "skin", "stem"]
    many = np.arange(30).astype(str), np.arange(23).astype(str)
    assert len({tuple(c.get_facecolor()[0]) for c in plot.links(result, x, y, labels=many).collections
                if c.get_label().isdigit()}) == 30  # fmt: skip


def test_dark_styles_have_light_ink(solved):
    result, x, y = solved
    with plt.style.context("dark_background"):
        quiver = quiver_of(plot.arrows(result, x, y))
        low, high = plot.plan(result).get_images()[0].cmap([0.0, 1.0])
    assert quiver.get_facecolor()[0, :3].min() == 1.0  # white
    assert low[:3].max() == 0.0  # no mass is the background
    assert high[:3].min() > 0.5


def test_colours_of_rows_and_columns_are_far_apart(solved):
    """The first two colours of dark_background, a pale green and a pale yellow, look alike."""
    result, x, y = solved
    for style in ("default", "dark_background", "ggplot", "Solarize_Light2", "grayscale"):
        with plt.style.context(style):
            rows, cols = (c.get_facecolor()[0, :3] for c in plot.links(result, x, y).collections[:2])
        assert np.linalg.norm(rows - cols) > 1 / 3**0.5, style


def test_titles_say_how_much_moves(solved, types):
    result, x, y = solved  # masses 1 and 2
    moved = f"mass {result.mass:.3g} moves, of 1 in rows and 2 in columns"
    drawn = plot.arrows(result, x, y), plot.links(result, x, y), plot.transitions(result, types)
    assert [ax.get_title() for ax in drawn] == [moved] * 3
    assert plot.plan(result).child_axes[1].get_title() == moved
    even = mapuot.solve(mapuot.PointCloud(x, y), reg=0.02, reg_m=0.1)
    assert plot.arrows(even, x, y).get_title() == f"{100 * even.mass:.3g} % of the mass moves"
    given = even.problem.rows.weight
    left = np.maximum(given - even.row_marginal, 0).sum()
    created = np.maximum(even.row_marginal - given, 0).sum()
    text = f"{100 * left:.2g} % left behind" + (f", {100 * created:.2g} % created" if created > 1e-3 else "")
    assert plot.masses(even).get_title() == text
    ax = plt.subplots()[1]
    ax.set_title("mine")
    assert plot.arrows(even, x, y, ax=ax).get_title() == "mine"


def test_keywords_go_to_matplotlib(solved, types):
    result, x, y = solved
    assert plot.plan(result, cmap="magma", vmax=0.1).get_images()[0].get_clim()[1] == 0.1
    assert plot.convergence(result, color="red").get_lines()[0].get_color() == "red"
    assert plot.links(result, x, y, linewidths=3).collections[-1].get_linewidths() == [3]
    np.testing.assert_array_equal(quiver_of(plot.arrows(result, x, y, color="red")).get_facecolor()[0, :3], [1, 0, 0])
    assert plot.masses(result, x, s=50).collections[0].get_sizes() == [50]
    assert plot.transitions(result, types, vmax=0.5).get_images()[0].get_clim()[1] == 0.5
    with pytest.raises(AttributeError, match="colour"):
        plot.convergence(result, colour="red")


@pytest.fixture(scope="module")
def grid():
    rng = np.random.default_rng(0)
    a = rng.random((6, 8))
    b = rng.random((5, 9))
    a[0, 0] = 0.0
    cost = mapuot.Grid((6, 8), (0.5, 0.25), target=(5, 9), offset=(0.1, -0.3))
    return mapuot.solve(cost, a, b, reg=0.1, reg_m=0.5), cost


def test_images_of_a_grid(grid):
    result, cost = grid
    axes = plot.image(result)
    gone = np.maximum(result.problem.rows.weight - result.row_marginal, 0).sum()
    sums = (result.problem.rows.mass, result.mass, gone)
    names = [f"{name}: {value:.3g}" for name, value in zip(("given", "received", "left behind"), sums, strict=True)]
    assert [ax.get_title() for ax in axes] == [*names, "displacement"]
    given, received, left, way = (np.ma.filled(ax.get_images()[0].get_array(), np.nan) for ax in axes)
    np.testing.assert_allclose(given, result.problem.rows.weight.reshape(6, 8))
    np.testing.assert_allclose(received, result.plan.sum(0).reshape(5, 9), rtol=1e-9)
    np.testing.assert_allclose(left, given - result.plan.sum(1).reshape(6, 8), atol=1e-9)
    steps = result.barycentric_map(cost.points("cols")) - cost.points()
    assert np.isnan(way[0, 0])  # nothing moves from there
    there = np.isfinite(way)
    np.testing.assert_allclose(way[there], np.linalg.norm(steps, axis=1).reshape(6, 8)[there])
    left, right, bottom, top = axes[1].get_images()[0].get_extent()
    np.testing.assert_allclose([top, bottom, left, right], [0.1 - 0.25, 0.1 + 4.5 * 0.5, -0.425, -0.3 + 8.5 * 0.25])
    quiver = quiver_of(axes[0])
    starts = np.column_stack([quiver.Y, quiver.X])
    rows = [np.flatnonzero((np.abs(cost.points() - start) < 1e-9).all(1))[0] for start in starts]
    np.testing.assert_allclose(np.column_stack([quiver.V, quiver.U]), steps[rows], rtol=1e-9)
    one = plot.image(result, show="left behind", cmap="viridis")
    assert one.get_images()[0].get_cmap().name == "viridis"


def test_path_draws_what_changes():
    case = clouds(20, 20)
    regs = [0.1, 0.05]
    answers = list(mapuot.path(case.M, case.a, case.b, regs=regs, reg_ms=1.0))
    mass, cost, passes = plot.path(answers)
    assert passes.get_xlabel() == "reg"
    for ax, values in ((mass, "mass"), (cost, "cost"), (passes, "n_passes")):
        np.testing.assert_array_equal(ax.get_lines()[0].get_xdata(), regs)
        np.testing.assert_array_equal(ax.get_lines()[0].get_ydata(), [getattr(one, values) for one in answers])
        assert ax.get_ylim()[0] <= 0
    axes = plot.path(list(mapuot.path(case.M, case.a, case.b, regs=[0.1] * 2, reg_ms=[1.0, 2.0])))
    assert axes[2].get_xlabel() == "reg_m"
    with pytest.raises(ValueError, match="results must hold a Result"):
        plot.path([])
    with pytest.raises(ValueError, match="ax must be 3 Axes, got 1"):
        plot.path(answers, ax=mass)


WRONG = {
    "plan": (), "convergence": (), "masses": (), "image": (), "transitions": ((),),
    "arrows": (np.ones((4, 2)), np.ones((5, 2))), "links": (np.ones((4, 2)), np.ones((5, 2))),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_another_object_is_named(name, solved):
    for wrong, kind in ((np.ones((4, 5)), "ndarray"), ([solved[0]], "list"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"result must be a Result, got {kind}"):
            getattr(plot, name)(wrong, *WRONG[name])
    batch = mapuot.solve_batch(np.ones((2, 4, 5)), reg=1.0, reg_m=1.0)
    with pytest.raises(TypeError, match=r"got BatchResult: draw one of its answers, result\[0\]"):
        getattr(plot, name)(batch, *WRONG[name])
    assert not plt.get_fignums()  # no empty figure is left


def test_points_of_more_dimensions_say_how_to_draw_them(solved):
    cells = np.ones((30, 10))
    for draw in (plot.arrows, plot.links):
        with pytest.raises(
            ValueError, match=r"shape \(30, 2\), got shape \(30, 10\): pass two coordinates, x\[:, :2\]"
        ):
            draw(solved[0], cells, solved[2])


def test_objects_that_hold_a_result_are_drawn(solved):
    tuned = mapuot.tune(solved[0].problem.M, mass=0.8, sharpness=0.5, tol=1e-2)
    drawn, right = (plot.plan(one).get_images()[0].get_array() for one in (tuned, tuned.result))
    np.testing.assert_array_equal(drawn, right)
    with pytest.raises(TypeError, match="y must be given, the points of the columns"):
        plot.arrows(tuned, solved[1])


def test_other_objects_of_path_and_image_are_named(solved):
    for wrong, text in (
        (solved[0], "results must be a list of Results, got one Result"),
        ([np.ones(3)], r"results\[0\] must be a Result, got ndarray"),
        (3.0, "results must be a list of Results, got float"),
    ):
        with pytest.raises(TypeError, match=text):
            plot.path(wrong)
    with pytest.raises(TypeError, match="result must be the answer of a Grid, got one of"):
        plot.image(solved[0])
    volume = mapuot.solve(mapuot.Grid((2, 3, 2)), reg=1.0, reg_m=1.0)
    with pytest.raises(ValueError, match="a Grid with 2 axes, got 3"):
        plot.image(volume)
    with pytest.raises(TypeError, match="got the text 'received': pass show='received'"):
        plot.image(volume, "received")
    mean = mapuot.barycenter(mapuot.Grid((3, 3)), np.ones((2, 3, 3)), reg=1.0)
    with pytest.raises(TypeError, match=r"got BarycenterResult: its image is result\.q"):
        plot.image(mean)
    assert mean.q.shape == (3, 3)
    with pytest.raises(TypeError, match="ax must be an Axes of Matplotlib"):
        plot.convergence(solved[0], ax=3)


def report_of(result, folder, **named):
    result.report(folder / "page.html", **named)
    return (folder / "page.html").read_text(encoding="utf-8")


def test_a_report_loads_nothing_and_escapes_names(solved, tmp_path):
    """A report of an unconverged solve shows the first and the last of its 60 passes."""
    result = solved[0]
    name = "<script>alert(1)</script>.npz"
    given = {"problem": name, "a": "x&y", "b": None}
    report.write_report(result, tmp_path / "page.html", name, given)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script" not in text.lower()
    assert html.escape(name) in text
    assert "x&amp;y" in text
    assert "<th>b</th>" not in text
    sources = re.findall(r"""\s(?:src|href|data|action)\s*=\s*["']?([^"'>]*)""", text)
    assert len(sources) == text.count("<img alt='") == 4
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|url\(|@import", text)
    assert "converged" in text
    with pytest.warns(mapuot.ConvergenceWarning):
        late = mapuot.solve(clouds(30, 30).M, reg=1e-4, reg_m=9.0, max_passes=60, method="sinkhorn")
    text = report_of(late, tmp_path)
    assert "<p class='no'>max_passes after 60 passes" in text
    assert "..." in text


def test_a_report_says_each_number_once_and_explains_it(solved, tmp_path):
    _, x, y = solved
    cloud = mapuot.PointCloud(x, y, metric="euclidean")
    result = mapuot.solve(cloud, reg=0.02, reg_m=(0.3, np.inf))
    text = report_of(result, tmp_path, title="Cells of two days")
    assert "<h1>Cells of two days</h1>" in text
    assert "<title>Cells of two days</title>" in text
    assert html.escape("metric 'euclidean'") in text
    heads = re.findall(r"<tr><th>([^<]*)</th><td>", text)
    assert len(set(heads)) == len(heads)
    for name in report.VALUES:
        assert f"<th>{name}</th><td>{float(getattr(result, name)):.6g}</td><td>{report.VALUES[name]}" in text
    assert text.count("differs from the optimal plan by at most") == 1
    head, end = text.split("<h2>For bug reports</h2>")
    assert result.how in html.unescape(end)
    assert html.escape(result.how) not in head
    alts = re.findall(r"<img alt='([^']*)'", text)
    assert len(alts) == 3  # the columns are balanced: their shares are all 1
    assert any(f"from {(result.row_marginal * 30).min():.6g}" in alt for alt in alts)
    assert "Transport plan of 30 x 23" in report_of(result, tmp_path)


def test_a_report_of_a_grid_shows_images(grid, tmp_path):
    alts = re.findall(r"<img alt='([^']*)'", report_of(grid[0], tmp_path))
    assert [alt.partition(":")[0] for alt in alts[1:]] == ["Four images"]


def test_a_notebook_shows_a_short_table(solved):
    heads = re.findall(r"<th>([^<]*)</th>", solved[0]._repr_html_())
    assert heads == ["solve", "costs", "reg", "rows", "columns", "moved mass", "accuracy", "sharpness"]
    balanced = mapuot.solve(solved[0].problem.M, reg=0.1, reg_m=np.inf, reference="uniform")._repr_html_()
    assert "balanced marginals" in balanced
    assert "<th>reference</th><td>ones</td>" in balanced
    scaled = mapuot.solve(solved[0].problem.M, reg=0.05, reg_m=(2.0, np.inf), scale_cost="median")
    unit = f"x scale_cost = {0.05 * scaled.scale_cost:.6g}, "
    assert f"<td>0.05 {unit}" in scaled._repr_html_()
    assert f"KL, reg_m 2 x scale_cost = {2 * scaled.scale_cost:.6g}<" in scaled._repr_html_()
    assert "optimal plan of its last step" in mapuot.gromov(solved[1], solved[2], reg=0.1, reg_m=1.0)._repr_html_()


def test_shares_of_a_balanced_side_are_a_flat_line(solved):
    """Differences by rounding do not fill the axis."""
    balanced = mapuot.solve(solved[0].problem.M, reg=0.1, reg_m=np.inf)
    low, high = plot.masses(balanced).get_ylim()
    assert low <= 0.99
    assert high >= 1.01
