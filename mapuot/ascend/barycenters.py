"""The passes of a barycenter of p histograms, and their certificate.

    u_s = (A_s / K v_s)^fi,  q = (sum_s w_s (K^T u_s)^(1 - fi))^(1 / (1 - fi)),  v_s = (q / K^T u_s)^fi

These v are feasible for the dual: sum_s w_s v_s^(-reg / rho) = 1. The dual value is sum_s w_s rho (|A_s| -
sum A_s u_s^(-reg / rho)) - reg |q|, less a constant. The plans P_s = diag(u_s) K diag(v_s) then miss the optimum by
gap = rho sum_s w_s KL(P_s 1 | A_s u_s^(-reg / rho)). For balanced histograms q is the geometric mean of K^T u_s, and
the dual value is reg (sum_s w_s <A_s, log u_s> - |q|). The plans then miss their row sums, and Newton's step bounds
the resulting error. Formulas: docs/mathematics.md, "Barycenters".
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.kernel import UNIT, log_sum
from ..backends.newton import GIVES_UP, HOLDS_AFTER, OPEN, Newton
from ..backends.rules import core, plan_error
from ..cached import cached_property
from ..contract import Options, Stats
from ..errors import InfeasibleError
from ..penalties import F64
from .passes import Body, PassCertificate

MOST_APART = 2.0  # |q - q*| / |q| of any two q of equal masses
MOST_IN_A_CALL = 1 << 19  # p n^2: up to it one call makes all passes, some .3 ms each, as NumPy's calls
WIDEST = 3.0  # |x_i + y_j| of a Newton step is at most this many times the largest |x_i|


def scaled(fi: float, log_t: F64, log_s: F64) -> F64:
    """Return log u = fi (log t - log s) of points with mass t and sum s = K v; -inf (u = 0) where t or s is 0."""
    found = fi * (log_t - log_s)
    finite = np.isfinite(found)
    if not finite.all():
        found[~finite] = -np.inf
    return np.asarray(found)


@dataclass
class Means:
    """The plans of one pass: log u and log v (p, n), and the barycenter q (n,)."""

    log_u: F64
    log_v: F64
    q: F64
    log_s: F64  # log K^T u
    log_kv: F64 | None = None  # log K v; None until the plans are completed

    @cached_property
    def mass(self) -> float:
        return float(self.q.sum())

    @cached_property
    def columns(self) -> F64:
        """The plans' columns P_s^T 1, (p, n)."""
        return np.exp(self.log_v + self.log_s)

    @property
    def is_complete(self) -> bool:
        return self.log_kv is not None


def fits_one_call(n_numbers: int, n_points: int) -> bool:
    """Tell whether one call of the C core may make the first passes: for ``n_numbers`` in all p histograms, p n."""
    return n_numbers * n_points <= MOST_IN_A_CALL


