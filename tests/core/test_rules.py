"""The rules of a pass hold their mathematical properties; the rules of Python and of the C library are equal.

Each bound is compared with the largest error that it must cover, where one or two points nearly reach it.
"""

import math

import numpy as np
import pytest
from compiled import COLUMN, Penalties, record, rule
from mapuot._core import lib
from problems import clouds

from mapuot import penalties
from mapuot.backends.cpu import backend as cpu
from mapuot.backends.limits import limits_of
from mapuot.backends.rules import Judge, plan_error
from mapuot.contract import Stats
from mapuot.problem.problem import Problem
from mapuot.route.options import make_options

NEUTRAL = {"reg": 1.0, "inv_reg": 1.0, "tol": 1e-6, "tol_gap": -1.0, "scale_limit": 1e100, "most_scale": 1e200}
NEUTRAL |= {"flush_tol": 1e-8, "missed": 1.0}


def limits(**members):
    return record("limits", **{**NEUTRAL, **members})


def progress(**members):
    return record("progress", **{"best_dual": -math.inf, "best_error": math.inf, "progress_dual": -math.inf, **members})


# ---- bounds that are nearly reached


@pytest.mark.parametrize("d", [0.0, 1e-300, 1e-9, 0.3, 1e99, 1e101, math.inf])
def test_plan_error_is_that_of_the_oracle(d):
    if d < math.inf:
        right = penalties.plan_error(min(d, 1e150))
    else:
        right = d
    assert plan_error(d) == rule("plan_error", d) == pytest.approx(right, rel=1e-15 if d < 1e100 else 0.06)
    assert plan_error(d) >= right * (1 - 1e-15)
    assert math.isnan(rule("plan_error", math.nan))


def test_plan_error_of_two_plans():
    """|p - q| <= plan_error(KL(q | p)) |p|, for one entry that changes and for two entries that exchange mass."""
    for x in (1e-5, 1e-3, 0.1, 0.5, 0.99, 3.0, 1e3, 1e9):
        for sign in (1, -1) if x < 1 else (1,):
            q = 1 + np.longdouble(sign * x)
            grown = float(q * np.log(q) - q + 1)
            assert x <= plan_error(grown) * (1 + 1e-9) <= x * (1 + 0.02 * (x < 0.01) + 2 * x)
    for x in (1e-4, 0.1, 0.5, 0.9):
        moved = float(sum((1 + s * np.longdouble(x)) * np.log1p(s * np.longdouble(x)) for s in (1, -1))) / 2
        assert x <= plan_error(moved) <= x * (1.01 + x)


def test_rounding_of_an_exponent():
    for x in (0.0, 1e-16, 1e-6, 0.1, 0.5, 1.0):
        assert math.expm1(x) <= rule("exponent_growth", x) <= 1.2 * math.expm1(x)
    assert rule("exponent_growth", 1.1) == rule("exponent_growth", math.inf) == math.inf
    assert math.isnan(rule("exponent_growth", math.nan))


def test_size_of_a_logarithm():
    for x in (*10.0 ** np.arange(-300, 301, 7), 1.0, 0.999, 2.0, 1.999):
        assert abs(math.log(x)) <= rule("size_of_log", x) <= 1.02 * abs(math.log(x)) + 1.4


def test_a_plan_of_infinite_mass_has_no_bound():
    assert certified(gap=1e-9, stats={"mass": math.inf})[:2] == (math.inf, math.inf)


def test_a_sum_beyond_float64_moves_no_translation():
    for log_ratio in (math.inf, -math.inf, math.nan):
        assert rule("translation", limits(lam_rate=1.0), log_ratio, 0.0) == 0
        assert rule("next_translation", limits(mu_rate=1.0), log_ratio) == 0
    assert rule("next_translation", limits(mu_rate=0.5), 2.0) == 1.0


def test_the_logarithm_of_a_ratio():
    """Near numbers keep all digits of their difference; a ratio that overflows has a finite logarithm."""
    for x in (3.0, 3e-300, 3e250):
        for grown in (1e-12, -1e-12, 1e-3):
            y = x * (1 + grown)
            right = math.log1p(float((np.longdouble(y) - np.longdouble(x)) / np.longdouble(x)))
            assert rule("log_ratio_of", y, x) == pytest.approx(right, abs=2.3e-16)
    assert rule("log_ratio_of", 1e300, 1e-300) == pytest.approx(600 * math.log(10), rel=1e-15)
    assert rule("log_ratio_of", 1e-300, 1e300) == pytest.approx(-600 * math.log(10), rel=1e-15)


