"""Unusual but valid input is understood, and the advice in a warning or an error fits its cause."""

import pickle

import numpy as np
import pytest
from problems import clouds, relative_error
from scipy import sparse

import mapuot
import mapuot.da
import mapuot.pot

CASE = clouds(4, 5)


def call(M=CASE.M, a=CASE.a, b=CASE.b, **changes):
    """Solve a 4 x 5 problem with some arguments exchanged."""
    return mapuot.solve(M, a, b, **{"reg": 0.05, "reg_m": 1.0, **changes})


RECORD = np.zeros((4, 5), [("flag", "u1"), ("cost", "f8")])
RECORD["cost"] = CASE.M
SHIFTED = np.frombuffer(b"x" + CASE.M.tobytes(), np.uint8)[1:].view(np.float64).reshape(4, 5)
FROZEN = CASE.M.copy()
FROZEN.flags.writeable = False
EVEN = {"a": np.full(4, 0.25), "b": np.full(5, 0.2)}
FEW = np.median(CASE.M) > CASE.M
SPELLINGS = [
    {"a": CASE.a.tolist(), "b": tuple(CASE.b)}, {"M": CASE.M.tolist()},
    {"M": CASE.M.astype(">f8"), "a": CASE.a.astype(">f8"), "b": CASE.b.astype(">f4")},
    {"M": CASE.M.astype(np.longdouble)}, {"M": np.asmatrix(CASE.M)}, {"M": np.ma.array(CASE.M)},
    {"reg": np.float32(0.05), "reg_m": np.float64(1.0)}, {"reg": np.array(0.05), "reg_m": np.array(1.0)},
    {"reg_m": [1.0]}, {"reg_m": np.array([1.0, 1.0])}, {"reg_m": (np.ones(4), np.ones(5))}, {"penalty": ("kl", "kl")},
    {"penalty": ["kl", "kl"]}, {"penalty": "KL"}, {"a": CASE.a[:, None], "b": CASE.b[:, None].tolist()},
    {"max_passes": np.int64(1000)}, {"reference": np.outer(CASE.a, CASE.b)}, {"M": RECORD["cost"]}, {"M": SHIFTED},
    {"M": FROZEN}, {"a": np.repeat(CASE.a, 2)[::2], "b": CASE.b[::-1].copy()[::-1]},
    *(({"a": x, "b": x}, EVEN) for x in (None, [], np.array([]))),
    ({"reference": FEW}, {"reference": FEW.astype(float)}),
]  # fmt: skip


@pytest.mark.parametrize("arguments", SPELLINGS)
def test_other_spellings(arguments, backend):
    """Other types, strides, unaligned addresses and read-only memory give an equal plan."""
    if isinstance(arguments, tuple):
        arguments, meant = arguments
    else:
        meant = {}
    result = call(**arguments, backend=backend)
    right = call(**meant, backend=backend)
    assert relative_error(result.plan, right.plan) < 2e-6


def test_tables_of_pandas_are_arrays(backend):
    """A pandas object may lack an entry [0] and refuse axis=-1 in its sums."""
    pandas = pytest.importorskip("pandas")
    a = pandas.Series(CASE.a, index=list("abcd"))
    b = pandas.Series(CASE.b, index=[5, 4, 3, 2, 1])
    given = {"M": pandas.DataFrame(CASE.M, index=a.index), "a": a, "b": b, "reg_m": pandas.Series([1.0, 1.0], [7, 8])}
    assert relative_error(call(**given, warm_start=(a, b), backend=backend).plan, call(backend=backend).plan) < 4e-6
    square = pandas.DataFrame(CASE.M[:, :4] + CASE.M[:, :4].T)
    assert abs(mapuot.sinkhorn_divergence(square, a, a, reg=0.1, reg_m=1.0, backend=backend)) < 1e-9


