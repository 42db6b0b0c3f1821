"""Time courses: wot's couplings, simulated growth that is known, descendants and ancestors."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.spatial.distance import cdist

import mapuot
from mapuot.problem.settings import POINTS
from mapuot.wot import OTModel, components


def course(counts=((80, 60), (90, 40), (100, 20)), seed=0):
    """Return two cell kinds far apart; the counts by day and kind."""
    rng = np.random.default_rng(seed)
    kind = np.concatenate([np.repeat([0, 1], pair) for pair in counts])
    days = np.repeat(np.arange(len(counts), dtype=float), [sum(pair) for pair in counts])
    X = kind[:, None] * np.array([6.0, 0.0]) + rng.normal(size=(len(kind), 2))
    return X, days, kind


def anndata_of(X, days, **columns):
    return SimpleNamespace(X=X, obs={"day": days, **columns}, obsm={"X_pca": X[:, :1]})


def by_scaling(C, G, epsilon, lambda1, lambda2, count=20000):
    """Return wot's fixed point by the formulas of its paper: a map with row sums of about G."""
    m, n = C.shape
    K = np.exp(-C / epsilon) / n
    u = np.ones(m)
    v = np.ones(n)
    b = np.full(n, G.sum() / n)
    for _ in range(count):
        u = (G / (K @ v)) ** (lambda1 / (lambda1 + epsilon))
        v = (b / (K.T @ u)) ** (lambda2 / (lambda2 + epsilon))
    return u[:, None] * K * v


@pytest.mark.parametrize("growth", [None, "known"])
def test_the_coupling_is_wots(growth):
    X, days, kind = course(((25, 15), (20, 12)))
    if growth is None:
        rate = None
    else:
        rate = np.where(kind == 0, 1.5, 0.6)
    model = OTModel(X, days=days, growth=rate, tol=1e-10)
    C = ((X[days == 0][:, None] - X[days == 1]) ** 2).sum(-1)
    C /= np.median(C)
    if rate is None:
        G = np.ones(40)
    else:
        G = rate[days == 0]
    np.testing.assert_allclose(model.coupling(0, 1).result.plan, by_scaling(C, G, 0.05, 1.0, 50.0), atol=1e-9)


@pytest.mark.filterwarnings("ignore")
def test_beside_wot():
    """With equal parameters, growth iterations included, the couplings equal wot's."""
    pytest.importorskip("wot", reason="needs wot: pip install --no-deps wot")
    wot_itself = pytest.importorskip("wot.ot.optimal_transport")  # its solver, without the pages imported beside it
    X, days, _ = course(((25, 15), (30, 12)))
    C = ((X[days == 0][:, None] - X[days == 1]) ** 2).sum(-1)
    C /= np.median(C)
    theirs, growths = wot_itself.compute_transport_matrix(
        wot_itself.optimal_transport_duality_gap, C=C, G=np.ones(40), growth_iters=3, lambda1=1.0, lambda2=50.0,
        epsilon=0.05, batch_size=5, tolerance=1e-12, tau=10000, epsilon0=1, max_iter=10**6,
    )  # fmt: skip
    ours = OTModel(X, days=days, growth_iters=3, tol=1e-9).coupling(0, 1)
    np.testing.assert_allclose(ours.result.plan, theirs, atol=1e-6)
    for found, right in zip(ours.growths, growths, strict=False):
        np.testing.assert_allclose(found, right, rtol=1e-5)


def test_growth_that_was_put_in_is_found():
    """Counts 80:60, 90:40: the first kind grows by 90/80 for each 40/60 of the second."""
    X, days, kind = course()
    coupling = OTModel(X, days=days, growth_iters=15).coupling(0, 1)
    growth = coupling.growth
    first = growth[kind[days == 0] == 0].mean()
    second = growth[kind[days == 0] == 1].mean()
    assert first / second == pytest.approx((90 / 80) / (40 / 60), rel=0.03)
    assert len(coupling.growths) == 16
    one = OTModel(X, days=days).coupling(0, 1).growth
    assert 1 < one[kind[days == 0] == 0].mean() / one[kind[days == 0] == 1].mean() < first / second


