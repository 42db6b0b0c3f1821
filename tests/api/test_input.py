"""Bad input: each kind is refused by an error that names the argument; odd but right input is understood."""

import re
import subprocess
import sys

import numpy as np
import pytest
from problems import clouds, relative_error
from scipy import sparse

import mapuot

CASE = clouds(4, 5)


def call(**changes):
    """solve on a 4 x 5 problem with some arguments exchanged."""
    args = {"M": CASE.M, "a": CASE.a, "b": CASE.b, "reg": 0.05, "reg_m": 1.0, **changes}
    return mapuot.solve(
        args.pop("M"), args.pop("a"), args.pop("b"), reg=args.pop("reg"), reg_m=args.pop("reg_m"), **args
    )


def changed(x, value, dtype=None):
    """A copy of x with one entry exchanged."""
    x = np.array(x, dtype=dtype)
    x.flat[x.size // 2] = value
    return x


REFUSED = [
    # shapes
    ({"M": np.ones(4)}, ValueError, "M must be a non-empty matrix (m, n), got shape (4,)"),
    ({"M": np.ones((4, 5, 1))}, ValueError, "M must be a non-empty matrix (m, n), got shape (4, 5, 1)"),
    ({"M": np.ones((0, 5))}, ValueError, "M must be a non-empty matrix (m, n), got shape (0, 5)"),
    ({"M": []}, ValueError, "M must be a non-empty matrix (m, n), got shape (0,)"),
    ({"M": 3.0}, ValueError, "M must be a non-empty matrix (m, n), got shape ()"),
    ({"a": np.ones(5)}, ValueError, "a must have shape (4,), got (5,)"),
    ({"b": np.ones(4)}, ValueError, "b must have shape (5,), got (4,)"),
    ({"b": np.ones((5, 2))}, ValueError, "b must have shape (5,), got (5, 2)"),
    ({"a": 1.0}, ValueError, "a must have shape (4,), got ()"),
    # entries
    ({"M": changed(CASE.M, np.nan)}, ValueError, "M must not hold NaN or -inf, got 1 such entries"),
    ({"M": changed(CASE.M, -np.inf)}, ValueError, "M must not hold NaN or -inf, got 1 such entries"),
    ({"M": CASE.M + 1j}, TypeError, "M must hold real numbers, got dtype complex128"),
    ({"M": CASE.M.astype(object)}, TypeError, "M must hold real numbers, got dtype object"),
    ({"M": CASE.M > 0.5}, TypeError, "M must hold real numbers, got dtype bool"),
    ({"M": CASE.M.astype(str)}, TypeError, "M must hold real numbers, got dtype <U"),
    ({"M": np.zeros((4, 5), "M8[s]")}, TypeError, "M must hold real numbers, got dtype datetime64[s]"),
    ({"a": changed(CASE.a, np.nan)}, ValueError, "a must be finite"),
    ({"a": changed(CASE.a, np.inf)}, ValueError, "a must be finite"),
    ({"a": changed(CASE.a, -0.1)}, ValueError, "a must be"),
    ({"b": changed(CASE.b, np.nan)}, ValueError, "b must be finite"),
    ({"b": changed(CASE.b, -1e-9)}, ValueError, "b must be"),
    ({"a": CASE.a + 1j}, TypeError, "a must hold real numbers, got dtype complex128"),
    ({"b": CASE.b.astype(object)}, TypeError, "b must hold real numbers, got dtype object"),
    ({"a": np.zeros(4)}, ValueError, "a must"),
    ({"b": np.zeros(5)}, ValueError, "b must"),
    ({"a": np.full(4, 1e308)}, ValueError, "a must have positive, finite mass, got inf"),
    ({"M": np.full((4, 5), np.inf)}, mapuot.InfeasibleError, "M forbids every pair"),
    ({"reference": sparse.coo_array(CASE.M)}, TypeError, "reference must be a dense array, got coo_array"),
    ({"M": [[1.0, 2.0], [3.0]]}, ValueError, "M cannot be read as an array: "),
    ({"a": [[1.0], [2.0, 3.0]]}, ValueError, "a cannot be read as an array: "),
    ({"a": np.array(1.0)}, ValueError, "a must have shape (4,), got ()"),
    ({"a": {}}, TypeError, "a must hold real numbers, got dtype object"),
    # reg, reg_m
    ({"reg": 0.0}, ValueError, "reg must be a positive finite number, got 0.0"),
    ({"reg": -1}, ValueError, "reg must be a positive finite number, got -1.0"),
    ({"reg": np.inf}, ValueError, "reg must be a positive finite number, got inf"),
    ({"reg": 5e-324}, ValueError, "reg must not be so small that M / reg overflows, got 5e-324"),
    ({"M": 1.7e308 * np.sign(CASE.M - np.median(CASE.M))}, ValueError, "reg must not be so small"),
    ({"reg": np.nan}, ValueError, "reg must be a positive finite number, got nan"),
    ({"reg": "big"}, TypeError, "reg must be a positive finite number, got 'big'"),
    ({"reg": "0.1"}, TypeError, "reg must be a positive finite number, got '0.1'"),
    ({"reg_m": "1"}, TypeError, "reg_m[0] must be a positive number, inf, or one per point, got '1'"),
    ({"penalty": None}, ValueError, "penalty must be one of"),
    ({"callback": 3}, TypeError, "callback must be callable, got 3"),
    ({"threads": 10**12}, ValueError, "threads must be at most 4096"),
    ({"M": np.ma.masked_greater(CASE.M, np.median(CASE.M))}, ValueError, "M must not be masked"),
    ({"a": np.ma.array(CASE.a, mask=[1, 0, 0, 0])}, ValueError, "a must not be masked"),
    ({"reference": changed(CASE.M, np.inf)}, ValueError, "and 1 entries that are not finite"),
    ({"reg": None}, TypeError, "reg must be a positive finite number, got None"),
    ({"reg": 1j}, TypeError, "reg must be a positive finite number, got 1j"),
    ({"reg": [0.1, 0.2]}, TypeError, "reg must be a positive finite number, got [0.1, 0.2]"),
    ({"reg_m": 0.0}, ValueError, "reg_m[0] must be > 0 (inf = balanced), got 0.0"),
    ({"reg_m": (1.0, -2.0)}, ValueError, "reg_m[1] must be > 0 (inf = balanced), got -2.0"),
    ({"reg_m": (np.nan, 1.0)}, ValueError, "reg_m[0] must be > 0 (inf = balanced), got nan"),
    ({"reg_m": (1.0, 2.0, 3.0)}, ValueError, "reg_m must be a scalar or have length 1 or 2, got length 3"),
    ({"reg_m": (np.ones(5), 1.0)}, ValueError, "reg_m[0] must have shape (4,), got (5,)"),
    ({"reg_m": (1.0, changed(np.ones(5), -1))}, ValueError, "reg_m[1] must be > 0"),
    ({"reg_m": "much"}, ValueError, "reg_m must be a scalar or have length 1 or 2"),
    ({"reg_m": None}, TypeError, "reg_m[0] must be a positive number, inf, or one per point, got None"),
    ({"penalty": "range", "reg_m": -0.1}, ValueError, "reg_m[0] must be a slack >= 0 for penalty 'range'"),
    ({"penalty": "range", "reg_m": np.inf}, ValueError, "reg_m[0] must be a slack >= 0 for penalty 'range'"),
    # both sides hard
    ({"reg_m": np.inf, "b": 2 * CASE.b}, ValueError, "equal mass"),
    # words
    ({"method": "newton"}, ValueError, "Unknown method 'newton': must be one of ['auto', "),
    ({"method": None}, ValueError, "Unknown method None"),
    ({"method": ["auto"]}, ValueError, "Unknown method ['auto']"),
    (
        {"penalty": "kullback"},
        ValueError,
        "penalty must be one of ['balanced', 'kl', 'l2', 'range', 'tv'] or a pair",
    ),
    ({"penalty": ("kl", "tv", "l2")}, ValueError, "penalty must be one of"),
    ({"reference": "ones"}, ValueError, "reference must be 'product', 'uniform' or a matrix, got 'ones'"),
    ({"reference": np.ones((5, 4))}, ValueError, "reference must have M's shape (4, 5), got (5, 4)"),
    ({"reference": np.zeros((4, 5))}, ValueError, "reference must be finite, >= 0 and not all zero"),
    ({"reference": changed(CASE.M, -1.0)}, ValueError, "reference must be finite, >= 0 and not all zero"),
    ({"reference": changed(CASE.M, np.nan)}, ValueError, "reference must be finite, >= 0 and not all zero"),
    ({"reference": changed(CASE.M, np.inf)}, ValueError, "reference must be finite, >= 0 and not all zero"),
    ({"reference": np.full((4, 5), 1e308)}, ValueError, "reference is too large: its sum is beyond float64"),
    ({"reference": CASE.M + 1j}, TypeError, "reference must hold real numbers, got dtype complex128"),
    (
        {"backend": "tpu"},
        ValueError,
        "backend must be one of ('auto', 'cpu', 'cuda', 'reference'), got 'tpu'",
    ),
    (
        {"precision": "float16"},
        ValueError,
        "precision must be one of ['auto', 'float64', 'mixed']",
    ),
    # numbers
    ({"tol": 0.0}, ValueError, "tol must be a positive finite number, got 0.0"),
    ({"tol": np.nan}, ValueError, "tol must be a positive finite number, got nan"),
    ({"tol": "tight"}, TypeError, "tol must be a positive finite number, got 'tight'"),
    ({"tol_gap": -1.0}, ValueError, "tol_gap must be a positive finite number, got -1.0"),
    ({"max_passes": 0}, ValueError, "max_passes must be an integer >= 1, got 0"),
    ({"max_passes": 10.0}, ValueError, "max_passes must be an integer >= 1, got 10.0"),
    ({"max_passes": True}, ValueError, "max_passes must be an integer >= 1, got True"),
    ({"threads": 0}, ValueError, "threads must be an integer >= 1, got 0"),
    ({"threads": "two"}, ValueError, "threads must be an integer >= 1, got 'two'"),
    # starts
    ({"warm_start": 3}, TypeError, "warm_start must be a Result or a pair (log_u, log_v)"),
    ({"warm_start": (CASE.a,)}, TypeError, "warm_start must be a Result or a pair (log_u, log_v)"),
    ({"warm_start": (CASE.b, CASE.a)}, ValueError, "warm_start must have shapes (4,), (5,), got (5,), (4,)"),
    ({"warm_start": (CASE.a, changed(CASE.b, np.nan))}, ValueError, "warm_start must not hold NaN"),
    ({"warm_start": (CASE.a + 1j, CASE.b)}, TypeError, "warm_start must be a Result or a pair (log_u, log_v)"),
    # not yet
    ({"comm": object()}, TypeError, "comm must be an intracommunicator of mpi4py"),
]


@pytest.mark.parametrize(
    ("arguments", "kind", "text"), REFUSED, ids=[f"{next(iter(r[0]))}-{k}" for k, r in enumerate(REFUSED)]
)
def test_refused(arguments, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        call(**arguments)


def test_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_iter_max'"):
        call(num_iter_max=3)
    with pytest.raises(TypeError):
        mapuot.solve(CASE.M, CASE.a, CASE.b, *(0.05, 1.0))  # keyword only from there on
    with pytest.raises(TypeError, match="reg_m"):
        mapuot.solve(CASE.M, CASE.a, CASE.b, reg=0.05)


def test_unreachable_hard_point_is_named(backend):
    M = CASE.M.copy()
    M[:, 2] = np.inf
    with pytest.raises(mapuot.InfeasibleError, match=re.escape("M forbids every pair of b[2]")):
        call(M=M, reg_m=(1.0, np.inf), backend=backend)
    M = CASE.M.copy()
    M[1] = np.inf
    with pytest.raises(mapuot.InfeasibleError, match=re.escape("M forbids every pair of a[1]")):
        call(M=M, reg_m=(np.inf, 1.0), backend=backend)


# ---- what is understood ----


@pytest.mark.parametrize(
    "arguments",
    [
        {"a": CASE.a.tolist(), "b": tuple(CASE.b)},
        {"M": CASE.M.tolist()},
        {"M": CASE.M.astype(">f8"), "a": CASE.a.astype(">f8"), "b": CASE.b.astype(">f4")},
        {"M": CASE.M.astype(np.longdouble)},
        {"M": np.asmatrix(CASE.M)},
        {"reg": np.float32(0.05), "reg_m": np.float64(1.0)},
        {"reg": np.array(0.05), "reg_m": np.array(1.0)},
        {"reg_m": [1.0]},
        {"reg_m": np.array([1.0, 1.0])},
        {"reg_m": (np.ones(4), np.ones(5))},
        {"penalty": ("kl", "kl")},
        {"penalty": ["kl", "kl"]},
        {"penalty": "KL"},
        {"a": CASE.a[:, None], "b": CASE.b[:, None].tolist()},
        {"max_passes": np.int64(1000)},
        {"reference": np.outer(CASE.a, CASE.b)},
    ],
)
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
    case = clouds(9, 13)
    M, right = case.M, case.solve(tol=1e-10).plan
    wide = np.full((18, 39), np.nan)
    wide[::2, ::3] = M
    record = np.zeros((9, 13), [("flag", "u1"), ("cost", "f8")])
    record["cost"] = M
    shifted = np.frombuffer(b"x" + M.tobytes(), np.uint8)[1:].view(np.float64).reshape(M.shape)
    frozen = M.copy()
    frozen.flags.writeable = False
    for other in (
        np.asfortranarray(M),
        np.ascontiguousarray(M[::-1, ::-1])[::-1, ::-1],
        wide[::2, ::3],
        record["cost"],  # the stride is no multiple of 8
        shifted,  # nor is the address
        frozen,
    ):
        np.testing.assert_array_equal(case.replace(M=other).solve(tol=1e-10).plan, right)
    a, b = np.repeat(case.a, 2)[::2], case.b[::-1].copy()[::-1]
    np.testing.assert_array_equal(case.replace(a=a, b=b).solve(tol=1e-10).plan, right)


def test_dtypes_of_the_plan(backend):
    case = clouds(6, 7)
    for given, returned in [
        ("f8", "f8"),
        ("f4", "f4"),
        ("f2", "f4"),
        ("i4", "f8"),
        ("u1", "f8"),
        ("i8", "f8"),
    ]:
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


def test_products_need_a_column(backend):
    result = call(backend=backend)
    for product, length, name in ((result.apply, 5, "X"), (result.apply_transpose, 4, "Y")):
        with pytest.raises(ValueError, match=f"{name} must have a column"):
            product(np.ones((length, 0)))


@pytest.mark.parametrize("k", [0, 6, 2.5, "3"])
def test_top_k_needs_a_number_of_columns(k):
    with pytest.raises(ValueError, match=re.escape(f"k must be in 1..5, got {k!r}")):
        call().top_k(k)


SQUARE = CASE.M[:, :4] + CASE.M[:, :4].T
MASKED = np.ma.masked_less(SQUARE, np.median(SQUARE))


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        (lambda: mapuot.barycenter(SQUARE, MASKED, reg=0.1), ValueError, "A must not be masked"),
        (
            lambda: mapuot.barycenter(SQUARE, SQUARE + 1j, reg=0.1),
            TypeError,
            "A must hold real numbers, got dtype complex",
        ),
        (lambda: mapuot.barycenter(SQUARE, SQUARE.astype(str), reg=0.1), TypeError, "A must hold real numbers"),
        (
            lambda: mapuot.barycenter(SQUARE, SQUARE, reg=0.1, weights="some"),
            TypeError,
            "weights must hold real numbers",
        ),
        (lambda: mapuot.log_matmul(MASKED, SQUARE), ValueError, "A must not be masked"),
        (lambda: mapuot.log_matmul(SQUARE, [[1.0], [1.0, 2.0]]), ValueError, "B cannot be read as an array"),
        (lambda: mapuot.log_matmul(SQUARE, SQUARE, threads=10**9), ValueError, "threads must be at most 4096"),
        (
            lambda: mapuot.solve_batch(CASE.M, [[1.0], [1.0, 2.0]], reg=0.1, reg_m=1.0),
            ValueError,
            "A cannot be read as",
        ),
        (
            lambda: mapuot.solve_batch(CASE.M, sparse.csr_array(SQUARE), reg=0.1, reg_m=1.0),
            TypeError,
            "A must be a dense",
        ),
        (lambda: mapuot.solve_batch(CASE.M, reg=0.1, reg_m=1.0, method=[]), ValueError, "method must be one of"),
        (
            lambda: mapuot.solve_batch(CASE.M, reg=0.1, reg_m=1.0, warm_start=("a", "b")),
            TypeError,
            "warm_start must hold real numbers",
        ),
        (lambda: mapuot.solve_batch(CASE.M, reg=1, reg_m=1).plan_sum([1, 2]), ValueError, "weights must have shape"),
        (
            lambda: mapuot.sinkhorn_divergence(CASE.M, CASE.a, CASE.b, reg=0.1, reg_m=1.0, M_a=CASE.M, M_b=CASE.M),
            ValueError,
            "M_a must be square, got shape (4, 5)",
        ),
    ],
)
def test_other_functions_refuse(function, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        function()


class Labelled:
    """What pandas makes of indices: the first entry is not [0], and sums take no axis -1."""

    def __init__(self, values):
        self.values = np.asarray(values, float)

    def __array__(self, dtype=None, copy=None):
        return self.values.astype(dtype or float)

    def __len__(self):
        return len(self.values)

    def __iter__(self):
        return iter(self.values)

    def __getitem__(self, label):
        raise KeyError(label)

    def sum(self, axis):
        raise ValueError(f"No axis named {axis}")


def test_labelled_arrays_are_arrays(backend):
    a, b = Labelled(CASE.a), Labelled(CASE.b)
    result = call(M=Labelled(CASE.M), a=a, b=b, reg_m=Labelled([1.0, 1.0]), backend=backend)
    assert relative_error(result.plan, call(backend=backend).plan) < 2e-6
    call(warm_start=(a, b), backend=backend)
    near = mapuot.sinkhorn_divergence(Labelled(SQUARE), a, a, reg=0.1, reg_m=1.0, backend=backend)
    assert abs(near) < 1e-9


def test_masked_arrays_without_a_mask_are_arrays():
    np.testing.assert_array_equal(call(M=np.ma.array(CASE.M)).plan, call().plan)


def test_cure_fits_the_cause():
    with pytest.warns(mapuot.ConvergenceWarning) as told:
        call(tol=1e-300)
    assert "float64" not in str(told[0].message)
    with pytest.warns(mapuot.ConvergenceWarning, match="precision='float64'"):
        call(tol=1e-300, precision="mixed", max_passes=3000)
    M = CASE.M.copy()
    M[:2, :3], M[2:, 3:] = np.inf, np.inf  # two blocks of unequal masses
    for method in ("auto", "sinkhorn"):
        with pytest.warns(mapuot.ConvergenceWarning, match="may be infeasible"):
            mapuot.solve(M, reg=0.1, reg_m=np.inf, method=method, max_passes=3000)


def test_source_folder_without_the_core_says_what_to_do():
    """As after ``pip install .`` a Python that is started in the source folder."""
    code = "import sys; sys.modules['mapuot._core'] = None; import mapuot; mapuot.solve([[0.0]], reg=1, reg_m=1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "mapuot's C library is not built in" in done.stderr
    assert "start Python in another folder" in done.stderr