@pytest.mark.parametrize("kind", ["kl", "tv", "l2"])
@pytest.mark.parametrize("d", [1e-7, 1e-3, 0.1])
def test_the_gap_of_rounded_marginals(kind, d):
    """For one point with a marginal off by a share d the bound holds; total variation and L2 nearly attain it."""
    t, rho, tight = 1.0, 3.0, 0.0
    known = limits(**{f"rho_{kind}": rho})
    number = penalties.NUMBERS[kind]
    for f in (-2.9, -0.5, 0.0, 0.3, 2.9, 3.0 * (1 - 1e-9)):
        best = math.exp(-f / rho)
        for r in (1e-3, 0.5, 1 - d, 1.0, 1 + d, 20.0, best * (1 - d), best, best * (1 + d), 20 * best, 1e4 * best):
            before = rule("gap_term", number, f, t, rho, 0.0, r)
            bound = rule("gap_of_rounded", known, before, r, d, 50.0)
            for other in (r * (1 + d), r * (1 - d)):
                after = rule("gap_term", number, f, t, rho, 0.0, other)
                assert after <= bound * (1 + 1e-12) + 1e-15 * rho * (t + other)
                tight = max(tight, (after - before) / (bound - before))
    assert tight >= {"kl": 0.4, "tv": 0.75, "l2": 0.75}[kind]


def test_the_gap_of_a_rounded_hard_side():
    """The potential pays for a hard side's marginal error: at most reg times the sizes of logarithms."""
    bound = rule("gap_of_rounded", limits(hard_sides=2, reg=0.5), 0.0, 4.0, 1e-7, 50.0)
    assert 2 * 4.0 * 1e-7 * 0.5 * 50.0 <= bound <= 1.001 * 2 * 4.0 * 1e-7 * 0.5 * 50.0


def test_mass_that_a_flushed_kernel_hides():
    """The bound covers entries just below the flush limit under all u and v, and rows with u below all numbers."""
    rng = np.random.default_rng(0)
    u = 10.0 ** rng.uniform(0, 20, 5)
    v = 10.0 ** rng.uniform(0, 20, 7)
    hidden = 1e-38 * u.sum() * v.sum()
    found = 1e3 * rule("lost_mass", limits(flush=1e-38), u.sum(), v.sum(), 1e3)
    assert hidden * (1 - 1e-12) <= found <= 1.01 * hidden
    for scales in ((1e-20, 1e200), (1e200, 1e-20)):
        assert 0.99e-90 <= rule("lost_mass", limits(flush=1e-300), *scales, 1.0) <= 1.01e-90


# ---- the certificate: everything that may be missing counts, once and a little more


CERTIFIED = {"mass": 2.0, "dual": 1.0, "lost": 0.0, "dead": 0.0}
SOFT = {"reg": 0.5, "inv_reg": 2.0, "rho_kl": 40.0, "dual_scale": 7.0, "dual_constant": 0.25, "row_weight": 1.0}


def certified(gap=0.0, hard=0.0, misfit=0.0, scale=1.0, state=None, stats=None, **members):
    """Return (error, gap, fall of the dual value) of a state without any error but the named one."""
    known = limits(**{**SOFT, **members})
    p = progress(**(state or {}))
    out = record("stats", **CERTIFIED)
    out.update(stats or {}) if isinstance(out, dict) else [out.__setitem__(k, x) for k, x in (stats or {}).items()]
    dual = float(out["dual"])
    rule("certify", known, p, out, gap, hard, misfit, scale)
    return float(out["error"]), float(out["gap"]), dual - float(out["dual"])


SHARES = {  # the error: (arguments, least growth of error, of the dual value's fall); mass 2, reg .5, rho 40
    "the storage": ({"storage_error": 1e-7}, 3e-7, 1e-7),
    "a plan in place": ({"storage_error": 1e-7, "in_place": 1, "state": {"since_absorb": 9}}, 30e-7, 10e-7),
    "a plan that becomes one": ({"storage_error": 1e-7, "in_place": 1}, 3e-7, 1e-7),
    "exponents": ({"exponent_error": 1e-6}, 1e-6, 2 * (0.5 + 40 / 4) * 1e-6),
    "the shift": ({"state": {"shift": 1e9}}, 4.5e-7, 2 * 40.5 * 4.5e-7),
    "a translation": ({"state": {"lam": -1e9}}, 4.5e-7, 2 * 40.5 * 4.5e-7),
    "flushed entries": ({"stats": {"lost": 1e-6}}, 1e-6, 1e-6),
    "the terms of the dual value": ({"dual_scale": 1e9}, 0.0, 1e-6),
    "its constant": ({"dual_constant": -1e9}, 0.0, 1e-6),
    "itself": ({"stats": {"dual": -1e9}}, 0.0, 1e-6),
    "float32 sums": ({"state": {"narrow": 1}}, 0.0, 1e-6 * (2 * (0.5 + 40) + 7)),
    "both": ({"state": {"narrow": 1}, "exponent_error": 1e-6}, 1e-6, 88e-6 + 2 * (0.5 + 40 / 4) * 1e-6),
    "what hard columns miss": ({"hard": 1e-3}, 5e-4, 0.0),
    "the same, along paths": ({"hard": 1e-3, "missed": 40.0}, 40 * 5e-4, 0.0),
    "what a caller knows": ({"extra_error": 1e-3, "extra_gap": 1e-2}, 1e-3, 1e-2),
}


@pytest.mark.parametrize("name", SHARES)
def test_what_is_missing_counts(name):
    given, error, fall = SHARES[name]
    plain = certified()
    found = certified(**given)
    for k, least in ((0, error), (2, fall)):
        grown = found[k] - plain[k]
        assert 0.88 * least <= grown <= 1.2 * least + 1e-12, ("error", "gap", "dual")[k]