class Barycenter(Body):
    """The body (passes.Body) for p histograms A (p, n) and one vector of weights.

    A state is log v, with 0 where v is 0. ``operator`` multiplies by K and by its transpose on logarithms,
    (p, n) -> (p, n). Balanced histograms must have equal masses.
    """

    accepted: Means | None = None  # plans of the last pass that the guard accepted
    change = math.inf  # relative L1 change of q in the last pass

    def __init__(self, A: F64, operator: Any, rho: float, weights: F64) -> None:
        self.A = A.astype(np.float64)
        self.operator = operator
        self.rho = rho
        self.weights = weights
        self.reg = reg = operator.reg
        rounding = 4 * UNIT * sum(map(abs, operator.ends))
        self.error = operator.apart(rounding) or rounding + UNIT * (A.shape[1] + 16)  # relative error of a sum
        self.hard = rho == math.inf
        self.rate = reg / rho
        self.fi = 1 / (1 + self.rate)
        self.power = self.rate * self.fi  # 1 - fi
        with np.errstate(divide="ignore"):
            self.log_a = np.log(self.A)
        self.size = A.size
        self.ends = [A.size]
        self.width = A.shape[1]
        kind = operator.cost.operator
        self.reads = "dense K" if kind == "tiles" else kind
        self.held = np.ones(A.shape, bool)
        self.used = (A > 0) & (weights > 0)[:, None]
        self.used_mass = (weights[:, None] * self.A)[self.used]

    def start(self, state: F64) -> F64:
        return state

    def newton(self) -> "BarycenterNewton | None":
        return BarycenterNewton(self)

    def find(self, state: F64, narrow: bool) -> Means:
        """Make a pass from log v: compute u, q and v by the formulas above, on logarithms."""
        log_v = state.reshape(self.A.shape)
        products = self.operator.log_products
        if not self.held.all():
            log_v = np.where(self.held, log_v, -np.inf)
        log_kv = products(log_v)
        if self.hard:
            self.check_reachable(log_kv)
        log_u = scaled(self.fi, self.log_a, log_kv)
        log_u, log_s, log_q = self.translated(log_u, products(log_u, True))
        if self.hard and np.isneginf(log_q).all():
            self.check_reachable(log_q)
        self.last = Means(log_u, scaled(self.fi, log_q, log_s), np.exp(log_q), log_s)
        return self.last

    def few_passes(self, log_v: F64, options: Options, most: int) -> tuple[F64, Stats | None]:
        """Make the passes of a small soft problem in one call; return the state after them, and their last pass.

        The pass is None if another way has to make the passes.
        """
        if self.hard or not self.weights.all() or self.reads != "dense K" or not fits_one_call(self.A.size, self.width):
            return log_v, None
        found = self.operator.barycenter_passes(self.weights, self.A, self.log_a, self.rho, log_v, most, options.tol)
        if found is None:
            return log_v, None
        record, (log_u, log_v, log_s, log_kv, log_q) = found
        self.last = means = Means(log_u, log_v, np.exp(log_q), log_s, log_kv)
        value = self.certified(means, options.allowed)
        if not value.error < math.inf:
            return log_v, None
        self.accepted, self.change = means, record.change
        stat = Stats(record.made, value.gap, value.error, value.dual, means.mass, record.residual, False, "running")
        return log_v.ravel(), stat

    def log_mean(self, log_s: F64) -> F64:
        """Return log q, the power mean of the sums s = K^T u with exponent 1 - fi; the geometric mean for fi = 1."""
        return mean_of_power(self.weights, log_s, self.power)

    def check_reachable(self, log_kv: F64) -> None:
        """Raise InfeasibleError where no finite cost leads balanced mass to a common point."""
        stuck = np.isneginf(log_kv) & (self.A > 0) & (self.weights > 0)[:, None]
        if stuck.any():
            s, i = np.unravel_index(int(stuck.argmax()), stuck.shape)
            raise InfeasibleError(f"M connects A[{s}, {i}], which must be transported, with no point that all A reach")

    def completed(self) -> Means:
        self.last.log_kv = self.operator.log_products(self.last.log_v)
        return self.last

    def image(self, found: Means, exact: bool) -> F64:
        """Return the next log v, and record the relative change of q."""
        before = self.accepted.q if self.accepted else 0.0
        mass = found.mass
        if mass > 0:
            self.change = float(np.abs(found.q - before).sum()) / mass
        else:
            self.change = math.inf
        self.accepted = found
        self.held = np.isfinite(found.log_v)
        return np.where(self.held, found.log_v, 0.0).ravel()

    def guess(self, residual: F64, found: Means) -> tuple[float, float]:
        """Guess (gap, missed row mass) from the last change; only the second is not 0 for balanced histograms.

        The gap is rho KL, to second order, of row sums that are off by residual / fi.
        """
        weight = self.metric(found)
        if self.hard:
            return 0.0, float(weight @ np.abs(residual))
        return 0.5 * self.rho * float(weight @ residual**2) / self.fi**2, 0.0

    def metric(self, found: Means) -> F64:
        """Return weights of the state's entries: the column sums of the plans."""
        if self.held.all():
            column = found.columns
        else:
            column = np.where(self.held, found.columns, 0.0)
        return np.asarray((column * self.weights[:, None]).ravel())

    def asked(self, log_u: F64) -> F64:
        """Return A u^(-reg / rho), the row sums that the potentials ask for; 0 where no column reaches a row."""
        if self.hard:
            return self.A
        return np.asarray(self.A * np.exp(-self.rate * np.where(np.isfinite(log_u), log_u, np.inf)))

    def translated(self, log_u: F64, log_s: F64) -> tuple[F64, F64, F64]:
        """Add a number t_s to each log u_s that raises the dual value; return log u, log s and log q.

        The dual value at log u_s + t_s is - rho sum_s B_s e^(-t_s reg / rho) - reg |q(t)| with B_s = w_s |asked_s|.
        First find the best common t. Where rows are not hard, then take one step of Newton's method in all t_s, if the
        step raises the dual value.
        """
        log_q = self.log_mean(log_s)
        B = self.weights * self.asked(log_u).sum(1)
        highest = log_q.max()
        least = float(np.exp(log_q - highest).sum())  # |q| may overflow float64 in a first pass
        if not (0 < least < math.inf and 0 < B.sum() < math.inf):
            return log_u, log_s, log_q
        common = (math.log(B.sum() / least) - highest) / (1 + self.rate)
        log_u = log_u + common
        log_s = log_s + common
        log_q = log_q + common
        if self.hard:
            return log_u, log_s, log_q
        B = B * math.exp(-self.rate * common)
        q = np.exp(log_q)
        share = self.weights[:, None] * np.exp(self.power * (log_s - np.where(q > 0, log_q, 0.0)))
        sums = (share * q).sum(1)
        lacks = B - sums
        lacks[np.abs(lacks) <= 64 * UNIT * B] = 0.0  # drop rounding errors: the step would divide them by reg / rho
        diagonal = self.rate * B + self.power * sums
        if not lacks.any() or diagonal.min(where=B > 0, initial=math.inf) <= 8 * UNIT * B.sum():
            return log_u, log_s, log_q
        hessian = (1 - self.power) * (share * q) @ share.T + np.diag(np.where(self.weights > 0, diagonal, 1.0))
        move = np.linalg.solve(hessian, lacks)
        if np.abs(self.power * move).max() < 1:
            log_moved = log_q + np.log1p(np.expm1(self.power * move) @ share) / self.power
        else:
            log_moved = self.log_mean(log_s + move[:, None])
        gained = -self.rho * float(B @ np.expm1(-self.rate * move))
        if gained >= self.reg * float((np.exp(log_moved) - q).sum()):
            return log_u + move[:, None], log_s + move[:, None], log_moved
        return log_u, log_s, log_q

    def value_of(self, log_u: F64) -> tuple[float, float]:
        """Return the rows' dual value, sum_s w_s rho <A_s, 1 - u_s^(-reg / rho)>, and the sum of its |terms|."""
        x = log_u[self.used]
        x[np.isneginf(x)] = np.inf  # no column reaches these rows
        if self.hard:
            terms = self.used_mass * (self.reg * x)
        else:
            terms = self.used_mass * (-self.rho * np.expm1(-self.rate * x))
        return float(terms.sum()), float(np.abs(terms).sum())

    def certified(self, found: Means, allowed: float) -> PassCertificate:
        """Certify the plans of log u and log v; the dual value is without its constant part.

        ``delta`` bounds the relative rounding of sums and entries. ``slip`` bounds the relative rounding of v, which
        must lie in the domain of the dual.
        """
        mass, log_u, log_kv = found.mass, found.log_u, found.log_kv
        value, terms = self.value_of(log_u)
        dual = value - self.reg * mass
        terms = terms + self.reg * mass
        if log_kv is None or not math.isfinite(dual):
            return PassCertificate(dual=dual, moved=0.0, terms=terms)
        sizes = largest(log_u) + largest(found.log_v) + largest(found.log_s) + largest(log_kv)
        delta = self.error + UNIT * (4 * sizes + 4 * largest(self.log_a) + 16)
        slip = 8 * UNIT * (largest(found.log_v) + largest(found.log_s) + 1)
        moved = self.reg * mass * (delta + slip) + UNIT * (self.A.size + 16) * terms
        certificate = PassCertificate(dual=dual - moved, moved=moved, terms=terms)
        kl, both, missed = self.apart(log_u, log_kv)
        root = (math.sqrt(max(kl, 0.0)) + 2 * delta * math.sqrt(both + mass)) * (0 if self.hard else self.rho**0.5)
        if root < math.inf and missed < math.inf and mass > 0 and delta + slip < 0.1:
            if self.hard:
                certificate.gap = math.inf
            else:
                certificate.gap = root * root + moved
            error = plan_error(root * root / self.reg / mass) + missed / mass
            certificate.error = error * (1 + 4 * delta) + 2 * delta + slip
            certificate.rounding = 2 * delta + slip, 4 * (delta + slip)
        return certificate

    def apart(self, log_u: F64, log_kv: F64) -> tuple[float, float, float]:
        """Return KL(r | asked), |r + asked| and, if rows are hard, |r - A|; r = u K v; weighted over histograms."""
        if self.hard:
            missed = np.abs(np.exp(np.where(self.A > 0, log_u + log_kv, -np.inf)) - self.A)
            return 0.0, 0.0, float(self.weights @ missed.sum(1))
        asked = self.asked(log_u)
        t = log_u + log_kv - self.log_a + self.rate * log_u  # log of r / asked
        t[~np.isfinite(t)] = 0.0
        grown = np.expm1(t)
        kl = float(self.weights @ (asked * (t * grown - (grown - t))).sum(1))
        return kl, float(self.weights @ (asked * (2 + grown)).sum(1)), 0.0