def test_growth_of_gene_sets():
    """The rates follow moscot's and wot's formulas, for scores and for genes by name; the coupling has these masses."""
    X, days, _ = course()
    rng = np.random.default_rng(3)
    cells = anndata_of(X, days)
    cells.X, cells.var_names = np.hstack([X, rng.poisson(2.0, (len(X), 5))]), [f"gene {k}" for k in range(7)]
    z = (cells.X - cells.X.mean(0)) / cells.X.std(0)
    birth = np.clip(z[:, [3, 4]], -5, 5).mean(1)
    death = np.clip(z[:, [2, 5, 6]], -5, 5).mean(1)
    beta = 0.3 + 1.4 / (1 + np.exp(-8 * (birth - 0.25)))
    delta = 0.3 + 1.4 / (1 + np.exp(-20 * (death - 0.1)))
    by_name = ["gene 3", "gene 4"], np.array(["gene 2", "gene 5", "gene 6"])
    for pair in (by_name, (birth, death), (birth, by_name[1])):
        np.testing.assert_allclose(OTModel(cells, growth=pair).growth, np.exp(beta - delta), rtol=1e-12)
    coupling = OTModel(cells, growth=by_name, local_pca=0).coupling(0, 2)
    np.testing.assert_allclose(coupling.result.problem.rows.weight, np.exp(2 * (beta - delta))[days == 0], rtol=1e-12)
    np.testing.assert_allclose(coupling.growths[-1] ** 2, coupling.result.row_marginal)


def test_scores_beside_wot_and_rates_beside_moscot():
    moscot = pytest.importorskip("moscot.base.problems.birth_death", reason="needs moscot: make test-doors")
    anndata = pytest.importorskip("anndata")
    scores = pytest.importorskip("wot.gene_set_scores")
    X = np.random.default_rng(0).poisson(1.5, (90, 6)).astype(float)
    cells = anndata.AnnData(X)
    cells.var_names = list("abcdef")
    sets = anndata.AnnData(np.eye(6)[:, :2] + np.eye(6)[:, 2:4])
    sets.obs_names = cells.var_names
    birth, death = (np.asarray(scores.score_gene_sets(cells, sets[:, [k]])["score"]) for k in (0, 1))
    found = OTModel(cells, days=np.zeros(90), growth=(["a", "c"], ["b", "d"])).growth
    np.testing.assert_allclose(found, np.exp(moscot.beta(birth) - moscot.delta(death)), rtol=1e-6)


def test_descendants_and_ancestors_follow_the_days():
    X, days, kind = course()
    model = OTModel(anndata_of(X, days), growth_iters=10)
    assert model.timepoints == [0.0, 1.0, 2.0]
    found = model.descendants(kind[days == 0] == 1, 0, 2)
    assert found[kind[days == 2] == 1].sum() > 0.95
    T1, T2 = (model.coupling(t, t + 1).result.plan for t in (0, 1))
    p = (kind[days == 0] == 1) @ T1
    right = p / p.sum() @ T2
    np.testing.assert_allclose(found, right / right.sum(), atol=1e-9)
    back = model.ancestors(kind[days == 2] == 0, 2, 0)
    q = T2 @ (kind[days == 2] == 0)
    q = T1 @ (q / q.sum())
    np.testing.assert_allclose(back, q / q.sum(), atol=1e-9)
    assert set(model.couplings) == {(0.0, 1.0), (1.0, 2.0)}
    assert all("plan" in vars(c.result) for c in model.couplings.values())  # asked for above


