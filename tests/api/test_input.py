"""Odd but right input is understood; what a warning or an error advises fits its cause."""

import numpy as np
import pytest
from problems import clouds, relative_error

import mapuot

CASE = clouds(4, 5)


def call(M=CASE.M, a=CASE.a, b=CASE.b, **changes):
    """solve on a 4 x 5 problem with some arguments exchanged."""
    return mapuot.solve(M, a, b, **{"reg": 0.05, "reg_m": 1.0, **changes})


@pytest.mark.parametrize("arguments",
                         [{"a": CASE.a.tolist(), "b": tuple(CASE.b)}, {"M": CASE.M.tolist()},
                          {"M": CASE.M.astype(">f8"), "a": CASE.a.astype(">f8"), "b": CASE.b.astype(">f4")},
                          {"M": CASE.M.astype(np.longdouble)}, {"M": np.asmatrix(CASE.M)}, {"M": np.ma.array(CASE.M)},
                          {"reg": np.float32(0.05), "reg_m": np.float64(1.0)},
                          {"reg": np.array(0.05), "reg_m": np.array(1.0)}, {"reg_m": [1.0]},
                          {"reg_m": np.array([1.0, 1.0])}, {"reg_m": (np.ones(4), np.ones(5))},
                          {"penalty": ("kl", "kl")}, {"penalty": ["kl", "kl"]}, {"penalty": "KL"},
                          {"a": CASE.a[:, None], "b": CASE.b[:, None].tolist()}, {"max_passes": np.int64(1000)},
                          {"reference": np.outer(CASE.a, CASE.b)}])  # fmt: skip
def test_other_spellings(arguments, backend):
    result, right = call(**arguments, backend=backend), call(backend=backend)
    assert relative_error(result.plan, right.plan) < 2e-6


class OnlyDLPack:
    """An array of which nothing is known but what the array API standard exchanges."""

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
    M, A = given["M"], strict.asarray(np.tile(CASE.a, (3, 1)))
    batch = mapuot.solve_batch(M, A, given["b"], reg=0.05, reg_m=1.0, backend=backend)
    np.testing.assert_allclose(batch.cost, [call(backend=backend).cost] * 3, rtol=1e-5)


def test_a_mask_is_a_reference(backend):
    mask = np.median(CASE.M) > CASE.M
    result, right = call(reference=mask, backend=backend), call(reference=mask.astype(float), backend=backend)
    np.testing.assert_array_equal(result.plan, right.plan)
    assert (np.asarray(result.plan)[~mask] == 0).all()


def test_none_or_empty_masses_are_uniform():
    right = call(a=np.full(4, 0.25), b=np.full(5, 0.2)).plan
    for nothing in (None, [], np.array([])):
        np.testing.assert_array_equal(call(a=nothing, b=nothing).plan, right)


def test_layouts_give_the_same_answer():
    """Strides and addresses that are no multiple of 8, and memory that must not be written."""
    case = clouds(9, 13)
    record = np.zeros((9, 13), [("flag", "u1"), ("cost", "f8")])
    record["cost"] = case.M
    shifted = np.frombuffer(b"x" + case.M.tobytes(), np.uint8)[1:].view(np.float64).reshape(9, 13)
    frozen = case.M.copy()
    frozen.flags.writeable = False
    a, b = np.repeat(case.a, 2)[::2], case.b[::-1].copy()[::-1]
    for changes in ({"M": record["cost"]}, {"M": shifted}, {"M": frozen}, {"a": a, "b": b}):
        np.testing.assert_array_equal(case.replace(**changes).solve(tol=1e-10).plan, case.solve(tol=1e-10).plan)


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


def test_tables_of_pandas_are_arrays(backend):
    """Whose first entry is not [0], and whose sums take no axis -1."""
    pandas = pytest.importorskip("pandas")
    a, b = pandas.Series(CASE.a, index=list("abcd")), pandas.Series(CASE.b, index=[5, 4, 3, 2, 1])
    M = pandas.DataFrame(CASE.M, index=a.index)
    result = call(M=M, a=a, b=b, reg_m=pandas.Series([1.0, 1.0], index=["x", "y"]), backend=backend)
    assert relative_error(result.plan, call(backend=backend).plan) < 2e-6
    call(warm_start=(a, b), backend=backend)
    square = pandas.DataFrame(CASE.M[:, :4] + CASE.M[:, :4].T)
    assert abs(mapuot.sinkhorn_divergence(square, a, a, reg=0.1, reg_m=1.0, backend=backend)) < 1e-9


def test_cure_fits_the_cause():
    with pytest.warns(mapuot.ConvergenceWarning) as told:
        call(tol=1e-300)
    assert "float64" not in str(told[0].message)
    with pytest.warns(mapuot.ConvergenceWarning, match="precision='float64'"):
        call(tol=1e-300, precision="mixed", max_passes=3000)
    far, words = 1e15 + CASE.M, r"not converged.*rounding of M / reg .* bring the costs nearer 0"
    with pytest.warns(mapuot.ConvergenceWarning, match=words):
        mapuot.solve(far, reg=0.1, reg_m=np.inf, tol=1e-3)
    with pytest.warns(mapuot.ConvergenceWarning, match=f"1 of 2 problems {words}"):
        mapuot.solve_batch(np.stack([CASE.M, far]), reg=0.1, reg_m=np.inf, tol=1e-3)
