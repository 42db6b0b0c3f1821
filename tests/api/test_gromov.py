"""`gromov` agrees with POT from one start, its forms agree with each other, and it finds a copy with outliers again."""

import math

import gromovs
import numpy as np
import pytest
from judge import divergence
from scipy import sparse
from scipy.sparse import csgraph
from scipy.spatial.distance import cdist

import mapuot
from mapuot.spaces import distances, starts, steps
from mapuot.spaces.settings import SPACES

ot = pytest.importorskip("ot")
SETTLED = {"tol": 2e-5, "inner_tol": 1e-9, "max_iter": 400}


def spaces(m=24, n=20, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(m, 3)) * [3, 2, 1]
    y = rng.normal(size=(n, 4)) * [2, 2, 1, 0.5]
    a = rng.random(m) + 0.2
    b = rng.random(n) + 0.2
    return x, y, cdist(x, x, "sqeuclidean"), cdist(y, y, "sqeuclidean"), a / a.sum(), b / b.sum()


@pytest.mark.parametrize("given_plan", [False, True])
def test_unbalanced_is_what_pot_finds(given_plan):
    x, y, A, B, a, b = spaces()
    init = None
    if given_plan:
        init = np.outer(a, b) * np.random.default_rng(1).random((24, 20))
    plan, _, log = ot.gromov.fused_unbalanced_gromov_wasserstein(
        A, B, a, b, reg_marginals=(300.0, 200.0), epsilon=20.0, unbalanced_solver="sinkhorn_log", init_pi=init,
        max_iter=500, tol=1e-10, max_iter_ot=5000, tol_ot=1e-12, log=True,
    )  # fmt: skip
    if init is None:
        start = "independent"
    else:
        start = init
    found = mapuot.gromov(x, y, a, b, reg=20.0, reg_m=(300.0, 200.0), init=start, **SETTLED)
    assert found.settled
    assert found.converged
    assert found.value <= log["fugw_cost"] * (1 + 1e-6)
    assert np.abs(plan - found.plan).sum() <= 1e-4 * plan.sum()
    assert found.value == pytest.approx(sum(found.parts), rel=1e-12)


@pytest.mark.parametrize("fused", [False, True])
def test_balanced_is_what_pot_finds_at_twice_the_reg(fused):
    x, y, A, B, a, b = spaces(25, 20)
    F = cdist(np.arange(25.0)[:, None], np.arange(20.0)[:, None])
    if fused:
        plan = ot.gromov.entropic_fused_gromov_wasserstein(
            F, A, B, a, b, epsilon=40.0, alpha=0.4, max_iter=2000, tol=1e-12
        )
    else:
        plan = ot.gromov.entropic_gromov_wasserstein(A, B, a, b, epsilon=40.0, max_iter=2000, tol=1e-12)
    found = mapuot.gromov(
        x, y, a, b, reg=20.0, reg_m=math.inf, features=F if fused else None, alpha=0.4, init="independent", **SETTLED
    )
    assert np.abs(plan - found.plan).sum() <= 1e-4
    structure = np.einsum("ijkl,ij,kl", (A[:, None, :, None] - B[None, :, None, :]) ** 2, plan, plan)
    if fused:
        value = 0.4 * structure + 0.6 * (F * plan).sum()
    else:
        value = structure
    assert found.parts.structure + found.parts.features == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("reg_m", [300.0, math.inf, (300.0, math.inf), (math.inf, 300.0)])
def test_points_matrices_and_both_are_one_problem(reg_m):
    x, y, A, B, a, b = spaces()
    b = 1.3 * b if reg_m != math.inf else b
    found = [
        mapuot.gromov(X, Y, a, b, reg=20.0, reg_m=reg_m, metric=metric, init="independent", **SETTLED)
        for X, Y, metric in (
            (x, y, "sqeuclidean"), (A, B, "precomputed"), (sparse.csr_array(A), sparse.csr_array(B), "precomputed"),
            (x, B, ("sqeuclidean", "precomputed")), (A, y, ("precomputed", "sqeuclidean")),
        )
    ]  # fmt: skip
    for one in found[1:]:
        assert one.settled
        assert one.value == pytest.approx(found[0].value, rel=1e-6)
        assert (
            np.abs(one.plan - found[0].plan).sum() <= 1e-3 * found[0].mass
        )  # near the end steps shrink by a tenth each


def test_the_objective_is_its_definition_and_the_change_bounds_the_plans():
    x, y, A, B, a, b = spaces(12, 9)
    found = mapuot.gromov(x, y, a, b, reg=20.0, reg_m=(300.0, 200.0), init="independent", **SETTLED)
    P = np.asarray(found.plan, float)
    mass = P.sum()
    r = P.sum(1)
    s = P.sum(0)

    def kl(p, q):
        return float(divergence("kl", np.multiply.outer(p, p), np.multiply.outer(q, q), 1.0).sum())

    structure = np.einsum("ijkl,ij,kl", (A[:, None, :, None] - B[None, :, None, :]) ** 2, P, P)
    want = structure, 0.0, 300.0 * kl(r, a), 200.0 * kl(s, b), 20.0 * kl(P.ravel(), np.outer(a, b).ravel())
    np.testing.assert_allclose(found.parts, want, rtol=1e-9, atol=1e-9)
    C = np.einsum("ijkl,kl", (A[:, None, :, None] - B[None, :, None, :]) ** 2, P)
    C += 300.0 * r @ np.log(r / a) + 200.0 * s @ np.log(s / b) + 20.0 * (P * np.log(P / np.outer(a, b))).sum()
    step = mapuot.solve(C, a, b, reg=20.0 * mass, reg_m=(300.0 * mass, 200.0 * mass), tol=1e-10).plan
    assert np.abs(step - P).sum() <= 3e-5 * mass  # the plan answers its own step
    loose = mapuot.gromov(x, y, a, b, reg=20.0, reg_m=(300.0, 200.0), init=P * 1.2 / mass, tol=99.0, inner_tol=1e-6)
    assert np.abs(loose.plan - P * 1.2 / mass).sum() <= loose.steps[0].change * loose.mass * (1 + 1e-9)


