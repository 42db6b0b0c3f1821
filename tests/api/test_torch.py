"""mapuot.torch: gradients match finite differences; SamplesLoss matches GeomLoss; input may be any kind of tensor."""

import contextlib
import pickle
import warnings

import numpy as np
import pytest
from conftest import CUDA
from numpy.testing import assert_allclose
from problems import clouds

torch = pytest.importorskip("torch")

import mapuot  # noqa: E402
from mapuot import compiled  # noqa: E402
from mapuot.torch import SamplesLoss, sinkhorn_divergence, sinkhorn_loss  # noqa: E402
from mapuot.torch_kernels import DISTANCES  # noqa: E402

DEVICES = ["cpu", *(CUDA if torch.cuda.is_available() else [])]
TIGHT = {"tol": 1e-10, "threads": 1}
EXACT = {"tol": 1e-11, "threads": 1}
REG_M = [1.0, (0.3, 5.0), 1e3]


def tensors(p=None, m=4, n=5, seed=0, own=False, dtype=torch.float64):
    """Return (a, b, M) with gradients asked for; masses differ."""
    rng = np.random.default_rng(seed)
    lead = () if p is None else (p,)
    a = rng.uniform(0.3, 1, (*lead, m))
    b = rng.uniform(0.3, 1.2, (*lead, n))
    M = rng.random((*lead, m, n) if own else (m, n))
    return [torch.tensor(x, dtype=dtype, requires_grad=True) for x in (a, b, M)]


@pytest.mark.parametrize("reg_m", REG_M, ids=str)
@pytest.mark.parametrize("reg", [1.0, 0.05, 2e-3])
def test_gradcheck(reg, reg_m):
    """gradcheck changes one entry at a time, so totals change, too; at reg 2e-3 problems are solved one by one."""
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
    """Half tensors have the value and gradient of the numbers that they hold; each gradient has its input's dtype."""
    a, b, M = (x.detach() for x in tensors(p=2, dtype=torch.float32))
    given = {"loss": [M, a, b], "divergence": [(M[:, :4] - M[:, :4].T).abs(), a, a.flip(1)],
             "points": [torch.rand(4, 2), torch.rand(5, 2), a[0], b[0]]}[loss]  # fmt: skip
    half = [x.to(dtype).requires_grad_() for x in given]
    wide = [x.detach().float().requires_grad_() for x in half]

    def value(tensors):
        if loss == "points":
            return mapuot.torch.sample_loss(*tensors, reg=0.1, reg_m=1.0)
        if loss == "loss":
            module = mapuot.torch.SinkhornLoss
        else:
            module = mapuot.torch.SinkhornDivergence
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
    """vmap is a batch; grad, jacrev and both orders of vmap with grad equal backward(), also when compiled."""
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
        if way == "called":
            run = function
        else:
            run = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(run(*given), type(run(*given))(wanted), rtol=1e-6, atol=1e-12)
    assert not compiled.VALUES


BROKEN = {
    "solve": lambda x: (mapuot.solve(x @ x.T, reg=0.5, reg_m=1.0).plan * x.sum()).sum(),
    "solve_sample": lambda x: 2 * mapuot.solve_sample(x, x + 0.1, reg=0.5, reg_m=1.0).plan.sum() + x.sum(),
    "solve_batch": lambda x: 2 * mapuot.solve_batch(torch.stack([x @ x.T] * 2), reg=0.5, reg_m=1.0)[1].log_u + x.sum(),
    "apply": lambda x: 2 * mapuot.solve_sample(x, x, reg=0.5, reg_m=1.0).apply(x) + x,
    "barycenter": lambda x: 2 * mapuot.barycenter(x @ x.T, x @ x.T, reg=0.5, reg_m=1.0).q + x[:, 0],
    "path": lambda x: sum(r.plan.sum() for r in mapuot.path(x @ x.T, regs=[1.0, 0.5], reg_ms=1.0)) * x.sum(),
}


