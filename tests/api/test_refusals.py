"""What was read wrongly, or refused without its name: odd numbers, words, tensors, callbacks and environments."""

import os
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
from problems import clouds

import mapuot
from mapuot import da

CASE = clouds(4, 5)
HUGE = 10**400  # no float64
MANY = 10**5000  # nor has it a text
WORDS = np.array(["auto", "auto"])
SQUARE = np.eye(4)
MASK = np.ma.array(np.ones((4, 4)), mask=True)


def call(**changes):
    args = {"M": CASE.M, "a": CASE.a, "b": CASE.b, "reg": 0.05, "reg_m": 1.0, **changes}
    return mapuot.solve(
        args.pop("M"), args.pop("a"), args.pop("b"), reg=args.pop("reg"), reg_m=args.pop("reg_m"), **args
    )


def batch(**changes):
    return mapuot.solve_batch(CASE.M, CASE.a, CASE.b, reg=0.05, reg_m=1.0, **changes)


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        # numbers that float64 has not, and those that are none
        (lambda: call(reg=HUGE), ValueError, "reg must be a positive finite number, got 1000"),
        (lambda: call(reg=MANY), ValueError, "reg must be a positive finite number, got <int>"),
        (lambda: call(reg_m=HUGE), ValueError, "reg_m[0] must be a positive number, inf, or one per point, got 1000"),
        (lambda: call(tol=-HUGE), ValueError, "tol must be a positive finite number, got -1000"),
        (lambda: call(threads=HUGE), ValueError, "threads must be at most 4096, got 1000"),
        (lambda: call(max_passes=-MANY), ValueError, "max_passes must be an integer >= 1, got <int>"),
        (lambda: call(reg=np.complex128(1)), TypeError, "reg must be a positive finite number"),
        (lambda: call(reg=np.ma.masked), TypeError, "reg must be a positive finite number, got masked"),
        (lambda: call(reg_m=np.array([1 + 1j, 1])), TypeError, "reg_m[0] must be a positive number"),
        (lambda: call(reg_m=b"ab"), TypeError, "reg_m must be a number, inf, or a pair, got b'ab'"),
        (lambda: call(reg_m=bytearray(b"ab")), TypeError, "reg_m must be a number, inf, or a pair"),
        (lambda: call(reg_m=([[1], [2, 3]], 1.0)), ValueError, "reg_m[0] cannot be read as an array"),
        (lambda: call(reg_m=np.ma.array([1.0, 2.0], mask=[1, 0])), ValueError, "reg_m[0] must not be masked"),
        (lambda: mapuot.barycenter(SQUARE, SQUARE, reg=HUGE), ValueError, "reg must be a positive finite number"),
        (
            lambda: mapuot.barycenter(SQUARE, SQUARE, reg=0.1, reg_m=HUGE),
            ValueError,
            "reg_m must be a number, got 1000",
        ),
        (
            lambda: mapuot.pot.sinkhorn_unbalanced(CASE.a, CASE.b, CASE.M, HUGE, 1.0),
            ValueError,
            "reg must be a positive",
        ),
        (
            lambda: mapuot.pot.sinkhorn_unbalanced(CASE.a, CASE.b, CASE.M, 1.0, 1.0, stopThr=HUGE),
            ValueError,
            "stopThr must be a number, got 1000",
        ),
        (lambda: call(a=[1e200, 1, 1, 1], b=[1e200, 1, 1, 1, 1]), ValueError, "a and b must have masses whose product"),
        (
            lambda: mapuot.solve_batch(
                CASE.M, np.outer([1.0, 1e200], np.ones(4)), [1e200, 1, 1, 1, 1], reg=1.0, reg_m=1.0
            ),
            ValueError,
            "A and B must have masses whose product",
        ),
        # arrays where a word is meant
        (lambda: call(method=WORDS), ValueError, "Unknown method array(['auto', 'auto']"),
        (lambda: call(precision=WORDS), ValueError, "precision must be one of"),
        (lambda: call(backend=WORDS), ValueError, "backend must be one of"),
        (lambda: call(penalty=CASE.M), ValueError, "penalty must be one of"),
        (lambda: call(penalty=("kl", CASE.M)), ValueError, "penalty must be one of"),
        (lambda: batch(method=WORDS), ValueError, "method must be one of"),
        (lambda: batch(precision=WORDS), ValueError, "precision must be one of"),
        # products of a plan
        (lambda: call().barycentric_map(np.ones(3)), ValueError, "Y must have shape (5,) or (5, d), got (3,)"),
        (lambda: call().sparse(np.nan), ValueError, "threshold must be a number, got nan"),
        (lambda: call().sparse(1j), TypeError, "threshold must be a number, got 1j"),
        (lambda: call().sparse(np.ones(5)), TypeError, "threshold must be a number"),
        (lambda: call().rows(0.5, 2), ValueError, "rows must satisfy 0 <= i0 <= i1 <= 4, got 0.5, 2"),
        (lambda: call().top_k(True), ValueError, "k must be in 1..5, got True"),
        (
            lambda: mapuot.log_matmul_gradient(SQUARE, SQUARE, SQUARE + 1j, SQUARE),
            TypeError,
            "out must hold real numbers, got dtype complex128",
        ),
        (
            lambda: mapuot.log_matmul_gradient(SQUARE, SQUARE, SQUARE, SQUARE + 1j),
            TypeError,
            "G must hold real numbers, got dtype complex128",
        ),
        (lambda: mapuot.log_matmul_gradient(SQUARE, SQUARE, MASK, SQUARE), ValueError, "out must not be masked"),
        (lambda: mapuot.log_matmul_gradient(SQUARE, SQUARE, SQUARE, MASK), ValueError, "G must not be masked"),
        # the estimator's own words
        (lambda: fit(reg_e=-1), ValueError, "reg_e must be a positive finite number, got -1.0"),
        (lambda: fit(reg_e=HUGE), ValueError, "reg_e must be a positive finite number, got 1000"),
        (lambda: fit(limit_max="x"), TypeError, "limit_max must be a number, got 'x'"),
        (lambda: fit(Xs=MASK), ValueError, "Xs must not be masked"),
        (lambda: call(checkpoint=5), TypeError, "checkpoint must be a path, got 5"),
    ],
)
def test_refused_by_name(function, kind, text):
    with pytest.raises(kind, match=re.escape(text)) as told:
        function()
    assert len(str(told.value)) < 300


