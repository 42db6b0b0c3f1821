"""A short slice of `make hostile`, and the tests of the tool: its answer, its judge."""

import dataclasses
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import CUDA
from judge import divergence, is_false, judge, judge_loss
from oracle import LONG, answer, call, compiler, library

from .problem import Problem, distances, draw
from .trial import KEPT, PATHS, Trial
from .trial import call as solved
from .worker import Runner, judged_trial

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler and a long double longer than double")
ONE = np.ones(1)


def single(cost, a, b, reg, rho, penalty="kl"):
    return Problem(np.full((1, 1), cost), a * ONE, b * ONE, reg, (rho, rho), (penalty, penalty))


# ---- the answer


def test_balanced_product():
    """A constant cost leaves the product of the marginals."""
    a = np.array([0.25, 0.75])
    b = np.array([0.5, 0.125, 0.375])
    found = answer(Problem(np.full((2, 3), 5.0), a, b, 0.3, (np.inf, np.inf), ("balanced", "balanced")))
    assert np.abs(found.plan - np.outer(a, b)).max() < 1e-18


def test_total_variation_kept_and_given_up():
    """Mass 1 at cost M moves if M < 2 rho."""
    assert abs(answer(single(1.0, 1.0, 1.0, 1e-3, 0.6, "tv")).mass - 1.0) < 1e-15
    assert answer(single(1.0, 1.0, 1.0, 1e-3, 0.4, "tv")).mass < 1e-80


def test_two_precisions_agree():
    """Where both are good, long double and __float128 agree within their own error estimates."""
    if library(True) is None:
        pytest.skip("no __float128")
    compared = 0
    for index in range(15):
        problem = draw(np.random.default_rng([5, index]))
        pair = [call(problem, None, quad) for quad in (False, True)]
        if None in pair or not all(one.good for one in pair):
            continue
        compared += 1
        off = np.abs(pair[0].plan - pair[1].plan).sum() / pair[1].plan.sum()
        assert off <= pair[0].error + pair[1].error, index
        assert abs(pair[0].dual - pair[1].dual) <= 1e-14 * pair[1].scale, index
    assert compared > 7


def test_a_column_of_next_to_no_mass_has_its_mass():
    """A step that left 1e-77 of the mass to a column once hid from the measure of the steps after it."""
    M = np.array([[0.2, 1.3], [0.1, 1.0]])
    a, b = np.array([3.7e-215, 2.2e-214]), np.array([2.2e-214, 2.5e-223])
    c = np.array([[0.3, 2.8], [1.0, 7.9]])
    found = answer(Problem(M, a, b, 23.5, (np.array([0.006, 0.003]), 1.0), ("range", "range"), c))
    assert found.log_v[1] < 0 == found.log_v[0]
    assert found.plan.sum(0)[1] == pytest.approx(2 * b[1], rel=1e-9, abs=0)


# ---- the judge


@pytest.mark.parametrize("off", [1e-12, 1e-6, 9.9e-4, 1.01e-3, 0.3, 3.0])
def test_divergence_does_not_cancel(off):
    """KL(t e^x | t) = t (x e^x - e^x + 1) = t sum (k - 1) x^k / k!, however small x is."""
    t = LONG(0.7)
    r = t * (1 + LONG(off))
    x = np.log1p((r - t) / t)
    term = LONG(1)
    wanted = LONG(0)
    for k in range(1, 60):
        term = term * x / k
        wanted += (k - 1) * term
    assert abs(divergence("kl", r, t, LONG(2)) / (2 * t * wanted) - 1) < 1e-12


def honest():
    problem = Problem(
        np.array([[0.0, 1.0], [2.0, 0.5]]), np.ones(2), np.array([1.0, 0.5]), 0.3, (1.0, 2.0), ("kl", "kl")
    )
    trial = Trial("cold", (problem,), {"precision": "float64", "tol": 1e-8})
    return problem, trial, solved(trial, "cpu")[0]


def kinds(problem, claim, trial):
    return {failure.kind for failure in judge(problem, claim, trial.options)[0]}


def test_a_true_claim_passes():
    problem, trial, claim = honest()
    assert claim.converged
    assert kinds(problem, claim, trial) == set()


@pytest.mark.parametrize(("kind", "lie"),
                         [("plan error", lambda c: {"log_v": c.log_v + 1e-6}),
                          ("not met", lambda c: {"error_bound": 1e-7}),
                          ("dual above", lambda c: {"dual": c.dual * (1 + 1e-12)}),
                          ("gap untrue", lambda c: {"log_v": c.log_v + 1e-4, "gap": 0.0}),
                          ("negative gap", lambda c: {"gap": -1e-9}), ("nan", lambda c: {"dual": np.nan}),
                          ("nan", lambda c: {"error_bound": np.inf}), ("mass", lambda c: {"mass": c.mass * 1.001}),
                          ("row_marginal", lambda c: {"row_marginal": c.row_marginal * 1.001}),
                          ("objective", lambda c: {"objective": c.objective * (1 + 1e-9)}),
                          ("float32 plan", lambda c: {"plan": np.zeros_like(c.plan, np.float32)})])  # fmt: skip
