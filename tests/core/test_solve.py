"""The solver agrees with POT, numpy, exact answers and itself: iterates, methods, precisions, starts, stops."""

import gc
import time
import warnings
import weakref

import numpy as np
import ot
import pytest
from problems import clouds, relative_error, verify

import mapuot


def iterates(case, count, **options):
    """Return the state after count passes, whatever its error."""
    return case.solve(tol=1e-300, max_passes=count, precision="float64", **options)


# ---- iterates ----


@pytest.mark.parametrize("passes", [1, 5, 20])
@pytest.mark.parametrize("reg_type", ["kl", "entropy"])
def test_sinkhorn_makes_pots_iterates(backend, passes, reg_type):
    reference = {"kl": "product", "entropy": "uniform"}[reg_type]
    case = clouds(23, 17, reg_m=(0.7, 2.0), ratio=1.6, reference=reference)
    result = iterates(case, passes, method="sinkhorn", backend=backend)
    log_u, log_v = pots_iterates(case, passes, reg_type)
    np.testing.assert_allclose(result.log_u, log_u[-1], atol=1e-12)
    np.testing.assert_allclose(result.log_v, log_v[-2], atol=1e-12)  # the pass reads v of the one before


def pots_iterates(case, passes, reg_type="kl"):
    """Return [log u_k], [log v_k] for k = 0 .. passes from POT's Sinkhorn; it starts at 1."""
    log_u = [np.zeros(len(case.a))]
    log_v = [np.zeros(len(case.b))]
    for k in range(1, passes + 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            problem = case.a, case.b, case.M, case.reg, case.reg_m, reg_type
            _, log = ot.unbalanced.sinkhorn_knopp_unbalanced(*problem, numItermax=k, stopThr=0, log=True)
        log_u.append(log["logu"])
        log_v.append(log["logv"])
    return log_u, log_v


# ---- starts ----


def test_warm_start_saves_passes_and_changes_nothing(backend):
    case = clouds(40, 30, reg=0.01, reg_m=1.0, ratio=1.4)
    options = {"tol": 1e-9, "backend": backend}
    cold = case.solve(**options)
    again = case.solve(warm_start=cold, **options)
    assert again.n_passes <= 2
    assert case.solve(warm_start=(cold.log_u, cold.log_v), **options).n_passes <= 2
    assert relative_error(again.plan, cold.plan) < 1e-8
    rng = np.random.default_rng(1)
    changed = [case.replace(a=case.a * rng.uniform(0.99, 1.01, 40), b=case.b * rng.uniform(0.99, 1.01, 30)),
               case.replace(M=case.M * 1.01), case.replace(reg=0.011), case.replace(reg_m=1.1)]  # fmt: skip
    for other in changed:
        fresh = other.solve(**options)
        warm = other.solve(warm_start=cold, **options)
        assert warm.n_passes < fresh.n_passes
        assert relative_error(warm.plan, fresh.plan) < 1e-8
        verify(warm, other)


# ---- stops ----


def test_callback_sees_every_pass_and_can_cancel(backend):
    case = clouds(30, 20, reg=0.01)
    seen = []
    result = case.solve(callback=seen.append, tol=1e-9, backend=backend)
    assert [s.n_pass for s in seen] == list(range(1, result.n_passes + 1))
    assert seen == result.trace
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cancelled = case.solve(callback=lambda s: s.n_pass == 7, tol=1e-9, backend=backend)
    assert (cancelled.status, cancelled.converged, cancelled.n_passes) == ("cancelled", False, 7)
    assert cancelled.error_bound == cancelled.trace[-1].error
    verify(cancelled, case)
    with pytest.raises(ZeroDivisionError):
        case.solve(callback=lambda s: 1 / 0, backend=backend)


def test_max_passes_gives_one_warning_that_says_what_to_change(backend):
    case = clouds(30, 20, reg=0.01)
    with pytest.warns(mapuot.ConvergenceWarning) as caught:
        result = case.solve(max_passes=3, tol=1e-9, backend=backend)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert text.startswith("not converged (max_passes) after 3 passes: certified relative plan error ")
    assert result.error_bound > 1
    assert "above 1, so far nothing is known of the plan (tol 1.00e-09)" in text
    assert "raise max_passes" in text
    assert caught[0].filename == __import__("problems").__file__  # it points at the caller of solve
    assert (result.status, result.converged, result.n_passes) == ("max_passes", False, 3)
    verify(result, case)


def test_progress_bar_is_on_standard_error(capfd):
    clouds(30, 20, reg=0.01).solve(progress=True)
    out, err = capfd.readouterr()
    assert not out
    assert "mapuot" in err
    clouds(30, 20, reg=0.01).solve()
    assert capfd.readouterr() == ("", "")


NUMBERS = {"reg": 0.05, "reg_m": 1.0}
CALLS = {
    "solve": lambda M, a, b, **more: mapuot.solve(M, a, b, **NUMBERS, **more),
    "ordinary": lambda M, a, b, **more: mapuot.solve(M, a, b, penalty=("kl", "tv"), **NUMBERS, **more),
    "streamed": lambda M, a, b, **more: mapuot.solve(lambda i, j: M[i:j], a, b, **NUMBERS, **more),
    "points": lambda M, a, b, **more: mapuot.solve(
        mapuot.PointCloud(M, M + 0.1, form=None), precision="float64", **NUMBERS, **more
    ),
    "batch": lambda M, a, b, **more: mapuot.solve_batch(M, a, b, **NUMBERS, **more),
    "batch, alone": lambda M, a, b, **more: mapuot.solve_batch(
        M, np.tile(a, (3, 1)), b, penalty=("kl", "tv"), reference=M + 1, **NUMBERS, **more
    ),
    "path": lambda M, a, b, **more: [*mapuot.path(M, a, b, regs=[0.5, 0.1], reg_ms=1.0, **more)],
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_of_a_call_stays(backend, name):
    """No cycle of references keeps the cost, or a device's vectors, alive after a call."""
    if backend == "reference":
        pytest.skip("arrays of NumPy in its own frames")
    case = clouds(12, 9)
    CALLS[name](case.M, case.a, case.b, backend=backend)  # made once
    M = case.M.copy()
    alive = weakref.ref(M)
    gc.collect()
    gc.disable()
    try:
        CALLS[name](M, case.a, case.b, backend=backend)
        del M
        end = time.monotonic() + 20
        while alive() is not None and time.monotonic() < end:  # a thread that has just ended lets go
            time.sleep(0.01)
        assert alive() is None
    finally:
        gc.enable()


def test_reg_and_reg_m_may_be_given_by_place():
    """As POT's users write them; a call without them names the argument."""
    case = clouds(12, 9)
    M = case.M
    a = case.a
    b = case.b
    A = np.stack([case.a, case.a])
    np.testing.assert_array_equal(
        mapuot.solve(M, a, b, 0.05, 1.0).plan, mapuot.solve(M, a, b, reg=0.05, reg_m=1.0).plan
    )
    x, y = np.random.default_rng(0).random((2, 8, 2))
    by_name = mapuot.solve_sample(x, y, None, None, reg=0.05, reg_m=(1.0, 2.0), metric="cityblock")
    by_place = mapuot.solve_sample(x, y, None, None, 0.05, (1.0, 2.0), metric="cityblock")
    np.testing.assert_array_equal(by_place.plan, by_name.plan)
    assert mapuot.solve_batch(M, A, b, 0.05, 1.0).cost[0] == mapuot.solve_batch(M, A, b, reg=0.05, reg_m=1.0).cost[0]
    for given, name in (((), "reg"), ((0.05,), "reg_m")):
        with pytest.raises(TypeError, match=rf"missing required argument: '{name}'"):
            mapuot.solve(M, a, b, *given)


@pytest.mark.parametrize(("reg", "statuses"), [(0.05, ["running", "converged", "converged"]), (5.0, ["converged"])])
def test_a_plan_in_place_is_certified_on_a_fresh_kernel(reg, statuses):
    """map-uot overwrites K, and loses entries that underflow: one more pass follows, unless the first is the last."""
    M = np.random.default_rng(0).random((6, 5))
    result = mapuot.solve(M, reg=reg, reg_m=1e-3, tol=1e-2, method="map-uot")
    assert [x.status for x in result.trace] == statuses