def step_of(A, B, Q, a, b, reg, reg_m):
    """Return the plan that answers the step from Q, by the definition of its cost."""
    mass = Q.sum()
    r = Q.sum(1)
    s = Q.sum(0)
    C = np.einsum("ijkl,kl", (A[:, None, :, None] - B[None, :, None, :]) ** 2, Q)
    if math.inf not in reg_m:
        C += reg_m[0] * r @ np.log(r / a) + reg_m[1] * s @ np.log(s / b) + reg * (Q * np.log(Q / np.outer(a, b))).sum()
    return mapuot.solve(C, a, b, reg=reg * mass, reg_m=tuple(rho * mass for rho in reg_m), tol=1e-11).plan


@pytest.mark.parametrize("reg_m", [(300.0, 200.0), (math.inf, math.inf), (math.inf, 200.0)])
def test_the_change_bounds_plans_whose_entries_all_err_alike(reg_m):
    """Pinsker's inequality is an equality to first order where |Q - P| is the same share of each entry."""
    ratios = []
    for seed in range(3):
        x, y, A, B, a, b = spaces(8, 7, seed)
        given = {"reg": 10.0, "reg_m": reg_m}
        P = mapuot.gromov(x, y, a, b, init="independent", **given, **SETTLED).plan
        Q = P * (1 + 0.1 * np.random.default_rng(seed).choice([-1, 1], P.shape))
        Q *= 1 / Q.sum() if math.inf in reg_m else 1.0
        found = mapuot.gromov(x, y, a, b, init=Q, tol=99.0, inner_tol=0.3, **given)
        ratios.append(found.steps[0].change * found.mass / np.abs(Q - step_of(A, B, Q, a, b, **given)).sum())
    assert 1 <= min(ratios) <= 1.2


def test_the_change_counts_what_the_inner_solve_leaves_open():
    """Two passes lead from a plan to itself, which does not answer its step."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 3)) * [3, 2, 1]
    y = rng.normal(size=(7, 2))
    A = cdist(x, x, "sqeuclidean")
    B = cdist(y, y, "sqeuclidean")
    a = np.full(8, 1 / 8)
    b = np.full(7, 1 / 7)
    Q = rng.random((8, 7))
    given = {"reg": 10.0, "reg_m": (math.inf, 200.0)}
    for _ in range(25):
        begun = Q / Q.sum()
        with pytest.warns(mapuot.ConvergenceWarning):
            found = mapuot.gromov(x, y, a, b, init=begun, max_iter=1, max_passes=2, **given)
        Q = found.plan
    assert np.abs(Q / Q.sum() - begun).sum() <= 1e-4
    apart = np.abs(begun - step_of(A, B, begun, a, b, **given)).sum()
    assert 0.05 <= apart <= found.steps[0].change * found.mass


@pytest.mark.parametrize("init", ["independent", "axes"])
def test_reg_m_far_above_reg_is_nearly_balanced(init):
    """The marginals' own rounding, 1e-16 or in float32 1e-8, is not multiplied by reg_m."""
    rng = np.random.default_rng(0)
    x = rng.random((6, 2))
    y = rng.random((5, 2))
    balanced = mapuot.gromov(x, y, reg=0.1, reg_m=math.inf, init=init)
    for reg_m in (1e8, 1e12, 1e15, 1e17, 1e300, (1e12, 1e3), (1e15, math.inf), (math.inf, 1e300)):
        found = mapuot.gromov(x, y, reg=0.1, reg_m=reg_m, init=init)
        assert found.settled
        assert found.converged
        assert found.value == pytest.approx(balanced.value, rel=2e-4 if reg_m == (1e12, 1e3) else 1e-6)
        assert min(found.parts[2:4]) >= 0
        assert max(found.parts[2:4]) <= 1e-4
        np.testing.assert_allclose(found.gradient().x, balanced.gradient().x, atol=1e-3)
    one_side = mapuot.gromov(x, y, b=np.full(5, 0.4), reg=0.1, reg_m=(1.0, math.inf))
    far = mapuot.gromov(x, y, b=np.full(5, 0.4), reg=0.1, reg_m=(1.0, 1e17))
    assert far.value == pytest.approx(one_side.value, rel=1e-12)
    for pair in (1e15, (math.inf, 1e15), (1e14, 1e17)):  # no plan is near both masses
        with pytest.raises(ValueError, match=r"reg_m must be .* unlike masses, .*: divide a and b by their sums"):
            mapuot.gromov(x, y, b=np.full(5, 0.4), reg=0.1, reg_m=pair)
    given = mapuot.gromov(x, y, reg=0.1, reg_m=1e12, init=0.8 * balanced.plan)
    assert given.value == pytest.approx(balanced.value, rel=1e-6)