def test_logarithms_of_scales_and_masses_count():
    """log u of 690 at a rho of 4e9 moves rho (a - r) by 1e-6 and more."""
    plain = certified(rho_kl=4e9)
    for given in ({"scale": 1e300 / 1e101}, {"stats": {"mass": 2e-200}}):
        found = certified(rho_kl=4e9, most_scale=math.inf, **given)
        mass = given.get("stats", CERTIFIED)["mass"]
        assert found[2] - plain[2] * (mass < 1) >= mass * 4e9 * 4.5e-16 * 440 - plain[2] * (mass < 1)
        assert found[0] - plain[0] >= 4.5e-16 * 440


def test_what_is_missed_along_paths_has_the_noise_of_its_sums():
    for missed in (1.5, 40.0):
        assert certified(missed=missed)[0] - certified()[0] == pytest.approx(missed * 4.5e-16, rel=1e-3, abs=0)


def test_prices_of_hard_sides_count():
    """A hard side's mass is priced by |f|, at most reg times the sizes of log u and log v, in dual value and gap."""
    for given, sizes in (({"exponent_error": 1e-6}, 1.1e9), ({"state": {"shift": -1e9}}, 1e9)):
        plain, found = (certified(hard_sides=k, hard=0.5, tol=1.0, **given) for k in (0, 2))
        price = 2 * 0.5 * sizes  # reg log u
        assert found[2] - plain[2] == pytest.approx(1e-15 * price * (2 + 0.5), rel=1e-3)
        assert found[1] - plain[1] >= 4.5e-7 * 2 * price


def test_the_gap_counts_the_rounding_of_marginals():
    plain = certified(gap=1e-3)
    for given, d in (
        ({"storage_error": 1e-4}, 1e-4), ({"exponent_error": 1e-4}, 1e-4), ({"stats": {"lost": 1e-4}}, 1e-4),
        ({"state": {"narrow": 1}}, 1e-6),
    ):  # fmt: skip
        root = math.sqrt(1e-3) + d * math.sqrt(2 * 40)
        assert root**2 * (1 - 1e-9) <= certified(gap=1e-3, **given)[1] <= root**2 * (1 + 10 * d) + 1e-12, given
    assert plain[1] == pytest.approx(1e-3, rel=1e-9)
    assert certified(gap=1e-3, extra_gap=0.25)[1] == pytest.approx(0.251, rel=1e-9)


def test_a_large_bound_errs_by_its_share():
    """The relative error allows for its mass, which is itself a sum of rounded entries."""
    one = plan_error(1e8 / (0.5 * 2))
    assert certified(gap=1e8, stats={"lost": 1e-3})[0] == pytest.approx(one * (1 + 2e-3), rel=1e-6)
    assert certified(gap=1e8)[0] == pytest.approx(one, rel=1e-9)


@pytest.mark.parametrize("tol_gap", [-1.0, 1e-4])
def test_hard_columns_leave_no_gap_until_they_are_met(tol_gap):
    known = {"tol": 1e-3 if tol_gap < 0 else 1e-12, "tol_gap": tol_gap}
    allowed = 2.0 * (1e-3 if tol_gap < 0 else 1e-4)
    assert certified(hard=0.99 * allowed, **known)[1] < 1e-9
    assert certified(hard=1.01 * allowed, **known)[1] == math.inf
    assert certified(hard=1e-12, tol=1e-3, tol_gap=0.0)[1] == math.inf


@pytest.mark.parametrize(
    "given",
    [{"gap": -1e-3}, {"gap": math.nan}, {"stats": {"dual": math.nan}}, {"stats": {"dual": math.inf}},
     {"stats": {"mass": math.inf}}, {"stats": {"dead": 1.0}}, {"scale": 1e200}, {"scale": math.nan},
     {"exponent_error": 2.0}, {"dual_scale": math.inf}, {"dual_scale": math.nan}],
    ids=str,
)  # fmt: skip
def test_what_is_unsound_certifies_nothing(given):
    error, gap, fall = certified(**given)
    assert (error, gap) == (math.inf, math.inf)
    assert fall == math.inf or "dual_scale" not in given


def test_a_gap_below_zero_counts_as_its_rounding():
    """Rounding is measured by the plan's mass, however much larger the masses of the sides are."""
    noise = 1e-13 * 2.0 * (0.5 + 40.0)
    for gap in (-1e-300, -1e-14, -0.99 * noise):
        error, told, _ = certified(gap=gap, dual_scale=1e17)
        assert error == pytest.approx(plan_error(noise / (0.5 * 2.0)), rel=1e-6)
        assert told == pytest.approx(noise, rel=1e-6, abs=0)
    assert certified(gap=-1.01 * noise, dual_scale=1e17)[0] == math.inf


