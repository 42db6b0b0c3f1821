/* penalty.h - the marginal penalties D(r | t), one point at a time, on logarithms, in float64.
 *
 * s = (K v)_i is the kernel sum of the point. prox_log returns log u = f / reg for the optimal f; the marginal is r = u
 * s.
 * rho is reg_m of the point, inf for a hard point. MAPUOT_RANGE: lower t <= r <= upper t, with the lower factor in rho.
 * Vector forms of KL and balanced: prox_rows.h and finish_tmpl.c. The oracle, mapuot/penalties.py, shares no code.
 * Formulas: Chizat, Peyre, Schmitzer, Vialard 2018; L2 through the Wright omega function w + log w = z. */
#pragma once
#include "common/record.h"

FN double clip(double x, double low, double high) { return fmin(fmax(x, low), high); }

/* Solve omega + log omega = z by three Halley steps. They start from the asymptotic forms or, between these, from the
 * tangent at z = 1. */
FN double wright_omega(double z) {
    if (z < -36) return exp(z);
    double w = z > 1 ? z - log(z) : exp(z < -1 ? z : 0.5 * z - 0.5);
    for (int i = 0; i < 3; i++) {
        const double r = z - w - log(w), p = 2 * (1 + w) * (1 + w + 2 * r / 3);
        w *= 1 + r / (1 + w) * (p - r) / (p - 2 * r);
    }
    return w;
}

FN double prox_log(int penalty, double log_s, double t, double log_t, double rho, double upper, double reg) {
    const double balanced = log_t - log_s, bound = rho / reg; /* r = t */
    switch (penalty) {
    case MAPUOT_KL: /* (t / s)^fi */
        return isinf(rho) ? balanced : rho / (rho + reg) * balanced;
    case MAPUOT_BALANCED:
        return balanced;
    case MAPUOT_TV: /* r = t while |f| <= rho */
        return clip(balanced, -bound, bound);
    case MAPUOT_L2: { /* log u = rho t / reg - omega(z) = log omega(z) - x, z = x + rho t / reg: the stabler form */
        const double x = log(bound) + log_s, w = wright_omega(x + bound * t);
        return bound * t < fabs(x) ? bound * t - w : log(w) - x;
    }
    default: /* range: clip(1, lower t / s, upper t / s) */
        return clip(0, log(rho) + balanced, log(upper) + balanced);
    }
}

/* -D*(-f), the point's term of the dual value; for total variation it is -inf below -rho, up to rounding */
FN double dual_term(int penalty, double f, double t, double rho, double upper) {
    switch (penalty) {
    case MAPUOT_KL:
    case MAPUOT_BALANCED:
        return isinf(rho)
                   ? f * t
                   : -rho * (t * expm1(-f / rho)); /* t first: rho t may underflow, t (e^(-f / rho) - 1) does not */
    case MAPUOT_TV:
        return f < -rho * (1 + 1e-9) ? -INF : clip(f, -rho, rho) * t;
    case MAPUOT_L2:
        return f < rho * t ? f * t - f * (f / (2 * rho)) : rho * t * t / 2;
    default: /* f is inf for a point that no mass can reach, and rho may be 0 */
        return f < 0 ? f * upper * t : rho > 0 ? f * rho * t : 0;
    }
}

/* Distance of r from the marginals that a hard penalty allows; 0 for soft penalties */
FN double violation(int penalty, double r, double t, double rho, double upper) {
    if (penalty == MAPUOT_RANGE) return fmax(0.0, fmax(rho * t - r, r - upper * t));
    return penalty <= MAPUOT_BALANCED && isinf(rho) ? fabs(r - t) : 0;
}

/* h(x) / x^2, h(x) = x e^x - e^x + 1 = sum over k of (k - 1) x^k / k!, to 1e-15 for |x| < 1/4.  Twin: kl.h */
FN double kl_series(double x) {
    const double late = 1.0 / 5760 + x * (1.0 / 45360 + x * (1.0 / 403200 + x * (1.0 / 3991680 + x / 43545600)));
    return 0.5 + x * (1.0 / 3 + x * (0.125 + x * (1.0 / 30 + x * (1.0 / 144 + x * (1.0 / 840 + x * late)))));
}

/* q h(x), given r = q e^x. A rounding d of the exponent puts r off by r d, so that r x - r + q is off by r d: for small
 * x, more than its own size. The series is off by x r d only. */
FN double kl_gap(double q, double r, double x) { return fabs(x) < 0.25 ? q * x * x * kl_series(x) : r * x - r + q; }

/* Does f lie on the bound of total variation, up to rounding? */
FN int at_bound(double f, double rho) { return fabs(f) >= rho * (1 - 1e-15); }

/* Penalties with kinks: the distance of r from the marginals that the potential f makes optimal. Total variation: t
 * inside the bounds, 0 to t at the upper bound of f, t to inf at the lower one. Range: one end, or all of it where
 * f = 0. Other penalties: INF. */
FN double misfit(int penalty, double f, double r, double t, double rho, double upper) {
    if (penalty == MAPUOT_TV) {
        const double beyond = rho * (1 + 1e-15);
        if (fabs(f) > beyond) return f > 0 ? r : INF;
        return !at_bound(f, rho) ? fabs(r - t) : fmax(0.0, f > 0 ? r - t : t - r);
    }
    if (penalty == MAPUOT_RANGE)
        return f < 0 ? fabs(r - upper * t) : f > 0 ? fabs(r - rho * t) : violation(penalty, r, t, rho, upper);
    return INF;
}

/* Fenchel-Young gap D(r|t) + D*(-f) + f r of the soft part, >= 0; for a range, at r clipped into the range */
FN double gap_term(int penalty, double f, double r, double t, double rho, double upper) {
    switch (penalty) {
    case MAPUOT_KL:
    case MAPUOT_BALANCED: {
        if (isinf(rho) || t == 0) return 0;
        const double q = t * exp(-f / rho);
        return rho * (r > 0 ? kl_gap(q, r, log(r) - log(t) + f / rho) : q);
    }
    case MAPUOT_TV: { /* as products: r may be far below t; an f that is rounded off its bound counts as the bound */
        const double at = at_bound(f, rho) ? copysign(rho, f) : f;
        const double gap = r < t ? (rho - at) * (t - r) : (rho + at) * (r - t);
        return f < -rho * (1 + 1e-9) ? INF : gap + fmax(0.0, f - rho) * r;
    }
    case MAPUOT_L2: {
        const double e = r - t + f / rho;
        return f < rho * t ? 0.5 * rho * e * e : r * (f - rho * t) + 0.5 * rho * r * r;
    }
    default:
        r = clip(r, rho * t, upper * t);
        return fmax(0.0, f * r - dual_term(penalty, f, t, rho, upper));
    }
}