@pytest.mark.parametrize("ratio", [1.3, 30.0])
@pytest.mark.parametrize("rho", [(1e9, 1e9), (1e9, math.inf), (1e11, 3e8)])
def test_reg_m_that_keeps_plans_from_settling_between_unlike_masses_is_refused(ratio, rho):
    """A step's change is a difference of potentials of size reg_m, so it cannot fall below their rounding.

    Masses divided by their totals have the same plan, up to a factor.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(15, 2))
    y = rng.normal(size=(12, 2)) * [1.2, 0.8]
    a = np.full(15, 1 / 15)
    b = np.full(12, ratio / 12)
    told = r"reg_m must be less than .* unlike masses and tol is .*, got .* masses 1 and .*: divide a and b by their"
    with pytest.raises(ValueError, match=told):
        mapuot.gromov(x, y, a, b, reg=0.5, reg_m=rho)
    with pytest.raises(ValueError, match=told):
        mapuot.gromov_pairwise([x, y], masses=[a, b], reg=0.5, reg_m=rho, tol=1e-4)
    at_limit = mapuot.gromov(x, y, a, b, reg=0.5, reg_m=1e5)
    divided = mapuot.gromov(x, y, a, b / ratio, reg=0.5, reg_m=1e5)
    assert at_limit.settled
    assert divided.settled
    np.testing.assert_allclose(at_limit.plan / at_limit.mass, divided.plan / divided.mass, atol=2e-5)
    assert mapuot.gromov(x, y, a, b / ratio, reg=0.5, reg_m=rho).settled


@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_array])
def test_distances_are_symmetric_but_for_their_rounding(kind):
    rng = np.random.default_rng(0)
    x = rng.random((40, 3))
    D = cdist(x, x)
    given = {"reg": 0.1, "reg_m": 1.0, "metric": "precomputed", "init": "independent"}
    right = mapuot.gromov(D, D, **given)
    single = (D * (1 + 3e-7 * rng.normal(size=D.shape))).astype(np.float32)
    squares = (x**2).sum(1)[:, None] + (x**2).sum(1) - 2 * x @ x.T + 1e-15 * rng.random((40, 40))
    for rounded in (single, single.astype(float), np.sqrt(np.maximum(0, squares))):  # near points: sqrt(eps)
        assert (rounded != rounded.T).any()
        assert mapuot.gromov(kind(rounded), kind(D), **given).value == pytest.approx(right.value, rel=1e-5)
    turned = mapuot.gromov(kind(single.T), kind(D), **given)
    assert turned.value == mapuot.gromov(kind(single), kind(D), **given).value
    adjacent = D < 0.4
    found = mapuot.gromov(kind(adjacent), kind(adjacent.astype(int)), **given)
    assert found.value == mapuot.gromov(kind(adjacent.astype(float)), kind(adjacent.astype(float)), **given).value
    for value, text in ((math.nan, "finite .*NaN at .3, 4."), (math.inf, "finite .*inf at .3, 4.: "), (0.5, "symm")):
        wrong = D.copy()
        wrong[3, 4] = value
        with pytest.raises(ValueError, match=f"^Y must be {text}"):
            mapuot.gromov(D, kind(wrong), **given)
        with pytest.raises(ValueError, match=f"^X must be {text}"):
            mapuot.gromov(kind(wrong), x, **given | {"metric": ("precomputed", "sqeuclidean")})


@pytest.mark.parametrize("how", ["median", "mean", "max"])
@pytest.mark.parametrize("metric", ["sqeuclidean", "precomputed"])
def test_units_of_the_costs_are_those_of_the_first_step(how, metric):
    x, y, A, B, a, b = spaces()
    F = np.random.default_rng(2).random((24, 20))
    if metric == "sqeuclidean":
        X, Y = (x, y)
    else:
        X, Y = (A, B)
    found = mapuot.gromov(X, Y, 3 * a, b, reg=0.05, reg_m=(1.0, 2.0), scale_cost=how, metric=metric, features=F)
    C = 0.5 * np.einsum("ijkl,k,l", (A[:, None, :, None] - B[None, :, None, :]) ** 2, a, b) + 0.25 * F
    scale = {"median": np.median, "mean": np.mean, "max": np.max}[how](C)
    assert found.scale_cost == pytest.approx(scale, rel=1e-12)
    given = {"metric": metric, "features": F}
    plain = mapuot.gromov(X, Y, 3 * a, b, reg=0.05 * scale, reg_m=(scale, 2 * scale), **given)
    assert plain.scale_cost == 1
    assert found.value == pytest.approx(plain.value, rel=1e-9)
    with pytest.raises(ValueError, match=r"leave a plan with mass, got 1e-05 .*cost of a step is .*: give reg_m of"):
        mapuot.gromov(x, y, a, b, reg=1e-5, reg_m=1e-4)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"reg": 2.0}, {"mass": 0.7}),
        ({}, {"mass": 0.7, "sharpness": 0.8}),
        ({"reg_m": (100.0, np.inf)}, {"sharpness": 0.8}),
        ({"reg": 0.05, "scale_cost": "median", "metric": "euclidean"}, {"mass": 0.4}),
    ],
)
def test_the_plan_has_the_mass_and_the_sharpness_asked_for(given, wanted):
    """They stand in the place of reg_m and reg, and these numbers alone give the same plan again."""
    x, y = clouds_of_unlike_ends()
    found = mapuot.gromov(x, y, **given, **wanted)
    assert found.converged
    assert found.settled
    for name, share in wanted.items():
        got = getattr(found, name)
        assert abs(np.log(got / (1 - got)) - np.log(share / (1 - share))) <= 1e-2
    units = {name: value for name, value in given.items() if name not in ("reg", "reg_m")}
    again = mapuot.gromov(x, y, reg=found.reg, reg_m=found.reg_m, init=found, **units)
    assert again.mass == pytest.approx(found.mass, rel=1e-3)
    assert again.value == pytest.approx(found.value, rel=1e-6)


def test_a_mass_that_no_plan_has_is_refused_with_the_nearest():
    x, y = clouds_of_unlike_ends()
    with pytest.raises(ValueError, match=r"the nearest found are 0\.9\d+ \(at reg_m"):
        mapuot.gromov(x, y, reg=2000.0, mass=0.999999)
    for given in ({"reg": 2.0}, {"reg": 2.0, "reg_m": 1.0, "mass": 0.5}, {"reg_m": 1.0}):
        with pytest.raises(TypeError, match="takes one of"):
            mapuot.gromov(x, y, **given)


def clouds_of_unlike_ends():
    """Return 40 points, and 30 of them turned, with 10 others."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)) * [3, 2, 1]
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    return x, np.vstack([x[:30] @ turn, 4 * rng.normal(size=(10, 3))])


