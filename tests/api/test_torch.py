"""The torch losses: values and gradients against finite differences, zero weights, autocast, refused second orders."""

import contextlib

import numpy as np
import pytest
from conftest import CUDA
from numpy.testing import assert_allclose

torch = pytest.importorskip("torch")

import mapuot  # noqa: E402
from mapuot import compiled  # noqa: E402
from mapuot.torch import sinkhorn_divergence, sinkhorn_loss  # noqa: E402

DEVICES = ["cpu", *(CUDA if torch.cuda.is_available() else [])]
TIGHT = {"tol": 1e-10, "threads": 1}
REG_M = [1.0, (0.3, 5.0), 1e3]


def tensors(p=None, m=4, n=5, seed=0, own=False, dtype=torch.float64):
    """(a, b, M) with gradients asked for; masses differ."""
    rng = np.random.default_rng(seed)
    lead = () if p is None else (p,)
    a, b = rng.uniform(0.3, 1, (*lead, m)), rng.uniform(0.3, 1.2, (*lead, n))
    M = rng.random((*lead, m, n) if own else (m, n))
    return [torch.tensor(x, dtype=dtype, requires_grad=True) for x in (a, b, M)]


@pytest.mark.parametrize("reg_m", REG_M, ids=str)
@pytest.mark.parametrize("reg", [1.0, 0.05, 2e-3])
def test_gradcheck(reg, reg_m):
    """Every entry of a, b and M changes by itself, so the masses change; 2e-3 is solved alone."""
    a, b, M = tensors(p=2)
    shared = a[0].detach().clone().requires_grad_(), b, M
    for arguments in (tensors(), (a, b, M), tensors(p=2, own=True), shared):
        assert torch.autograd.gradcheck(
            lambda a, b, M: sinkhorn_loss(M, a, b, reg=reg, reg_m=reg_m, **TIGHT),
            arguments,
            eps=1e-6,
            atol=2e-6,
            rtol=1e-5,
        )


@pytest.mark.parametrize("loss", [sinkhorn_loss, sinkhorn_divergence])
def test_the_gradient_holds_the_scale_of_the_costs(loss):
    a, b, M = tensors(m=5)
    M, scale, found = 7 * (M + M.T).detach(), 7 * float((M + M.T).detach().mean()), []
    for how in ({"reg": 0.1, "reg_m": 1.0, "scale_cost": "mean"}, {"reg": 0.1 * scale, "reg_m": scale}):
        costs = M.clone().requires_grad_()
        value = loss(costs, a, b, **how, **TIGHT)
        found.append((float(value.detach()), *torch.autograd.grad(value, (a, b, costs))))
    for one, other in zip(*found, strict=True):
        assert_allclose(one, other, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("reg", [0.5, 0.05])
def test_gradcheck_of_divergence(reg):
    a, b, _ = tensors()
    x = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    y = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)

    def cost(p, q):
        return ((p[:, None] - q[None]) ** 2).sum(-1)

    def value(a, b, x, y):
        return sinkhorn_divergence(cost(x, y), a, b, reg=reg, reg_m=1.0, M_a=cost(x, x), M_b=cost(y, y), **TIGHT)

    assert torch.autograd.gradcheck(value, (a, b, x, y), eps=1e-6, atol=5e-6, rtol=1e-5)


def test_forbidden_pairs():
    a, b, M = tensors()
    with torch.no_grad():
        M[0, 1:] = M[1, :] = torch.inf  # row 1 has no partner
    slopes = torch.autograd.grad(sinkhorn_loss(M, a, b, reg=0.1, reg_m=1.0, tol=1e-9), (a, b, M))
    assert all(torch.isfinite(x).all() for x in slopes)
    assert_allclose(slopes[0][1].item(), 1.0 + 0.1 * b.sum().item(), rtol=1e-9)
    assert not slopes[2][1].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("loss", ["loss", "divergence", "points"])
