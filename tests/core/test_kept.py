"""Passes over the pairs that may carry mass: which they are, when the way is taken, and that its answers are true."""

import math

import numpy as np
import pytest
from oracle import compiler
from problems import clouds, verify, with_forbidden, with_zeros

import mapuot
from mapuot.ascend import groups, kept
from mapuot.backends import boxes, cpu
from mapuot.problem.cost import Dense
from mapuot.route import stages

needs_oracle = pytest.mark.skipif(compiler() is None, reason="needs a C compiler and a long double longer than double")
WAY = r"pairs kept"


@pytest.fixture
def small(monkeypatch):
    """Let small problems take the way, however many pairs matter."""
    monkeypatch.setattr(stages, "SERIAL_ENTRIES", 0)
    monkeypatch.setattr(kept, "MOST_SHARE", 1.0)
    monkeypatch.setattr(kept, "MOST_OF_LINES", math.inf)


def grid(side, reg, reg_m, **more):
    """A grid against itself: costs with many ties."""
    x = np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1).reshape(-1, 2) / side
    M = ((x[:, None] - x) ** 2).sum(-1)
    return clouds(side**2, side**2, reg, reg_m, seed=3, **more).replace(M=M / M.max())


def tails(reg, reg_m):
    """Points with heavy tails, masses over six decades."""
    rng = np.random.default_rng(5)
    x, y = rng.standard_t(1.5, (40, 2)), rng.standard_t(1.5, (35, 2))
    M = ((x[:, None] - y) ** 2).sum(-1)
    case = clouds(40, 35, reg, reg_m)
    return case.replace(M=M / M.max(), a=10.0 ** rng.uniform(-6, 0, 40), b=10.0 ** rng.uniform(-6, 0, 35))


CASES = {
    "soft": clouds(60, 50, 2e-5, 1.0),
    "unequal": clouds(60, 50, 2e-5, (0.1, 20.0), ratio=1.7),
    "semi-relaxed": clouds(60, 50, 1e-4, (np.inf, 0.3), ratio=1.2),
    "turned": clouds(60, 50, 1e-4, (0.3, np.inf), ratio=1.2),
    "balanced": clouds(30, 25, 1e-4, np.inf),
    "one rho each": clouds(60, 50, 2e-5, (np.linspace(0.1, 2, 60), 1.0)),
    "forbidden": with_forbidden(clouds(60, 50, 2e-5, 1.0)),
    "zeros": with_zeros(clouds(60, 50, 2e-5, 1.0)),
    "uniform": clouds(60, 50, 2e-5, 1.0, reference="uniform"),
    "ties": grid(7, 2e-5, 1.0),
    "tails": tails(1e-5, 0.5),
    "sharp": clouds(30, 25, 1e-7, 1.0),
}


@needs_oracle
@pytest.mark.parametrize("name", CASES)
def test_answers_are_true(name, small):
    case = CASES[name]
    result = case.solve(symmetric=False)
    assert WAY in result.how
    assert result.converged
    verify(result, case)


@needs_oracle
def test_a_reference_is_that_of_the_kept_pairs(small):
    case = clouds(60, 50, 2e-5, 1.0)
    c = np.random.default_rng(0).uniform(0.01, 1, case.shape)
    c[:, ::4] = 0.0
    case = case.replace(reference=c)
    result = case.solve(symmetric=False)
    assert WAY in result.how
    assert result.converged
    verify(result, case)


@needs_oracle
@pytest.mark.parametrize("truncate", [None, 3.0])
@pytest.mark.parametrize("reg_m", [1.0, (np.inf, 0.3), (0.3, np.inf)])
def test_answers_between_points_are_true(reg_m, truncate, small, monkeypatch):
    """Where all pairs of points are looked at, and where boxes say which."""
    monkeypatch.setattr(boxes, "WORTH", 0.98)
    monkeypatch.setattr(groups.Groups, "correct", None)
    rng = np.random.default_rng(0)
    x, y = rng.random((2, 64, 2)) + rng.integers(0, 3, (2, 64, 1))
    M = ((x[:, None] - y) ** 2).sum(-1)
    case = clouds(64, 64, 2e-5, reg_m, ratio=1.3).replace(M=M / M.max())
    points = mapuot.PointCloud(x, y, scale=1 / M.max(), truncate=truncate, form=None)
    result = case.replace(M=points).solve(symmetric=False)
    assert WAY in result.how
    assert ("% of the pairs," in result.how) == (truncate is not None)
    assert result.converged
    verify(result, case)