@pytest.mark.parametrize("reg_m", [(300.0, 200.0), (math.inf, math.inf), (math.inf, 200.0)])
@pytest.mark.parametrize("metric", ["sqeuclidean", "precomputed", ("precomputed", "sqeuclidean")])
@pytest.mark.parametrize("fused", [False, True])
def test_without_entropy_each_plan_is_the_reference_of_the_next(reg_m, metric, fused):
    """The third step follows its definition, from the second step's plan, scaled to equal masses."""
    x, y, A, B, a, b = spaces(8, 7)
    if isinstance(metric, str):
        kinds = (metric, metric)
    else:
        kinds = metric
    given = [z if kind == "sqeuclidean" else Z for z, Z, kind in zip((x, y), (A, B), kinds, strict=True)]
    if fused:
        F = np.random.default_rng(1).random((8, 7))
    else:
        F = np.zeros((8, 7))
    alpha = 0.7 if fused else 1.0
    options = {"reg": 0, "reg_m": reg_m, "metric": metric, "init": "independent", "tol": 1e-9, "inner_tol": 1e-9}
    options |= {"features": F, "alpha": alpha} if fused else {}
    with pytest.warns(mapuot.ConvergenceWarning, match="still changes"):
        plans = [mapuot.gromov(*given, a, b, max_iter=k, **options) for k in (1, 2, 3)]
    Q, mass = plans[0].plan, 1.0
    for found in plans[1:]:
        if math.inf not in reg_m:
            Q = Q * math.sqrt(mass / Q.sum())
        mass = Q.sum()
        C = alpha * np.einsum("ijkl,kl", (A[:, None, :, None] - B[None, :, None, :]) ** 2, Q) + (1 - alpha) / 2 * F
        if math.inf not in reg_m:
            C = C + reg_m[0] * Q.sum(1) @ np.log(Q.sum(1) / a) + reg_m[1] * Q.sum(0) @ np.log(Q.sum(0) / b)
        reg = found.problem.reg
        step = mapuot.solve(C, a, b, reg=reg, reg_m=tuple(rho * mass for rho in reg_m), reference=Q, tol=1e-9).plan
        assert np.abs(step - found.plan).sum() <= 0.03 * found.mass  # inner solves before the last ones are loose
        assert np.abs(step - Q).sum() <= found.steps[-1].change * found.mass + 0.03
        Q = found.plan


@pytest.mark.parametrize("seed", [0, 1])
def test_without_entropy_values_are_not_above_those_of_linear_programs(seed):
    x, y, A, B, a, b = spaces(30, 25, seed)
    found = mapuot.gromov(x, y, a, b, reg=0, reg_m=math.inf)
    assert found.settled
    assert found.converged
    assert found.parts.entropy == 0
    assert found.value == pytest.approx(found.parts.structure)
    _, log = ot.gromov.gromov_wasserstein(A, B, a, b, log=True)
    assert found.value <= log["gw_dist"] * (1 + 1e-6)
    soft = mapuot.gromov(x, y, a, b, reg=0, reg_m=300.0)
    with_entropy = mapuot.gromov(x, y, a, b, reg=0.5, reg_m=300.0)
    assert soft.settled
    assert soft.value <= sum(with_entropy.parts[:4]) * (1 + 1e-6)


def outline(petals, turn, n=60):
    t = np.linspace(0, 2 * np.pi, n, endpoint=False)
    r = 1 + 0.3 * np.cos(petals * t + turn)
    return r[:, None] * np.stack([np.cos(t), np.sin(t)], 1)


@pytest.mark.parametrize("petals", [2, 4])
@pytest.mark.parametrize(("reg", "best"), [(0.05, 0.057), (0.01, 0.0106)])
def test_starts_leave_the_saddle_of_round_shapes(petals, reg, best):
    """The starts leave the saddle of a flower and its rotated copy, as POT's solver does from a b^T at reg .01."""
    C, D = (cdist(z, z) for z in (outline(petals, 0.0), outline(petals, 1.0)))
    for X in (C, sparse.csr_array(C)):
        found = mapuot.gromov(X, D, reg=reg, reg_m=math.inf, metric="precomputed")
        assert len(found.values) == 3
        assert found.parts.structure <= best
        assert found.settled
        assert not found.is_independent
    noise = mapuot.gromov(C, D, reg=reg, reg_m=math.inf, metric="precomputed", init="noise")
    assert noise.parts.structure <= best


def test_a_ring_against_itself_is_turned_unless_reg_is_large():
    """All points of a ring see the same distances: a b^T is a fixed point of the steps, at a small reg a saddle."""
    step = np.abs(np.arange(20)[:, None] - np.arange(20))
    ring = np.minimum(step, 20 - step)
    given = {"reg_m": math.inf, "metric": "precomputed", "init": "independent"}
    flat, found = (mapuot.gromov(ring, ring, reg=reg, **given) for reg in (20.0, 0.5))
    assert flat.settled
    assert flat.is_independent
    assert "near the independent plan" in repr(flat)
    assert found.settled
    assert not found.is_independent
    assert "independent" not in repr(found)
    assert found.parts.structure < 0.1 * flat.parts.structure
    assert abs(flat.sharpness) < 0.05 < found.sharpness
    assert mapuot.gromov(ring, ring, reg=0.0, **given).parts.structure < 1e-3 * flat.parts.structure


@pytest.mark.parametrize("seed", range(3))
def test_without_entropy_a_shuffled_copy_is_matched_from_the_independent_plan(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(60, 3)) * [3, 2, 1]
    order = rng.permutation(60)
    D = cdist(x, x) / 4
    found = mapuot.gromov(D, D[order][:, order], reg=0, reg_m=1.0, metric="precomputed", init="independent")
    assert (order[found.plan.argmax(1)] == np.arange(60)).all()


@pytest.mark.parametrize("metric", ["sqeuclidean", "precomputed"])
def test_symmetric_spaces_do_not_end_at_a_saddle(metric):
    """Points on a line and their mirror images have the same distances: steps from a b^T match both with both."""
    x = np.array([-3.0, -2.0, -0.5, 0.5, 2.0, 3.0])[:, None]
    if metric == "sqeuclidean":
        X = x
    else:
        X = cdist(x, x)
    given = {"reg": 0.3, "reg_m": math.inf, "metric": metric}
    found = mapuot.gromov(X, X, init="independent", **given)
    best = mapuot.gromov(X, X, init=np.eye(6), **given)
    saddle = mapuot.gromov(X, X, init=np.eye(6) + np.eye(6)[::-1], max_iter=3, **given)
    assert saddle.value > 1.1 * best.value
    assert found.settled
    assert found.value == pytest.approx(best.value, rel=1e-6)


