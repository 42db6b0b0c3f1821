"""A reference of low rank, or by labels, gives the answers of its matrix."""

import numpy as np
import pytest

import mapuot

KINDS = np.array(["b", "a", "b", "c", "a", "c", "b"])
OTHERS = np.arange(9) % 2
TABLE = np.array([[1.0, 0.2], [0.0, 2.0], [0.5, 0.7]])


def costs():
    rng = np.random.default_rng(0)
    return rng.random((7, 2)), rng.random((9, 2))


@pytest.mark.parametrize("reg_m", [1.0, (1.0, np.inf)], ids=str)
@pytest.mark.parametrize("kind", ["array", "points", "points in passes", "function", "turned"])
def test_answers_are_those_of_the_matrix(kind, reg_m):
    rng = np.random.default_rng(1)
    x, y = costs()
    U = rng.random((7, 2))
    V = rng.random((9, 2))
    M = np.asarray(mapuot.PointCloud(x, y))
    given = {
        "array": M, "points": mapuot.PointCloud(x, y), "points in passes": mapuot.PointCloud(x, y, form=None),
        "function": lambda i0, i1: M[i0:i1], "turned": M.T,
    }[kind]  # fmt: skip
    if kind == "turned":
        U, V = V, U
    a, b = (np.full(len(z), 1 / len(z)) for z in (U, V))
    options = {"reg": 0.1, "reg_m": reg_m, "tol": 1e-9}
    want = mapuot.solve(M.T if kind == "turned" else M, a, b, reference=U @ V.T, **options)
    found = mapuot.solve(given, a, b, reference=mapuot.LowRankReference(U, V), **options)
    assert found.converged
    np.testing.assert_allclose(found.plan, want.plan, atol=1e-8)
    assert found.objective == pytest.approx(want.objective, rel=1e-8)


def test_labels_choose_entries_of_the_table():
    reference = mapuot.LowRankReference.of_labels(KINDS, OTHERS, TABLE)
    np.testing.assert_array_equal(np.asarray(reference), TABLE[[1, 0, 1, 2, 0, 2, 1]][:, OTHERS])
    plan = mapuot.solve(mapuot.PointCloud(*costs()), reg=0.1, reg_m=1.0, reference=reference).plan
    assert not plan[KINDS == "b"][:, OTHERS == 0].any()
    assert (plan[KINDS == "a"] > 0).all()


@pytest.mark.parametrize(("args", "match"), [
    ((np.ones((3, 2)), np.ones((4, 1))), "V must have 2 columns"),
    ((-np.ones((3, 2)), np.ones((4, 2))), "U must be finite and >= 0"),
    ((np.ones(3), np.ones((4, 1))), "U must be a non-empty matrix"),
])  # fmt: skip
def test_wrong_factors_are_named(args, match):
    with pytest.raises(ValueError, match=match):
        mapuot.LowRankReference(*args)
    with pytest.raises(ValueError, match=r"table must have shape \(3, 2\)"):
        mapuot.LowRankReference.of_labels(KINDS, OTHERS, np.ones((2, 2)))
    with pytest.raises(ValueError, match="reference must have M's shape"):
        mapuot.solve(
            np.ones((3, 3)), reg=1.0, reg_m=1.0, reference=mapuot.LowRankReference(np.ones((2, 1)), np.ones((3, 1)))
        )
