"""Rules hold at their edge cases, which random problems hardly ever meet: draws, files, bounds of boxes."""

import types

import numpy as np
import pytest
from scipy import sparse

import mapuot
from mapuot import files
from mapuot.answer.draw import draw_rows
from mapuot.ascend.truncation import in_boxes
from mapuot.backends.boxes import Boxes, PassState, Share, Truncation
from mapuot.backends.cpu import backend as cpu
from mapuot.backends.cpu import native
from mapuot.backends.draw import columns_in
from mapuot.backends.rules import plan_error
from mapuot.contract import Stats
from mapuot.marginals.certificate import certify
from mapuot.problem.points import KeptBoxes
from mapuot.problem.problem import Problem

LONG = np.longdouble
LAST = np.nextafter(1.0, 0.0)


def test_rows_without_mass_are_never_drawn():
    """A draw at a row's end takes the next row with mass; just below 1 it takes the last row with mass."""
    drawn = types.SimpleNamespace(random=lambda size: np.array([0.0, 0.25, np.nextafter(0.25, 0), 0.75, LAST]))
    rows = draw_rows(np.array([0.0, 1.0, 0.0, 2.0, 1.0, 0.0]), 5, drawn, "independent")
    np.testing.assert_array_equal(rows, [1, 3, 1, 4, 4])


@pytest.mark.parametrize("behind", [0, 100])
@pytest.mark.parametrize("form", [np.asarray, sparse.csr_array])
def test_columns_without_mass_are_never_drawn(form, behind):
    """Columns without mass are never drawn: zeros at both ends and within, few columns, and many, searched in runs."""
    P = np.array([[0.0, 1.0, 0.0, 3.0, 0.0], [0.0, 0.0, 2.0, 0.0, 0.0]])
    P = np.pad(P, ((0, 0), (0, behind)))
    if form is not np.asarray:
        i, j = np.indices(P.shape)  # zeros that are stored
        block = form((P.ravel(), (i.ravel(), j.ravel())), shape=P.shape)
    else:
        block = P
    rows = np.array([0, 0, 0, 0, 1, 1])
    at = np.array([0.0, np.nextafter(0.25, 0), 0.25, LAST, 0.0, LAST])
    np.testing.assert_array_equal(columns_in(block, rows, at), [1, 1, 3, 3, 2, 2])