def test_a_coupling_forms_no_plan():
    X, days, kind = course()
    coupling = OTModel(X, days=days).coupling(0, 1)
    classes, shares = coupling.fates(kind[days == 1])
    np.testing.assert_array_equal(classes, [0, 1])
    assert (shares.argmax(1) == kind[days == 0]).mean() > 0.97
    assert coupling.sparse(0.9).nnz < 130 * 130 // 4
    c0, c1, table = coupling.transition_table(kind[days == 0], kind[days == 1])
    assert "plan" not in vars(coupling.result)
    P = coupling.result.plan
    for i in c0:
        for j in c1:
            assert table[i, j] == pytest.approx(P[kind[days == 0] == i][:, kind[days == 1] == j].sum())
    np.testing.assert_allclose(coupling.push_forward(np.ones(140)), P.sum(0), rtol=1e-9)
    np.testing.assert_allclose(coupling.pull_back(np.ones(130)), P.sum(1), rtol=1e-9)


def test_moscots_tau_is_a_lambda():
    X, days, _ = course(((25, 15), (20, 12)))
    tau = 0.9
    moscot = OTModel(X, days=days, epsilon=0.1, tau_a=tau, tau_b=1.0, scale_cost="mean", reference="product")
    assert moscot.lambda1 == pytest.approx(0.1 * tau / (1 - tau))
    assert moscot.lambda2 == np.inf
    C = ((X[days == 0][:, None] - X[days == 1]) ** 2).sum(-1)
    right = mapuot.solve(C / C.mean(), np.ones(40), np.full(32, 40 / 32), reg=0.1, reg_m=(0.9, np.inf))
    np.testing.assert_allclose(moscot.coupling(0, 1).result.plan, right.plan, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tau", [(1.0, 1.0), (0.9, 1.0), (0.9, 0.8)])
@pytest.mark.parametrize("given", ["points", "costs"])
def test_backend_of_moscot(tau, given):
    """mapuot's answers to moscot's problems agree with moscot's own backend to that backend's threshold."""
    time = pytest.importorskip("moscot.problems.time", reason="needs moscot: make test-doors")
    anndata = pytest.importorskip("anndata")
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("mapuot.moscot")
    X, days, kind = course(((25, 15), (20, 12)))
    names = [f"cell {i}" for i in range(len(kind))]
    obs = pandas.DataFrame({"day": pandas.Categorical(days), "kind": pandas.Categorical(kind)}, index=names)
    cells = anndata.AnnData(X, obs=obs, obsm={"X_pca": X})
    found = []
    words = {"epsilon": 0.1, "tau_a": tau[0], "tau_b": tau[1], "threshold": 1e-6, "max_iterations": 10**5}
    if given == "points":
        cost = "sq_euclidean"
    else:
        cost = "euclidean"
    for more in ({}, {"backend": "mapuot", "tol": 1e-9}):
        problem = (
            time.TemporalProblem(cells).prepare(time_key="day", joint_attr="X_pca", cost=cost).solve(**words, **more)
        )
        solution = problem[0.0, 1.0].solution
        table = problem.cell_transition(0.0, 1.0, "kind", "kind")
        moved = solution.push(np.eye(40)[:, :3]), solution.pull(np.ones(32)), solution.sparsify("threshold", 1e-9)
        arrays = solution.transport_matrix, moved[0], moved[1], moved[2].transport_matrix.toarray(), table
        found.append([np.asarray(x, float) for x in (*arrays, solution.cost)])
        assert solution.converged
        assert solution.shape == (40, 32)
    for theirs, ours in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())
    assert solution.result.error_bound <= 1e-9
    assert ("points" in solution.result.problem.cost.kind) == (given == "points")
    with pytest.raises(NotImplementedError, match="rank must be -1"):
        problem.solve(**words, rank=3, backend="mapuot")


def test_components_keep_what_varies():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 3)) @ rng.normal(size=(3, 40))
    x, y = components(X[:30], X[30:], 10)
    centred = X - X.mean(0)
    centred -= centred.mean(1, keepdims=True)
    right = ((centred[:30, None] - centred[30:]) ** 2).sum(-1)
    np.testing.assert_allclose(((x[:, None] - y) ** 2).sum(-1), right, atol=1e-9)  # rank 4: nothing is lost
    model = OTModel(X, days=np.repeat([0, 1], 30), local_pca=10)
    M = model.coupling(0, 1).result.problem.M
    np.testing.assert_allclose(np.asarray(M), right / np.median(right), atol=1e-9)