class DebiasedBarycenter(Barycenter):
    """The body of passes for a debiased barycenter: v_s = (q / K^T u_s)^fi, d <- sqrt(d (q / K d)^fi).

    Passes end when q changes by at most ``tol_change`` of its mass and the row sums miss at most as much. The value has
    a certified gap where K is positive definite. A balanced q has an error where K is well conditioned, too.
    """

    certifies = False
    log_kd: F64  # log K d of the last pass, before the update of d
    missed = 0.0  # mass that the plans of the previous pass lack or exceed in their rows

    def __init__(self, A: F64, operator: Any, rho: float, weights: F64, tol_change: float) -> None:
        super().__init__(A, operator, rho, weights)
        self.tol_change, self.log_d, self.highest = tol_change, np.zeros(self.width), operator.ends[1] * self.reg

    def newton(self) -> None:
        """Return None: no Newton's step certifies debiased barycenters."""

    def start(self, state: F64) -> F64:
        """Return the state, and set d to match it: sum_s w_s v_s^(-reg / rho) = d^(-reg / rho)."""
        self.log_d = -mean_of_power(self.weights, -state.reshape(self.A.shape), self.rate)
        return state

    def find(self, state: F64, narrow: bool) -> Means:
        log_v = state.reshape(self.A.shape)
        products = self.operator.log_products
        log_kv = products(np.where(self.held, log_v, -np.inf))
        if self.hard:
            self.check_reachable(log_kv)
        if self.accepted:
            rows = np.exp(np.where(self.A > 0, self.accepted.log_u + log_kv, -np.inf))
            self.missed = float(self.weights @ np.abs(rows - self.asked(self.accepted.log_u)).sum(1))
        log_u = scaled(self.fi, self.log_a, log_kv)
        log_s = products(log_u, True)
        log_q = self.log_mean(log_s) + self.log_d / self.fi
        if self.hard:  # give q the mass of the histograms
            more = math.log(self.A[self.weights > 0][0].sum()) - log_sum(log_q)
            log_u = log_u + more
            log_s = log_s + more
            log_q = log_q + more
        self.log_kd = products(self.log_d[None])[0]
        self.before = self.log_d
        self.log_d = 0.5 * (self.log_d + scaled(self.fi, log_q, self.log_kd))
        self.last = Means(log_u, scaled(self.fi, log_q, log_s), np.exp(log_q), log_s)
        return self.last

    def image(self, found: Means, exact: bool) -> F64:
        """Return the next log v; record the change of q or the missed row mass, whichever is larger."""
        has_start = self.accepted is not None
        mass = found.mass
        image = super().image(found, exact)
        if has_start and mass > 0:
            self.change = max(self.change, self.missed / mass)
        else:
            self.change = math.inf
        return image

    def bounds(self) -> tuple[float, float]:
        """Take the plans with column sums t = d K d; bound the value less the minimum, and |q - q*| / |q|.

        A bound is inf if it is not known: both are if K is not positive definite, since the problem is then not convex.
        Formulas: docs/mathematics.md, "Barycenters", (18) to (20).
        """
        pairs = self.operator.cost.operator == "pairs"
        least, diagonal = self.operator.spectrum
        if least == -math.inf or diagonal == 0 or (self.hard and pairs):
            return math.inf, math.inf
        if self.hard:
            return self.hard_bounds(least, diagonal)
        return self.soft_gap(max(-least, 0.0) / diagonal), math.inf

    def hard_bounds(self, least: float, diagonal: float) -> tuple[float, float]:
        """Bound the value and q by formula (18), and by (19) if K is well conditioned."""
        found = self.last
        mass = self.A[self.weights > 0][0].sum()
        log_t = self.before + self.log_kd
        scale = math.log(mass) - log_sum(log_t)
        log_t += scale
        log_z = self.log_kd + scale - self.log_mean(found.log_s)
        found.q = np.exp(log_t)
        found.log_v = log_t - found.log_s
        rows = np.exp(found.log_u + self.operator.log_products(found.log_v))
        missed = float(self.weights @ np.abs(rows - self.A).sum(1))
        rounding = self.rounding(log_t)
        gap = self.reg * (float(found.q @ log_z) - mass * float(log_z.min()) + 4 * rounding * mass)
        gap += self.highest * (missed + 4 * rounding * mass) + 2 * self.reg * mass * max(-least, 0.0) / diagonal
        if least <= 0:
            return gap, math.inf
        kl = max(gap, 0.0) / self.reg / mass
        smooth = np.exp(self.log_kd + 0.5 * (scale + self.operator.ends[0] - math.log(mass)))
        error = (
            2 / 3 * kl + math.sqrt(4 / 9 * kl**2 + 2 * kl) + math.sqrt(2 * kl / least) * float(np.linalg.norm(smooth))
        )
        error = (error + rounding) * (1 + 4 * rounding)
        return gap, error if error < MOST_APART else math.inf

    def soft_gap(self, indefinite: float) -> float:
        """Bound the value by formula (20); ``indefinite``: -(least eigenvalue) / (least diagonal entry) of K, or 0."""
        found, log_d, log_kd = self.last, self.before, self.log_kd
        log_p = self.log_mean(found.log_s)
        log_z = np.where(np.isneginf(log_p), np.inf, log_kd - log_p)
        lowered = float(log_z.min())
        if not -math.inf < lowered < math.inf:
            return math.inf
        log_u = found.log_u + lowered
        log_t = log_d + log_kd
        # columns of the plans, on average
        c = np.exp(log_d + log_p)
        log_c = log_d + log_p
        log_kv = self.operator.log_products(found.log_v) - lowered
        terms = self.value_of(log_u)[1]
        mass = float(c.sum() + np.exp(log_t).sum())
        kl, both, _ = self.apart(log_u, log_kv)
        rounding = self.rounding(log_t)
        asked = float(self.weights @ self.asked(log_u).sum(1))
        root = (math.sqrt(max(kl, 0.0)) + 2 * rounding * math.sqrt(both + mass)) * math.sqrt(self.rho)
        columns = c * np.where(c > 0, log_z - lowered + log_c - log_t, 0.0) - c + np.exp(log_t)
        gap = root**2 + self.reg * float(columns.sum())
        gap += self.reg * rounding * (4 * mass + asked) + UNIT * (self.A.size + 16) * (terms + self.reg * mass)
        if indefinite > 0:  # the mass of the best plans is at most ``most``
            most = 2 * (self.rho * asked / self.reg + mass) / max(1 - 2 * indefinite, 0.5)
            gap += self.reg * indefinite * (most + mass)
        return float(gap) if indefinite < 0.1 else math.inf

    def rounding(self, log_t: F64) -> float:
        """Bound the relative rounding of the sums and of t."""
        found = self.last
        sizes = largest(found.log_s) + largest(log_t) + largest(self.before) + largest(found.log_u)
        return float(self.error + UNIT * (8 * sizes + 16))