def test_a_data_set_is_refused_for_its_arrays():
    """An AnnData in the place of an array is refused at once: NumPy would read it cell by cell."""
    anndata = pytest.importorskip("anndata")
    cells = anndata.AnnData(np.ones((4, 5)))
    options = {"reg": 0.05, "reg_m": 1.0}
    result = call()
    for name, run in {
        "M": lambda: mapuot.solve(cells, **options),
        "a": lambda: call(a=cells),
        "x": lambda: mapuot.PointCloud(cells, cells),
        "M[0]": lambda: mapuot.solve_batch([cells, cells], **options),
        "X": lambda: mapuot.gromov(cells, cells, **options),
        "x[0]": lambda: mapuot.pairwise([cells, cells], **options),
        "labels": lambda: result.push(cells),
        "Y": lambda: result.barycentric_map(cells),
        "reference": lambda: call(reference=cells),
    }.items():
        with pytest.raises(TypeError) as error:
            run()
        assert str(error.value).startswith(f"{name} must be an array, got AnnData: pass one of its arrays")
    with pytest.raises(TypeError, match="M must be an array, got AnnData"):
        mapuot.sinkhorn_divergence(cells, **options)


class View(np.ndarray):
    """An array that calls itself sparse by a method, as the views of AnnData do."""

    def toarray(self):
        raise AssertionError("it is dense")


VIEW = CASE.M.view(View)
DOORS = {"reg": 0.1, "reg_m": 1.0}
DENSE_DOORS = {
    "solve": lambda x, y, M: mapuot.solve(M, M[:, 0] + 0.1, reference=M + 1, **DOORS).plan,
    "solve_sample": lambda x, y, M: mapuot.solve_sample(x, y, **DOORS).plan,
    "solve_batch": lambda x, y, M: mapuot.solve_batch(M, np.stack([M[:, 0], M[:, 1]]) + 0.1, **DOORS).mass,
    "clouds": lambda x, y, M: mapuot.solve_batch(mapuot.PointCloud([x], [y]), **DOORS).mass,
    "pairwise": lambda x, y, M: mapuot.pairwise([x, y], **DOORS),
    "knn_cost": lambda x, y, M: mapuot.knn_cost(x, y, 2).toarray(),
    "gromov": lambda x, y, M: mapuot.gromov(x, y, reg=0.5, reg_m=np.inf).value,
    "multimarginal": lambda x, y, M: mapuot.multimarginal({(0, 1): M}, [M[:, 0] + 1, M[0] + 1], **DOORS).pair(0, 1),
    "barycenter": lambda x, y, M: mapuot.barycenter(M @ M.T, M.T + 0.1, **DOORS).q,
    "images": lambda x, y, M: mapuot.solve(CASE.M, **DOORS).barycentric_map(M.T),
    "apply": lambda x, y, M: mapuot.solve(CASE.M, **DOORS).apply(M.T),
    "da": lambda x, y, M: mapuot.da.UnbalancedSinkhornTransport(0.1).fit(x, Xt=y).coupling_,
    "pot": lambda x, y, M: mapuot.pot.sinkhorn_unbalanced(M[:, 0] + 0.1, M[0] + 0.1, M, 0.1, 1.0),
}


@pytest.mark.parametrize("door", DENSE_DOORS)
def test_views_that_have_toarray_are_arrays(door):
    x = CASE.M[:, :3].copy()
    y = CASE.M[:, 2:5].copy()
    found = DENSE_DOORS[door](x.view(View), y.view(View), CASE.M.view(View))
    np.testing.assert_array_equal(found, DENSE_DOORS[door](x, y, CASE.M))