def test_extrapolations_do_not_lead_to_another_minimum(monkeypatch):
    given, *_ = gromovs.draw(np.random.default_rng([1, 200]))
    options = {**given, "init": "independent", **gromovs.LIMITS}
    found = mapuot.gromov(**options)
    monkeypatch.setattr(steps, "ahead", lambda *arguments: None)
    plain = mapuot.gromov(**options)
    assert found.settled
    assert plain.settled
    assert found.value <= plain.value * (1 + 1e-6)


def test_a_plan_that_leaves_a_saddle_slowly_settles(monkeypatch):
    """Near the largest reg at which a ring is turned, steps from the saddle grow by some percent each."""
    step = np.abs(np.arange(20)[:, None] - np.arange(20))
    ring = np.minimum(step, 20 - step)
    given = {"reg": 7.5, "reg_m": math.inf, "metric": "precomputed", "init": "independent", "max_iter": 400}
    found = mapuot.gromov(ring, ring, **given)
    assert found.settled
    assert found.value < 0.999 * mapuot.gromov(ring, ring, **given | {"init": np.ones((20, 20))}).value
    monkeypatch.setattr(steps, "ahead", lambda *arguments: None)
    plain = mapuot.gromov(ring, ring, **given)
    assert found.value <= plain.value * (1 + 1e-6)
    assert len(found.steps) < 0.7 * len(plain.steps)


@pytest.mark.parametrize("metric", ["sqeuclidean", "precomputed"])
def test_sorted_rows_are_quantiles_by_mass(metric):
    x, _, A, _, a, _ = spaces()
    rows = starts.sorted_rows(starts.Space(x if metric == "sqeuclidean" else A, metric, "X"), a)
    levels = (np.arange(starts.LEVELS) + 0.5) / starts.LEVELS
    for row, far in zip(rows, A, strict=True):
        right = [min(d for d in far if a[far <= d].sum() >= level - 1e-12) for level in levels]
        np.testing.assert_allclose(row, np.array(right) / 8, atol=1e-12)


def test_a_turned_shuffled_noisy_copy_with_outliers_is_matched():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 5)) * [5, 4, 3, 2, 1] + rng.exponential(2.0, (200, 5)) * [2, 1, 1, 1, 1]
    turn = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    order = rng.permutation(200)
    copy = (x @ turn)[order] + 0.02 * rng.normal(size=(200, 5))
    outliers = rng.normal(size=(40, 5)) @ np.diag([9.0, 9.0, 9.0, 9.0, 9.0])
    y = np.vstack([copy, outliers])
    a = np.full(200, 1 / 200)
    b = np.full(240, 1 / 200)
    found = mapuot.gromov(x, y, a, b, reg=4.0, reg_m=400.0)
    partner = found.top_k(1)[0][:, 0]
    right = (partner < 200) & (order[np.minimum(partner, 199)] == np.arange(200))
    assert right.mean() > 0.9
    assert len(found.values) == 2
    assert found.value == min(found.values)
    assert found.col_marginal[200:].sum() < 0.5 * found.col_marginal.sum() * 40 / 240


@pytest.mark.parametrize("metric", ["sqeuclidean", "precomputed", ("precomputed", "sqeuclidean")])
@pytest.mark.parametrize("reg_m", [4.0, math.inf])
def test_a_start_between_some_points_leads_to_the_plan_of_all(metric, reg_m, using):
    using(SPACES, start_points=50)
    rng = np.random.default_rng(3)
    x = rng.normal(size=(120, 3)) * [3, 2, 1] + rng.exponential(2.0, (120, 3)) * [2, 1, 1]
    order = rng.permutation(120)
    a = rng.random(120) + 0.5
    F = rng.random((120, 2))
    a *= 1.2 / a.sum()
    if isinstance(metric, str):
        kinds = (metric, metric)
    else:
        kinds = metric
    spaces = [
        z if kind == "sqeuclidean" else cdist(z, z, "sqeuclidean") for z, kind in zip((x, x[order]), kinds, strict=True)
    ]
    given = {"reg": 1.0, "reg_m": 100 * reg_m, "metric": metric, "features": (F, F[order]), "alpha": 0.9}
    found = mapuot.gromov(*spaces, a, a[order], init="coarse", **given)
    assert found.settled
    assert found.coarse.problem.shape[0] <= 50
    assert found.coarse.problem.rows.mass == pytest.approx(a.sum())
    assert found.steps[0].change == math.inf
    own = mapuot.gromov(*spaces, a, a[order], init=found, **given)
    assert own.value == pytest.approx(found.value, rel=1e-6)
    assert (order[found.top_k(1)[0][:, 0]] == np.arange(120)).mean() > 0.9
    assert mapuot.gromov(*spaces, a, a[order], init="independent", **given).coarse is None


@pytest.mark.parametrize("seed", [1, 4])  # by the axes of 50 points both, and by their best answer 4, end elsewhere
def test_a_coarse_start_finds_the_directions_of_the_axes(seed, using):
    using(SPACES, start_points=50)
    rng = np.random.default_rng(seed)
    x = (rng.exponential(size=(900, 4)) - 1) * 0.85 ** np.arange(4)
    turn = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    order = rng.permutation(900)
    unit = x.var(0).sum() ** 2
    found = mapuot.gromov(x, x[order] @ turn, reg=0.02 * unit, reg_m=0.3 * unit)
    assert len(found.coarse.coarse.values) == 5  # a b^T and 4 directions of the axes, between 56 points
    assert (order[found.top_k(1)[0][:, 0]] == np.arange(900)).mean() > 0.97


