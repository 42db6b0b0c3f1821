"""mapuot.torch.SamplesLoss: GeomLoss's values, potentials and slopes, true derivatives, every form of its arguments."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import mapuot  # noqa: E402
from mapuot.torch import SamplesLoss  # noqa: E402

TIGHT = {"tol": 1e-11, "threads": 1}
REACHES = [None, 0.5, 2.0]


def measures(*lead, n=9, m=7, d=2, mass=1.0, seed=0, dtype=torch.float64):
    """(a, x, b, y) with gradients asked for; b has ``mass`` times the mass of a."""
    rng = np.random.default_rng(seed)
    a, b = (rng.uniform(0.3, 1.0, (*lead, k)) for k in (n, m))
    a, b = a / a.sum(-1, keepdims=True), mass * b / b.sum(-1, keepdims=True)
    x, y = rng.random((*lead, n, d)), rng.random((*lead, m, d)) + 0.2
    return [torch.tensor(z, dtype=dtype, requires_grad=True) for z in (a, x, b, y)]


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("p", [1, 2])
def test_it_agrees_with_geomloss(p, reach, debias):
    """It makes one step a blur, from ``diameter`` down: with 700 between .32 and .3 it comes near its limit.

    Its slopes of a finite reach are (rho + eps / 2) / (rho + eps) of the derivative.
    """
    geomloss = pytest.importorskip("geomloss")
    tensors = measures(2, n=6, m=5, mass=1.0 if reach is None else 1.4)
    common = {"p": p, "blur": 0.3, "reach": reach, "debias": debias}
    slow = {"diameter": 0.32, "scaling": 0.9999, "backend": "tensorized"}
    theirs = geomloss.SamplesLoss("sinkhorn", **slow, **common)
    ours = SamplesLoss("sinkhorn", **common, **TIGHT)
    values = theirs(*tensors), ours(*tensors)
    torch.testing.assert_close(*values, rtol=1e-4, atol=1e-4 if p == 1 and debias else 1e-6)  # |x - y| is 1e-4 at least
    want, got = (torch.autograd.grad(value.sum(), tensors) for value in values)
    eps, rho = 0.3**p, np.inf if reach is None else reach**p
    factor = 1.0 if reach is None else (rho + eps / 2) / (rho + eps)
    for k in (1, 3):
        assert (want[k] - factor * got[k]).abs().max() <= 1e-2 * got[k].abs().max()
    if debias:  # without it theirs forget that a is in the reference measure
        for k in (0, 2):
            left = want[k] - factor * got[k]
            left = left - left.mean(-1, keepdim=True) * (reach is None)
            assert left.abs().max() <= 1e-2 * (got[k] - got[k].mean(-1, keepdim=True)).abs().max()
    pairs = (geomloss.SamplesLoss("sinkhorn", potentials=True, **slow, **common)(*tensors),
             SamplesLoss("sinkhorn", potentials=True, **common, **TIGHT)(*tensors))  # fmt: skip
    for left, right in zip(*pairs, strict=True):
        apart = left - right
        assert (apart - apart.mean(-1, keepdim=True) * (reach is None)).abs().max() <= 2e-3


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize(("reach", "mass"), [(0.5, 1.4), (2.0, 0.6)])
@pytest.mark.parametrize("p", [1, 2])
def test_gradcheck(p, reach, mass, debias):
    loss = SamplesLoss(p=p, blur=0.3, reach=reach, debias=debias, **TIGHT)
    assert torch.autograd.gradcheck(loss, measures(n=3, m=4, mass=mass), eps=1e-6, atol=2e-6, rtol=1e-5)


def test_gradcheck_of_points_of_equal_masses():
    a, x, b, y = measures(n=4, m=5)
    loss = SamplesLoss(blur=0.3, **TIGHT)
    assert torch.autograd.gradcheck(lambda x, y: loss(a.detach(), x, b.detach(), y), (x, y), atol=2e-6, rtol=1e-5)


def test_values_are_those_of_solve():
    a, x, b, y = (z.detach() for z in measures(mass=1.4))
    loss = SamplesLoss(blur=0.3, reach_x=0.5, reach_y=None, **TIGHT)

    def value(a, x, b, y, rho):
        return mapuot.solve(0.5 * torch.cdist(x, y) ** 2, a, b, reg=0.09, reg_m=rho, tol=1e-11).dual

    want = value(a, x, b, y, (0.25, np.inf)) - 0.5 * (value(a, x, a, x, 0.25) + value(b, y, b, y, np.inf))
    want += 0.045 * float(a.sum() - b.sum()) ** 2
    assert loss(a, x, b, y).item() == pytest.approx(want, rel=1e-9)
    assert SamplesLoss(blur=0.3, reach=1.0, **TIGHT)(a, x, a, x).item() == pytest.approx(0.0, abs=1e-12)


def test_every_form_of_the_arguments():
    a, x, b, y = measures(2, mass=1.4)
    loss = SamplesLoss("sinkhorn", 2, 0.3, 1.0, 3.0, 0.9, 5, "(SqDist(X,Y) / IntCst(2))", None, 0.1, True, False, True,
                       "multiscale", **TIGHT)  # fmt: skip
    value = loss(a, x, b, y)
    assert (value.shape, value.dtype) == ((2,), torch.float64)
    assert "blur=0.3" in repr(loss)
    for k in range(2):
        alone = loss(a[k, :, None], x[k], b[k, :, None], y[k])
        assert alone.ndim == 0
        assert alone.item() == pytest.approx(value[k].item(), rel=1e-9)
    torch.testing.assert_close(loss(torch.zeros(2, 9), a[..., None], x, torch.zeros(2, 7), b[..., None], y), value)
    uniform = loss(x, y)
    torch.testing.assert_close(loss(torch.full((2, 9), 1 / 9), x, torch.full((2, 7), 1 / 7), y), uniform)
    assert SamplesLoss(blur=0.3)(x.float(), y.float()).dtype == torch.float32
    F, G = SamplesLoss(blur=0.3, reach=1.0, potentials=True)(a, x, b, y)
    assert (F.shape, G.shape, F.requires_grad) == (a.shape, b.shape, False)


@pytest.mark.parametrize("p", [1, 2])
def test_clouds_of_several_sizes(p):
    """Values and slopes of lists, nested tensors and a cloud that serves all problems, those of one after another."""
    several = [measures(n=n, m=m, d=3, mass=1.4, seed=n) for n, m in ((9, 7), (4, 12), (6, 6))]
    loss = SamplesLoss(p=p, blur=0.3, reach=1.0, **TIGHT)
    tensors = [*zip(*several, strict=True)]
    value = loss(*map(list, tensors))
    alone = torch.stack([loss(*four) for four in several])
    torch.testing.assert_close(value, alone)
    weights, flat = torch.tensor([1.0, -2.0, 0.5]), sum(tensors, ())
    slopes = (torch.autograd.grad((weights * v).sum(), flat) for v in (value, alone))
    for got, want in zip(*slopes, strict=True):
        torch.testing.assert_close(got, want)
    nested = loss(*(torch.nested.nested_tensor([z.detach() for z in side]) for side in tensors))
    torch.testing.assert_close(nested, value)
    F, G = SamplesLoss(p=p, blur=0.3, reach=1.0, potentials=True)(*map(list, tensors))
    assert [(len(f), len(g)) for f, g in zip(F, G, strict=True)] == [(9, 7), (4, 12), (6, 6)]
    x, (b, y) = torch.stack([z[:4] for z in tensors[1]]), (z[0] for z in tensors[2:])
    a = torch.stack([z[:4] for z in tensors[0]])
    shared, own = loss(a, x, b, y), loss(a, x, torch.stack([b] * 3), torch.stack([y] * 3))
    torch.testing.assert_close(shared, own)
    for got, want in zip(*(torch.autograd.grad((weights * v).sum(), (x, b, y)) for v in (shared, own)), strict=True):
        torch.testing.assert_close(got, want)
    order, more = (1, 3, 0, 2), {"reg": 0.1, "reg_m": 1.0}
    plain = mapuot.torch.sample_loss(*(list(tensors[k]) for k in order), **more)
    torch.testing.assert_close(plain[1], mapuot.torch.sample_loss(*(several[1][k] for k in order), **more))


def test_a_cost_that_is_a_function():
    tensors = measures(n=4, m=5, mass=1.4)

    def half(x, y):
        return 0.5 * ((x[:, :, None] - y[:, None]) ** 2).sum(-1)

    for how in ({}, {"debias": False}, {"static_y": True}):
        ours, other = (SamplesLoss(blur=0.3, reach=1.0, cost=cost, **how, **TIGHT) for cost in (None, half))
        torch.testing.assert_close(other(*tensors), ours(*tensors))
        for left, right in zip(*(torch.autograd.grad(f(*tensors), tensors) for f in (ours, other)), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-8)
    pairs = (SamplesLoss(blur=0.3, reach=1.0, potentials=True, cost=c, **TIGHT)(*tensors) for c in (None, half))
    for left, right in zip(*pairs, strict=True):
        torch.testing.assert_close(left, right)


def test_a_static_target_has_no_term_of_its_own(monkeypatch):
    """The value lacks OT(b, b); what depends on x has the same derivatives."""
    tensors = measures(2, mass=1.4)
    known = {"blur": 0.3, "reach": 1.0, **TIGHT}
    whole, static = SamplesLoss(**known), SamplesLoss(**known, static_y=True)
    _, _, b, y = tensors
    own = SamplesLoss(**{**known, "debias": False})(b, y, b, y) + 0.3**2 * (b.sum(1) ** 2 - b.sum(1))  # OT(b, b)
    torch.testing.assert_close(static(*tensors), whole(*tensors) + 0.5 * own)
    slopes = (torch.autograd.grad(loss(*tensors).sum(), tensors[:2]) for loss in (whole, static))
    for left, right in zip(*slopes, strict=True):
        torch.testing.assert_close(left, right)
    calls, solve = [], SamplesLoss.solve
    monkeypatch.setattr(SamplesLoss, "solve", lambda self, *args: calls.append(args) or solve(self, *args))
    static(*(z.detach().clone() for z in tensors))
    assert len(calls) == 2
    potentials = SamplesLoss(**known, static_y=True, potentials=True)(*tensors)
    right = (SamplesLoss(**known, debias=debias, potentials=True)(*tensors)[k] for k, debias in ((0, True), (1, False)))
    for ours, wanted in zip(potentials, right, strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("reach", [None, 0.8])
@pytest.mark.parametrize("how", [{}, {"debias": False}, {"static_y": True}], ids=str)
def test_gradgradcheck_by_x_alone(reach, how):
    """Also of what x is made of, and of what becomes of the value."""
    _, x, _, y = (z.detach() for z in measures())
    loss = SamplesLoss(p=2, blur=0.3, reach=reach, tol=1e-10, **how)
    x = x[:6].requires_grad_()
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x: loss(2 * x, y) ** 2, (x,), eps=1e-5, atol=2e-5, rtol=1e-4)


def test_a_fixed_target_is_solved_with_itself_once(monkeypatch):
    """As long as its tensor and its numbers stay; the value is that of a new loss."""
    torch.manual_seed(0)
    x, y = torch.rand(40, 2, dtype=torch.float64), torch.rand(30, 2, dtype=torch.float64)
    loss, calls, at, solve = SamplesLoss(blur=0.1, reach=0.5), [], id(y), SamplesLoss.solve

    def noted(self, rows, *more):
        calls.append(id(rows.given) == at)
        return solve(self, rows, *more)

    monkeypatch.setattr(SamplesLoss, "solve", noted)
    values = [loss(x + 0.01 * k, y) for k in range(3)]
    assert calls == [False, False, True] + [False, False] * 2
    y.data[0] += 0.1  # which no counter of torch tells
    moved = loss(x, y)
    assert calls[-1]
    assert moved.item() == pytest.approx(SamplesLoss(blur=0.1, reach=0.5)(x.clone(), y.clone()).item(), rel=1e-12)
    assert moved.item() != values[0].item()
    assert SamplesLoss(blur=0.2, reach=0.5)(x, y).item() != moved.item()
    kept = len(mapuot.torch.ALONE)
    assert y in mapuot.torch.ALONE
    del y
    assert len(mapuot.torch.ALONE) == kept - 1