def test_a_member_is_read_to_its_end_for_its_checksum(tmp_path):
    """Damage behind the first MiB, which is read at once, is found."""
    path = tmp_path / "M.npz"
    M = np.random.default_rng(0).random((400, 800))
    np.savez(path, M=M)
    np.testing.assert_array_equal(np.asarray(files.open_matrix(path)), M)
    data = bytearray(path.read_bytes())
    data[data.rindex(M[-1, -1].tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"M\.npz.*CRC"):
        files.open_matrix(path)


def repeated(far=1.0, reg_m=1.0):
    """Return boxes of sixteen points at one place, an iterate between them, and its plan in long double."""
    rng = np.random.default_rng(0)
    places = rng.random((12, 2)) * far, rng.random((9, 2)) * far + 0.3
    x, y = (np.repeat(p, 16, 0) for p in places)
    a = np.repeat(rng.random(12) + 0.1, 16)
    b = np.repeat(rng.random(9) + 0.1, 16)
    problem = Problem.from_arrays(mapuot.PointCloud(x, y, truncate=2.0), a, b, 1e-2, reg_m, "kl", "product", cpu)
    task = in_boxes(problem, False, 16)[0]
    p = np.asarray(task.cost.rows, LONG)
    q = np.asarray(task.cost.targets, LONG)
    reg = LONG(task.reg)
    log_v = np.repeat(rng.normal(size=9), 16)
    log_u = np.asarray(((p[:, None] - q) ** 2).sum(2), float).min(1) / 1e-2 + np.repeat(rng.normal(size=12), 16)
    exponent = log_u[:, None] + LONG(1) * log_v - ((p[:, None] - q) ** 2).sum(2) / reg
    P = np.exp(exponent) * task.rows.weight[:, None] * task.cols.weight
    state = PassState(log_u, log_v, np.asarray(P.sum(1), float), np.asarray(P.sum(0), float))
    return task, Boxes(task, native.SERIAL), state, P


@pytest.mark.parametrize("far", [1.0, 1e3, 1e5])
def test_bounds_between_boxes_of_one_point_each_are_reached(far):
    """For sixteen points at one place the bound is the sum itself, rounded to the safe side."""
    _, found, state, P = repeated(far)
    _, _, arrays = found.tilt(state)
    arrays["x_cut"][:] = np.inf  # nothing is kept
    _, row_mass, col_mass = found.sweep(arrays)
    for mass, sums in ((row_mass[:12], P.reshape(12, -1).sum(1)), (col_mass[:9], P.reshape(192, 9, 16).sum((0, 2)))):
        right = sums / LONG(found.mass)
        assert (mass >= right).all()
        assert (mass <= right * (1 + 1e-11 * max(1.0, far * far))).all()
    share = found.share(1e-3 * row_mass, 1e-3 * col_mass, ())
    assert 1e-3 * P.sum() <= share.mass <= 1.001e-3 * row_mass.sum() * found.mass
    assert share.error >= plan_error(1e-3)


@pytest.mark.parametrize(("p", "q"), [(60.0, 60.0), (60.0, -60.0), (90.0, 10.0), (-10.0, 90.0)])
def test_bounds_hold_for_potentials_of_any_slopes(p, q):
    """Bounds hold where both sides' potentials rise along the boxes, together or opposed, and where only one does."""
    rng = np.random.default_rng(0)
    cloud = mapuot.PointCloud(rng.random((48, 2)), rng.random((48, 2)), truncate=2.0)
    task = in_boxes(Problem.from_arrays(cloud, None, None, 0.1, 1.0, "kl", "product", cpu), False, 16)[0]
    x = np.asarray(task.cost.rows)
    y = np.asarray(task.cost.targets)
    log_u = x @ [p, -p]
    log_v = y @ [q, -q]
    P = np.exp(log_u[:, None] + log_v - ((x[:, None] - y) ** 2).sum(2) / 0.1) / 48**2
    state = PassState(log_u, log_v, P.sum(1), P.sum(0))
    found = Boxes(task, native.SERIAL)
    _, _, arrays = found.tilt(state)
    _, row_mass, col_mass = found.sweep(arrays)  # nothing is kept
    blocks = P.reshape(3, 16, 3, 16).sum((1, 3)) / P.sum()
    assert (row_mass[:3] >= blocks.sum(1) * (1 - 1e-12)).all()
    assert (col_mass[:3] >= blocks.sum(0) * (1 - 1e-12)).all()


def test_what_skipped_mass_costs_a_kl_side_is_reached():
    """Skipping t costs rho (KL(r + t | q) - KL(r | q)) at most; sides with a hard point have no such bound."""
    task, found, state, _ = repeated(reg_m=(0.7, 2.0))
    *sides, _ = found.tilt(state)
    growths = found.growths(state, (sides[0], sides[1]))
    terms = (task.rows, state.log_u, state.r), (task.cols, state.log_v, state.s)
    for growth, (side, log, r), half in zip(growths, terms, (found.rows, found.cols), strict=True):
        bound = np.linspace(1e-4, 1e-2, len(half.mid))
        t = np.repeat(bound[: half.boxes], 16) * found.mass / 16  # every point has an equal share of its box
        q = LONG(1) * side.weight * np.exp(-LONG(task.reg) * log / side.rho)
        grown = (r + t) * np.log((r + t) / q) - r * np.log(r / q) - t
        assert growth(bound) == pytest.approx(float((side.rho * np.maximum(grown, 0)).sum()), rel=1e-9)
    task, found, state, _ = repeated(reg_m=(np.where(np.arange(192) % 2, np.inf, 1.0), 1.0))
    *sides, _ = found.tilt(state)
    assert not found.growths(state, (sides[0], sides[1]))


def test_what_skipped_pairs_add_to_a_pass():
    """The error becomes (error + e) (1 + tau) + tau, tau the mass's share; the gap grows once by reg times the mass."""
    task, found, state, _ = repeated()
    skips = Truncation(task, state, 1e-3, -1.0, 3.0, rough=False)
    skips.boxes, found.skipped = found, lambda state, kept: Share(0.02, 0.3)
    stat = Stats(5, 0.1, 0.04, 1.0, 2.0, 1e-3, False, "converged")
    for _ in range(2):
        skips.count_skipped(stat, state, 0.0)
        assert stat.error == pytest.approx((0.04 + 0.3) * 1.01 + 0.01)
        assert stat.gap == pytest.approx(0.1 + 1e-2 * 0.02)
        assert stat.dual == pytest.approx(1.0 - 1e-2 * 0.02)
    assert stat.status == "absorb"  # converged no more: a mask is made that costs less
    assert skips.hidden == 0.02


def test_a_mask_skips_what_its_cuts_do():
    """Bounds from cuts, and from the runs of kept pairs that these cuts make, are equal to the last bit."""
    _, found, state, _ = repeated()
    _, _, arrays = found.tilt(state)
    _, *whole = found.sweep(arrays | {"x_cut": np.full(12, np.inf)})
    for part in (0.01, 0.2, 0.6):
        y_cut = np.log(whole[1] * part + 1e-300)
        cuts = arrays | {"x_cut": np.log(whole[0] * part / whole[0].sum()), "y_cut": y_cut}
        width, *bounds = found.sweep(cuts)
        first, run = found.runs(cuts)
        assert 0 < width.sum() < 12 * 9
        starts, ends = run.reshape(-1, 2).T
        ends = np.minimum(ends, found.cols.boxes * 16)
        np.testing.assert_array_equal(width, np.add.reduceat(ends - starts, first[:-1]) // 16)
        _, *again = found.sweep(cuts, KeptBoxes(16, first, run, 16 * 9, 2.0, 1.0))
        np.testing.assert_array_equal(again[0], bounds[0])
        np.testing.assert_array_equal(again[1], bounds[1])


WORTH = {"sizes": (3.0, 2.0), "values": (0.5, 0.25), "value_sizes": (0.5, 0.25), "amounts": (1.0, 0.0)}
WORTH |= {"gaps": (1e-6, 0.0), "boths": (2.0, 0.0), "misses": (0.0, 0.0)}  # of a soft marginal and of a hard one


def certified(allowed=1e-3, **given):
    """The certificate of a plan of mass 2 at reg .5 counts the given errors and nothing else."""
    space = types.SimpleNamespace
    worth = np.array([given.pop(name, value) for name, value in WORTH.items()])
    problem = space(reg=0.5, soft=[0], hard=[1], marginals=[space(rho=40.0), space(rho=np.inf)], reference_mass=3.0,
                    constant=0.0, log_sizes=1.0, largest=1.0, cost_error=0.0, shape=(3, 4))  # fmt: skip
    state = {"mass": 2.0, "worth": worth, "log_s": None, "rounding": 0.0, "storage": 0.0, "is_complete": True}
    return certify(problem, space(**{**state, **given}), np.zeros((2, 1)), allowed)


def test_what_is_missing_of_many_marginals_counts():
    """Error, gap and dual value count the plan's entries, a soft side's marginal and a hard side's marginal."""
    plain = certified()
    assert plain.gap == pytest.approx(40e-6, rel=1e-4)
    assert plain.error == pytest.approx(plan_error(40e-6 / (0.5 * 2)), rel=1e-4)
    found = certified(rounding=1e-6)
    assert plain.dual - found.dual == pytest.approx(0.5 * 2 * 1e-6, rel=1e-3)
    root = np.sqrt(40e-6) + 2e-6 * np.sqrt(40 * 2.0)
    assert found.gap == pytest.approx(root**2 + 1e-6 * 2 * 0.5 * 2 + 1e-6, rel=1e-4)
    stored = certified(storage=1e-6)
    assert plain.dual - stored.dual == pytest.approx(0.5 * 2 * 1e-6, rel=1e-3)
    far = certified(sizes=(3e9, 2.0))
    assert plain.dual - far.dual >= 0.99 * 3e9 * 2.0**-53 * (40 * 8 * 0.5 / 40 + 0.5 * 2 * 4)
    assert certified(misses=(0.0, 1e-5)).error - plain.error == pytest.approx(0.5e-5, rel=1e-3)
    assert certified(misses=(0.0, 0.99 * 2e-3)).gap < 1e-4
    assert certified(misses=(0.0, 1.01 * 2e-3)).gap == np.inf
    for wrong in ({"gaps": (-1e-3, 0.0)}, {"rounding": 0.2}, {"values": (np.nan, 0.0)}):
        assert certified(**wrong).error == np.inf


def test_costs_of_denormal_numbers_are_not_infeasible(backend):
    """At a reg with 1 / reg = inf no pair can carry mass, but none is forbidden, and the status says so."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        M = rng.random((4, 3)) * 10.0 ** rng.uniform(-318, -310)
        reg = float(np.ptp(M)) * 10 ** rng.uniform(-2, 1)
        with np.errstate(all="ignore"):
            found = mapuot.solve(M, reg=reg, reg_m=np.inf, backend=backend)
        assert not found.converged or found.error_bound < 1e-6
    with pytest.raises(mapuot.InfeasibleError, match="forbids every pair of a"):
        mapuot.solve(np.where([[True], [False]], np.inf, np.ones((2, 3))), reg=0.1, reg_m=np.inf, backend=backend)