@pytest.mark.parametrize("door", BROKEN)
def test_a_solve_breaks_the_graph_of_a_compiler(door):
    torch.compiler.reset()
    function = BROKEN[door]
    x = torch.rand(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    compiled_one = torch.compile(function, backend="aot_eager")
    for given in (x, 2 * x):
        assert_allclose(compiled_one(given), function(given), rtol=1e-12)


def test_points_in_tensors_out():
    x = torch.rand(8, 3, dtype=torch.float64, requires_grad=True)
    with pytest.warns(UserWarning, match=r"x requires grad .* mapuot\.torch\.sample_loss is the value"):
        result = mapuot.solve_sample(x, x.detach() + 1, reg=0.5, reg_m=1.0)
    arrays = mapuot.solve_sample(x.detach().numpy(), x.detach().numpy() + 1, reg=0.5, reg_m=1.0, scale_cost=None)
    assert isinstance(result, mapuot.Result)
    assert torch.equal(result.plan, torch.as_tensor(arrays.plan))
    scaled = mapuot.solve_sample(x.detach(), x.detach() + 1, reg=0.5, reg_m=1.0, scale_cost="median")
    assert torch.is_tensor(scaled.log_u)
    assert scaled.scale_cost > 0


def test_transforms_of_points():
    x = torch.rand(6, 2, dtype=torch.float64)
    y = torch.rand(5, 2, dtype=torch.float64)

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

X = torch.linspace(0, 1, 18, dtype=torch.float64).reshape(9, 2)
Y = torch.linspace(0.2, 0.9, 14).reshape(7, 2)
A = torch.linspace(0.05, 0.2, 9, dtype=torch.float64)
SQUARE = (X[:, None] - X[None]).square().sum(-1)
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
    """A compiled loss breaks no graph, equals the uncompiled one, and keeps nothing after value and gradient."""
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
    assert not compiled.VALUES


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_compiled_loss_has_no_second_derivatives():
    """A second derivative of a compiled loss and a mapped batch raise; a sparse loss breaks the graph."""
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
    loss = COMPILED["in float32"][0]
    M = SQUARE.float().to_sparse_csr()
    assert_allclose(torch.compile(loss, backend="aot_eager")(M), loss(M))


# ---- sparse costs


def csr_case(m=5, n=6, parts=1, dtype=torch.float64, seed=0):
    """Return (a, b, indices, values, M): the pairs of a chain and some more; nothing between the parts."""
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
    """Return the dense tensor with inf where nothing is stored."""
    return torch.where(torch.sparse_csr_tensor(M.crow_indices(), M.col_indices(), torch.ones_like(M.values()), M.shape)
                       .to_dense() > 0, M.to_dense(), torch.inf)  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("reg_m", REG_M, ids=str)
@pytest.mark.parametrize("parts", [1, 2])
def test_gradcheck_of_stored_costs(reg_m, parts):
    """Gradients by a, b and the values, given directly or as parts of a CSR tensor; also for p problems."""
    a, b, _, values, csr = csr_case(parts=parts)
    for lead in ((), (2,)):
        if lead:
            A = (a.detach() * torch.rand(*lead, 5, dtype=torch.float64) + 0.1).requires_grad_()
        else:
            A = a
        M = csr(torch.zeros_like(values))
        for loss in (
            lambda a, b, v: sinkhorn_loss(csr(v), a, b, reg=0.1, reg_m=reg_m, **TIGHT),
            lambda a, b, v, M=M: sinkhorn_loss(M, a, b, reg=0.1, reg_m=reg_m, values=v, **TIGHT),
        ):
            assert torch.autograd.gradcheck(loss, (A, b, values), atol=2e-6, rtol=1e-5)


def test_the_gradient_is_a_csr_tensor():
    """A leaf's gradient has its indices; the numbers equal the dense loss, also at masses of 0 and in float32."""
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
            if x is M:
                slope = x.grad.to_dense()
            else:
                slope = x.grad
            assert_allclose(slope, torch.nan_to_num(y.grad), rtol=100 * tol, atol=tol)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_unsorted_and_double_entries_have_slopes_of_their_own():
    crow = torch.tensor([0, 3, 4])
    col = torch.tensor([2, 0, 2, 1])
    values = torch.tensor([0.3, 0.2, 0.1, 0.4], dtype=torch.float64, requires_grad=True)
    a = torch.ones(2, dtype=torch.float64)
    b = torch.ones(3, dtype=torch.float64)
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
    value = mapuot.torch.gromov_loss(*tensors, **options)
    result = mapuot.gromov(*given, **options)
    (2 * value).backward()
    assert float(value) == result.value
    for tensor, slope in zip(tensors, result.gradient()[:4], strict=True):
        assert_allclose(tensor.grad.numpy(), 2 * slope, rtol=1e-12)
    alone = tensors[0].detach().float().requires_grad_()
    mapuot.torch.gromov_loss(alone, tensors[1].detach(), **options).backward()
    assert alone.grad.dtype == torch.float32


# ---- SamplesLoss: GeomLoss's values, potentials and slopes, and every form of its arguments

REACHES = [None, 0.5, 2.0]


def measures(*lead, n=9, m=7, d=2, mass=1.0, seed=0, dtype=torch.float64):
    """Return (a, x, b, y) with gradients asked for; b has ``mass`` times the mass of a."""
    rng = np.random.default_rng(seed)
    a, b = (rng.uniform(0.3, 1.0, (*lead, k)) for k in (n, m))
    a = a / a.sum(-1, keepdims=True)
    b = mass * b / b.sum(-1, keepdims=True)
    x = rng.random((*lead, n, d))
    y = rng.random((*lead, m, d)) + 0.2
    return [torch.tensor(z, dtype=dtype, requires_grad=True) for z in (a, x, b, y)]


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("p", [1, 2])
def test_it_agrees_with_geomloss(p, reach, debias):
    """GeomLoss makes one step a blur, from ``diameter`` down: with 700 between .32 and .3 it comes near its limit.

    At a finite reach GeomLoss's slopes are (rho + eps / 2) / (rho + eps) of the derivative.
    """
    geomloss = pytest.importorskip("geomloss")
    tensors = measures(2, n=6, m=5, mass=1.0 if reach is None else 1.4)
    common = {"p": p, "blur": 0.3, "reach": reach, "debias": debias}
    slow = {"diameter": 0.32, "scaling": 0.9999, "backend": "tensorized"}
    theirs = geomloss.SamplesLoss("sinkhorn", **slow, **common)
    ours = SamplesLoss("sinkhorn", **common, **EXACT)
    values = theirs(*tensors), ours(*tensors)
    torch.testing.assert_close(*values, rtol=1e-4, atol=1e-4 if p == 1 and debias else 1e-6)  # |x - y| is 1e-4 at least
    want, got = (torch.autograd.grad(value.sum(), tensors) for value in values)
    eps = 0.3**p
    rho = np.inf if reach is None else reach**p
    if reach is None:
        factor = 1.0
    else:
        factor = (rho + eps / 2) / (rho + eps)
    for k in (1, 3):
        assert (want[k] - factor * got[k]).abs().max() <= 1e-2 * got[k].abs().max()
    if debias:  # without it theirs forget that a is in the reference measure
        for k in (0, 2):
            left = want[k] - factor * got[k]
            left = left - left.mean(-1, keepdim=True) * (reach is None)
            assert left.abs().max() <= 1e-2 * (got[k] - got[k].mean(-1, keepdim=True)).abs().max()
    pairs = (geomloss.SamplesLoss("sinkhorn", potentials=True, **slow, **common)(*tensors),
             SamplesLoss("sinkhorn", potentials=True, **common, **EXACT)(*tensors))  # fmt: skip
    for left, right in zip(*pairs, strict=True):
        apart = left - right
        assert (apart - apart.mean(-1, keepdim=True) * (reach is None)).abs().max() <= 2e-3


KERNEL_LOSSES = ["energy", "gaussian", "laplacian"]


@pytest.mark.parametrize("lead", [(), (3,)], ids=["one", "many"])
@pytest.mark.parametrize("name", KERNEL_LOSSES)
def test_kernel_losses_agree_with_geomloss(name, lead):
    """GeomLoss takes 1e-4 as the distance of a point to itself, which moves all but "gaussian" by 1e-4 sum a^2."""
    geomloss = pytest.importorskip("geomloss")
    tensors = measures(*lead, mass=1.4)
    theirs = geomloss.SamplesLoss(name, blur=0.3, backend="tensorized")(*tensors)
    ours = SamplesLoss(name, blur=0.3)(*tensors)
    own = {"gaussian": 0.0, "energy": 1e-4, "laplacian": 1 - np.exp(-1e-4)}[name]  # of k(0), in a double sum
    own = -0.5 * own * ((tensors[0] ** 2).sum(-1) + (tensors[2] ** 2).sum(-1))
    torch.testing.assert_close(ours, theirs - own, rtol=1e-9, atol=1e-12)
    for k, slopes in enumerate(zip(*(torch.autograd.grad(z.sum(), tensors) for z in (theirs, ours)), strict=True)):
        torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-9 if k in (1, 3) else 1e-4)
    words = {"blur": 0.3, "potentials": True}
    want = geomloss.SamplesLoss(name, backend="tensorized", **words)(*tensors)
    for got, right in zip(SamplesLoss(name, **words)(*tensors), want, strict=True):
        torch.testing.assert_close(got, right.reshape(got.shape), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("name", KERNEL_LOSSES)
def test_kernel_losses_gradcheck(name, using):
    """All four derivatives, in pieces of a few rows, and with a point of x that is also one of y."""
    using(DISTANCES, pairs=20)
    loss = SamplesLoss(name, blur=0.4)
    a, x, b, y = measures(n=5, m=4, mass=1.4)
    assert torch.autograd.gradcheck(loss, (a, x, b, y), eps=1e-6, atol=1e-7)
    with torch.no_grad():
        y[0] = x[0]
    value = loss(a, x, b, y)
    assert all(torch.isfinite(z).all() for z in torch.autograd.grad(value, (a, x, b, y)))
    assert loss(a, x, a, x).item() == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("name", KERNEL_LOSSES)
def test_kernel_losses_of_lists_and_shared_clouds(name):
    loss = SamplesLoss(name, blur=0.4)
    clouds = [torch.rand(k, 2, dtype=torch.float64, requires_grad=True) for k in (3, 6)]
    y = torch.rand(5, 2, requires_grad=True)
    found = loss(clouds, y.double())
    want = torch.stack([loss(x, y.double()) for x in clouds])
    torch.testing.assert_close(found, want)
    for got, right in zip(*(torch.autograd.grad((z * z).sum(), [*clouds, y]) for z in (found, want)), strict=True):
        torch.testing.assert_close(got, right)
    F, G = SamplesLoss(name, blur=0.4, potentials=True)(clouds, y.double())
    assert [len(z) for z in F] == [3, 6]
    assert G.shape == (2, 5)
    assert loss(clouds[0].float(), y).dtype == torch.float32
    far = [x.float() + 1000 for x in clouds]
    torch.testing.assert_close(loss(far, y + 1000), want, rtol=2e-3, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("name", KERNEL_LOSSES)
def test_kernel_losses_refuse_what_the_sinkhorn_loss_refuses(name):
    x = torch.rand(3, 2)
    y = torch.rand(4, 2)
    a = torch.ones(3) / 3
    loss = SamplesLoss(name, blur=0.3)
    with pytest.raises(ValueError, match="x must be a non-empty matrix of points"):
        loss(x[:0], y)
    with pytest.raises(ValueError, match="y must be finite"):
        loss(x, y * np.nan)
    with pytest.raises(ValueError, match="a must be finite"):
        loss(a * np.inf, x, torch.ones(4) / 4, y)


def test_kernel_losses_in_transforms_and_programs():
    loss = SamplesLoss("energy")
    a, x, b, y = measures(n=4, m=3)
    slope = torch.func.grad(lambda z: loss(a, z, b, y))(x)
    torch.testing.assert_close(slope, torch.autograd.grad(loss(a, x, b, y), x)[0])
    with pytest.raises(NotImplementedError, match="kernel and static_y are not for loss 'energy'"):
        SamplesLoss("energy", static_y=True)


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize(("reach", "mass"), [(0.5, 1.4), (2.0, 0.6), (None, 1.0)])
@pytest.mark.parametrize("p", [1, 2])
def test_samples_loss_gradcheck(p, reach, mass, debias):
    loss = SamplesLoss(p=p, blur=0.3, reach=reach, debias=debias, **EXACT)
    a, x, b, y = measures(n=3, m=4, mass=mass)
    if reach:
        given = (a, x, b, y)
        call = loss
    else:
        given = (x, y)

        def call(x, y):
            return loss(a.detach(), x, b.detach(), y)

    assert torch.autograd.gradcheck(call, given, eps=1e-6, atol=2e-6, rtol=1e-5)


def test_values_are_those_of_solve():
    a, x, b, y = (z.detach() for z in measures(mass=1.4))
    loss = SamplesLoss(blur=0.3, reach_x=0.5, reach_y=None, **EXACT)

    def value(a, x, b, y, rho):
        return mapuot.solve(0.5 * torch.cdist(x, y) ** 2, a, b, reg=0.09, reg_m=rho, tol=1e-11).dual

    want = value(a, x, b, y, (0.25, np.inf)) - 0.5 * (value(a, x, a, x, 0.25) + value(b, y, b, y, np.inf))
    want += 0.045 * float(a.sum() - b.sum()) ** 2
    assert loss(a, x, b, y).item() == pytest.approx(want, rel=1e-9)
    assert SamplesLoss(blur=0.3, reach=1.0, **EXACT)(a, x, a, x).item() == pytest.approx(0.0, abs=1e-12)


def test_every_form_of_the_arguments():
    a, x, b, y = measures(2, mass=1.4)
    loss = SamplesLoss("sinkhorn", 2, 0.3, 1.0, 3.0, 0.9, 5, "(SqDist(X,Y) / IntCst(2))", None, 0.1, True, False, True,
                       "multiscale", **EXACT)  # fmt: skip
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
    """Lists, nested tensors and a cloud shared by all problems give the values and slopes of single calls."""
    several = [measures(n=n, m=m, d=3, mass=1.4, seed=n) for n, m in ((9, 7), (4, 12), (6, 6))]
    loss = SamplesLoss(p=p, blur=0.3, reach=1.0, **EXACT)
    tensors = [*zip(*several, strict=True)]
    value = loss(*map(list, tensors))
    alone = torch.stack([loss(*four) for four in several])
    torch.testing.assert_close(value, alone)
    weights = torch.tensor([1.0, -2.0, 0.5])
    flat = sum(tensors, ())
    slopes = (torch.autograd.grad((weights * v).sum(), flat) for v in (value, alone))
    for got, want in zip(*slopes, strict=True):
        torch.testing.assert_close(got, want)
    nested = loss(*(torch.nested.nested_tensor([z.detach() for z in side]) for side in tensors))
    torch.testing.assert_close(nested, value)
    F, G = SamplesLoss(p=p, blur=0.3, reach=1.0, potentials=True)(*map(list, tensors))
    assert [(len(f), len(g)) for f, g in zip(F, G, strict=True)] == [(9, 7), (4, 12), (6, 6)]
    x = torch.stack([z[:4] for z in tensors[1]])
    (b, y) = (z[0] for z in tensors[2:])
    a = torch.stack([z[:4] for z in tensors[0]])
    shared = loss(a, x, b, y)
    own = loss(a, x, torch.stack([b] * 3), torch.stack([y] * 3))
    torch.testing.assert_close(shared, own)
    for got, want in zip(*(torch.autograd.grad((weights * v).sum(), (x, b, y)) for v in (shared, own)), strict=True):
        torch.testing.assert_close(got, want)
    order = (1, 3, 0, 2)
    more = {"reg": 0.1, "reg_m": 1.0}
    plain = mapuot.torch.sample_loss(*(list(tensors[k]) for k in order), **more)
    torch.testing.assert_close(plain[1], mapuot.torch.sample_loss(*(several[1][k] for k in order), **more))


def test_a_cost_that_is_a_function():
    tensors = measures(n=4, m=5, mass=1.4)

    def half(x, y):
        return 0.5 * ((x[:, :, None] - y[:, None]) ** 2).sum(-1)

    for how in ({}, {"debias": False}, {"static_y": True}):
        ours, other = (SamplesLoss(blur=0.3, reach=1.0, cost=cost, **how, **EXACT) for cost in (None, half))
        torch.testing.assert_close(other(*tensors), ours(*tensors))
        for left, right in zip(*(torch.autograd.grad(f(*tensors), tensors) for f in (ours, other)), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-8)
    pairs = (SamplesLoss(blur=0.3, reach=1.0, potentials=True, cost=c, **EXACT)(*tensors) for c in (None, half))
    for left, right in zip(*pairs, strict=True):
        torch.testing.assert_close(left, right)


def test_a_static_target_has_no_term_of_its_own(monkeypatch):
    """The value lacks OT(b, b); derivatives with respect to x are unchanged."""
    tensors = measures(2, mass=1.4)
    known = {"blur": 0.3, "reach": 1.0, **EXACT}
    whole = SamplesLoss(**known)
    static = SamplesLoss(**known, static_y=True)
    _, _, b, y = tensors
    own = SamplesLoss(**{**known, "debias": False})(b, y, b, y) + 0.3**2 * (b.sum(1) ** 2 - b.sum(1))  # OT(b, b)
    torch.testing.assert_close(static(*tensors), whole(*tensors) + 0.5 * own)
    slopes = (torch.autograd.grad(loss(*tensors).sum(), tensors[:2]) for loss in (whole, static))
    for left, right in zip(*slopes, strict=True):
        torch.testing.assert_close(left, right)
    calls = []
    solve = SamplesLoss.solve
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
    """Gradients flow through the operations before x and after the value."""
    _, x, _, y = (z.detach() for z in measures())
    loss = SamplesLoss(p=2, blur=0.3, reach=reach, tol=1e-10, **how)
    x = x[:6].requires_grad_()
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x: loss(2 * x, y) ** 2, (x,), eps=1e-5, atol=2e-5, rtol=1e-4)


def test_a_fixed_target_is_solved_with_itself_once(monkeypatch):
    """The self term is cached while the tensor and its numbers stay; the value equals a new loss's."""
    torch.manual_seed(0)
    x = torch.rand(40, 2, dtype=torch.float64)
    y = torch.rand(30, 2, dtype=torch.float64)
    loss = SamplesLoss(blur=0.1, reach=0.5)
    calls = []
    at = id(y)
    solve = SamplesLoss.solve

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


# ---- torch in, torch out

CASE = clouds(30, 40, reg=0.05)


def case_tensors(dtype=torch.float64, **more):
    return [torch.tensor(x, dtype=dtype, **more) for x in (CASE.M, CASE.a, CASE.b)]


def assert_same(tensor, array):
    assert isinstance(tensor, torch.Tensor)
    assert tensor.device.type == "cpu"
    assert not tensor.requires_grad
    np.testing.assert_array_equal(tensor.numpy(), array)
    assert tensor.numpy().dtype == array.dtype


@pytest.mark.parametrize(
    "options", [{}, {"progress": False, "callback": lambda stats: None}], ids=["short", "ordinary"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_result_of_tensors(dtype, options):
    M, a, b = case_tensors(dtype)
    found = mapuot.solve(M, a, b, reg=CASE.reg, reg_m=1.0, **options)
    wide = [x.float().numpy() if dtype == torch.float16 else x.numpy() for x in (M, a, b)]
    right = mapuot.solve(*wide, reg=CASE.reg, reg_m=1.0, **options)
    for name in ("plan", "log_u", "log_v", "f", "g", "row_marginal", "col_marginal"):
        assert_same(getattr(found, name), getattr(right, name))
    X = np.random.default_rng(0).random((40, 3))
    assert_same(found.apply(torch.tensor(X)), right.apply(X))
    assert_same(found.barycentric_map(torch.tensor(X)), right.barycentric_map(X))
    assert_same(found.apply_transpose(wide[1]), right.apply_transpose(wide[1]))
    assert_same(found.rows(3, 7), right.rows(3, 7))
    for one, other in ((found.top_k(3), right.top_k(3)), (found.sample(50, seed=1), right.sample(50, seed=1))):
        for x, y in zip(one, other, strict=True):
            assert_same(x, y)
    first, again = (found.sample(50, torch.Generator().manual_seed(3), method="systematic") for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert isinstance(found, mapuot.Result)
    assert found.error_bound == right.error_bound
    assert found.converged is True
    assert repr(found) == repr(right)
    assert_same(pickle.loads(pickle.dumps(found)).plan, right.plan)
    assert found.sparse(1e-4).nnz == right.sparse(1e-4).nnz


def test_other_arguments_of_tensors():
    """The loss takes penalties of points, reference, start and plan memory; one tensor among arrays is enough."""
    M, a, b = case_tensors()
    rho = torch.linspace(0.5, 2.0, 30)
    c = torch.rand(30, 40, dtype=torch.float64)
    out = torch.zeros_like(M)
    found = mapuot.solve(M, a, b, reg=CASE.reg, reg_m=(rho, 1.0), reference=c, out=out)
    right = mapuot.solve(CASE.M, CASE.a, CASE.b, reg=CASE.reg, reg_m=(rho.numpy(), 1.0), reference=c.numpy())
    assert_same(out, right.plan)
    assert found.plan.data_ptr() == out.data_ptr()
    for start in (found, (found.log_u, found.log_v), found.arrays):
        for M_again in (M, CASE.M):
            again = mapuot.solve(M_again, a, b, reg=CASE.reg, reg_m=(rho, 1.0), reference=c, warm_start=start)
            assert again.n_passes <= 2
    assert mapuot.solve(CASE.M, CASE.a, CASE.b, reg=CASE.reg, reg_m=1.0, warm_start=found).converged
    assert_same(mapuot.solve(CASE.M, a, CASE.b, reg=0.1, reg_m=1.0).plan,
                mapuot.solve(CASE.M, CASE.a, CASE.b, reg=0.1, reg_m=1.0).plan)  # fmt: skip
    regs = [0.5, 0.1]
    paths = (mapuot.path(*three, regs=regs, reg_ms=1.0) for three in ((M, a, b), (CASE.M, CASE.a, CASE.b)))
    for x, y in zip(*paths, strict=True):
        assert_same(x.plan, y.plan)


def test_a_batch_of_tensors():
    M, a, b = case_tensors()
    A = torch.stack([a, a.flip(0)])
    found = mapuot.solve_batch(M, A, b, reg=0.1, reg_m=1.0)
    right = mapuot.solve_batch(CASE.M, A.numpy(), CASE.b, reg=0.1, reg_m=1.0)
    for name in ("log_u", "row_marginal", "gap", "error_bound", "cost", "n_passes", "converged"):
        assert_same(getattr(found, name), getattr(right, name))
    assert_same(found.plan, right.plan)
    assert_same(found[1].plan, right[1].plan)
    assert_same(found.plan_sum(torch.tensor([0.5, 2.0])), right.plan_sum(np.array([0.5, 2.0])))
    assert found.status.tolist() == ["converged"] * 2
    assert len(found) == 2
    for one in (found[1], list(found)[1], found[-1:][0]):
        assert_same(one.plan, right[1].plan)
    again = mapuot.solve_batch(M, A, b, reg=0.1, reg_m=1.0, warm_start=found)
    assert again.n_passes.max() <= 2


def test_a_gradient_that_is_lost_is_told_at_the_callers_line():
    M, a, b = case_tensors()
    right = mapuot.solve(M, a, b, reg=CASE.reg, reg_m=1.0).plan
    M.requires_grad_()
    for call in (
        lambda: mapuot.solve(M, a, b, reg=CASE.reg, reg_m=1.0).plan,
        lambda: mapuot.solve_batch(M, a[None], b, reg=CASE.reg, reg_m=1.0, tol=1e-9)[0].plan,
        lambda: next(mapuot.path(M, a, b, regs=[CASE.reg], reg_ms=1.0)).plan,
    ):
        with pytest.warns(UserWarning, match="^M requires grad .*mapuot.torch.sinkhorn_loss") as told:
            plan = call()
        assert [one.filename for one in told] == [__file__]
        assert not plan.requires_grad
        torch.testing.assert_close(plan, right, atol=1e-8, rtol=1e-5)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        mapuot.solve(M, a, b, reg=CASE.reg, reg_m=1.0)
    with pytest.warns(mapuot.ConvergenceWarning) as told, torch.no_grad():
        mapuot.solve(M, a, b, reg=CASE.reg, reg_m=1.0, max_passes=1)
    assert [one.filename for one in told] == [__file__]


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_csr_tensor_is_solved_as_its_pairs():
    """The plan is a sparse tensor, too, with equal indices; indices of 32 and 64 bits, half precision in float32."""
    from scipy import sparse

    rng = np.random.default_rng(0)
    S = sparse.random_array((30, 20), density=0.4, rng=rng, format="csr")
    a = rng.random(30) + 0.1
    b = rng.random(20) + 0.1
    right = mapuot.solve(S, a, b, reg=0.1, reg_m=1.0, tol=1e-9)
    for index in (torch.int32, torch.int64):
        places = torch.tensor(S.indptr, dtype=index), torch.tensor(S.indices, dtype=index)
        M = torch.sparse_csr_tensor(*places, torch.tensor(S.data), S.shape)
        found = mapuot.solve(M, a, torch.tensor(b), reg=0.1, reg_m=1.0, tol=1e-9)
        assert found.plan.layout == torch.sparse_csr
        np.testing.assert_array_equal(found.plan.col_indices(), S.indices)
        np.testing.assert_allclose(found.plan.values(), right.plan.data, rtol=1e-9)
        assert isinstance(found.log_u, torch.Tensor)
        assert found.sparse(keep=0.5).layout == torch.sparse_csr
        batch = mapuot.solve_batch(M, torch.tensor(np.stack([a, 2 * a])), reg=0.1, reg_m=1.0)
        assert batch[1].plan.layout == torch.sparse_csr
        again = mapuot.pot.sinkhorn_unbalanced(torch.tensor(a), torch.tensor(b), M, 0.1, 1.0, stopThr=1e-9)
        np.testing.assert_allclose(again.values(), right.plan.data, rtol=1e-6)
    half = mapuot.solve(M.to(torch.bfloat16), a, b, reg=0.1, reg_m=1.0)
    assert half.plan.dtype == torch.float32
    with pytest.raises((TypeError, ValueError), match="M cannot be read as an array"):
        mapuot.solve(M.to_sparse_coo(), a, b, reg=0.1, reg_m=1.0)


def test_a_balanced_loss_stops_by_its_value(recwarn):
    """Rounding leaves the plan open: it once cost 36,000 products and a warning, at a value known to 3e-9."""
    torch.manual_seed(0)
    x = torch.randn(2, 256, 4, dtype=torch.float64)
    y = torch.randn(2, 256, 4, dtype=torch.float64)
    found = {}
    for name, more in (("default", {}), ("sharp", {"tol_gap": 1e-7})):
        points = x.clone().requires_grad_()
        value = mapuot.torch.SamplesLoss(**more)(points, y)
        value.sum().backward()
        found[name] = value.detach(), points.grad
    assert not recwarn.list
    assert_allclose(found["default"][0], found["sharp"][0], rtol=1e-6)
    slope = found["default"][1]
    sharp = found["sharp"][1]
    assert (slope - sharp).abs().sum() <= 1e-4 * sharp.abs().sum()
    M = torch.cdist(x[0], y[0]) ** 2 / 2
    for loss in (
        sinkhorn_loss(M, reg=0.0025, reg_m=np.inf),
        mapuot.torch.sample_loss(x[0], y[0], reg=0.0025, reg_m=np.inf, scale=0.5),
    ):
        sharp = mapuot.torch.sample_loss(x[0], y[0], reg=0.0025, reg_m=np.inf, scale=0.5, tol_gap=1e-7)
        assert_allclose(loss, sharp, rtol=1e-7)
    assert not recwarn.list


def test_a_warning_names_the_line_that_calls_a_module():
    torch.manual_seed(0)
    loss = mapuot.torch.SamplesLoss(max_passes=3)
    with pytest.warns(mapuot.ConvergenceWarning) as seen:
        loss(torch.randn(50, 3), torch.randn(50, 3))
    assert {x.filename for x in seen} == {__file__}


def test_a_barycenter_of_tensors_has_tensors():
    t = torch.linspace(0, 1, 21, dtype=torch.float64)
    M = (t[:, None] - t) ** 2
    A = torch.exp(-((t - torch.tensor([[0.3], [0.7]])) ** 2) / 0.01)
    found, right = (mapuot.barycenter(*x, reg=0.01, reg_m=1.0) for x in ((M, A), (M.numpy(), A.numpy())))
    assert isinstance(found.q, torch.Tensor)
    assert_allclose(found.q.numpy(), right.q)
    assert [x.shape for x in found.potentials] == [(2, 21), (2, 21)]
    assert mapuot.barycenter(M, A, reg=0.01, reg_m=1.0, warm_start=found).n_passes <= 2


@pytest.mark.parametrize("name", ["reg", "reg_m"])
def test_numbers_that_require_a_gradient_are_refused(name):
    """The value has no derivative by reg or reg_m, and would be differentiated as if it did not depend on them."""
    M = torch.rand(5, 4, dtype=torch.float64)
    numbers = {"reg": torch.tensor(0.05), "reg_m": torch.tensor(1.0)}
    assert mapuot.torch.sinkhorn_loss(M, **numbers) == mapuot.torch.sinkhorn_loss(M, reg=float(numbers["reg"]), reg_m=1)
    numbers[name].requires_grad_()
    with pytest.raises(TypeError, match=rf"{name}.* must be a number, got a tensor with requires_grad"):
        mapuot.torch.sinkhorn_loss(M, **numbers)


def test_words_and_shapes_of_beginners_are_named():
    """Two clouds in place of costs, and words that no loss takes, are named by the loss that was called."""
    x = torch.rand(8, 2)
    y = torch.rand(6, 2)
    for call, place in (
        (lambda: sinkhorn_loss(x, y, reg=0.1, reg_m=1.0), "mapuot.torch.sample_loss"),
        (lambda: mapuot.torch.SinkhornLoss(reg=0.1, reg_m=1.0)(x, y), "mapuot.torch.sample_loss"),
        (lambda: sinkhorn_divergence(x, y, reg=0.1, reg_m=1.0), "mapuot.torch.SamplesLoss"),
    ):
        with pytest.raises(
            ValueError, match=rf"shapes \(8, 2\) and \(6, 2\), as of two clouds: {place}\(x, y, \.\.\.\)"
        ):
            call()
    M = torch.rand(8, 6)
    with pytest.raises(TypeError, match=r"^sinkhorn_loss\(\) has no reduction: .* take its sum\(\) or mean\(\)"):
        sinkhorn_loss(M, reg=0.1, reg_m=1.0, reduction="mean")
    with pytest.raises(TypeError, match=r"^SinkhornLoss\(\) has no epsilon: did you mean reg\?"):
        mapuot.torch.SinkhornLoss(epsilon=0.1, reg=0.1, reg_m=1.0)
    with pytest.raises(TypeError, match=r"^sample_loss\(\) has no debias: it takes x, y, a, b, reg, reg_m, metric"):
        mapuot.torch.sample_loss(x, y, reg=0.1, reg_m=1.0, debias=True)


@pytest.mark.parametrize("how", ["weighted_median", "weighted_mean"])
def test_scales_of_losses_may_be_weighted(how):
    """The loss in units of a weighted statistic is the loss at the reg and reg_m that the unit gives."""
    torch.manual_seed(0)
    M = torch.rand(7, 7, dtype=torch.float64)
    a = torch.softmax(torch.randn(2, 7, dtype=torch.float64), 1)
    M = M + M.T
    b = torch.softmax(torch.randn(7, dtype=torch.float64), 0)
    unit = mapuot.solve_batch(M.numpy(), a.numpy(), b.numpy(), reg=0.1, reg_m=1.0, scale_cost=how).scale_cost
    for loss in (sinkhorn_loss, sinkhorn_divergence):
        found = loss(M, a, b, reg=0.1, reg_m=1.0, scale_cost=how)
        assert_allclose(found, loss(M, a, b, reg=0.1 * unit, reg_m=unit), rtol=1e-9)
    x = torch.rand(7, 2, dtype=torch.float64)
    y = torch.rand(7, 2, dtype=torch.float64)
    unit = mapuot.solve_sample(
        x.numpy(), y.numpy(), a[0].numpy(), b.numpy(), reg=0.1, reg_m=1.0, scale_cost=how
    ).scale_cost
    found = mapuot.torch.sample_loss(x, y, a[0], b, reg=0.1, reg_m=1.0, scale_cost=how)
    assert_allclose(found, mapuot.torch.sample_loss(x, y, a[0], b, reg=0.1 * unit, reg_m=unit), rtol=1e-9)


@pytest.mark.parametrize("how", ["median", "weighted_mean"])
def test_each_divergence_may_have_its_own_unit(how):
    """With scale_each value and gradient equal each problem alone in the unit of its costs."""
    rng = np.random.default_rng(0)
    x = rng.random((3, 6, 2)) * np.array([1, 2, 5])[:, None, None]
    M = torch.tensor(((x[:, :, None] - x[:, None]) ** 2).sum(-1))
    a = torch.tensor(rng.random((3, 6)), requires_grad=True)
    b = torch.tensor(rng.random((3, 6)))
    numbers = {"reg": 0.1, "reg_m": 1.0, "scale_cost": how}
    found = sinkhorn_divergence(M, a, b, scale_each=True, **numbers)
    alone = torch.stack([sinkhorn_divergence(*one, **numbers) for one in zip(M, a, b, strict=True)])
    assert_allclose(found.detach(), alone.detach(), rtol=1e-6)
    slopes = [torch.autograd.grad(value.sum(), a)[0] for value in (found, alone)]
    assert_allclose(*slopes, rtol=1e-5, atol=1e-7)


def test_losses_keep_the_unit_of_mass():
    """The slopes of a loss in units of its masses would not be those by the given masses."""
    M = torch.rand(4, 4)
    numbers = {"reg": 0.1, "reg_m": 1.0, "scale_mass": True}
    for loss, given in (
        (sinkhorn_loss, (M,)), (sinkhorn_divergence, (M,)), (mapuot.torch.sample_loss, (M, M)),
        (mapuot.sinkhorn_divergence, (M.numpy(),)), (mapuot.pairwise, ([M.numpy(), M.numpy()],)),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=r"scale_mass is not an option of the .*: divide a and b"):
            loss(*given, **numbers)
    with pytest.raises(TypeError, match=r"^sinkhorn_loss\(\) has no A"):
        sinkhorn_loss(M, A=torch.ones(4), reg=0.1, reg_m=1.0)
