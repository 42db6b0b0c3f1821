// Mirrors src_c/prox.h: marginal penalties D(r | t), one point at a time, float64.
// log u = prox(log s) with s = (K v)_i;  dual_term = -D*(-f), f = reg log u;  gap_term = D(r|t) + D*(-f) + f r >= 0.
// Formulas: Chizat, Peyre, Schmitzer, Vialard 2018 (KL, TV, range); L2 by the Wright omega function.
#ifndef PROX_CUH
#define PROX_CUH
#include "state.cuh"

__device__ __forceinline__ double clip(double x, double low, double high) { return fmin(fmax(x, low), high); }

// omega + log omega = z, by three Halley steps from its asymptotes and, between them, from its tangent at 1.
__device__ __forceinline__ double wright_omega(double z)
{
    if (z < -36)
        return exp(z);
    double w = z > 1 ? z - log(z) : exp(z < -1 ? z : 0.5 * z - 0.5);
    for (int i = 0; i < 3; i++) {
        const double r = z - w - log(w), p = 2 * (1 + w) * (1 + w + 2 * r / 3);
        w *= 1 + r / (1 + w) * (p - r) / (p - 2 * r);
    }
    return w;
}

__device__ __forceinline__ double prox(int kind, double log_s, double t, double log_t, double rho, double upper,
                                       double reg)
{
    const double balanced = log_t - log_s; // r = t
    switch (kind) {
    case KL:
        return isinf(rho) ? balanced : rho / (rho + reg) * balanced;
    case BALANCED:
        return balanced;
    case TV:
        return clip(balanced, -rho / reg, rho / reg); // r = t while |f| <= rho
    case L2:
        return rho * t / reg - wright_omega(log(rho / reg) + log_s + rho * t / reg);
    default:
        return clip(0, log(rho) + balanced, log(upper) + balanced);
    }
}

__device__ __forceinline__ double dual_term(int kind, double f, double t, double rho, double upper)
{
    switch (kind) {
    case KL:
    case BALANCED:
        return isinf(rho) ? f * t : -rho * t * expm1(-f / rho);
    case TV:
        return f < -rho * (1 + 1e-9) ? -INF : clip(f, -rho, rho) * t;
    case L2:
        return f < rho * t ? f * t - f * f / (2 * rho) : rho * t * t / 2;
    default:
        return fmin(f * rho * t, f * upper * t);
    }
}

__device__ __forceinline__ double violation(int kind, double r, double t, double rho, double upper)
{
    if (kind == RANGE)
        return fmax(0.0, fmax(rho * t - r, r - upper * t));
    return kind <= BALANCED && isinf(rho) ? fabs(r - t) : 0;
}

// q h(x), h(x) = x e^x - e^x + 1, with r = q e^x given
__device__ __forceinline__ double kl_gap(double q, double r, double x)
{
    return fabs(x) < 1e-4 ? q * x * x * (0.5 + x / 3) : r * x - r + q;
}

// The penalties without a closed residual: TV, L2, range (r clipped into the range).
__device__ __forceinline__ double gap_term(int kind, double f, double r, double t, double rho, double upper)
{
    if (kind == L2) {
        const double d = r - t + f / rho;
        return f >= rho * t ? r * (f - rho * t) + 0.5 * rho * r * r : 0.5 * rho * d * d;
    }
    if (kind == TV) { // products: the mass may be far below t, and at the bound, but for rounding, f counts as it
        const double at = fabs(f) >= rho * (1 - 1e-15) ? copysign(rho, f) : f;
        const double gap = r < t ? (rho - at) * (t - r) : (rho + at) * (r - t);
        return f < -rho * (1 + 1e-9) ? INF : gap + fmax(0.0, f - rho) * r;
    }
    r = clip(r, rho * t, upper * t);
    return fmax(0.0, f * r - dual_term(kind, f, t, rho, upper));
}
#endif