def test_half_precision_is_solved_in_float32(dtype, autocast, loss):
    """Value and gradient of the numbers that the half tensors hold; each gradient in its input's dtype."""
    a, b, M = (x.detach() for x in tensors(p=2, dtype=torch.float32))
    given = {"loss": [M, a, b], "divergence": [(M[:, :4] - M[:, :4].T).abs(), a, a.flip(1)],
             "points": [torch.rand(4, 2), torch.rand(5, 2), a[0], b[0]]}[loss]  # fmt: skip
    half = [x.to(dtype).requires_grad_() for x in given]
    wide = [x.detach().float().requires_grad_() for x in half]

    def value(tensors):
        if loss == "points":
            return mapuot.torch.sample_loss(*tensors, reg=0.1, reg_m=1.0)
        module = mapuot.torch.SinkhornLoss if loss == "loss" else mapuot.torch.SinkhornDivergence
        return module(reg=0.1, reg_m=1.0)(*tensors)

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = value(half)
    right = value(wide)
    assert found.dtype == torch.float32
    assert_allclose(found.item(), right.item(), rtol=1e-6, atol=1e-7)
    scale = 1024.0  # of torch.amp.GradScaler
    (scale * found).backward()
    (scale * right).backward()
    for x, y in zip(half, wide, strict=True):
        assert x.grad.dtype == dtype
        assert_allclose(x.grad.float(), y.grad.to(dtype).float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", ["matrix", "pairs", "points"])
def test_no_second_derivative(kind):
    x, b, M = tensors()
    if kind == "pairs":
        a, b, _, x, csr = csr_case()
        loss = sinkhorn_loss(csr(x.detach()), a, b, reg=0.1, reg_m=1.0, values=x)
    elif kind == "points":
        x = M
        loss = mapuot.torch.sample_loss(x, 2 * x.detach(), reg=0.1, reg_m=1.0, metric="euclidean")
    else:
        loss = sinkhorn_loss(M, x, b, reg=0.1, reg_m=1.0)
    slope = torch.autograd.grad(loss, x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="second"):
        slope.sum().backward()


@pytest.mark.parametrize("kind", ["loss", "divergence"])
def test_modules_are_the_functions(kind):
    a, b, M = tensors(p=3, m=4, n=4)
    M = (M + M.T).detach()
    module, function = {"loss": (mapuot.torch.SinkhornLoss, sinkhorn_loss),
                        "divergence": (mapuot.torch.SinkhornDivergence, sinkhorn_divergence)}[kind]  # fmt: skip
    right = function(M, a, b, reg=0.2, reg_m=1.0, **TIGHT)
    assert_allclose(module(reg=0.2, reg_m=1.0, reduction="none", **TIGHT)(M, a, b).detach(), right.detach())
    for reduction in ("mean", "sum"):
        value = module(reg=0.2, reg_m=1.0, reduction=reduction, **TIGHT)(M, a, b)
        assert_allclose(value.detach(), getattr(right, reduction)().detach())
        value.backward()
    assert a.grad is not None
    assert "reg=0.2" in repr(module(reg=0.2, reg_m=1.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (None, None, 0)])
@pytest.mark.parametrize("way", ["called", "compiled"])
def test_transforms_of_torch_func(dims, way, device):
    """vmap is a batch; grad, jacrev and both orders of vmap with grad are backward(), in a compiled program, too."""
    torch.compiler.reset()
    a, b, M = (x.detach().to(device) for x in tensors(p=3))
    inputs = [a, b, M * torch.tensor([1.0, 1.5, 0.7], dtype=M.dtype, device=device)[:, None, None]]
    inputs = [x if at == 0 else x[0] for x, at in zip(inputs, dims, strict=True)]

    def loss(a, b, M):
        return sinkhorn_loss(M, a, b, reg=0.1, reg_m=1.0, **TIGHT)

    rows = [[x[i] if at == 0 else x for x, at in zip(inputs, dims, strict=True)] for i in range(3)]
    leaves = [[x.clone().requires_grad_() for x in row] for row in rows]
    values = [loss(*row) for row in leaves]
    sum(values).backward()
    mapped = torch.vmap(loss, dims)
    right = [torch.stack([row[k].grad for row in leaves]) for k in range(3)]
    whole = [x if at == 0 else x.sum(0) for x, at in zip(right, dims, strict=True)]
    for function, given, wanted in (
        (mapped, inputs, torch.stack(values).detach()),
        (torch.vmap(torch.func.grad(loss, (0, 1, 2)), dims), inputs, right),
        (torch.func.jacrev(loss, (0, 1, 2)), rows[0], [x[0] for x in right]),
        (torch.func.grad(lambda *x: mapped(*x).sum(), (0, 1, 2)), inputs, whole),
    ):
        run = function if way == "called" else torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(run(*given), type(run(*given))(wanted), rtol=1e-6, atol=1e-12)
    assert not compiled.KEPT


def test_transforms_of_points():
    x, y = torch.rand(6, 2, dtype=torch.float64), torch.rand(5, 2, dtype=torch.float64)

    def loss(x):
        return mapuot.torch.SamplesLoss(blur=0.3, reach=1.0, tol=1e-9)(x, y)

    given = x.clone().requires_grad_()
    loss(given).backward()
    assert_allclose(torch.func.grad(loss)(x), given.grad, rtol=1e-9)
    with pytest.raises(NotImplementedError, match="x must hold all clouds"):
        torch.vmap(loss)(x[None])
    with pytest.raises(NotImplementedError, match="not over batches of them"):
        torch.vmap(lambda M: sinkhorn_loss(M, reg=0.1, reg_m=1.0))(torch.rand(2, 3, 4, 4))


# ---- compiled programs

X, Y = torch.linspace(0, 1, 18, dtype=torch.float64).reshape(9, 2), torch.linspace(0.2, 0.9, 14).reshape(7, 2)
A, SQUARE = torch.linspace(0.05, 0.2, 9, dtype=torch.float64), (X[:, None] - X[None]).square().sum(-1)
COMPILED = {
    "one": (lambda M, a: 2 * sinkhorn_loss(M.sin(), a, reg=0.1, reg_m=1.0), (SQUARE, A)),
    "in float32": (lambda M: sinkhorn_loss(M, reg=0.1, reg_m=(1.0, 2.0)), (SQUARE.float(),)),
    "batch": (lambda M, a: sinkhorn_loss(M, a, reg=0.1, reg_m=1.0), (torch.stack([SQUARE, 2 * SQUARE]), A)),
    "module": (mapuot.torch.SinkhornLoss(reg=0.1, reg_m=1.0), (torch.stack([SQUARE, 2 * SQUARE]),)),
    "divergence": (lambda M, a: sinkhorn_divergence(M + M.T, a, reg=0.1, reg_m=1.0), (SQUARE, A)),
    "points": (lambda x, y: mapuot.torch.sample_loss(x, y, reg=0.1, reg_m=1.0), (X, Y.double())),
    "samples": (mapuot.torch.SamplesLoss(blur=0.1, reach=0.5), (A, X, torch.full((7,), 0.1), Y)),
    "many": (mapuot.torch.SamplesLoss(blur=0.1, debias=False), (torch.stack([X, X**2]), torch.stack([X**3, X]))),
    "lists": (lambda x, y: mapuot.torch.SamplesLoss(blur=0.1, reach=0.5)([x, y], [y, x]), (X, Y.double())),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", COMPILED)
def test_a_compiled_loss_is_one_operator(case, device):
    """No break of the graph, as value and gradient without a compiler, and nothing kept when both are told."""
    loss, given = COMPILED[case]
    found = []
    for call in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        inputs = [x.detach().to(device).clone().requires_grad_() for x in given]
        if device == "cuda":
            torch.cuda.synchronize()  # another stream reads them
        with contextlib.nullcontext() if device == "cpu" else torch.cuda.stream(torch.cuda.Stream()):
            value = call(*inputs)
            found.append((value.detach(), *torch.autograd.grad(value.sum(), inputs)))
            del value
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-9)
    assert not compiled.KEPT


def test_a_compiled_loss_has_no_second_derivatives():
    """It says so instead of zeros; and no batch is mapped over."""
    torch.compiler.reset()
    slope = torch.func.jacrev(COMPILED["in float32"][0])
    with pytest.raises(Exception, match="one gradient, and none around it"):
        torch.compile(torch.func.jacrev(slope), fullgraph=True, backend="aot_eager")(SQUARE.float())
    scale = torch.tensor(1.3, dtype=torch.float64)
    inner = torch.func.grad_and_value(lambda M, w: sinkhorn_loss(M * w, reg=0.1, reg_m=1.0))
    with pytest.raises(Exception, match="one gradient, and none around it"):  # a first one, of the inner value
        torch.compile(torch.func.grad(lambda w: inner(SQUARE, w)[1]), fullgraph=True, backend="aot_eager")(scale)
    with pytest.raises(Exception, match="not over batches of them"):
        torch.compile(torch.vmap(COMPILED["batch"][0], (0, None)), backend="aot_eager")(SQUARE.expand(2, 2, 9, 9), A)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_loss_breaks_the_graph():
    M = torch.rand(5, 6, dtype=torch.float64).to_sparse_csr()
    found = torch.compile(lambda M: 2 * sinkhorn_loss(M, reg=0.1, reg_m=1.0), backend="aot_eager")(M)
    assert_allclose(found, 2 * sinkhorn_loss(M, reg=0.1, reg_m=1.0))


# ---- sparse costs


def csr_case(m=5, n=6, parts=1, dtype=torch.float64, seed=0):
    """(a, b, indices, values, M): the pairs of a chain and some more; nothing between the parts."""
    rng = np.random.default_rng(seed)
    stored = rng.random((m, n)) < 0.4
    stored[np.arange(m), np.arange(m)] = stored[np.arange(m), np.arange(m) + 1] = True
    stored &= (np.arange(m) * parts // m)[:, None] == np.arange(n) * parts // n
    plain = torch.tensor(stored.astype(float)).to_sparse_csr()
    indices = plain.crow_indices(), plain.col_indices()
    values = torch.tensor(rng.random(int(stored.sum())), dtype=dtype, requires_grad=True)
    a, b = (torch.tensor(rng.random(k) + 0.2, dtype=dtype, requires_grad=True) for k in (m, n))
    return a, b, indices, values, lambda v: torch.sparse_csr_tensor(*indices, v, (m, n))


def filled(M):
    """The dense tensor with inf where nothing is stored."""
    return torch.where(torch.sparse_csr_tensor(M.crow_indices(), M.col_indices(), torch.ones_like(M.values()), M.shape)
                       .to_dense() > 0, M.to_dense(), torch.inf)  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("reg_m", REG_M, ids=str)
@pytest.mark.parametrize("parts", [1, 2])
def test_gradcheck_of_stored_costs(reg_m, parts):
    """By a, b and the values, given by themselves or as what a CSR tensor is made of; of p problems, too."""
    a, b, _, values, csr = csr_case(parts=parts)
    for lead in ((), (2,)):
        A = (a.detach() * torch.rand(*lead, 5, dtype=torch.float64) + 0.1).requires_grad_() if lead else a
        M = csr(torch.zeros_like(values))
        for loss in (
            lambda a, b, v: sinkhorn_loss(csr(v), a, b, reg=0.1, reg_m=reg_m, **TIGHT),
            lambda a, b, v, M=M: sinkhorn_loss(M, a, b, reg=0.1, reg_m=reg_m, values=v, **TIGHT),
        ):
            assert torch.autograd.gradcheck(loss, (A, b, values), atol=2e-6, rtol=1e-5)


def test_the_gradient_is_a_csr_tensor():
    """Of a leaf: with its indices; the numbers are those of the dense loss, masses of 0 and float32 included."""
    for dtype, tol in ((torch.float64, 1e-8), (torch.float32, 1e-4)):
        a, b, _, values, csr = csr_case(dtype=dtype)
        with torch.no_grad():
            a[1] = b[2] = 0.0
        M = csr(values.detach()).requires_grad_()
        value = sinkhorn_loss(M, a, b, reg=0.1, reg_m=(1.0, 2.0), tol=1e-9)
        value.backward()
        dense = [x.detach().clone().requires_grad_() for x in (filled(M.detach()), a, b)]
        wanted = sinkhorn_loss(*dense, reg=0.1, reg_m=(1.0, 2.0), tol=1e-9)
        wanted.backward()
        assert M.grad.layout == torch.sparse_csr
        assert M.grad.dtype == dtype
        assert torch.equal(M.grad.col_indices(), M.col_indices())
        assert_allclose(value.item(), wanted.item(), rtol=tol)
        for x, y in zip((M, a, b), dense, strict=True):
            slope = x.grad.to_dense() if x is M else x.grad
            assert_allclose(slope, torch.nan_to_num(y.grad), rtol=100 * tol, atol=tol)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_unsorted_and_double_entries_have_slopes_of_their_own():
    crow, col = torch.tensor([0, 3, 4]), torch.tensor([2, 0, 2, 1])
    values = torch.tensor([0.3, 0.2, 0.1, 0.4], dtype=torch.float64, requires_grad=True)
    a, b = torch.ones(2, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    M = torch.sparse_csr_tensor(crow, col, torch.ones(4), (2, 3), check_invariants=False)
    sinkhorn_loss(M, a, b, reg=0.1, reg_m=1.0, values=values, tol=1e-10).backward()
    leaf = torch.sparse_csr_tensor(crow, col, values.detach(), (2, 3), check_invariants=False).requires_grad_()
    sinkhorn_loss(leaf, a, b, reg=0.1, reg_m=1.0, tol=1e-10).backward()
    assert_allclose(leaf.grad.values(), values.grad)
    dense = np.array([[0.2, np.inf, 0.4], [np.inf, 0.4, np.inf]])
    plan = mapuot.solve(dense, np.ones(2), np.ones(3), reg=0.1, reg_m=1.0, tol=1e-10).plan
    assert_allclose(values.grad, plan[[0, 0, 0, 1], [2, 0, 2, 1]], rtol=1e-7)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_no_dense_copy_of_stored_costs():
    """10^5 x 10^5 costs: value and gradient in the memory of the pairs."""
    n = 100_000
    col = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n], 1).sort(1)[0].ravel()
    values = torch.rand(2 * n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    M = torch.sparse_csr_tensor(torch.arange(0, 2 * n + 1, 2), col, values.detach(), (n, n)).requires_grad_()
    a = torch.full((n,), 1 / n, dtype=torch.float64, requires_grad=True)
    for given in (values, None):
        sinkhorn_loss(M, a, a.detach(), reg=0.1, reg_m=1.0, values=given).backward()
    module = mapuot.torch.SinkhornLoss(reg=0.1, reg_m=1.0)(M, a, a.detach(), values=values)
    assert module.item() == sinkhorn_loss(M, a, a.detach(), reg=0.1, reg_m=1.0).item()
    total = mapuot.pot.sinkhorn_unbalanced2(a[:0], a[:0].detach(), M, 0.1, 1.0, returnCost="total", stopThr=1e-9)
    assert_allclose(total.item(), module.item(), rtol=1e-6)
    result = mapuot.solve(M.detach(), a.detach(), a.detach(), reg=0.1, reg_m=1.0)
    for slope in (values.grad, M.grad.values()):
        assert_allclose(slope, result.plan.values(), atol=1e-6 / n)


def test_gromov_loss_has_the_slopes_of_its_answer():
    rng = np.random.default_rng(0)
    given = [rng.normal(size=(9, 2)), rng.normal(size=(8, 3)), rng.random(9) + 0.2, rng.random(8) + 0.2]
    options = {"reg": 0.5, "reg_m": 5.0, "init": "independent"}
    tensors = [torch.tensor(z, requires_grad=True) for z in given]
    value, result = mapuot.torch.gromov_loss(*tensors, **options), mapuot.gromov(*given, **options)
    (2 * value).backward()
    assert float(value) == result.value
    for tensor, slope in zip(tensors, result.gradient()[:4], strict=True):
        assert_allclose(tensor.grad.numpy(), 2 * slope, rtol=1e-12)
    alone = tensors[0].detach().float().requires_grad_()
    mapuot.torch.gromov_loss(alone, tensors[1].detach(), **options).backward()
    assert alone.grad.dtype == torch.float32