@needs_oracle
@pytest.mark.parametrize("nats", [0.5, 3.0])
def test_pairs_that_were_missed_are_found(nats, small, monkeypatch):
    """Of too few pairs the answer is another one, which no pass over all pairs certifies."""
    monkeypatch.setattr(kept, "NATS", nats)
    monkeypatch.setattr(kept, "MOVE", 0.0)
    for seed in range(3):
        case = clouds(30, 25, 1e-4, 1.0, seed=seed)
        result = case.solve(symmetric=False)
        assert result.converged
        verify(result, case)


def test_the_way_is_left_where_many_pairs_matter():
    """And where a solve is small, begins warm or has one potential."""
    rng = np.random.default_rng(0)
    line, cube = rng.random((2, 700, 1)), rng.random((2, 700, 3))
    for (x, y), reg, taken in ((line, 1e-3, False), (line, 1e-6, False), (cube, 1e-3, False), (cube, 1e-5, True)):
        M = ((x[:, None] - y) ** 2).sum(-1)
        result = mapuot.solve(M, reg=reg * M.max(), reg_m=1.0, threads=1)
        assert result.converged
        assert (WAY in result.how) == taken, (reg, result.how)
    again = mapuot.solve(M, reg=1e-5 * M.max(), reg_m=1.0, threads=1, warm_start=result)
    assert WAY not in again.how
    assert WAY not in mapuot.solve(M[:300, :300], reg=1e-5, reg_m=1.0, callback=lambda _: None).how
    assert WAY not in mapuot.solve(((x[:, None] - x) ** 2).sum(-1), reg=1e-5, reg_m=1.0).how


@needs_oracle
@pytest.mark.filterwarnings("ignore::mapuot.ConvergenceWarning")
@pytest.mark.parametrize(
    "options", [{"max_passes": 20}, {"max_passes": 90}, {"callback": lambda stats: stats.n_pass > 40}]
)
def test_it_ends_where_it_is_told_to(options, small):
    """Its certificate then is that of a pass over all pairs, at the reg asked for."""
    case = clouds(40, 30, 2e-6, 1.0)
    result = case.solve(symmetric=False, **options)
    assert result.status in ("max_passes", "cancelled")
    assert result.n_passes <= options.get("max_passes", 41) + 2
    verify(result, case)


@pytest.mark.filterwarnings("ignore::mapuot.ConvergenceWarning")
def test_pairs_that_leave_no_mass_are_found_once(small):
    """Since no others would have any, either."""
    case = clouds(40, 30, 1e-5, 0.01)
    result = case.replace(M=case.M + 100).solve(symmetric=False, max_passes=400)
    assert WAY in result.how
    assert result.status == "underflow"
    assert result.n_passes < 30


def test_potentials_that_pairs_led_astray_are_left():
    """From them passes over all pairs would not find back; from those before they do."""
    x, y = np.random.default_rng(0).random((2, 700, 3))
    M = ((x[:, None] - y) ** 2).sum(-1)
    result = mapuot.solve(M, reg=1e-5 * M.max(), reg_m=(1.0, np.inf), threads=1, max_passes=5000)
    assert WAY in result.how
    assert result.converged


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.usefixtures("isa")
def test_near_pairs(threads, turned, dtype):
    """All with exponents so far below 0 at most, in their order, with their costs; None where they are too many."""
    rng = np.random.default_rng(1)
    M = rng.random((37, 531)).astype(dtype)
    M[rng.random(M.shape) < 0.1] = np.inf
    c = rng.uniform(0.1, 1, M.shape)
    c[rng.random(M.shape) < 0.1] = 0.0
    alpha, beta = rng.standard_normal(37), rng.standard_normal(531)
    alpha[3], beta[5] = -np.inf, -np.inf
    if turned:
        M, c = np.asfortranarray(M), np.asfortranarray(c)
    for reference in (None, c):
        share = np.ones(M.shape) if reference is None else reference
        with np.errstate(divide="ignore"):
            exponents = np.log(share) + alpha[:, None] + beta - M.astype(float) / 0.2
        right = exponents >= -3.0
        operator = cpu.operator_of(Dense(M), 0.2, None if reference is None else Dense(reference), threads=threads)
        found = operator.near(alpha, beta, 3.0, right.size)
        i, j = np.nonzero(right)
        assert np.array_equal(found.row_numbers(), i)
        assert np.array_equal(found.column, j)
        assert np.array_equal(found.data, M[right])
        assert operator.near(alpha, beta, 3.0, int(right.sum()) - 1) is None