def test_a_gap_near_the_least_number_is_not_known():
    error = certified(gap=0.0, reg=1e-150, inv_reg=1e150, rho_kl=1e-150, dual_scale=0.0, stats={"mass": 1e-160})[0]
    assert error >= plan_error(0.99e-6)  # 5e-324 of 1e-310, in some terms
    stiff = {"reg": 1e-6, "inv_reg": 1e6, "rho_kl": 1e10, "dual_scale": 0.0}
    assert certified(gap=0.0, **stiff, stats={"mass": 1e-290})[0] >= plan_error(0.99e-10)  # terms times rho


def test_the_bound_along_paths():
    """The bound is linear in the misfit, whatever the gap, above the noise of its sums; the smaller bound counts."""
    for gap in (1e-13, 1e-9, 1e3):
        assert 40 * 5e-10 <= certified(gap=gap, misfit=1e-9, path=40)[0] <= 1.001 * 40 * 5e-10
    assert certified(gap=1e-9, misfit=1e-9)[0] >= plan_error(1e-9)
    assert certified(gap=1e-13, misfit=0.0, path=1e6)[0] >= 1e6 * 2.0**-52
    assert certified(gap=1e-16, misfit=1.0, path=40)[0] <= 1.001 * plan_error(1e-16) + 1e-13


# ---- columns

SIDES = {"kl": (2.0, 0.0), "balanced": (math.inf, 0.0), "tv": (0.4, 0.0), "l2": (2.0, 0.0), "range": (0.8, 1.3)}


@pytest.mark.parametrize("kind", SIDES)
@pytest.mark.parametrize(("shift", "offset"), [(0.0, 0.0), (0.7, 0.0), (30.0, -0.4)])
def test_a_column_is_what_its_potential_makes_it(kind, shift, offset):
    """log v = x - shift, and K^T u is in units of K's absorbed scaling; each penalty's formula gives every number."""
    (rho, upper) = SIDES[kind]
    number = penalties.NUMBERS[kind]
    reg = 0.5
    t = 1.7
    absorbed = 0.3
    for log_v in (-1.5, -0.2, 0.1, 0.6):
        for sum in (0.02, 1.0, 30.0):
            given = absorbed, t, rho, upper, reg, log_v + shift, sum, shift, offset
            found = {name: rule("column", number, *given, k) for k, name in enumerate(COLUMN)}
            log_s = math.log(sum) - absorbed + offset + shift  # of K^T u
            r = math.exp(log_v + log_s)
            f = reg * log_v
            law = Penalties()
            bound = kind, f, r, t, rho, upper
            image = float(law.prox(kind, log_s, t, rho, upper, reg))
            dual = float(law.dual_term(kind, f, t, rho, upper))
            want = {
                "marginal": r, "image": image + shift, "gap": float(law.gap_term(*bound)), "dual": dual,
                "hard": float(law.violation(kind, r, t, rho, upper)),
                "misfit": float(law.misfit(*bound)) if kind in ("tv", "range") else 0.0,
                "next": 0.0 if upper or kind in ("tv", "l2") else t * math.exp(-reg / rho * image),
            }  # fmt: skip
            for name, right in want.items():
                assert found[name] == pytest.approx(right, rel=1e-11, abs=1e-12), (name, log_v, sum)
    dead = {name: rule("column", number, absorbed, t, rho, upper, reg, 3.0, 0.0, shift, offset, k)
            for k, name in enumerate(COLUMN)}  # fmt: skip
    assert (dead["image"], dead["marginal"]) == (3.0, 0.0)
    assert dead["gap"] == pytest.approx(float(Penalties().gap_term(kind, reg * (3 - shift), 0.0, t, rho, upper)))


# ---- limits, guard, end


def limits_of_case(dtype="float64", **case):
    case = clouds(9, 7, reg=0.5, **case)
    problem = Problem.from_arrays(case.M, case.a, case.b, 0.5, case.reg_m, case.penalty, "product", cpu)
    return np.asarray(limits_of(problem, make_options("auto", "auto", 1e-6, None, 1), dtype, 1e-7))


def test_limits_count_the_sides_of_each_penalty():
    for penalty, reg_m, known in (
        (("kl", "kl"), (2.0, 8.0), {"rho_kl": 10, "hard_sides": 0, "path": 0}),
        (("kl", "balanced"), (2.0, 8.0), {"rho_kl": 2, "hard_sides": 1}),
        (("kl", "kl"), (np.where(np.arange(9) % 2, np.inf, 3.0), 8.0), {"rho_kl": 11, "hard_sides": 1}),
        (("tv", "l2"), (2.0, 8.0), {"rho_kl": 0, "rho_tv": 2, "rho_l2": 8, "path": 0}),
        (("l2", "tv"), (2.0, 8.0), {"rho_tv": 8, "rho_l2": 2, "path": 14, "hard_sides": 0}),
        (("range", "range"), (0.1, 0.1), {"rho_kl": 0, "hard_sides": 2, "path": 14}),
    ):
        found = limits_of_case(penalty=penalty, reg_m=reg_m)
        assert {name: found[name] for name in known} == known, penalty