def test_points_take_the_place_of_a_large_cost(using):
    X, days, _ = course(((25, 15), (20, 12)))
    small = OTModel(X, days=days, scale_cost=7.0).coupling(0, 1)
    using(POINTS, most_formed=10)
    large = OTModel(X, days=days, scale_cost=7.0).coupling(0, 1)
    assert large.result.problem.cost.cloud is not None
    np.testing.assert_allclose(large.result.plan, small.result.plan, atol=1e-6)
    scaled = OTModel(X, days=days).coupling(0, 1).result.problem.M
    assert np.median(np.asarray(scaled)) == pytest.approx(1, rel=0.05)


def test_annotated_data(tmp_path):
    anndata = pytest.importorskip("anndata")
    import pandas as pd
    from scipy import sparse

    X, days, kind = course(((25, 15), (20, 12)))
    rate = np.where(kind == 0, 1.2, 0.8)
    obs = pd.DataFrame({"day": days, "cell_growth_rate": rate}, index=[f"cell{i}" for i in range(len(X))])
    data = anndata.AnnData(sparse.csr_matrix(X), obs, obsm={"X_pca": X})
    right = OTModel(X, days=days, growth=rate).coupling(0, 1).result.plan
    np.testing.assert_allclose(OTModel(data).coupling(0, 1).result.plan, right, atol=1e-9)
    np.testing.assert_allclose(OTModel(data, representation="X_pca").coupling(0, 1).result.plan, right, atol=1e-9)


def named_cells(X, days, **obs):
    """Return an AnnData of these cells with names in another order."""
    anndata = pytest.importorskip("anndata")
    pandas = pytest.importorskip("pandas")
    names = [f"cell {(7 * i) % len(X)}" for i in range(len(X))]
    return anndata.AnnData(X, obs=pandas.DataFrame({"day": days, **obs}, index=names))


def test_a_cell_without_growth_dies():
    X, days, _ = course(((25, 15), (20, 12)))
    growth = np.ones(len(X))
    kept = np.arange(len(X)) != 3
    growth[3] = 0.0
    right = OTModel(X[kept], days=days[kept], scale_cost=8.0).coupling(0, 1).result.plan
    coupling = OTModel(X, days=days, growth=growth, scale_cost=8.0).coupling(0, 1)
    assert coupling.growth[3] == coupling.result.plan[3].sum() == 0
    np.testing.assert_allclose(np.delete(coupling.result.plan, 3, 0), right, atol=1e-7)
    with pytest.raises(ValueError, match="growth must be > 0 for some cell of day 0: all of them die"):
        OTModel(X, days=days, growth=np.where(days == 0, 0.0, 1.0)).coupling(0, 1)
    growth[4] = np.nan
    with pytest.raises(ValueError, match="growth must be finite and >= 0, got nan for cell 4"):
        OTModel(X, days=days, growth=growth)
    with pytest.raises(ValueError, match="growth must be finite and >= 0, got nan for cell 'cell 28'"):
        OTModel(named_cells(X, days), growth=growth)


def test_days_are_numbers_or_lengths_of_time():
    pandas = pytest.importorskip("pandas")
    X, days, _ = course()
    right = OTModel(X, days=days).coupling(0, 2).growth
    lengths = pandas.to_timedelta(days, unit="D")
    texts = pandas.Categorical([f"{t:g}" for t in days])
    for given in (lengths, lengths.to_numpy(), texts, pandas.Series(days).astype("Float64"), pandas.Categorical(days)):
        np.testing.assert_array_equal(OTModel(X, days=given).coupling(0, 2).growth, right)
    words = pandas.Categorical([f"E{t:g}" for t in days])
    with pytest.raises(ValueError, match=r"got 'E0': pass \.astype\(str\)\.str\.removeprefix\('E'\)\.astype\(float\)"):
        OTModel(X, days=words)
    numbers = pandas.Series(words).astype(str).str.removeprefix("E").astype(float)
    np.testing.assert_array_equal(OTModel(X, days=numbers).coupling(0, 2).growth, right)
    with pytest.raises(ValueError, match=r"^days must be numbers of days, got 'early': .*map\(\{'early': \.\.\.\}\)"):
        OTModel(X, days=np.where(days > 0, "late 2", "early"))
    with pytest.raises(ValueError, match=r"^days \(obs\['stage'\]\) must be numbers of days, got 'E0'"):
        OTModel(named_cells(X, days, stage=words), day_field="stage")
    with pytest.raises(TypeError, match=r"^days must be numbers of days, got dates: subtract the first of them"):
        OTModel(X, days=pandas.Timestamp("2024-01-01") + lengths)
    some = pandas.Series(days).astype("Float64")
    some[:3] = None
    assert OTModel(X, days=some).coupling(0, 1).shape == (137, 130)


