"""A seeded mask keeps the same pairs in every lane; answers and certificates belong to the masked problem."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from problems import clouds

import mapuot
from mapuot.answer.slopes import dual_value, marginal_gradient
from mapuot.backends import pick
from mapuot.backends.cpu import backend as cpu
from mapuot.problem import mask as masks
from mapuot.problem.cost import Dense
from mapuot.problem.problem import Problem

# philox4x32, 10 rounds, of Random123's kat_vectors: counter, key, answer
KNOWN = (
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
)  # fmt: skip
MASK = mapuot.SeededMask(keep=0.3, seed=12345678901)


@dataclasses.dataclass(frozen=True)
class Exact(mapuot.SeededMask):
    """A mask with a known limit."""

    most: int = 0
    _limit = property(lambda self: self.most)


def joined(low, high):
    return low + (high << 32)


def weights_of(mask, shape, row=0, col=0, module=cpu, dtype=float, threads=1):
    """Return the weights that the backend's plan derives from the mask alone."""
    c = masks.MaskedReference("uniform", mask, shape, row, col)
    ones = [np.ones(k) for k in shape]
    zeros = Dense(np.broadcast_to(np.zeros(1, dtype), shape))
    task = Problem.from_cost(zeros, *ones, 1.0, 1.0, "kl", "uniform", module)
    stream = module.plan_of(dataclasses.replace(task, reference=c), *map(np.zeros, shape), threads)
    return np.asarray(stream.plan(0, shape[0]))


def by_numpy(mask, shape, row=0, col=0):
    kept = mask.kept(row + np.arange(shape[0])[:, None], col + np.arange(shape[1]))
    return np.where(kept, 1 / mask.keep, 0.0)


# ---- the numbers ----


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_the_published_numbers(counter, key, answer):
    i, j = (np.uint64(joined(*counter[k : k + 2])) for k in (0, 2))
    assert [int(x) for x in masks.philox(joined(*key), i, j)] == answer


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_the_core_does_too(counter, key, answer, isa):
    """A pair is kept if the limit equals its random bits, and dropped if the limit is one less."""
    i, j = (int(np.uint64(joined(*counter[k : k + 2])).astype(np.int64)) for k in (0, 2))
    for less in (0, 1):
        mask = Exact(0.5, joined(*key), most=joined(*answer[:2]) - less)
        assert weights_of(mask, (1, 1), i, j)[0, 0] == (0.0 if less else 2.0)


@pytest.mark.parametrize("keep", [1.0, 0.5, 0.1, 2.0**-64, 0.1 + 2.0**-54])
def test_the_limit_is_exact(keep):
    limit = mapuot.SeededMask(keep, 0)._limit
    assert Fraction(limit, 2**64) < Fraction(keep) <= Fraction(limit + 1, 2**64)


# ---- the same pairs ----


@pytest.mark.parametrize("shape", [(1, 1), (9, 1200), (37, 29), (130, 513)])
def test_every_instruction_set_makes_the_same_entries(shape, isa):
    for row, col in ((0, 0), (3, 2**32 - 7), (2**40, 5)):
        wanted = by_numpy(MASK, shape, row, col)
        for dtype in (float, np.float32):
            np.testing.assert_array_equal(
                weights_of(MASK, shape, row, col, dtype=dtype, threads=2), wanted.astype(dtype)
            )
        np.testing.assert_array_equal(weights_of(MASK.T, shape[::-1], col, row), wanted.T)


def test_blocks_have_the_entries_of_the_whole(backend):
    whole = masks.MaskedReference("uniform", MASK, (50, 60))
    wanted = by_numpy(MASK, (50, 60))
    for part, rows in ((whole.read(7, 30), wanted[7:30]), (whole.T.read(7, 30), wanted.T[7:30])):
        np.testing.assert_array_equal(np.asarray(part), rows)
        np.testing.assert_array_equal(np.asarray(part.T), rows.T)
    for row, col in ((0, 0), (3, 2**32 - 7), (2**40, 5)):
        wanted = by_numpy(MASK, (50, 60), row, col)
        for mask, at, right in ((MASK, (row, col), wanted), (MASK.T, (col, row), wanted.T)):
            found = weights_of(mask, right.shape, *at, module=pick(backend))
            np.testing.assert_array_equal(found > 0, right > 0)
            np.testing.assert_allclose(found, right, rtol=3e-16)  # the oracle has them from logarithms