def fit(Xs=SQUARE, **parameters):
    return da.UnbalancedSinkhornTransport(**parameters).fit(Xs, [0, 0, 1, 1], SQUARE, [0, 0, 1, 1])


@pytest.mark.parametrize("name", ["M", "a", "b", "reg_m", "reference", "warm_start"])
@pytest.mark.parametrize("trouble", ["grad", "bfloat16", "sparse", "meta", "complex"])
def test_tensors_that_cannot_be_read_are_named(name, trouble):
    torch = pytest.importorskip("torch")
    given = {"M": CASE.M, "a": CASE.a, "b": CASE.b, "reg_m": np.ones(2), "reference": CASE.M, "warm_start": CASE.a}
    tensor = torch.tensor(given[name])
    spoiled = {
        "grad": lambda x: x.requires_grad_(),
        "bfloat16": lambda x: x.bfloat16(),
        "sparse": lambda x: x.to_sparse(),
        "meta": lambda x: x.to("meta"),
        "complex": lambda x: x + 1j,
    }[trouble](tensor)
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
    x = tensors[place]
    tensors[place] = {"sparse": x.to_sparse(), "meta": x.to("meta"), "complex": x + 1j}[trouble]
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
        args = {"a": CASE.a, "b": CASE.b, "M": CASE.M, "reg": 0.05, "reg_m": 1.0, **tables}
        three = [args.pop(name) for name in ("M", "a", "b")]
        mapuot.solve_batch(*three, max_passes=60, **args)


def test_a_callback_hears_its_own_warnings():
    with pytest.warns(RuntimeWarning, match="divide by zero"):
        call(callback=lambda stats: bool(np.ones(1) / np.zeros(1) < 0))