@pytest.mark.parametrize("reg_m", [(40.0, 60.0), math.inf, (math.inf, 60.0), (40.0, math.inf)])
def test_slopes_are_differences_of_the_objective(reg_m):
    rng = np.random.default_rng(5)
    x, y, _, _, a, b = spaces(9, 8)
    b = b if reg_m == math.inf else 1.2 * b
    given = {"reg": 12.0, "reg_m": reg_m, "features": (rng.normal(size=(9, 2)), rng.normal(size=(8, 2))), "alpha": 0.7}
    result = mapuot.gromov(x, y, a, b, init="independent", **given, **SETTLED)
    slopes = result.gradient()[:4]
    for k, slope in enumerate(slopes):
        way = rng.normal(size=slope.shape) * (1.0 if k < 2 else 0.05)
        way -= way.mean() * (k > 1 and reg_m == math.inf)  # both masses stay equal
        far = []
        for step in (-1e-3, 1e-3):
            moved = [z + step * way if i == k else z for i, z in enumerate((x, y, a, b))]
            far.append(mapuot.gromov(*moved, init=result, **given, **SETTLED).value)
        assert (far[1] - far[0]) / 2e-3 == pytest.approx(float((slope * way).sum()), rel=1e-3)


def test_coordinates_that_all_points_share_change_nothing():
    """Points of a plane in space have the plane's answer; all mass in one point leaves a single plan."""
    x, y, *_, a, b = spaces()
    flat = np.column_stack([x, np.zeros(24)])
    found, right = (mapuot.gromov(z, y, a, b, reg=2.0, reg_m=50.0, max_iter=200) for z in (flat, x))
    assert found.value == pytest.approx(right.value, rel=1e-6)
    one = mapuot.gromov(x, y, np.eye(24)[3], b, reg=2.0, reg_m=50.0)
    np.testing.assert_allclose(one.plan[3], one.plan.sum(0))


def test_steps_that_do_not_settle_are_told():
    x, y, *_ = spaces(12, 9)
    with pytest.warns(mapuot.ConvergenceWarning, match="still changes by"):
        found = mapuot.gromov(x, y, reg=20.0, reg_m=math.inf, max_iter=1, init="independent")
    assert not found.settled
    assert "not settled" in repr(found)
    assert found.how in str(found)  # of a step that the core solved in one call, too
    assert (len(found.log_u), len(found.log_v)) == (12, 9)
    np.testing.assert_allclose(found.row_marginal, found.plan.sum(1), atol=1e-6)
    with pytest.warns(mapuot.ConvergenceWarning, match="the last step: not converged .*inner_tol"):
        assert not mapuot.gromov(x, y, reg=20.0, reg_m=200.0, max_passes=1, init="independent").converged


@pytest.mark.parametrize("init", ["independent", "rows"])
def test_steps_that_overshoot_go_half_as_far(init):
    """Full steps alternate between two plans for ever, with objectives of 386 and 455."""
    rng = np.random.default_rng(0)
    clouds = [rng.normal(size=(n, 3)) * [3.0, 2.0, 1.0] for n in (12, 9, 15)]
    a, b = (rng.dirichlet(np.ones(n)) for n in (12, 9, 15)[1:])
    x, y = clouds[1:]
    given = {"reg": 3.0, "reg_m": (math.inf, 60.0)}
    found = mapuot.gromov(x, y, a, b, init=init, **given, **SETTLED)
    assert found.settled
    A = cdist(x, x, "sqeuclidean")
    B = cdist(y, y, "sqeuclidean")
    assert found.value == pytest.approx(objective(A, B, found.plan, a, b, 3.0, (math.inf, 60.0)), rel=1e-9)
    step = step_of(A, B, found.plan, a, b, **given)
    assert np.abs(step - found.plan).sum() <= 1e-4 * found.mass
    for share in (0.01, 0.1):
        if init == "rows":
            other = np.outer(a, b)
        else:
            other = np.outer(a, found.col_marginal)
        nearby = (1 - share) * found.plan + share * other
        assert objective(A, B, nearby, a, b, 3.0, (math.inf, 60.0)) >= found.value


@pytest.mark.parametrize(("d", "e", "seed"), [(2, 2, 0), (2, 1, 1), (1, 4, 2), (2, 2, 3)])
def test_no_plan_lies_below_the_global_bound(d, e, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(9, d))
    y = rng.normal(size=(7, e)) ** 2
    a = 3 * rng.dirichlet(np.ones(9))
    b = 3 * rng.dirichlet(np.ones(7))
    given = {"reg": 0.1, "reg_m": math.inf}
    given |= {"features": rng.random((9, 7)), "alpha": 0.6} if seed else {}
    found = mapuot.gromov(x, y, a, b, bound_tol=0.02, **given)
    assert 0.97 * found.value <= found.lower_bound <= found.value
    for _ in range(12):
        other = mapuot.gromov(x, y, a, b, init=rng.random((9, 7)) ** 4, **given)
        assert found.lower_bound <= other.value
        assert 0.98 * found.value <= other.value


@pytest.mark.parametrize("fused", [False, True])
def test_a_bound_between_many_points_forms_no_costs(fused, using):
    x, y, *_, a, b = spaces(12, 10)
    options = {"reg": 2.0, "reg_m": math.inf, "bound_tol": 0.05}
    if fused:
        rng = np.random.default_rng(1)
        options |= {"features": (rng.random((12, 2)), rng.random((10, 2))), "alpha": 0.7}
    formed = mapuot.gromov(x[:, :2], y[:, :2], a, b, **options)
    using(SPACES, corner_entries=0)
    found = mapuot.gromov(x[:, :2], y[:, :2], a, b, **options)
    assert found.value == pytest.approx(formed.value, rel=1e-5)
    assert found.lower_bound == pytest.approx(formed.lower_bound, rel=1e-3)


def test_the_search_for_a_bound_improves_a_poor_plan():
    """From noise alone, a cloud and its turned copy end at 13 times the minimum."""
    rng = np.random.default_rng(5)
    x = rng.random((12, 2)) * [1.0, 0.9]
    y = x[rng.permutation(12)] @ [[0.0, -1.0], [1.0, 0.0]]
    given = {"reg": 1e-3, "reg_m": math.inf, "init": "noise"}
    poor = mapuot.gromov(x, y, **given)
    found = mapuot.gromov(x, y, bound_tol=0.05, **given)
    assert found.value < 0.1 * poor.value
    assert found.values[0] == poor.value