def test_what_is_missing_is_named():
    X, days, _ = course()
    cells = named_cells(X, days, stage=np.where(days > 0, "late", "early"))
    cells.obsm["X_pca"] = X
    for given, text in (
        ({"representation": "X_scVI"}, "representation must be a matrix of data.obsm, ['X_pca'], got 'X_scVI'"),
        ({"growth": "S_score"}, "growth must be (cells,) values or a column of obs, ['day', 'stage'], got 'S_score'"),
        ({"growth": "stage"}, "growth (obs['stage']) must hold numbers, got 'early'"),
        ({"growth": (["MKI67"], ["0"])}, "growth[0] must be names of genes in data.var_names, got ['MKI67']"),
    ):
        with pytest.raises((ValueError, TypeError)) as told:
            OTModel(cells, **given)
        assert text in str(told.value)
    with pytest.warns(UserWarning, match=r"growth\[0\]: 1 of 2 genes are not in .* and are left out: \['MKI67'\]"):
        found = OTModel(cells, growth=(["0", "MKI67"], ["1"])).growth
    np.testing.assert_array_equal(found, OTModel(cells, growth=(["0"], ["1"])).growth)
    X = X.copy()
    X[days == 1, 1] = np.nan
    with pytest.raises(ValueError, match=r"data must not hold NaN or inf, .* in 130 cells of day 1, first cell 140"):
        OTModel(X, days=days).coupling(0, 1)
    model = OTModel(cells)
    with pytest.raises(ValueError, match=r"t1, the later day, comes first: ancestors\(population, 1, 0\) goes from 1"):
        model.ancestors(np.ones(140), 0, 1)
    with pytest.raises(ValueError, match=r"t1 must be after t0: descendants\(population, 0, 1\) goes from 0 to 1"):
        model.descendants(np.ones(140), 1, 0)
    with pytest.raises(
        ValueError, match=r"got 'late': for the cells of a label pass the mask obs\['stage'\] == 'late'"
    ):
        model.descendants("late", 0, 1)
    with pytest.raises(ValueError, match=r"pass days= the name of one of its columns, \['day', 'stage'\]"):
        OTModel(cells, day_field="time")
    np.testing.assert_array_equal(model.descendants(cells[:9], 0, 1), model.descendants(cells.obs_names[:9], 0, 1))
    stages = cells.obs["stage"]
    for words, text in ((["nobody"], "nobody"), (stages, "early"), (stages.astype("category"), "early")):
        with pytest.raises(ValueError, match=f"population must be names of cells, got '{text}'"):
            model.descendants(words, 0, 1)
    with pytest.raises(ValueError, match="t0 and t1 must be two days, got 1 twice"):
        model.ancestors(np.ones(130), 1, 1)