@pytest.mark.parametrize("reg_m", [(2.0, 8.0), (8.0, 2.0), (np.inf, 2.0), (2.0, np.inf)])
def test_translations_make_the_dual_value_stationary(reg_m):
    """A e^-(fi1 k1 lam) = B e^(k2 lam) holds, also for the image, which is shifted by fi2 mu."""
    k1, k2 = (0.5 / rho for rho in reg_m)
    found = limits_of_case(reg_m=reg_m)
    assert (found["fi_rows"], found["rate_cols"]) == (pytest.approx(1 / (1 + k1)), k2)
    log_ratio, shift = 0.7, 3.0
    lam = rule("translation", found, log_ratio, shift)
    assert k1 / (1 + k1) * lam + k2 * lam == pytest.approx(log_ratio - k2 * shift)
    moved = rule("next_translation", found, log_ratio)
    assert (k1 + k2 / (1 + k2)) * moved * (1 + k2) == pytest.approx(log_ratio)
    assert rule("left_of_rows", found, 1.0) == pytest.approx(1 / (1 + k1) - 1)


@pytest.mark.parametrize(("dtype", "digits", "least"), [("float32", 24, 1.2e-38), ("float64", 53, 2.3e-308)])
def test_limits_know_the_storage(dtype, digits, least):
    found = limits_of_case(dtype)
    assert found["storage_error"] == 2.0**-digits
    assert least <= found["flush"] <= 20 * least  # nothing below is a normal number; no entry is 0 that need not be
    assert found["flush_tol"] == pytest.approx(1e-8)
    assert (found["rho_rows"], found["rho_cols"], found["finer"]) == (1.0, 1.0, 0)
    for tol, finer in ((11.9 * 2.0**-24, dtype == "float32"), (12.1 * 2.0**-24, False)):
        case = clouds(9, 7)
        problem = Problem.from_arrays(case.M, case.a, case.b, 0.5, 1.0, "kl", "product", cpu)
        known = limits_of(problem, make_options("auto", "auto", tol, None, 1), dtype, 1e-7)
        assert known["finer"] == finer
        assert known["flush_tol"] == pytest.approx(tol / 100)


def a_pass(number=1, error=1.0, gap=1.0, dual=1.0, mass=1.0):
    return Stats(number, gap, error, dual, mass, 1e-3, False, "running")


def test_a_judge_asks_the_rules_of_the_core():
    judge = Judge(tol=1e-6)
    assert judge.judge(a_pass(error=1.01e-6)) == "running"
    assert judge.judge(a_pass(error=1e-6)) == "converged"
    assert Judge(tol=1e-6).judge(a_pass(mass=1e-300)) == "underflow"
    lost = a_pass(mass=math.nan)
    assert Judge(tol=1e-6).judge(lost) == "not finite"
    assert (lost.gap, lost.error, lost.dual, lost.mass) == (math.inf, math.inf, -math.inf, math.inf)
    for more, status in (({}, "converged"), ({"extra_gap": 0.5}, "running")):
        small = Judge(tol=1e-9, tol_gap=1e-3, **more)
        assert small.judge(a_pass(gap=1.01e-3)) == "running"
        assert small.judge(a_pass(gap=1e-3)) == status
        small.progress.moved = 0.5  # the dual value may be half of the computed one
        assert small.judge(a_pass(gap=1e-3)) == "running"


