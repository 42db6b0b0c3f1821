"""Bad input: each kind is refused by an error that names the argument, briefly; what looks wrong is told."""

import os
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
from problems import clouds
from scipy import sparse

import mapuot
from mapuot import da

CASE = clouds(4, 5)
HUGE = 10**400  # no float64
MANY = 10**5000  # nor has it a text
WORDS = np.array(["auto", "auto"])
HEAVY = [1e200, 1, 1, 1, 1]
RAGGED = [[1.0], [1.0, 2.0]]
SQUARE = np.eye(4)
MASKED = np.ma.array(np.ones((4, 4)), mask=True)


def call(M=CASE.M, a=CASE.a, b=CASE.b, **changes):
    """solve on a 4 x 5 problem with some arguments exchanged."""
    return mapuot.solve(M, a, b, **{"reg": 0.05, "reg_m": 1.0, **changes})


def changed(x, value):
    """A copy of x with one entry exchanged."""
    x = np.array(x)
    x.flat[x.size // 2] = value
    return x


def each(name, values, kind, text):
    """A row for each value that is refused in the same words."""
    return [({name: value}, kind, text) for value in values]


REAL = "must hold real numbers, got dtype "
POSITIVE = "must be a positive finite number, got "
WORD = "penalty must be one of ['balanced', 'kl', 'l2', 'range', 'tv'] or a pair"
WEIGHTS = "reference must be finite, >= 0 and not all zero"
START = "warm_start must be a Result or a pair (log_u, log_v)"
REFUSED = [
    # shapes
    ({"M": np.ones(4)}, ValueError, "M must be a non-empty matrix (m, n), got shape (4,)"),
    *each("M", (np.ones((4, 5, 1)), np.ones((0, 5)), [], 3.0), ValueError, "M must be a non-empty matrix (m, n), got"),
    *each("a", (1.0, np.array(1.0)), ValueError, "a must have shape (4,), got ()"),
    ({"a": np.ones(5)}, ValueError, "a must have shape (4,), got (5,)"),
    *each("b", (np.ones(4), np.ones((5, 2))), ValueError, "b must have shape (5,), got "),
    ({"M": [[1.0, 2.0], [3.0]]}, ValueError, "M cannot be read as an array: "),
    ({"a": RAGGED}, ValueError, "a cannot be read as an array: "),
    # entries
    *each(
        "M", (changed(CASE.M, np.nan), changed(CASE.M, -np.inf)), ValueError, "M must not hold NaN or -inf, got 1 such"
    ),
    ({"M": CASE.M + 1j}, TypeError, f"M {REAL}complex128"),
    *each("M", (CASE.M.astype(object), CASE.M > 0.5, CASE.M.astype(str)), TypeError, f"M {REAL}"),
    ({"M": np.zeros((4, 5), "M8[s]")}, TypeError, f"M {REAL}datetime64[s]"),
    ({"M": np.full((4, 5), np.inf)}, mapuot.InfeasibleError, "M forbids every pair"),
    ({"M": np.ma.masked_greater(CASE.M, np.median(CASE.M))}, ValueError, "M must not be masked"),
    *each("a", (changed(CASE.a, np.nan), changed(CASE.a, np.inf)), ValueError, "a must be finite"),
    *each("a", (changed(CASE.a, -0.1), np.zeros(4)), ValueError, "a must "),
    ({"a": np.full(4, 1e308)}, ValueError, "a must have positive, finite mass, got inf"),
    ({"a": CASE.a + 1j}, TypeError, f"a {REAL}complex128"),
    ({"a": {}}, TypeError, f"a {REAL}object"),
    ({"a": np.ma.array(CASE.a, mask=[1, 0, 0, 0])}, ValueError, "a must not be masked"),
    ({"b": changed(CASE.b, np.nan)}, ValueError, "b must be finite"),
    *each("b", (changed(CASE.b, -1e-9), np.zeros(5)), ValueError, "b must "),
    ({"b": CASE.b.astype(object)}, TypeError, f"b {REAL}object"),
    ({"a": HEAVY[:4], "b": HEAVY}, ValueError, "a and b must have masses whose product"),
    ({"reg_m": np.inf, "b": 2 * CASE.b}, ValueError, "equal mass"),
    # reg, reg_m
    ({"reg": -1}, ValueError, f"reg {POSITIVE}-1.0"),
    ({"reg": HUGE}, ValueError, f"reg {POSITIVE}1000"),
    ({"reg": MANY}, ValueError, f"reg {POSITIVE}<int>"),
    *each("reg", (0.0, np.inf, np.nan), ValueError, f"reg {POSITIVE}"),
    ({"reg": "0.1"}, TypeError, f"reg {POSITIVE}'0.1'"),
    ({"reg": np.ma.masked}, TypeError, f"reg {POSITIVE}masked"),
    *each("reg", ("big", None, 1j, [0.1, 0.2], np.complex128(1)), TypeError, f"reg {POSITIVE}"),
    ({"reg": 5e-324}, ValueError, "reg must not be so small that M / reg overflows, got 5e-324"),
    ({"M": 1.7e308 * np.sign(CASE.M - np.median(CASE.M))}, ValueError, "reg must not be so small"),
    ({"reg_m": 0.0}, ValueError, "reg_m[0] must be > 0 (inf = balanced), got 0.0"),
    ({"reg_m": (np.nan, 1.0)}, ValueError, "reg_m[0] must be > 0 (inf = balanced), got nan"),
    *each("reg_m", ((1.0, -2.0), (1.0, changed(np.ones(5), -1))), ValueError, "reg_m[1] must be > 0"),
    ({"reg_m": (1.0, 2.0, 3.0)}, ValueError, "reg_m must be a scalar or have length 1 or 2, got length 3"),
    ({"reg_m": "much"}, ValueError, "reg_m must be a scalar or have length 1 or 2"),
    ({"reg_m": (np.ones(5), 1.0)}, ValueError, "reg_m[0] must have shape (4,), got (5,)"),
    ({"reg_m": HUGE}, ValueError, "reg_m[0] must be a positive number, inf, or one per point, got 1000"),
    *each(
        "reg_m", ("1", None, np.array([1 + 1j, 1])), TypeError, "reg_m[0] must be a positive number, inf, or one per"
    ),
    *each("reg_m", (b"ab", bytearray(b"ab")), TypeError, "reg_m must be a number, inf, or a pair, got b"),
    ({"reg_m": ([[1], [2, 3]], 1.0)}, ValueError, "reg_m[0] cannot be read as an array"),
    ({"reg_m": np.ma.array([1.0, 2.0], mask=[1, 0])}, ValueError, "reg_m[0] must not be masked"),
    ({"penalty": "range", "reg_m": -0.1}, ValueError, "reg_m[0] must be a slack >= 0 for penalty 'range'"),
    ({"penalty": "range", "reg_m": np.inf}, ValueError, "reg_m[0] must be a slack >= 0 for penalty 'range'"),
    # words
    ({"method": "newton"}, ValueError, "Unknown method 'newton': must be one of ['auto', "),
    *each("method", (None, ["auto"], WORDS), ValueError, "Unknown method "),
    *each("penalty", ("kullback", None, ("kl", "tv", "l2"), CASE.M, ("kl", CASE.M)), ValueError, WORD),
    *each("backend", ("tpu", WORDS), ValueError, "backend must be one of ('auto', 'cpu', 'cuda', 'reference'), got "),
    *each("precision", ("float16", WORDS), ValueError, "precision must be one of ['auto', 'float64', 'mixed']"),
    # the reference
    ({"reference": "ones"}, ValueError, "reference must be 'product', 'uniform' or a matrix, got 'ones'"),
    ({"reference": np.ones((5, 4))}, ValueError, "reference must have M's shape (4, 5), got (5, 4)"),
    *each("reference", (np.zeros((4, 5)), changed(CASE.M, -1.0), changed(CASE.M, np.nan)), ValueError, WEIGHTS),
    ({"reference": changed(CASE.M, np.inf)}, ValueError, "and 1 entries that are not finite"),
    ({"reference": np.full((4, 5), 1e308)}, ValueError, "reference is too large: its sum is beyond float64"),
    ({"reference": CASE.M + 1j}, TypeError, f"reference {REAL}complex128"),
    ({"reference": sparse.coo_array(CASE.M)}, TypeError, "reference must be a dense array, got coo_array"),
    # numbers
    *each("tol", (0.0, np.nan), ValueError, f"tol {POSITIVE}"),
    ({"tol": -HUGE}, ValueError, f"tol {POSITIVE}-1000"),
    ({"tol": "tight"}, TypeError, f"tol {POSITIVE}'tight'"),
    ({"tol_gap": -1.0}, ValueError, f"tol_gap {POSITIVE}-1.0"),
    ({"max_passes": -MANY}, ValueError, "max_passes must be an integer >= 1, got <int>"),
    *each("max_passes", (0, 10.0, True), ValueError, "max_passes must be an integer >= 1, got "),
    *each("threads", (0, "two"), ValueError, "threads must be an integer >= 1, got "),
    *each("threads", (10**12, HUGE), ValueError, "threads must be at most 4096, got 1000"),
    # starts and objects
    *each("warm_start", (3, (CASE.a,), (CASE.a + 1j, CASE.b)), TypeError, START),
    ({"warm_start": (CASE.b, CASE.a)}, ValueError, "warm_start must have shapes (4,), (5,), got (5,), (4,)"),
    ({"warm_start": (CASE.a, changed(CASE.b, np.nan))}, ValueError, "warm_start must not hold NaN"),
    ({"callback": 3}, TypeError, "callback must be callable, got 3"),
    ({"comm": object()}, TypeError, "comm must be an intracommunicator of mpi4py"),
    ({"checkpoint": 5}, TypeError, "checkpoint must be a path, got 5"),
]


def assert_refused(function, arguments, kind, text):
    with pytest.raises(kind, match=re.escape(text)) as told:
        function(**arguments)
    assert len(str(told.value)) < 300


@pytest.mark.parametrize(
    ("arguments", "kind", "text"), REFUSED, ids=[f"{next(iter(r[0]))}-{k}" for k, r in enumerate(REFUSED)]
)
def test_refused(arguments, kind, text):
    assert_refused(call, arguments, kind, text)


def test_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_iter_max'"):
        call(num_iter_max=3)
    with pytest.raises(TypeError):
        mapuot.solve(CASE.M, CASE.a, CASE.b, *(0.05, 1.0))  # keyword only from there on
    with pytest.raises(TypeError, match="reg_m"):
        mapuot.solve(CASE.M, CASE.a, CASE.b, reg=0.05)


@pytest.mark.parametrize(
    ("where", "reg_m", "name"), [(np.s_[:, 2], (1.0, np.inf), "b[2]"), (np.s_[1], (np.inf, 1.0), "a[1]")]
)
def test_unreachable_hard_point_is_named(backend, where, reg_m, name):
    M = CASE.M.copy()
    M[where] = np.inf
    with pytest.raises(mapuot.InfeasibleError, match=re.escape(f"M forbids every pair of {name}")):
        call(M=M, reg_m=reg_m, backend=backend)


def fit(Xs=SQUARE, **parameters):
    return da.UnbalancedSinkhornTransport(**parameters).fit(Xs, [0, 0, 1, 1], SQUARE, [0, 0, 1, 1])


# a function, and arguments that it takes
GOOD = {
    "solve_batch": (mapuot.solve_batch, {"M": CASE.M, "reg": 0.1, "reg_m": 1.0}),
    "barycenter": (mapuot.barycenter, {"M": SQUARE, "A": SQUARE, "reg": 0.1}),
    "divergence": (mapuot.sinkhorn_divergence, {"M": CASE.M, "a": CASE.a, "b": CASE.b, "reg": 0.1, "reg_m": 1.0}),
    "pot": (mapuot.pot.sinkhorn_unbalanced, {"a": CASE.a, "b": CASE.b, "M": CASE.M, "reg": 1.0, "reg_m": 1.0}),
    "log_matmul": (mapuot.log_matmul, {"A": SQUARE, "B": SQUARE}),
    "gradient": (mapuot.log_matmul_gradient, dict.fromkeys(("A", "B", "out", "G"), SQUARE)),
    "fit": (fit, {}),
    "plan_sum": (mapuot.solve_batch(CASE.M, reg=1, reg_m=1).plan_sum, {}),
}


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "text"),
    [
        ("solve_batch", {"A": RAGGED}, ValueError, "A cannot be read as"),
        ("solve_batch", {"A": sparse.csr_array(SQUARE)}, TypeError, "A must be a dense"),
        ("solve_batch", {"A": np.outer(HEAVY[1::-1], np.ones(4)), "B": HEAVY}, ValueError, "A and B must have masses"),
        ("solve_batch", {"method": []}, ValueError, "method must be one of"),
        ("solve_batch", {"method": WORDS}, ValueError, "method must be one of"),
        ("solve_batch", {"precision": WORDS}, ValueError, "precision must be one of"),
        ("solve_batch", {"warm_start": ("a", "b")}, TypeError, "warm_start must hold real numbers"),
        ("barycenter", {"A": MASKED}, ValueError, "A must not be masked"),
        ("barycenter", {"A": SQUARE + 1j}, TypeError, "A must hold real numbers, got dtype complex"),
        ("barycenter", {"A": SQUARE.astype(str)}, TypeError, "A must hold real numbers"),
        ("barycenter", {"weights": "some"}, TypeError, "weights must hold real numbers"),
        ("barycenter", {"reg": HUGE}, ValueError, "reg must be a positive finite number"),
        ("barycenter", {"reg_m": HUGE}, ValueError, "reg_m must be a number, got 1000"),
        ("divergence", {"M_a": CASE.M, "M_b": CASE.M}, ValueError, "M_a must be square, got shape (4, 5)"),
        ("pot", {"reg": HUGE}, ValueError, "reg must be a positive"),
        ("pot", {"stopThr": HUGE}, ValueError, "stopThr must be a number, got 1000"),
        ("log_matmul", {"A": MASKED}, ValueError, "A must not be masked"),
        ("log_matmul", {"B": RAGGED}, ValueError, "B cannot be read as an array"),
        ("log_matmul", {"threads": 10**9}, ValueError, "threads must be at most 4096"),
        ("log_matmul", {"threads": 0}, ValueError, "threads"),
        ("log_matmul", {"A": np.ones((2, 3))}, ValueError, "must share k"),
        ("log_matmul", {"A": np.ones(4)}, ValueError, "A must have 2 or 3 dimensions"),
        ("log_matmul", {"A": np.ones((2, 4, 4)), "B": np.ones((3, 4, 4))}, ValueError, "equally many products"),
        ("log_matmul", {"A": SQUARE + 1j}, TypeError, "A must hold real numbers"),
        ("gradient", {"out": SQUARE + 1j}, TypeError, "out must hold real numbers, got dtype complex128"),
        ("gradient", {"G": SQUARE + 1j}, TypeError, "G must hold real numbers, got dtype complex128"),
        ("gradient", {"out": MASKED}, ValueError, "out must not be masked"),
        ("gradient", {"G": MASKED}, ValueError, "G must not be masked"),
        ("gradient", {"G": np.ones((4, 3))}, ValueError, "G must have shape"),
        ("plan_sum", {"weights": [1, 2]}, ValueError, "weights must have shape"),
        ("fit", {"reg_e": -1}, ValueError, "reg_e must be a positive finite number, got -1.0"),
        ("fit", {"reg_e": HUGE}, ValueError, "reg_e must be a positive finite number, got 1000"),
        ("fit", {"limit_max": "x"}, TypeError, "limit_max must be a number, got 'x'"),
        ("fit", {"Xs": MASKED}, ValueError, "Xs must not be masked"),
    ],
)
def test_other_functions_refuse(name, arguments, kind, text):
    function, good = GOOD[name]
    assert_refused(function, good | arguments, kind, text)


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "text"),
    [
        *(
            (name, {x: factor}, kind, f"{x}{text}")
            for name, x, n in (("apply", "X", 5), ("apply_transpose", "Y", 4))
            for factor, kind, text in (
                *((bad, ValueError, "") for bad in (1.0, np.ones(n + 1), np.ones((n + 1, 2)), np.ones((n, 1, 1)))),
                (np.ones((n, 0)), ValueError, " must have a column"),
                (np.ones(n) + 1j, TypeError, ""),
            )
        ),
        ("barycentric_map", {"Y": np.ones(3)}, ValueError, "Y must have shape (5,) or (5, d), got (3,)"),
        ("rows", {"i0": -1, "i1": 1}, ValueError, "rows must satisfy 0 <= i0 <= i1 <= 4, got -1, 1"),
        ("rows", {"i0": 0, "i1": 5}, ValueError, "rows must satisfy 0 <= i0 <= i1 <= 4, got 0, 5"),
        ("rows", {"i0": 0.5, "i1": 2}, ValueError, "rows must satisfy 0 <= i0 <= i1 <= 4, got 0.5, 2"),
        *(("top_k", {"k": k}, ValueError, f"k must be in 1..5, got {k!r}") for k in (0, 6, 2.5, "3", True)),
        *(("sample", {"size": size}, ValueError, "size must be an integer") for size in (0, 2.5, True)),
        ("sparse", {"threshold": np.nan}, ValueError, "threshold must be a number, got nan"),
        ("sparse", {"threshold": 1j}, TypeError, "threshold must be a number, got 1j"),
        ("sparse", {"threshold": np.ones(5)}, TypeError, "threshold must be a number"),
        ("sparse", {}, ValueError, "threshold or keep, one of both, must be given, got None and None"),
        ("sparse", {"threshold": 0.1, "keep": 0.5}, ValueError, "one of both"),
        ("sparse", {"keep": 0}, ValueError, "keep must be a share in (0, 1], got 0"),
        ("sparse", {"keep": 1.5}, ValueError, "keep must be a share in (0, 1], got 1.5"),
        ("sparse", {"keep": np.nan}, ValueError, "keep must be a share"),
        ("sparse", {"keep": "all"}, TypeError, "keep must be a share"),
        ("push", {"labels": [1, 2, 3]}, ValueError, "labels must have shape (4,), got (3,)"),
        ("pull", {"labels": np.array([1, "a", 1, "a", None], object)}, TypeError, "labels must be labels of one kind"),
    ],
)
def test_products_of_a_plan_refuse(name, arguments, kind, text, backend):
    assert_refused(getattr(call(backend=backend), name), arguments, kind, text)