def test_nullable_and_categorical_columns_are_numbers(backend):
    pandas = pytest.importorskip("pandas")
    M = pandas.DataFrame(CASE.M).astype("Float64")
    a = pandas.Series([1, 2, 1, 3])
    right = call(a=np.array([1.0, 2.0, 1.0, 3.0]), backend=backend).plan
    for masses in (a, a.astype("Int64"), a.astype("category"), pandas.array(a, dtype="Float64")):
        np.testing.assert_allclose(call(M, masses, backend=backend).plan, right, rtol=1e-5)
    with pytest.raises(ValueError, match="a must be finite, got NaN or inf at index 2"):
        call(a=pandas.Series([1, 2, None, 3], dtype="Int64"), backend=backend)
    points = pandas.DataFrame({"u": [1.0, 2.0], "kind": ["k", "l"]})
    with pytest.raises(TypeError, match="x must hold real numbers, got the column 'kind': drop it"):
        mapuot.PointCloud(points, [[1.0, 2.0]])
    points["kind"] = pandas.Series([0, 1], dtype="UInt8")
    assert mapuot.PointCloud(points, [[1.0, 2.0]]).shape == (2, 1)


def test_costs_are_shown_by_their_kind():
    x = np.ones((4, 2))
    assert repr(mapuot.PointCloud(x, x[:3], "euclidean")) == (
        "<mapuot.PointCloud 4 x 3: points in 2 dimensions, metric 'euclidean'>"
    )
    assert repr(mapuot.Grid((3, 4))) == "<mapuot.Grid 12 x 12: a grid of 3 x 4 nodes>"


@pytest.mark.parametrize("form", ["array", "cloud", "grid", "list", "none"])
def test_scaled_masses_have_no_unit(form, backend):
    """With scale_mass the same share moves in any unit of mass, and all numbers are in units of the scale."""
    rng = np.random.default_rng(3)
    a = rng.random(6) + 0.2
    b = rng.random(6) + 0.2
    M = rng.random((6, 6))
    M = {"cloud": mapuot.PointCloud(rng.random((6, 2)), rng.random((6, 2))), "grid": mapuot.Grid((3, 2))}.get(form, M)
    if form == "grid":
        a = a.reshape(3, 2)
    elif form == "none":
        a = None
    given = {"reg": 0.2, "reg_m": 0.7, "scale_mass": True, "backend": backend, "tol": 1e-9}
    results = []
    for unit in (1.0, 1e6):
        weights = (None if a is None else unit * a), unit * b
        if form == "list":
            weights = tuple(x.tolist() for x in weights)
        results.append(mapuot.solve(M, *weights, **given))
    one, other = results
    np.testing.assert_allclose(one.plan, other.plan, rtol=1e-7)
    unit = np.sqrt(1e6 if a is None else 1e12)
    assert other.scale_mass == pytest.approx(unit * one.scale_mass, rel=1e-12)
    assert one.problem.rows.mass * one.problem.cols.mass == pytest.approx(1, rel=1e-12)
    if a is None:
        whole = np.full(6, 1 / 6)
    else:
        whole = np.ravel(a)
    np.testing.assert_allclose(one.problem.rows.weight * one.scale_mass, whole, rtol=1e-12)
    both = mapuot.solve(M, a, b, scale_cost="max", **given)
    assert both.scale_mass == one.scale_mass
    assert both.scale_cost != 1
    assert pickle.loads(pickle.dumps(one)).scale_mass == one.scale_mass
    with pytest.raises(TypeError, match="scale_mass must be True or False, got 'sum'"):
        mapuot.solve(M, a, b, **given | {"scale_mass": "sum"})