def test_a_lie_is_found(kind, lie):
    problem, trial, claim = honest()
    assert kind in kinds(problem, dataclasses.replace(claim, **lie(claim)), trial)


@pytest.mark.parametrize(
    ("kind", "lie"),
    [
        (None, lambda c: {}),
        ("dual above", lambda c: {"value": c.value + 1e-9}),
        ("slopes", lambda c: {"slopes": 1.001 * c.slopes}),
    ],
)
def test_a_lie_of_a_loss_is_found(kind, lie):
    pytest.importorskip("torch")
    x, y = np.arange(3.0)[:, None] * [0.3, 0.1], np.arange(4.0)[:, None] * [0.1, -0.2]
    M = distances(x, y, "sqeuclidean", 1.0)
    problem = Problem(
        M, np.full(3, 0.3), np.full(4, 0.2), 0.1, (1.0, np.inf), ("kl", "kl"), points=(x, y, "sqeuclidean", 1.0)
    )
    trial = Trial("embeddings", (problem,), {"precision": "float64", "tol": 1e-6}, function="sample_loss")
    true = solved(trial, "cpu")[0]
    claim = dataclasses.replace(true, **lie(true))
    assert claim.converged
    assert [f.kind for f in judge_loss(problem, claim, trial.options)[0]] == [kind] * bool(kind)


# ---- the slice

SEED = 11
COUNTS = {"truncated": 24, "clouds": 8, "boxes": 3, "batch": 12, "sparse batch": 12}  # a third in boxes skip pairs


@pytest.mark.parametrize("how", PATHS)
def test_slice(how):
    count = COUNTS.get(how, 18)
    runner = Runner("cpu", over_ranks=False)
    totals = Counter()
    for index in range(count):
        found = judged_trial(runner, how, SEED, index)
        assert [f for f in found["failures"] if is_false(f["kind"])] == []
        totals.update(found["totals"])
    assert totals["judged"] >= 0.6 * count
    assert (totals["truncated"] >= 4) == (how == "truncated")
    assert (totals["kept"] >= 4) == (how in KEPT)


def test_one_path_in_processes():
    """The program counts its trials and has exit code 1 if and only if one failed."""
    words = [sys.executable, "-m", "hostile", "--only", "cold reference", "--count", "12", "--seed", "2"]
    done = subprocess.run(words, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    assert "compared with an independent answer" in done.stdout, done.stdout + done.stderr
    assert done.returncode == (" 0 false claims, 0 other failures" not in done.stdout)


def test_a_mask_that_bounds_nothing():
    """At a mass of 2e-56 the dual value was -inf: a gap of inf then passed the test against tol_gap."""
    found = judged_trial(Runner("cpu", over_ranks=False), "truncated", 41, 2077)
    assert found["totals"]["converged"] == 1
    assert found["failures"] == []


@pytest.mark.parametrize("backend", CUDA)
def test_a_set_without_partners_is_sought_among_masses_of_the_device(backend):
    """Forbidden pairs, hard sides and masses of 1e142: steps with a factor ask first whether a plan exists."""
    found = judged_trial(Runner(backend, over_ranks=False), "points", 7105, 53, numbers="extreme")
    assert found["failures"] == []
    assert found["totals"]["converged"] == 1


def test_the_dual_value_holds_where_a_marginal_is_e_to_the_709_times_its_mass():
    """Masses of 1e-36 beside 1e-11: the exponential of the core ended at e^709, and the dual value was too large."""
    found = judged_trial(Runner("cpu", over_ranks=False), "path", 630105, 262, numbers="extreme")
    assert found["failures"] == []
    assert found["totals"]["judged"] >= 3


@pytest.mark.parametrize("backend", ["cpu", *CUDA])
def test_clouds_that_are_scaled_keep_the_rounding_of_unit_vectors(backend):
    """Nearly parallel vectors: the scaled batch claimed a plan error of 8e-14, and missed by 1e-13."""
    found = judged_trial(Runner(backend, over_ranks=False), "ragged", 630903, 58, numbers="extreme")
    assert found["failures"] == []


@pytest.mark.parametrize(("how", "index"), [("batch", 26), ("truncated", 170)])
def test_no_column_takes_part_in_a_step_and_no_mass_is_lost_beyond_a_cut(how, index):
    """A step with a factor divided by a sum of column sizes that was 0; a cut took the logarithm of a share of 0."""
    found = judged_trial(Runner("cpu", over_ranks=False), how, 630904, index, numbers="extreme")
    assert found["failures"] == []


def test_a_failed_problem_without_a_constant_beside_others_with_one():
    """The constant of each cost is paid by its plan: 0 times the infinite mass of a failed problem warned of NaN."""
    found = judged_trial(Runner("cpu", over_ranks=False), "own batch", 680, 47)
    assert found["failures"] == []
    assert found["totals"]["problems"] == 6