STATUS = "running", "converged", "absorb", "stalled", "not finite", "underflow", "coarse"
PASS = {"error": 1e-3, "gap": 1e-3, "dual": 1.0, "mass": 1.0, "residual": 1e-3}
OLD = {"since_absorb": 5}  # K is some passes old
ENDS = [  # (the pass, the state before it, limits, sums of scales and of the next v, status)
    ({}, {}, {}, (1, 1), "running"),
    ({"error": 1e-7}, {}, {}, (1, 1), "converged"),
    ({}, {}, {"tol_gap": 1.01e-3}, (1, 1), "converged"),
    ({}, {}, {"tol_gap": 1.01e-3, "extra_gap": 0.5}, (1, 1), "running"),  # the dual value may be half as large
    ({"error": 1.01e-6}, {}, {}, (1, 1), "running"),
    ({"gap": 1e-4}, {}, {"tol_gap": 1e-4}, (1, 1), "converged"),
    ({"gap": 1.01e-4}, {}, {"tol_gap": 1e-4}, (1, 1), "running"),
    ({"gap": 9e-9, "dual": 1e-3}, {"moved": 9e-4}, {"tol_gap": 1e-4}, (1, 1), "converged"),
    ({"gap": 6e-8, "dual": 1e-3}, {"moved": 6e-4}, {"tol_gap": 1e-4}, (1, 1), "running"),  # lost: 6e-4 of the value
    ({"gap": 1e-9, "dual": -math.inf}, {}, {"tol_gap": 1e-4}, (1, 1), "running"),
    ({"gap": 1e-9, "dual": -1e-3}, {"moved": 4e-4}, {"tol_gap": 1e-4}, (1, 1), "converged"),
    ({"gap": 1e-9, "dual": -1e-3}, {"moved": 6e-4}, {"tol_gap": 1e-4}, (1, 1), "running"),  # the optimum may be 0
    ({"error": 1e-7}, {"narrow": 1}, {}, (1, 1), "running"),
    ({"error": 1e-7}, OLD, {}, (1, 1e-101), "absorb"),
    ({"error": 1e-7}, {}, {}, (1, 1e101), "converged"),
    ({}, {}, {}, (1, 1e101), "absorb"),
    ({}, {}, {}, (1, 1e-101), "absorb"),
    ({}, {}, {}, (1, math.nan), "absorb"),
    ({}, OLD, {}, (1e101, 1), "absorb"),
    ({"lost": 1e-7}, OLD, {}, (1, 1), "absorb"),
    ({"lost": 1e-7}, {}, {}, (1, 1), "running"),
    ({"mass": 1e-291}, {}, {}, (1, 1), "underflow"),
    ({"mass": 1e-291}, OLD, {}, (1, 1), "absorb"),
    ({"dead": 1, "residual": 1e-10}, {}, {}, (1, 1), "underflow"),
    ({"dead": 1}, {}, {}, (1, 1), "running"),
    ({"dead": 1, "residual": 1e-10}, OLD, {}, (1, 1), "absorb"),
    ({"mass": math.nan}, {}, {}, (1, 1), "not finite"),
    ({"dual": math.nan}, {}, {}, (1, 1), "not finite"),
    ({"mass": math.inf, "dual": -math.inf}, {}, {}, (1, 1), "not finite"),
    ({"rejected": 1}, {}, {}, (1, 1), "running"),
    ({"rejected": 1, "mass": math.nan}, {}, {}, (1, math.inf), "absorb"),
    ({"rejected": 1}, {"step": 3}, {}, (1, 1), "absorb"),
    ({"error": 3e-7}, {}, {"finer": 1, "storage_error": 1e-7, "tol": 2e-7}, (1, 1), "coarse"),
    ({"error": 3e-7}, {}, {"storage_error": 1e-7, "tol": 2e-7}, (1, 1), "running"),
    ({"error": 1e-4}, {}, {"finer": 1, "storage_error": 1e-7, "tol": 2e-7}, (1, 1), "running"),
    ({"error": 4.9e-7}, {}, {"finer": 1, "storage_error": 1e-7, "tol": 4e-7}, (1, 1), "coarse"),
    ({"error": 5.1e-7}, {}, {"finer": 1, "storage_error": 1e-7, "tol": 4e-7}, (1, 1), "running"),
    ({"error": 4.4e-7}, {}, {"finer": 1, "storage_error": 1e-7, "tol": 2e-7}, (1, 1), "coarse"),
    ({"error": 4.6e-7}, {}, {"finer": 1, "storage_error": 1e-7, "tol": 2e-7}, (1, 1), "running"),
    ({"error": 1.5e-4}, {}, {"extra_error": 1e-4}, (1, 1), "stalled"),
    ({"error": 1.5e-4}, {}, {"extra_error": 1e-4}, (1, 1e101), "stalled"),  # no fresh K helps
    ({"error": 2.1e-4}, {}, {"extra_error": 1e-4}, (1, 1), "running"),
    ({"rejected": 1}, {"dropped": 2}, {"symmetric": 1}, (1, 1), "stalled"),
    ({"rejected": 1}, {"dropped": 1}, {"symmetric": 1}, (1, 1), "running"),
    ({"rejected": 1}, {"dropped": 2}, {}, (1, 1), "running"),
    ({"rejected": 1}, {"dropped": 2}, {"symmetric": 1}, (1, 1e101), "absorb"),
    ({}, {"dropped": 2}, {"symmetric": 1}, (1, 1), "running"),
    ({"dead": 1}, {"since_best": 249, "best_error": 1e-3, "progress_dual": 1.0}, {}, (1, 1), "underflow"),
    ({}, {"since_best": 249, "best_error": 1e-3, "progress_dual": 1.0}, {}, (1, 1), "stalled"),
    ({}, {"since_best": 248, "best_error": 1e-3, "progress_dual": 1.0}, {}, (1, 1), "running"),
    ({"error": 1e-7}, {"since_best": 249, "best_error": 1e-7, "progress_dual": 1.0}, {}, (1, 1), "converged"),
    ({"error": 9.995e-4}, {"since_best": 249, "best_error": 1e-3, "progress_dual": 1.0}, {}, (1, 1), "stalled"),
    ({"error": 9.98e-4}, {"since_best": 249, "best_error": 1e-3, "progress_dual": 1.0}, {}, (1, 1), "running"),
    ({"dual": 1.001}, {"since_best": 249, "best_error": 1e-3, "progress_dual": 1.0}, {}, (1, 1), "running"),
    ({}, {"since_best": 19, "best_error": 1e-3, "progress_dual": 1.0}, {"scale_limit": math.inf}, (1e200, 1),
     "not finite"),
]  # fmt: skip


@pytest.mark.parametrize(("stats", "state", "known", "sums", "status"), ENDS)
def test_status_of_a_pass(stats, state, known, sums, status):
    p = progress(**state)
    out = record("stats", **{**PASS, **stats})
    assert STATUS[int(rule("judge", limits(**known), p, out, *map(float, sums)))] == status
    assert p["passes"] == 1
    assert p["since_absorb"] == state.get("since_absorb", 0) + 1
    nothing = status in ("not finite", "underflow")
    assert (out["gap"] == out["error"] == math.inf) == nothing
    assert not np.isnan(out["mass"]) or status == "absorb"
    proves = not stats.get("dead") and sums[0] < 1e200 and not nothing and stats.get("dual") != -math.inf
    assert (out["dual"] == -math.inf) == (not proves)