@pytest.mark.parametrize("form", ["array", "one vector", "uniform", "clouds", "one array", "list of pairs"])
def test_scaled_masses_of_a_batch(form, backend):
    """Each problem of a batch is the problem that `solve` makes with scale_mass, in its own unit of mass."""
    rng = np.random.default_rng(3)
    M = rng.random((6, 6))
    A = rng.random((3, 6)) + 0.2
    B = (rng.random((3, 6)) + 0.2) * [[1.0], [1e3], [1e6]]
    if form == "one vector":
        A = A[0]
    elif form == "uniform":
        A = None
    elif form == "one array":
        A = B
    elif form == "list of pairs":
        M = [sparse.csr_array(M)] * 3
    elif form == "clouds":
        x = [rng.random((k, 2)) for k in ((4, 5, 6) if backend == "cpu" else (6, 6, 6))]
        M = mapuot.PointCloud(x, x)
        A = [a[: len(p)] for a, p in zip(A, x, strict=True)]
        B = None
    given = {"reg": 0.2, "reg_m": 0.7, "scale_mass": True, "backend": backend, "tol": 1e-9}
    batch = mapuot.solve_batch(M, A, B, **given)
    assert np.shape(batch.scale_mass) == (3,)
    for i, result in enumerate(batch):
        a, b = (x if x is None or np.ndim(x[0]) == 0 else x[i] for x in (A, B))
        one = mapuot.solve(M[i] if form in ("clouds", "list of pairs") else M, a, b, **given)
        assert result.scale_mass == pytest.approx(one.scale_mass, rel=1e-12)
        np.testing.assert_allclose(
            *(x.toarray() if sparse.issparse(x) else x for x in (result.plan, one.plan)), atol=1e-8
        )
    both = mapuot.solve_batch(M, A, B, scale_cost="max", **given)
    np.testing.assert_allclose(both.scale_mass, batch.scale_mass)
    assert both.scale_cost == both[0].scale_cost != 1
    with pytest.raises(TypeError, match="scale_mass must be True or False, got 'sum'"):
        mapuot.solve_batch(M, A, B, **given | {"scale_mass": "sum"})


def test_passes_without_a_limit_are_many(backend):
    """The core's 64-bit counters are the only limit."""
    for most in (2**63, 2**80):
        assert call(max_passes=most, backend=backend).converged
        assert call(max_passes=most, penalty="l2", backend=backend).converged
    assert mapuot.solve_batch(CASE.M, reg=0.1, reg_m=1.0, max_passes=2**63).converged.all()
    assert mapuot.multimarginal({(0, 1): CASE.M}, [CASE.a, CASE.b], reg=0.1, reg_m=1.0, max_passes=2**63).converged


PAIR = (0.1, 10.0)


@pytest.mark.parametrize(("regs", "given", "meant"),
                         [([1, 0.5], [0.1, 10.0], [0.1, 10.0]), ([1, 0.5], np.array([0.1, 10.0]), [0.1, 10.0]),
                          ([1, 0.5], (0.1, 10.0), [0.1, 10.0]), ([1, 0.5, 0.2], (0.1, 1.0, 10.0), [0.1, 1.0, 10.0]),
                          ([1, 0.5, 0.2], np.array([0.1, 1.0, 10.0]), [0.1, 1.0, 10.0]),
                          ([1, 0.5, 0.2], PAIR, [PAIR] * 3), ([1, 0.5, 0.2], np.array(PAIR), [PAIR] * 3),
                          ([1, 0.5, 0.2], np.array([PAIR] * 3), [PAIR] * 3), ([1, 0.5], [PAIR, PAIR], [PAIR] * 2),
                          ([1, 0.5, 0.2], (np.full(4, 0.1), np.full(5, 10.0)), [PAIR] * 3), ([1], PAIR, [PAIR]),
                          ([1, 0.5], np.array(0.1), [0.1] * 2), ([1, 0.5], [np.inf, 1.0], [np.inf, 1.0]),
                          (np.array([1, 0.5]), 0.1, [0.1] * 2)])  # fmt: skip
def test_reg_ms_of_a_path_are_one_for_each_reg_or_that_of_all(regs, given, meant):
    found = [result.mass for result in mapuot.path(CASE.M, CASE.a, CASE.b, regs=regs, reg_ms=given)]
    right = [call(reg=x, reg_m=y).mass for x, y in zip(regs, meant, strict=True)]
    np.testing.assert_allclose(found, right, rtol=2e-6)


