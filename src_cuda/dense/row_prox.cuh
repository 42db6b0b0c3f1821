// Mirrors src_c/prox_rows.h (prox_rows): u = prox(s) of one row, its marginal and its terms of the row scalars.
#include "common/penalty.h"
#include "state.cuh"

#if !KL_ROWS // out of line: the hot loop keeps its registers; log u itself, since a bound on it must not be rounded
__device__ __noinline__ double general_prox(const State &S, Point p, double s, double shift) {
    if (isinf(p.x)) return -INF;
    return prox_log((int)S.rows.penalty, log(s) - p.x - shift, p.y, log(p.y), p.z, p.w, S.limits.reg);
}

__device__ __noinline__ double general_dual(const State &S, Point p, double log_u) {
    return dual_term((int)S.rows.penalty, S.limits.reg * log_u, p.y, p.z, p.w);
}
#endif

// The row scalars of one row of the tile, ROW_MASS .. ROW_DEAD; dual: the terms that the translation does not scale
// with the mass.
typedef double RowSums[NEXT_B];

#if NARROW && KL_ROWS
// The data for the prox of a row in a pass: log2 u = whole + part - (fi + rest) log2 s
struct Row {
    float whole, part, fi, rest;
    double rho, mass; // rho holds -rho and mass holds reg a, as in Point; costs of 1e-120 put them beyond float32
};

FN Row row_of(Point p, double shift) {
    const double t = (p.x - (1 - p.y) * shift) * LOG2E;
    const float whole = rintf((float)t), fi = (float)p.y;
    return {whole, (float)(t - whole), fi, (float)(p.y - fi), p.z, p.w};
}

// u from s, with exponents kept separately, so that their size costs no digits. log2 u is low + high.
FN float short_prox(Row p, float s, float &high, float &low) {
    const int bits = __float_as_int(s), e = (bits - 0x3f400000) >> 23; // mantissa in [.75, 1.5)
    const float m = __int_as_float(bits - (e << 23)), exponent = (float)e, product = p.fi * exponent;
    float log_m, u;
    asm("lg2.approx.f32 %0, %1;" : "=f"(log_m) : "f"(m));
    const float left = fmaf(-p.fi, exponent, product); // rounding error of `product`
    high = rintf(fminf(fmaxf(p.whole - product, -200.0f), 122.0f));
    low = ((p.whole - high) - product) + (left + fmaf(-p.rest, exponent, fmaf(-p.fi, log_m, p.part)));
    asm("ex2.approx.f32 %0, %1;" : "=f"(u) : "f"(low));
    return high < -122.0f ? 0.0f : __int_as_float(__float_as_int(u) + ((int)high << 23));
}
#else
typedef Point Row;
FN Row row_of(Point p, double) { return p; }
#endif

// u of row i, from s = (K v)_i: 0 if it is dead, left out or beyond m. If `mine`, the row is stored and
// counted.  log u is relative to K.
FN num row_scale(const State &S, int i, Row p, num s, double shift, bool mine, double *row) {
    if (isinf(s)) s = 0; // a sum that overflowed is as unusable as one that vanished
    const bool live = s >= (num)(NARROW ? 1.2e-38 : TINY), there = i < (int)S.m;
#if NARROW && KL_ROWS
    float high, low;
    const bool left_out = isinf(p.whole);
    const num found = short_prox(p, s, high, low), u = live && !left_out ? found : s == s ? 0.0f : s;
#else
    const bool left_out = isinf(p.x);
#if KL_ROWS // p = {base, fi, -rho, reg a}: log u = base - (1 - fi) shift - fi log s
    const double log_u = live && there ? p.x - (1 - p.y) * shift - p.y * log((double)s) : -INF;
#else       // p = {d, t, rho, upper}, d = inf: left out
    const double whole = live && there ? general_prox(S, p, s, shift) : -INF;
    const double log_u = left_out ? -INF : whole - p.x - shift;
#endif
    const double value = exp(log_u < BOUND ? log_u : BOUND);
    const num u = s == s ? (num)value : s;
#endif
    if (!mine || !there) return there ? u : (num)0;
#if NARROW && KL_ROWS
    const double log_u = ((double)high + (double)low) * LN2;
#endif
    const double r = (double)u * (double)s;
    S.u_log[i] = live && !left_out ? log_u : -INF;
    S.r[i] = r;
#if !NARROW
    S.u_scale[i] = u;
#endif
    row[ROW_MASS] += r;
    row[ROW_SCALE] += u;
    if (!live || left_out) {
        row[ROW_DEAD] += !left_out;
        return u;
    }
#if NARROW && KL_ROWS
    row[ROW_SOFT] += p.rho * r;
    row[ROW_DUAL] += p.mass * log_u;
#elif KL_ROWS
    row[ROW_SOFT] += p.z * r;
    row[ROW_DUAL] += p.w * log_u;
#else
    row[ROW_DUAL] += general_dual(S, p, whole);
#endif
    return u;
}

#if !NARROW
// row_scale with one potential: u is v, whatever the prox of s, and the dual terms are the columns'.
FN double same_scale(const State &S, int i, double s, bool mine, double *row) {
    if (i >= (int)S.m) return 0;
    const double v = S.v_scale[i], r = v * s, absorbed = S.cols.absorbed[i];
    if (!mine) return v;
    S.u_log[i] = S.x_next[i] - absorbed;
    S.r[i] = r;
    S.u_scale[i] = v;
    row[ROW_MASS] += r;
    row[ROW_SCALE] += v;
    row[ROW_DEAD] += !(s >= TINY) && isfinite(absorbed);
    return v;
}
#endif