def test_a_poor_start_does_not_keep_the_search_going(using):
    """No bound is within 1 % of a value 3 % above the minimum, so that the search has to find the minimum."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(14, 2)) * [1.0, 0.6]
    y = rng.normal(size=(14, 2)) * [0.9, 0.7]
    given = {"reg": 0.1, "reg_m": math.inf}
    plans = [rng.random((14, 14)) ** 8 for _ in range(20)]
    values = [mapuot.gromov(x, y, init=plan, **given).value for plan in plans]
    best = min(values)
    poor = plans[int(np.argmax(values))]
    assert max(values) > 1.03 * best
    using(SPACES, most_corners=600)
    found = mapuot.gromov(x, y, init=poor, bound_tol=0.01, **given)
    assert found.value <= best * (1 + 1e-6)
    assert found.lower_bound >= 0.99 * found.value


def test_a_search_whose_edges_have_no_middle_left_ends_with_a_true_bound(using):
    """Halves by a place beside the middle would leave plans between them."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(8, 2))
    y = rng.normal(size=(7, 2)) ** 2
    given = {"reg": 0.05, "reg_m": math.inf}
    for units in (1, 2, 6):
        using(SPACES, box_units=units)
        with pytest.warns(mapuot.ConvergenceWarning, match="lower_bound"):
            found = mapuot.gromov(x, y, bound_tol=1e-3, **given)
        assert found.lower_bound <= found.value
        values = [mapuot.gromov(x, y, init=rng.random((8, 7)) ** 4, **given).value for _ in range(4)]
        assert found.lower_bound <= min(values)


def test_the_bound_says_where_it_does_not_apply():
    x = np.random.default_rng(0).random((5, 3))
    D = cdist(x, x)
    cases = [
        (x, {"reg_m": math.inf}, "product up to 4, got 9"),
        (x, {"reg_m": 1.0}, "reg_m = inf"),
        (D, {"reg_m": math.inf, "metric": "precomputed"}, "sqeuclidean"),
    ]
    for space, given, word in cases:
        with pytest.raises(NotImplementedError, match=word):
            mapuot.gromov(space, space, reg=0.1, bound_tol=0.1, **given)


def few_landmarks(using, most=10):
    """Embed distances between more than ``most`` points."""
    using(SPACES, formed_points=most)


@pytest.mark.parametrize("power", [0.5, 1.0, 1.7])
def test_coordinates_of_distances_exceed_them_by_a_positive_semidefinite_matrix(power):
    x = np.random.default_rng(0).normal(size=(50, 3)) ** 3
    a = np.random.default_rng(1).random(50)
    space = distances.Space(x, "euclidean", "X", power)
    D = cdist(x, x) ** power
    sizes = []
    for landmarks in (5, 10, 20, 50):
        space.embed(a, landmarks)
        rest = space.rows(0, 50) - D
        assert np.linalg.eigvalsh(rest).min() >= -1e-9
        found, whole = space.misfit(a)
        assert 0 <= found - a @ rest**2 @ a <= 1e-12 * whole
        assert whole == pytest.approx(a @ D**2 @ a)
        sizes.append(found)
        Z = np.random.default_rng(2).normal(size=(50, 4))
        np.testing.assert_allclose(space.distances.times(Z), D @ Z, rtol=1e-7, atol=1e-7)
        np.testing.assert_allclose(space.distances.square_means(a), D**2 @ a, rtol=1e-7)
    assert sizes[1] < 0.6 * sizes[0]
    assert sizes[-1] <= 1e-12 * whole