class OnlyDLPack:
    """An array that supports nothing beyond the exchange protocol of the array API standard."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_arrays_of_the_standard(backend):
    if backend == "cuda":
        pytest.skip("arrays of the host")
    given = {name: OnlyDLPack(np.ascontiguousarray(getattr(CASE, name))) for name in ("M", "a", "b")}
    np.testing.assert_array_equal(call(**given, backend=backend).plan, call(backend=backend).plan)
    strict = pytest.importorskip("array_api_strict")
    given = {name: strict.asarray(getattr(CASE, name)) for name in given}
    np.testing.assert_array_equal(call(**given, backend=backend).plan, call(backend=backend).plan)
    M = given["M"]
    A = strict.asarray(np.tile(CASE.a, (3, 1)))
    batch = mapuot.solve_batch(M, A, given["b"], reg=0.05, reg_m=1.0, backend=backend)
    np.testing.assert_allclose(batch.cost, [call(backend=backend).cost] * 3, rtol=1e-5)


def test_dtypes_of_the_plan(backend):
    case = clouds(6, 7)
    for given, returned in {"f8": "f8", "f4": "f4", "f2": "f4", "i4": "f8", "u1": "f8", "i8": "f8"}.items():
        M = np.round(10 * case.M).astype(given)
        result = case.replace(M=M, reg=0.5, reg_m=10.0).solve(backend=backend)
        right = case.replace(M=np.round(10 * case.M), reg=0.5, reg_m=10.0).solve(backend=backend)
        assert result.plan.dtype == returned
        assert result.rows(1, 3).dtype == result.top_k(2)[1].dtype == returned
        assert result.log_u.dtype == result.col_marginal.dtype == result.apply(case.b).dtype == np.float64
        assert relative_error(result.plan, right.plan) < 3e-7


def test_arguments_are_left_alone():
    case = clouds(6, 7, reg_m=(np.full(6, 1.0), np.full(7, 2.0)))
    copies = [x.copy() for x in (case.M, case.a, case.b, *case.reg_m)]
    result = case.solve(method="map-uot")
    start = result.log_u.copy(), result.log_v.copy()
    case.solve(warm_start=start)
    for x, y in zip((case.M, case.a, case.b, *case.reg_m), copies, strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(result.log_u, start[0])


def test_cure_fits_the_cause():
    with pytest.warns(mapuot.ConvergenceWarning) as told:
        call(tol=1e-300)
    assert "float64" not in str(told[0].message)
    known = {"reg": 0.05, "reg_m": 1e5, "tol": 1e-8, "method": "sinkhorn", "precision": "mixed", "max_passes": 3000}
    with pytest.warns(mapuot.ConvergenceWarning, match="use precision='float64' and method='auto'"):
        mapuot.solve(CASE.M, CASE.a, CASE.b, **known)
    rows = 1e15 * np.arange(len(CASE.M))[:, None]
    far = rows + CASE.M
    words = r"not converged.*rounding of M / reg .* bring the costs nearer 0"
    with pytest.warns(mapuot.ConvergenceWarning, match=words):
        mapuot.solve(far, reg=0.1, reg_m=np.inf, tol=1e-3)
    with pytest.warns(mapuot.ConvergenceWarning, match=f"1 of 2 problems {words}"):
        mapuot.solve_batch(np.stack([CASE.M, far]), reg=0.1, reg_m=np.inf, tol=1e-3)


def test_masses_of_1e_287_are_named():
    rng = np.random.default_rng(0)
    M, a = ((rng.random((60, 1, 2)) - rng.random((60, 2))) ** 2).sum(-1), np.full(60, 2e-287)
    with pytest.warns(mapuot.ConvergenceWarning, match="masses are near the least number of float64.*multiply a and b"):
        mapuot.solve(M, a, a, reg=1e-3, reg_m=np.inf)


def test_log_scalings_beyond_float64_are_named():
    """Parts of M with another mass in their rows than in their columns, at a huge reg_m / reg."""
    rng = np.random.default_rng(0)
    M = rng.random((6, 5))
    a = np.full(6, 1 / 6)
    b = np.full(5, 0.2)
    M[:3, 2:] = M[3:, :2] = np.inf
    words = r"log scalings reach .e\+1\d.*masses nearer each other, lower reg_m"
    with pytest.warns(mapuot.ConvergenceWarning, match=words):
        mapuot.solve(M, a, b, reg=0.1, reg_m=(np.inf, 1e14))