def test_cells_by_name():
    X, days, kind = course()
    cells = named_cells(X, days, kind=np.array(["a", "b"])[kind], rate=np.where(kind == 0, 1.2, 0.9))
    model = OTModel(cells, growth="rate")
    plain = OTModel(X, days=days, growth=np.where(kind == 0, 1.2, 0.9))
    chosen = kind == 1
    right = plain.descendants(chosen[days == 0], 0, 2)
    by_mask = model.descendants(chosen, 0, 2)
    assert by_mask.index.equals(cells.obs_names[days == 2])
    names = cells.obs_names[chosen]
    weights = cells.obs["kind"].eq("b").sample(frac=1, random_state=0)  # in another order, matched by name
    for population in (chosen, names, names.tolist(), names[np.isin(names, cells.obs_names[days == 0])], weights):
        np.testing.assert_allclose(model.descendants(population, 0, 2), right, rtol=1e-9)
    back = model.ancestors(by_mask, 2, 0)
    np.testing.assert_allclose(back, plain.ancestors(right, 2, 0), rtol=1e-9)
    coupling = model.coupling(0, 1)
    same = plain.coupling(0, 1)
    assert coupling.growth.index.equals(cells.obs_names[days == 0])
    classes, shares = coupling.fates("kind")
    np.testing.assert_allclose(shares["b"], same.fates(kind[days == 1])[1][:, 1], rtol=1e-9)
    assert shares.index.equals(cells.obs_names[days == 0])
    assert list(classes) == list(shares.columns) == ["a", "b"]
    table = coupling.transition_table("kind")[2]
    np.testing.assert_allclose(table, same.transition_table(kind[days == 0], kind[days == 1])[2], rtol=1e-9)
    assert list(table.index) == list(table.columns) == ["a", "b"]
    shares = model.transition_table("kind", 0, 2)[2]
    np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(shares.loc["b", "a"], right[kind[days == 2] == 0].sum(), rtol=1e-9)
    np.testing.assert_allclose(plain.transition_table(kind, 0, 2)[2], shares, rtol=1e-9)


def test_words_of_moscot_and_wot():
    model = OTModel(np.random.default_rng(0).random((9, 2)), days=np.repeat([0, 1], [4, 5]))
    for thing, word, name in (
        (model, "push", "descendants"), (model, "pull", "ancestors"), (model, "cell_transition", "transition_table"),
        (model, "transport_map", "coupling"), (model.coupling(0, 1), "push", "push_forward"),
        (model.coupling(0, 1), "pull", "pull_back"), (model, "compute_transport_map", "coupling"),
        (model, "fates", "coupling(t0, t1).fates"), (model, "growth_rates", "growth"),
        (model, "report", "coupling(t0, t1).result.report"), (model.coupling(0, 1), "save", "result.save"),
        (model.coupling(0, 1), "plan", "result.plan"), (model.coupling(0, 1), "gamma", "result.plan"),
    ):  # fmt: skip
        with pytest.raises(AttributeError, match=re.escape(f"has no {word}: did you mean {name}?")):
            getattr(thing, word)
    assert repr(model) == "<mapuot.wot.OTModel days 0 (4 cells), 1 (5 cells), epsilon 0.05, lambda1 1, lambda2 50>"