STOOD = {"best_error": 1e-3, "progress_dual": 1.0, "since_best": 7}


@pytest.mark.parametrize(
    ("stats", "state", "after"),
    [({}, STOOD, (1e-3, 1.0, 8)), ({"error": 5e-4, "dual": 0.9}, STOOD, (5e-4, 1.0, 0)),
     ({"error": 2e-3, "dual": 1.5}, STOOD, (1e-3, 1.5, 0)),
     ({"dual": -2.0}, {**STOOD, "progress_dual": -2 - 1.9e-9}, (1e-3, -2 - 1.9e-9, 8)),
     ({"dual": -2.0}, {**STOOD, "progress_dual": -2 - 2.1e-9}, (1e-3, -2.0, 0))],
)  # fmt: skip
def test_what_counts_as_progress(stats, state, after):
    p = progress(**state)
    rule("judge", limits(), p, record("stats", **{**PASS, **stats}), 1.0, 1.0)
    assert (p["best_error"], p["progress_dual"], p["since_best"]) == after


NEAR = {"floor_error": 1.2e-3, "floor_passes": 5}  # beside an error of 1e-3
GIVE_WAY = [  # (the pass, the state before it, limits, sum of scales, whether float64 passes follow, the status)
    ({}, {}, {}, 1.0, False, "running"),
    ({}, {}, {"narrow_floor": 1e-3}, 1.0, True, "running"),
    ({}, {}, {"narrow_floor": 0.99e-3}, 1.0, False, "running"),
    ({}, {}, {"narrow_floor": 1e-4, "symmetric": 1}, 1.0, True, "running"),
    ({}, {}, {"narrow_floor": 0.99e-4, "symmetric": 1}, 1.0, False, "running"),
    ({}, NEAR, {"narrow_floor": 1.01e-4}, 1.0, True, "running"),
    ({}, NEAR, {"narrow_floor": 0.99e-4}, 1.0, False, "running"),
    ({}, {**NEAR, "floor_passes": 4}, {"narrow_floor": 1.01e-4}, 1.0, False, "running"),
    ({}, {**NEAR, "floor_error": 1.3e-3}, {"narrow_floor": 1.01e-4}, 1.0, False, "running"),
    ({}, {**STOOD, "since_best": 19}, {}, 1.0, True, "running"),
    ({}, {**STOOD, "since_best": 18}, {}, 1.0, False, "running"),
    ({}, {}, {}, 1.1e20, True, "running"),
    ({}, {}, {}, 0.9e20, False, "running"),
    ({}, OLD, {"made": 1}, 1.1e20, False, "absorb"),
    ({}, OLD, {"made": 1}, 0.9e20, False, "running"),
    ({}, {}, {"made": 1}, 1.1e20, True, "running"),
    ({}, OLD, {}, 1.1e20, True, "running"),
    ({"dead": 1}, {}, {}, 1.0, True, "running"),
    ({"error": 1e-7}, {}, {}, 1.0, True, "running"),
    ({"error": 0.0}, {}, {"tol": 0.0}, 1.0, True, "running"),
    ({"dead": 1}, {}, {"tol": -1.0}, 1.0, False, "running"),
]


@pytest.mark.parametrize(("stats", "state", "known", "scale", "wide", "status"), GIVE_WAY)
def test_when_float32_passes_give_way(stats, state, known, scale, wide, status):
    """float32 passes end once they have converged or stalled; the guard allows for the error of their dual value."""
    p = progress(narrow=1, moved=0.25, **{**state, "best_dual": 1.0})
    out = record("stats", **{**PASS, **stats})
    assert STATUS[int(rule("judge", limits(**{"scale_limit": 1e100, **known}), p, out, scale, 1.0))] == status
    assert (p["narrow"], p["best_dual"]) == ((0, 0.5) if wide else (1, 1.0))
    fell = p["floor_passes"] == 0
    assert fell == (state.get("floor_error", 0.0) != 1.2e-3)
    assert not fell or p["floor_error"] in (0.0, out["error"])
    wide = progress(best_dual=1.0, **state)
    rule("judge", limits(**known), wide, record("stats", **{**PASS, **stats}), scale, 1.0)
    assert (wide["narrow"], wide["best_dual"], wide["floor_passes"]) == (0, 1.0, state.get("floor_passes", 0))


def test_guard_drops_steps_that_lower_the_dual_value():
    judge = Judge(tol=1e-6, anderson_depth=5)
    assert not judge.settle(1.0, 1.0)
    assert not judge.settle(2.0, 1.0)
    assert judge.progress.extrapolated
    judge.progress.coarse = 1
    assert judge.settle(1.5, 1.0)
    assert not judge.progress.extrapolated
    assert not judge.progress.coarse  # the correction was wrong
    assert not judge.settle(1.4, 1.0)  # an image is no extrapolated step
    assert not judge.settle(1.4 * (1 - 1e-14), 1.0)  # nor is rounding a fall
    assert judge.settle(1.4 * (1 - 1e-11), 1.0)