def test_a_sample_has_the_same_entries():
    case = clouds(301, 117)
    sample = MASK.sample(case.M)
    kept = by_numpy(MASK, case.M.shape) > 0
    assert sample.has_sorted_indices
    assert sample.nnz == kept.sum()
    np.testing.assert_array_equal(sample.toarray(), np.where(kept, case.M, 0.0))
    np.testing.assert_array_equal(MASK.T.sample(case.M.T).toarray(), sample.toarray().T)
    assert MASK.sample(np.zeros((0, 4))).shape == (0, 4)


# ---- gradients ----


@pytest.mark.parametrize("reg_m", [1.0, (0.5, 3.0)])
def test_losses_of_torch_have_the_gradient_of_their_mask(reg_m):
    torch = pytest.importorskip("torch")
    from mapuot.torch import SinkhornLoss, sample_loss, sinkhorn_loss

    case = clouds(8, 6, reg=0.1)
    rng = np.random.default_rng(0)
    options = {"reg": 0.1, "reg_m": reg_m, "mask": MASK, "tol": 1e-11, "precision": "float64"}
    A, b, M = given = [torch.tensor(x, requires_grad=True) for x in (np.stack([case.a, case.a[::-1]]), case.b, case.M)]
    assert torch.autograd.gradcheck(lambda a, b, M: sinkhorn_loss(M, a, b, **options), given, atol=2e-6, rtol=1e-5)
    loss = SinkhornLoss(reduction="sum", **options)(M, A, b)
    loss.backward()
    kept = by_numpy(MASK, M.shape) > 0
    np.testing.assert_array_equal(M.grad.numpy() > 0, kept)
    assert loss.item() == sinkhorn_loss(M, A, b, **options).sum().item()
    points = [torch.tensor(x, requires_grad=True) for x in (rng.random((8, 2)), rng.random((6, 2)), case.a, case.b)]
    for metric in ("sqeuclidean", "euclidean"):
        assert torch.autograd.gradcheck(
            lambda *z, metric=metric: sample_loss(*z, metric=metric, **options), points, atol=2e-6, rtol=1e-5
        )


@pytest.mark.parametrize("mask", [None, mapuot.SeededMask(0.7, 1)], ids=["all pairs", "a mask"])
@pytest.mark.parametrize("reg_m", [(0.5, 3.0), (np.inf, 0.8), (0.8, np.inf)])
def test_derivatives_by_the_masses(reg_m, mask):
    """Derivatives by the masses, of batches and points, match differences; one-sided ones where a point has no mass."""
    (x, y) = (np.random.default_rng(k).random((6 - k, 2)) for k in (0, 1))
    a = np.array([0.2, 0.0, 0.4, 0.3, 0.1, 0.5])
    b = np.array([0.3, 0.6, 0.0, 0.2, 0.4])
    cloud = mapuot.PointCloud(x, y)
    options = {"reg": 0.1, "reg_m": reg_m, "mask": mask, "tol": 1e-11}

    def values(a, b):
        batch = mapuot.solve_batch(np.asarray(cloud), a[None], b[None], **options)
        return batch, mapuot.solve(cloud, a, b, **options)

    (batch, one) = values(a, b)
    step = 1e-6
    for axis, name in enumerate(("rows", "cols")):
        found = marginal_gradient(batch, name)[0], (one.gradient().a, one.gradient().b)[axis]
        for i, mass in enumerate((a, b)[axis]):
            moved = [[z.copy() for z in (a, b)] for _ in range(2)]
            moved[0][axis][i] += step
            moved[1][axis][i] -= step * (mass > 0)
            for derivative, after, before in zip(found, values(*moved[0]), values(*moved[1]), strict=True):
                right = np.ravel(dual_value(after) - dual_value(before))[0] / (step * (1 + (mass > 0)))
                assert derivative[i] == pytest.approx(right, rel=2e-4, abs=2e-5)


# ---- refused masks ----


def test_a_mask_that_leaves_no_way_out():
    few = mapuot.SeededMask(0.05, 3)
    assert (~(by_numpy(few, (40, 60)) > 0).any(1)).any()
    with pytest.raises(mapuot.InfeasibleError, match=r"M and the mask forbid every pair of a\["):
        clouds(40, 60, reg_m=(np.inf, 1.0)).solve(mask=few)