class BarycenterNewton(Newton):
    """Newton's step towards the row sums of all histograms at once; the step of log v is eliminated.

    With h = sum_s w_s P_s^T x_s, the change of q, a step x_s of log u_s implies the step

        y_s = fi (v_s^(-reg / rho) h - P_s^T x_s) / (P_s^T 1)

    of log v_s, so that sum_s w_s v_s^(-reg / rho) y_s = 0. The equations of the rows are

        (r_s + (reg / rho) asked_s) x_s + P_s y_s = asked_s - r_s.
    """

    def __init__(self, body: Barycenter) -> None:
        self.body = body
        self.weights = body.weights[:, None]
        self.needed = body.hard
        super().__init__(body.reg, (self.weights * body.A).ravel(), np.full(body.size, body.rho))
        self.ends = np.array([0, body.size])
        self.record.marginals, self.record.widest = 1, WIDEST
        self.record.start = core()[0].from_buffer("int64_t *", self.ends)

    def step(self, workspace: Any, backend: Any, stat: Stats, tol: float) -> str:
        """Find the step from the last pass; ``stat`` takes its error and gap if rows are hard or the error is less."""
        found, body = workspace.found, self.body
        if found is None:
            return GIVES_UP
        if not found.is_complete:
            workspace.conclude(stat)
        value = body.certified(found, math.inf)
        if not value.error < math.inf:
            return GIVES_UP
        r = self.weights * np.exp(np.where(body.A > 0, found.log_u + found.log_kv, -np.inf))
        apart, self.record.rounding = value.rounding
        missed = body.apart(found.log_u, found.log_kv)[2] / found.mass
        with np.errstate(divide="ignore"):
            self.duals = np.exp(-body.rate * np.where(np.isfinite(found.log_v), found.log_v, 0.0))
        self.found = found
        verdict = self.solve(apart + missed, tol, found.log_u.ravel(), r.ravel(), self.product)
        error = float(self.record.error)
        if body.hard or error < stat.error:
            # invert plan_error: the gap is reg KL(P* | P)
            stat.error = error
            stat.gap = body.reg * found.mass * error**2 / (2 + error / 1.5) + value.moved
        return OPEN if verdict == HOLDS_AFTER else verdict  # the new v is feasible for the dual only to first order

    def start(self, workspace: Any, backend: Any) -> F64:
        """Return log v at the start of the next pass."""
        moved = workspace.found.log_v + self.of_columns(self.y.reshape(self.body.A.shape))
        return np.where(self.body.held, moved, 0.0).ravel()

    def product(self, d: F64) -> F64:
        """Return -w_s P_s y_s, with the y_s that a step d of all log u_s implies."""
        found = self.found
        y = self.of_columns(d.reshape(self.body.A.shape))
        return np.asarray(-self.weights * self.through(found.log_u, found.log_v, y, False)).ravel()

    def of_columns(self, x: F64) -> F64:
        """Return the step y of log v that a step x of log u implies."""
        found = self.found
        along = self.through(found.log_v, found.log_u, x, True)
        apart = self.duals * (self.body.weights @ along) - along
        return np.asarray(
            self.body.fi * np.divide(apart, self.found.columns, out=np.zeros_like(apart), where=self.found.columns > 0)
        )

    def through(self, log_own: F64, log_other: F64, x: F64, turned: bool) -> F64:
        """Return diag(own) K diag(other) x by products with the positive and with the negative part of x."""
        total = np.zeros_like(x)
        with np.errstate(divide="ignore"):
            for sign in (1.0, -1.0):
                part = np.maximum(sign * x, 0.0)
                if part.any():
                    log_part = self.body.operator.log_products(log_other + np.log(part), turned)
                    total += sign * np.exp(np.where(np.isneginf(log_own), -np.inf, log_own + log_part))
        return total


def mean_of_power(weights: F64, x: F64, power: float) -> F64:
    """Return log (sum_s w_s e^(power x_s)) / power of each column of x (p, n); for power 0 the mean of x.

    For a small power the logarithm is nearly 0, so the largest x is subtracted first and log1p is used.
    """
    used = weights > 0
    weights = weights[used]
    x = x[used]
    if power == 0:
        return np.asarray(weights @ x)
    top = x.max(axis=0)
    beside = power * (x - np.where(np.isfinite(top), top, 0.0))
    less = weights @ np.expm1(beside)
    with np.errstate(divide="ignore"):
        log_total = np.where(less > -0.5, np.log1p(np.maximum(less, -0.5)), np.log(weights @ np.exp(beside)))
    return np.asarray(top + log_total / power)


def largest(x: F64) -> float:
    return float(np.abs(x).max(initial=0.0, where=np.isfinite(x)))