def test_a_coarse_correction_is_guarded_like_a_step():
    """Without Anderson's steps, too, a pass after a correction must not lower the dual value; a plain pass may."""
    for coarse in (0, 1):
        p, out = progress(coarse=coarse), record("stats", mass=1.0, dual=2.0)
        assert not rule("settle", limits(anderson_depth=0), p, out)
        out["dual"] = 1.0
        assert rule("settle", limits(anderson_depth=0), p, out) == coarse


@pytest.mark.parametrize(
    ("extrapolated", "dual", "rejected", "best"),
    [(1, 1 - 0.9e-13, 0, 1.0), (1, 1 - 1.1e-13, 1, 1.0), (1, 2.0, 0, 2.0), (0, 0.5, 0, 0.5)],
)
def test_best_dual_value_and_rounding_of_the_guard(extrapolated, dual, rejected, best):
    """A step may fall by rounding and leaves the best value; an image becomes the value that steps must keep."""
    p = progress(extrapolated=extrapolated, best_dual=1.0, coarse=extrapolated)
    assert rule("settle", limits(), p, record("stats", mass=1.0, dual=dual)) == rejected
    assert p["best_dual"] == best
    assert p["coarse"] == (extrapolated and not rejected)


def test_guard_compares_with_the_best():
    """A fall in many small steps counts as a fall."""
    judge = Judge(tol=1e-6, anderson_depth=5)
    dual = 1.0
    assert not judge.settle(dual, 1.0)
    found = [judge.settle(1.0 - k * 0.8e-13, 1.0) for k in range(3)]
    assert found == [False, False, True]


def test_differences_fill_a_ring():
    """Each accepted pass behind the first keeps a difference, in turn; a dropped step empties the ring."""
    known = limits(anderson_depth=3)
    p = progress()
    out = record("stats", mass=1.0)
    seen = []
    for dual in range(9):
        out["dual"] = dual
        rule("settle", known, p, out)
        seen.append(tuple(p[name].item() for name in ("step", "slot", "depth", "head", "have", "extrapolated")))
    image = int(lib.MAPUOT_IMAGE)
    step = int(lib.MAPUOT_EXTRAPOLATE)
    rings = [(0, 1, 1), (1, 2, 2), (2, 3, 0), (0, 3, 1), (1, 3, 2), (2, 3, 0), (0, 3, 1), (1, 3, 2)]
    assert seen == [(image, -1, 0, 0, 1, 0), *((step, *ring, 1, 1) for ring in rings)]
    out["dual"] = -1.0
    rule("settle", known, p, out)
    assert [p[name].item() for name in ("step", "slot", "depth", "head", "have")] == [lib.MAPUOT_GO_BACK, -1, 0, 0, 0]
    assert p["dropped"] == 1
    none = progress()
    for _ in range(2):
        rule("settle", limits(anderson_depth=0), none, out)
    assert [none[name].item() for name in ("step", "slot", "depth", "extrapolated")] == [image, -1, 0, 0]


def test_float32_sums_allow_a_fall():
    known = limits(reg=0.5, dual_scale=7.0)
    assert rule("guard_slack", known, progress(narrow=1), 3.0) == pytest.approx(1e-6 * 0.5 * 3 + 1e-7 * 7)
    assert rule("guard_slack", known, progress(best_dual=-2.0), 3.0) == pytest.approx(2e-13 + 1.4e-14, rel=1e-9, abs=0)


@pytest.mark.parametrize(
    ("state", "stats", "scale", "grown"),
    [({}, {"dead": 1}, 1.0, True), ({}, {"lost": 2e-3}, 1.0, True), ({}, {}, 1e200, True), ({}, {}, 1.0, False),
     ({"dead": 1}, {"dead": 1}, 1.0, False), ({"clipped": 1}, {}, 1e200, False),
     ({"since_absorb": 1}, {"dead": 1}, 1.0, True), ({"since_absorb": 0}, {"dead": 1, "lost": 1.0}, 1e200, False)],
)  # fmt: skip
def test_what_a_kernel_has_outgrown(state, stats, scale, grown):
    p = progress(**{**OLD, **state})
    assert bool(rule("outgrown", limits(), p, record("stats", **{**PASS, **stats}), scale)) == grown


def test_a_dead_point_leaves_no_dual_value():
    for dead, dual in ((0.0, 1.0), (1.0, -math.inf)):
        out = record("stats", **PASS, dead=dead)
        rule("settle", limits(), progress(), out)
        assert out["dual"] == dual


def test_what_is_known_later_counts():
    judge = Judge(tol=1e-6)
    stat = a_pass(error=9e-7, gap=1e-7)
    assert judge.judge(stat) == "converged"
    assert not judge.again(stat, 2e-7, 0.5, 0.0)
    assert (stat.error, stat.gap, stat.dual) == (pytest.approx(1.1e-6), pytest.approx(0.5), 0.5)