SPOILED = {
    "grad": lambda x: x.requires_grad_(),
    "bfloat16": lambda x: x.bfloat16(),
    "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
    "complex": lambda x: x + 1j,
}


@pytest.mark.parametrize("name", ["M", "a", "b", "reg_m", "reference", "warm_start"])
@pytest.mark.parametrize("trouble", SPOILED)
def test_tensors_that_cannot_be_read_are_named(name, trouble):
    torch = pytest.importorskip("torch")
    given = {"M": CASE.M, "a": CASE.a, "b": CASE.b, "reg_m": np.ones(2), "reference": CASE.M, "warm_start": CASE.a}
    spoiled = SPOILED[trouble](torch.tensor(given[name]))
    if name == "reg_m" and trouble in ("grad", "bfloat16", "sparse"):
        pytest.skip("numbers one by one, each of which is read")
    if name in ("M", "a", "b") and trouble in ("grad", "bfloat16"):
        pytest.skip("taken as data, and as float32: test_tensors.py")
    value = (spoiled, CASE.b) if name == "warm_start" else spoiled
    with pytest.raises(
        (TypeError, ValueError), match=rf"^{name}\b.*(read as an array|real numbers|a positive number|must be a Result)"
    ):
        call(**{name: value})


@pytest.mark.parametrize("trouble", ["sparse", "meta", "complex"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_tensors_of_the_loss(trouble, place):
    torch = pytest.importorskip("torch")
    from mapuot.torch import sinkhorn_loss

    tensors = [torch.tensor(x) for x in (CASE.M, CASE.a, CASE.b)]
    tensors[place] = SPOILED[trouble](tensors[place])
    with pytest.raises(TypeError, match=f"^{'Mab'[place]} must be a dense tensor of real numbers in memory"):
        sinkhorn_loss(*tensors, reg=0.1, reg_m=1.0)


def test_jax_takes_real_numbers():
    jax = pytest.importorskip("jax.numpy")
    from mapuot.jax import sinkhorn_loss

    a, b, M = map(jax.asarray, (CASE.a, CASE.b, CASE.M))
    for x, y, z in ((a + 1j, b, M), (a, b + 1j, M), (a, b, M + 1j)):
        with pytest.raises(TypeError, match="must hold real numbers, got dtype complex"):
            sinkhorn_loss(z, x, y, reg=0.1, reg_m=1.0)
    with pytest.raises(ValueError, match="reg must be a positive finite number"):
        sinkhorn_loss(M, a, b, reg=HUGE, reg_m=1.0)


# ---- callbacks ----


def test_a_callback_cannot_change_the_certificate(backend):
    kept = []

    def meddle(stats):
        kept.append((stats, stats.error))
        stats.error, stats.gap, stats.dual, stats.status, stats.n_pass = 0.0, 0.0, 1e9, "converged", 1000

    plain = call(tol=1e-9, precision="float64", backend=backend)
    result = call(tol=1e-9, precision="float64", backend=backend, callback=meddle)
    assert (result.n_passes, result.error_bound) == (plain.n_passes, plain.error_bound)
    assert [stat.error for stat in result.trace] == [error for _, error in kept]
    assert result.trace[-1].status == "converged"


@pytest.mark.parametrize("answer", [np.ones(2), np.array(["a", "b"])], ids=["numbers", "words"])
def test_a_callback_answers_yes_or_no(answer):
    with pytest.raises(TypeError, match="callback must return a truth value, or None to go on, got array"):
        call(callback=lambda stats: answer)
    assert call(callback=lambda stats: np.array([True])).status == "cancelled"


# ---- the environment ----


def told(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_an_unknown_instruction_set_is_told():
    code, text = told("import mapuot.backends.cpu", MAPUOT_ISA="garbage")
    assert code == 0
    assert "MAPUOT_ISA must be auto, scalar, avx2 or avx512, as this machine has it, got 'garbage'" in text
    assert told("import mapuot.backends.cpu", MAPUOT_ISA="scalar") == (0, "")


@pytest.mark.parametrize("text", ["abc", "nan", "-1"])
def test_seconds_of_a_checkpoint_are_a_number(tmp_path, text):
    program = f"import mapuot; mapuot.solve([[1.]], reg=1, reg_m=1, checkpoint={str(tmp_path / 'x.npz')!r})"
    code, found = told(program, MAPUOT_CHECKPOINT_SECONDS=text)
    assert code != 0
    assert f"MAPUOT_CHECKPOINT_SECONDS must be a number of seconds >= 0, got '{text}'" in found
    assert told("import mapuot", MAPUOT_CHECKPOINT_SECONDS=text) == (0, "")


# ---- units that look wrong ----


def scaling_warnings(function):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = function()
    return [str(x.message) for x in told if x.category is mapuot.ScalingWarning], result


def test_finite_costs_that_stand_for_inf_are_told():
    case = clouds(6, 7)
    for large in (1e8, 1e10):
        M = np.where(np.median(case.M) < case.M, large, case.M)
        (text,), _ = scaling_warnings(lambda M=M: mapuot.solve(M, reg=0.1, reg_m=1.0))
        assert f"M reaches {large:.1e}" in text
        assert "use inf" in text
        (text,), _ = scaling_warnings(lambda M=M: mapuot.solve_batch(M, np.ones((3, 6)), reg=0.1, reg_m=1.0))
        assert "use inf" in text
        told, result = scaling_warnings(lambda M=M: mapuot.solve(np.where(M < 1e8, M, np.inf), reg=0.1, reg_m=1.0))
        assert not told
        assert result.n_passes < 20


def test_a_plan_that_moves_almost_nothing_is_told(backend):
    told, result = scaling_warnings(lambda: call(M=100 * CASE.M + 25, reg=1.0, backend=backend))
    assert result.converged
    assert result.mass < 1e-4
    assert len(told) == 1
    assert f"the plan moves almost nothing, {result.mass:.1e} of a mass of" in told[0]
    assert not scaling_warnings(lambda: call(backend=backend))[0]
    few = np.stack([CASE.M, 100 * CASE.M + 25, CASE.M])
    told, _ = scaling_warnings(lambda: mapuot.solve_batch(few, CASE.a, CASE.b, reg=1.0, reg_m=1.0, backend=backend))
    assert "almost nothing in 1 of 3 problems" in told[0]


def test_unscaled_costs_of_an_estimator_are_told():
    X = np.random.default_rng(0).normal(size=(9, 40)) * 10
    told, _ = scaling_warnings(lambda: da.UnbalancedSinkhornTransport().fit(X, Xt=X + 30))
    assert len(told) == 1
    assert not scaling_warnings(lambda: da.UnbalancedSinkhornTransport(reg_m=10, norm="max").fit(X, Xt=X + 30))[0]


# ---- warnings of numpy from inside ----


@pytest.mark.parametrize(
    "changes",
    [
        {"reg_m": 1.7e308},
        {"M": CASE.M * 1e300, "reg": 1e295},
        {"a": CASE.a * 1e150, "b": CASE.b * 1e150},
        {"penalty": "l2", "reg_m": 1e300, "a": CASE.a * 1e100, "b": CASE.b * 1e100},
        {"warm_start": (np.full(4, 1e308), np.full(5, -1e308))},
        {"reg": 1e-3, "method": "sinkhorn", "warm_start": (np.full(4, 700.0), np.full(5, -700.0))},
    ],
    ids=range(6),
)
def test_numpy_says_nothing_from_inside(changes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RuntimeWarning)
        result = call(max_passes=60, **changes)
        for name in ("mass", "objective", "dual", "f", "g"):
            getattr(result, name)
        tables = {k: np.tile(v, (3, 1)) if k in ("a", "b") else v for k, v in changes.items() if k != "warm_start"}
        M, a, b = (tables.pop(name, getattr(CASE, name)) for name in "Mab")
        mapuot.solve_batch(M, a, b, max_passes=60, **{"reg": 0.05, "reg_m": 1.0, **tables})


def test_a_callback_hears_its_own_warnings():
    with pytest.warns(RuntimeWarning, match="divide by zero"):
        call(callback=lambda stats: bool(np.ones(1) / np.zeros(1) < 0))
