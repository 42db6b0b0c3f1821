/* prox.h - the marginal penalties one entry at a time, on logarithms, in float64.  Twin: mapuot/penalties.py.
 *
 * s = (K v)_i is the kernel that the point sees; prox gives log u with f = reg log u optimal, r = u s its marginal.
 * KL and balanced have vector forms in kernels_tmpl.c and finish_tmpl.c; a KL side with mixed rho comes here too.
 * Formulas: Chizat, Peyre, Schmitzer, Vialard 2018; L2 through the Wright omega function w + log w = z.
 */
#ifndef MAPUOT_PROX_H
#define MAPUOT_PROX_H
#include <math.h>

#include "mapuot.h"

/* omega(z): w + log w = z, Newton on log w, started at the asymptotes. */
static inline double wright_omega(double z)
{
    if (z < -30.0)
        return exp(z);
    double w = z > 1.0 ? z - log(z) : exp(z < -1.0 ? z : 0.56 * z - 0.57);
    for (int i = 0; i < 40; i++) {
        double step = (w + log(w) - z) / (1.0 + 1.0 / w);
        double next = w - step;
        next = next > 0.0 ? next : 0.5 * w;
        if (fabs(next - w) <= 1e-16 * w)
            return next;
        w = next;
    }
    return w;
}

static inline double prox_log(const mapuot_side *side, int64_t i, double log_s, double reg)
{
    double t = side->weight[i], rho = side->rho[i];
    double balanced = t > 0.0 ? log(t) - log_s : -INFINITY;
    double bound = rho / reg;
    switch (side->penalty) {
    case MAPUOT_KL:
    case MAPUOT_BALANCED: /* (t / s)^fi */
        return (isinf(rho) ? 1.0 : rho / (rho + reg)) * balanced;
    case MAPUOT_TV: /* clip(t / s, e^-rho/reg, e^rho/reg) */
        return fmin(fmax(balanced, -bound), bound);
    case MAPUOT_L2: /* f = rho t - reg omega(log(rho s / reg) + rho t / reg) */
        return bound * t - wright_omega(log(bound) + log_s + bound * t);
    default: /* range: clip(1, lo t / s, hi t / s) */
        return fmin(fmax(0.0, log(rho) + balanced), log(side->upper[i]) + balanced);
    }
}

/* -D*(-f), what the point adds to the dual value; of total variation -inf beneath -rho (rounding apart) */
static inline double dual_term(const mapuot_side *side, int64_t i, double f)
{
    double t = side->weight[i], rho = side->rho[i];
    switch (side->penalty) {
    case MAPUOT_KL:
    case MAPUOT_BALANCED:
        return isinf(rho) ? f * t : -rho * t * expm1(-f / rho);
    case MAPUOT_TV:
        return f < -rho * (1 + 1e-9) ? -INFINITY : fmin(fmax(f, -rho), rho) * t;
    case MAPUOT_L2:
        return f < rho * t ? f * t - f * f / (2 * rho) : rho * t * t / 2;
    default:
        return fmin(f * rho * t, f * side->upper[i] * t);
    }
}

/* Fenchel-Young gap D(r|t) + D*(-f) + f r of the soft part; *hard += distance from what a hard penalty allows. */
static inline double gap_term(const mapuot_side *side, int64_t i, double f, double r, double *hard)
{
    double t = side->weight[i], rho = side->rho[i];
    switch (side->penalty) {
    case MAPUOT_KL:
    case MAPUOT_BALANCED: {
        if (isinf(rho)) {
            *hard += fabs(r - t);
            return 0.0;
        }
        if (t == 0.0)
            return 0.0;
        double q = t * exp(-f / rho); /* rho q h(log(r / q)), h(x) = x e^x - e^x + 1 */
        if (r <= 0.0)
            return rho * q;
        double x = log(r) - log(t) + f / rho;
        return rho * (fabs(x) < 1e-4 ? q * x * x * (0.5 + x / 3) : r * x - r + q);
    }
    case MAPUOT_TV: { /* products: the mass may be far below t, and at the bound, but for rounding, f counts as it */
        double at = fabs(f) >= rho * (1 - 1e-15) ? copysign(rho, f) : f;
        double gap = r < t ? (rho - at) * (t - r) : (rho + at) * (r - t);
        return f < -rho * (1 + 1e-9) ? INFINITY : gap + fmax(0.0, f - rho) * r;
    }
    case MAPUOT_L2: {
        double e = r - t + f / rho;
        return f < rho * t ? 0.5 * rho * e * e : r * (f - rho * t) + 0.5 * rho * r * r;
    }
    default: {
        double inside = fmin(fmax(r, rho * t), side->upper[i] * t);
        *hard += fabs(r - inside);
        return fmax(0.0, f * inside - dual_term(side, i, f));
    }
    }
}
#endif