def test_points_at_one_place_are_one_landmark():
    """Several pivots are drawn at a time; a pivot without a rest is rejected."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 3))[rng.integers(5, size=60)]
    space = distances.Space(x, "euclidean", "X")
    space.embed(np.ones(60), 20)
    assert (np.abs(space.phi[:, 2:]).max(0) > 0).sum() == 4
    np.testing.assert_allclose(space.rows(0, 60), cdist(x, x), atol=1e-12)


def test_a_step_between_points_has_one_coordinate_more_than_they():
    x, y, A, B, a, b = spaces()
    found = mapuot.gromov(x, y, a, b, reg=0.5, reg_m=math.inf, init="independent", **SETTLED)
    assert found.problem.cost.cloud.x.shape[1] == 4
    P = found.plan
    M = (A**2 @ P.sum(1))[:, None] + B**2 @ P.sum(0) - 2 * A @ P @ B  # of the step from the settled plan
    np.testing.assert_allclose(np.asarray(found.problem.M) + found.problem.constant, M, atol=1e-3 * M.max())


def objective(A, B, P, a, b, reg, reg_m, F=0.0, alpha=1.0):
    """Return the objective of `gromov` by its definition."""
    r = P.sum(1)
    s = P.sum(0)

    def kl(p, q):
        return 2 * P.sum() * divergence("kl", p, q, 1.0).sum() + (p.sum() - q.sum()) ** 2

    structure = r @ A**2 @ r + s @ B**2 @ s - 2 * ((A @ P @ B) * P).sum()
    value = alpha * structure + (1 - alpha) * (F * P).sum() + reg * kl(P, np.outer(a, b))
    return value + sum(rho * kl(p, q) for rho, p, q in zip(reg_m, (r, s), (a, b), strict=True) if rho < math.inf)


@pytest.mark.parametrize("reg_m", [(3.0, 2.0), (math.inf, math.inf), (math.inf, 2.0)])
@pytest.mark.parametrize("fused", [None, "points", "matrix"])
def test_few_landmarks_bound_the_objective_at_true_distances(reg_m, fused, using):
    few_landmarks(using)
    x, y, A, B, a, b = spaces(60, 50)
    A = np.sqrt(A)
    B = np.sqrt(B)
    f = np.random.default_rng(3).random((60, 2))
    g = np.random.default_rng(4).random((50, 2))
    F = cdist(f, g, "sqeuclidean")
    options = {"reg": 0.1, "reg_m": reg_m, "init": "independent", "tol": 1e-5, "inner_tol": 1e-9}
    if fused:
        options |= {"features": (f, g) if fused == "points" else F, "alpha": 0.8}
    alpha = 0.8 if fused else 1.0
    right = mapuot.gromov(A, B, a, b, metric="precomputed", **options)
    for landmarks, z in ((60, y), (8, y**2), (20, y)):
        G = cdist(z, z)
        if z is y:
            options["init"] = right
        found = mapuot.gromov(x, z, a, b, metric="euclidean", landmarks=landmarks, **options)
        assert found.settled
        assert found.value == pytest.approx(sum(found.parts), rel=1e-12)
        true = objective(A, G, found.plan, a, b, 0.1, reg_m, F, alpha)
        assert found.value - found.value_error - 1e-9 <= true <= found.value + 1e-9
        if landmarks == 60:
            assert found.value == pytest.approx(right.value, rel=1e-7)
            assert found.value_error <= 1e-6
        else:
            assert max(found.misfit) < 0.05  # of 64 landmarks, all points
    assert true <= right.value * 1.01
    with pytest.raises(NotImplementedError, match="gradient"):
        found.gradient()


@pytest.mark.filterwarnings("ignore::mapuot.ConvergenceWarning")  # the costs of these points may stall passes
@pytest.mark.parametrize(("metric", "far", "rounding"), [("euclidean", 1e8, 1e-12), ("sqeuclidean", 1e6, 1e-6)])
def test_far_points_without_mass_leave_the_value_right(metric, far, rounding, using):
    """Coordinates have the mean of the masses as their origin, not the mean of all points."""
    few_landmarks(using)
    x, y, _, _, a, b = spaces(60, 50)
    x[0] = far
    a[0] = 0.0
    a /= a.sum()
    found = mapuot.gromov(x, y, a, b, reg=0.3, reg_m=math.inf, metric=metric, init="independent", max_iter=5)
    X, Y = (cdist(z, z, metric) for z in (x, y))
    true = objective(X, Y, found.plan, a, b, 0.3, (math.inf, math.inf))
    assert found.value - found.value_error - rounding * true <= true <= found.value + rounding * true


@pytest.mark.parametrize("metric", [("euclidean", "sqeuclidean"), ("sqeuclidean", "euclidean")])
@pytest.mark.parametrize("reg", [0.3, 0.0])
def test_true_distances_beside_squares_are_exact(metric, reg, using):
    """One space has all its coordinates: products with the true distances of the other leave no error."""
    few_landmarks(using)
    x, y, A, B, a, b = spaces(40, 35)
    if metric[0] == "euclidean":
        A = np.sqrt(A)
    else:
        B = np.sqrt(B)
    options = {"reg": reg, "reg_m": math.inf, "init": "independent", "tol": 1e-5, "inner_tol": 1e-9, "max_iter": 300}
    found = mapuot.gromov(x, y, a, b, metric=metric, landmarks=30, **options)
    assert found.value_error <= 1e-9
    assert found.value == pytest.approx(objective(A, B, found.plan, a, b, reg, (math.inf, math.inf)), rel=1e-9)
    right = mapuot.gromov(A, B, a, b, metric="precomputed", **options)
    assert found.value <= right.value * (1 + (1e-6 if reg else 0.05))


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5])
def test_few_points_have_the_matrix_of_their_distances(power):
    x, y, A, B, a, b = spaces()
    given = {"reg": 0.1, "reg_m": 5.0}
    found = mapuot.gromov(x, y, a, b, metric="euclidean", power=power, **given)
    right = mapuot.gromov(A ** (power / 2), B ** (power / 2), a, b, metric="precomputed", **given)
    assert found.value == pytest.approx(right.value, rel=1e-9)
    assert (found.value_error, found.misfit) == (0.0, (0.0, 0.0))


def test_geodesics_are_shortest_paths_and_landmarks_approximate_them(using):
    rng = np.random.default_rng(0)
    x = rng.random((70, 2))
    D = cdist(x, x)
    edges = sparse.csr_array(np.where(D < 0.4, D, 0.0))
    near = csgraph.dijkstra(edges, directed=False)
    given = {"reg": 0.02, "reg_m": math.inf, "init": "rows"}
    given["a"] = rng.dirichlet(np.ones(70))
    right = mapuot.gromov(near, near[:40, :40], metric="precomputed", **given)
    found = mapuot.gromov(edges, near[:40, :40], metric=("geodesic", "precomputed"), **given)
    assert found.value == pytest.approx(right.value, rel=1e-6)
    few_landmarks(using)
    line = sparse.diags_array(rng.random(39) + 0.5, offsets=1, shape=(40, 40))
    line = sparse.csr_array(line + line.T)
    path = csgraph.dijkstra(line, directed=False)  # of negative type, as every tree
    errors = []
    for landmarks in (5, 40):
        found = mapuot.gromov(edges, line, metric="geodesic", landmarks=landmarks, **given)
        assert found.value_error == math.inf
        errors.append(found.misfit)
    assert max(errors[1]) < 0.05
    assert errors[1][1] < 1e-6
    assert min(errors[0]) > 2 * max(errors[1])
    exact = mapuot.gromov(near, path, metric="precomputed", **given)
    assert found.value == pytest.approx(exact.value, rel=0.05)
    apart = sparse.csr_array(np.kron(np.eye(2), np.ones((20, 20))))
    with pytest.raises(ValueError, match=r"^X must be a connected graph"):
        mapuot.gromov(apart, line, metric="geodesic", **given)
    with pytest.raises(ValueError, match=r"^X must have lengths of edges >= 0"):
        mapuot.gromov(-apart, line, metric="geodesic", **given)


@pytest.mark.parametrize(("seed", "count"), [(5, 6), pytest.param(1, 200, marks=pytest.mark.nightly)])
def test_random_problems_have_true_values_certificates_and_bounds(seed, count):
    totals, failures = gromovs.run(seed=seed, count=count, starts=20)
    assert not failures
    assert totals["certificates judged"] >= 0.9 * count
    assert totals["compared with POT"] + totals["POT ended in NaN"] == count
    assert not totals["above POT"]
    assert totals["bounds"] >= 0.1 * count