def test_unknown_arguments_are_named_at_once():
    X, days, _ = course()
    for word, told in (
        ("joint_attr", "did you mean representation?"), ("use_rep", "did you mean representation?"),
        ("time_key", "did you mean day_field?"), ("eps", "did you mean epsilon?"), ("lamda1", "did you mean lambda1"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=re.escape(f"OTModel() has no {word}: {told}")):
            OTModel(X, days=days, **{word: "x"})
    assert OTModel(X, days=days, max_passes=3, threads=1).options == {"max_passes": 3, "threads": 1}


def test_pictures_of_a_coupling_take_names():
    """Labels and points of a Coupling may be names, or values of all cells; they are split by day."""
    pytest.importorskip("matplotlib").use("agg")
    plot = mapuot.plot
    X, days, kind = course()
    cells = named_cells(X, days, kind=np.array(["a", "b"])[kind])
    cells.obsm["X_umap"] = X[:, :2]
    coupling = OTModel(cells).coupling(0, 1)
    labels = cells.obs["kind"].to_numpy()
    pair = labels[days == 0], labels[days == 1]
    right = plot.transitions(coupling.result, pair).get_images()[0].get_array()
    for given in ("kind", cells.obs["kind"], labels, pair):
        np.testing.assert_array_equal(plot.transitions(coupling, given).get_images()[0].get_array(), right)
    assert [text.get_text() for text in plot.plan(coupling, labels="kind").get_yticklabels()] == ["a", "b"]
    for draw in (plot.arrows, plot.links):
        drawn = [draw(coupling, given, labels="kind") for given in ("X_umap", X[:, :2])]
        drawn.append(draw(coupling, X[days == 0, :2], X[days == 1, :2], labels=pair))
        places = [[tuple(c.get_offsets().ravel()) for c in ax.collections[:4]] for ax in drawn]
        assert places[0] == places[1] == places[2]
    for side, day in (("rows", 0), ("cols", 1)):
        dots = plot.masses(coupling, "X_umap", side).collections[0]
        np.testing.assert_array_equal(dots.get_offsets(), X[days == day, :2])
    with pytest.raises(
        ValueError, match=r"labels must be \(cells,\) values or a column of obs, \['day', 'kind'\], got 'fate'"
    ):
        plot.transitions(coupling, "fate")
    with pytest.raises(ValueError, match=r"labels must be a pair, or values of all \d+ cells, got shape \(7,\)"):
        plot.transitions(coupling, labels[:7])
    with pytest.raises(TypeError, match=r"got OTModel: draw a coupling, result\.coupling\(t0, t1\)"):
        plot.plan(OTModel(cells))


def test_couplings_of_cellrank():
    X, days, _ = course(((25, 15), (20, 12), (9, 9)))
    cells = named_cells(X, days)
    cells.obs["stage"] = cells.obs["day"].map("{:g}".format).astype("category")
    model = OTModel(cells, day_field="stage")
    found = model.to_cellrank()
    assert [*found] == [("0", "1"), ("1", "2")]
    one = found["0", "1"]
    assert one.obs_names.equals(cells.obs_names[days == 0])
    assert one.var_names.equals(cells.obs_names[days == 1])
    np.testing.assert_array_equal(one.X, model.coupling(0, 1).result.plan)
    part = model.to_cellrank(keep=0.9)["1", "2"]
    np.testing.assert_allclose(part.X.sum(), 0.9 * model.coupling(1, 2).result.mass, rtol=0.05)


@pytest.mark.parametrize("form", ["array", "sparse"])
def test_the_first_components_are_those_of_a_full_decomposition(form):
    from scipy import sparse

    rng = np.random.default_rng(0)
    X = rng.poisson(0.5 * rng.random(300) * rng.random((200, 300)) + 0.05).astype(float)
    if form == "array":
        read = np.asarray
    else:
        read = sparse.csr_matrix
    x, y = components(read(X[:90]), read(X[90:]), 8)
    centred = X - X.mean(0)
    centred -= centred.mean(1, keepdims=True)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    right = (u * s)[:, :8]
    np.testing.assert_allclose(x @ y.T, right[:90] @ right[90:].T, atol=1e-9)
    same = components(np.ones((30, 40)), np.ones((20, 40)), 3)
    assert not np.concatenate(same).any()


def test_far_cells_are_followed():
    """Where the plan underflows, descendants and ancestors follow the conditional plans, as in `fates`."""
    X = np.array([[0.0], [0.1], [0.2], [60.0], [0.0], [0.15], [0.3], [0.4]])
    days = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    labels = np.arange(8)
    model = OTModel(X, days=days, local_pca=0, scale_cost=1.0, epsilon=1.0, lambda1=1.0, lambda2=1.0)
    coupling = model.coupling(0, 1)
    assert coupling.result.row_marginal[3] == 0
    far, near = (np.asarray(model.descendants(np.eye(4)[i], 0, 1)) for i in (3, 0))
    shares = coupling.fates(labels)[1]
    np.testing.assert_allclose(far, shares[3], rtol=1e-10)
    np.testing.assert_allclose(near, shares[0], rtol=1e-6)
    np.testing.assert_allclose(model.descendants([0.0, 1e-3, 0.0, 1.0], 0, 1), model.descendants([0, 1, 0, 0], 0, 1))
    back = OTModel(X, days=1 - days, local_pca=0, scale_cost=1.0, epsilon=1.0, lambda1=1.0, lambda2=1.0)
    target = back.coupling(0, 1).result
    forward = np.asarray(back.ancestors(np.eye(4)[3], 1, 0))
    assert target.col_marginal[3] == 0
    logs = target.log_u - (X[4:, 0] - 60.0) ** 2
    np.testing.assert_allclose(forward, np.exp(logs - logs.max()) / np.exp(logs - logs.max()).sum(), rtol=1e-9)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("alpha", "cost", "tau"),
    [(1.0, "sq_euclidean", (1.0, 1.0)), (0.6, "euclidean", (1.0, 1.0)), (0.6, "sq_euclidean", (0.9, 0.8))],
)
def test_quadratic_backend_of_moscot(alpha, cost, tau):
    """Balanced answers agree with OTT's within its threshold; others are answers of `mapuot.gromov`."""
    modality = pytest.importorskip("moscot.problems.cross_modality", reason="needs moscot: make test-doors")
    anndata = pytest.importorskip("anndata")
    pytest.importorskip("mapuot.moscot")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)) * [3.0, 2.0, 1.0]
    y = (x @ np.linalg.qr(rng.normal(size=(3, 3)))[0])[:32] + 0.1 * rng.normal(size=(32, 3))
    left = anndata.AnnData(x, obsm={"own": x, "shared": x[:, :2]})
    other = anndata.AnnData(y, obsm={"own": y, "shared": x[:32, :2]})
    words = {"epsilon": 0.1, "alpha": alpha, "tau_a": tau[0], "tau_b": tau[1], "scale_cost": "mean"}
    given = {"src_attr": "own", "tgt_attr": "own", "cost": cost}
    given |= {} if alpha == 1 else {"joint_attr": "shared"}
    options = {"init": "independent", "max_iter": 400}

    def solution_of(**more):
        problem = modality.TranslationProblem(left, other).prepare(**given).solve(**words, **more)
        return problem[next(iter(problem))].solution

    ours = solution_of(backend="mapuot", **options)
    assert ours.converged
    assert not ours.is_linear
    assert ours.cost == pytest.approx(ours.result.value / alpha)
    assert ("points" in ours.result.problem.cost.kind) == (cost == "sq_euclidean")
    if tau == (1.0, 1.0):
        words |= {"max_iterations": 200, "threshold": 1e-6, "linear_solver_kwargs": {"max_iterations": 10**5}}
        right = np.asarray(solution_of().transport_matrix, float)
    else:
        A = cdist(x, x, "sqeuclidean")
        B = cdist(y, y, "sqeuclidean")
        F = cdist(x[:, :2], x[:32, :2], "sqeuclidean")
        reg_m = [alpha * 0.1 * t / (1 - t) for t in tau]
        right = mapuot.gromov(
            A / A.mean(), B / B.mean(), reg=alpha * 0.1, reg_m=reg_m, features=2 * F / F.mean(), alpha=alpha,
            metric="precomputed", **options,
        ).plan  # fmt: skip
    np.testing.assert_allclose(ours.transport_matrix, right, atol=2e-2 * right.max())
    with pytest.raises(NotImplementedError, match="rank must be -1"):
        solution_of(rank=3, backend="mapuot")


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_numbers_beyond_float64():
    """Weights of 1e308 are shares though their sum is inf; days and masses of cells that are inf are refused."""
    X, days, _ = course(((8, 6), (9, 4)))
    model = OTModel(X, days)
    count = int((days == 0).sum())
    np.testing.assert_allclose(
        model.descendants(np.full(count, 1e308), 0, 1), model.descendants(np.ones(count), 0, 1), rtol=1e-12
    )
    with pytest.raises(ValueError, match="days must be finite, or NaN, got inf"):
        OTModel(X, np.where(days == 0, days, np.inf))
    with pytest.raises(ValueError, match="growth must be so small that cells have finite masses after 1e"):
        OTModel(X, days * 1e6, growth=np.full(len(X), 2.0)).coupling(0, 1e6)
