// Mirrors src_c/finish_tmpl.c and src_c/finish.c (anderson_weights, judge): certificate, guard, Anderson and the
// second sweep over the columns of one problem of a batch.  Included after batch.cuh.
#ifndef BATCH_FINISH_CUH
#define BATCH_FINISH_CUH
#include "batch.cuh"
#include "progress.cuh"

// Anderson's weight of difference `lane`: columns normalised, ridge 1e-10; one warp.  t: lane q has sum q, c: what the
// residual gains by its translation.
__device__ __forceinline__ double anderson(Standing &p, double t, double c, int slot, int depth)
{
    const int lane = threadIdx.x % 32, row = lane < depth ? lane : 0;
    const double F = __shfl_sync(FULL, t, SUM_F), P = __shfl_sync(FULL, t, SUM_P), ones = p.mass_b;
    const double PP = __shfl_sync(FULL, t, SUM_PP), PF = __shfl_sync(FULL, t, SUM_PF);
    double dot = __shfl_sync(FULL, t, SUM_DOT + row) + c * p.ones[row];
    double y = __shfl_sync(FULL, t, SUM_RHS + row) + c * p.ones[row];
    if (row == slot) {
        dot = PP + c * (2 * P + c * ones);
        y = PF + c * (P + F + c * ones);
    }
    __syncwarp();
    if (lane < depth)
        p.gram[lane * DEPTH + slot] = p.gram[slot * DEPTH + lane] = dot;
    if (lane == slot)
        p.ones[slot] = P + c * ones;
    __syncwarp();
    const double scale = lane < depth ? rsqrt(fmax(p.gram[row * (DEPTH + 1)], TINY)) : 0;
    double A[DEPTH], inverted = 0;
    y *= scale;
#pragma unroll
    for (int k = 0; k < DEPTH; k++)
        A[k] = p.gram[row * DEPTH + k] * scale * __shfl_sync(FULL, scale, k) + (k == lane ? 1e-10 : 0);
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        if (i >= depth)
            break;
        const double pivot = inverse(__shfl_sync(FULL, A[i], i)), factor = lane == i ? 0 : A[i] * pivot;
        inverted = lane == i ? pivot : inverted;
#pragma unroll
        for (int k = i + 1; k < DEPTH; k++)
            A[k] -= factor * __shfl_sync(FULL, A[k], i);
        y -= factor * __shfl_sync(FULL, y, i);
    }
    const double gamma = lane < depth ? y * inverted * scale : 0;
    return __all_sync(FULL, isfinite(gamma)) ? gamma : 0;
}

// What the state is worth; t as in anderson.
__device__ __forceinline__ Report certify(const Batch &S, const Work &W, const Standing &p, const Move &move, double t)
{
    const double loss = __shfl_sync(FULL, t, LOSS), worth = __shfl_sync(FULL, t, WORTH);
    const double shift = p.shift + move.off, c_mass = S.product ? p.mass_a * p.mass_b : (double)S.m * (double)S.n;
    Report out;
    out.mass = move.kappa * move.mass;
    const double part = loss * inverse(out.mass);
    out.gap = S.k2 > 0 ? S.rho2 * loss : part <= (S.tol_gap >= 0 ? S.tol_gap : S.tol) ? 0 : INF;
    out.error = S.k2 > 0 ? plan_error(S.rho2 * S.inv_reg * part) : part;
    out.error += S.unresolved * (S.rounding + 4.5e-16 * fabs(shift)); // log u and log v hold it: 4 roundings
    out.dual = S.reg * (c_mass - out.mass);
    out.dual += S.k1 > 0 ? S.rho1 * (p.mass_a - out.mass) : S.reg * (total(W.row, WARPS) + shift * p.mass_a);
    out.dual += S.k2 > 0 ? S.rho2 * (p.mass_b - move.weight * move.grow) : S.reg * worth;
    return out;
}

// The status that the certificate gives.
__device__ __forceinline__ int judge(const Batch &S, Standing &p, const Report &out, bool rejected)
{
    const bool done = out.error <= S.tol || out.gap <= S.tol_gap * fabs(out.dual);
    if (rejected)
        return RUNNING;
    if (out.mass < LEAST_MASS)
        return UNDERFLOW;
    if (!isfinite(out.mass) || !isfinite(out.dual) || !isfinite(out.error))
        return NOT_FINITE;
    if (done)
        return CONVERGED;
    return stalled(p, out) ? STALLED : RUNNING;
}

// Sweep 2: the next x by extrapolation (step 1), as it is (0), or the last image again (2); true where v goes too far.
__device__ __forceinline__ bool second_sweep(const Batch &S, Work &W, double *col, int ld, double *v, const Standing &p,
                                             int step, int slot, double c, double gamma)
{
    const int depth = (int)p.depth;
    const double g[DEPTH] = {__shfl_sync(FULL, gamma, 0), __shfl_sync(FULL, gamma, 1), __shfl_sync(FULL, gamma, 2),
                             __shfl_sync(FULL, gamma, 3), __shfl_sync(FULL, gamma, 4)};
    double sum = 0;
    bool far = false;
#pragma unroll 1
    for (int j = threadIdx.x; j < (int)S.n; j += THREADS) {
        double x = col[IMAGE * ld + j];
        if (!(col[WEIGHT * ld + j] > 0))
            continue;
        if (step < 2) {
            const double G = col[NEW_G * ld + j] + c, f = col[NEW_F * ld + j] + c;
            double y = G;
            if (slot >= 0) {
                col[(DF + slot) * ld + j] = f - col[LAST * ld + j];
                col[(DG + slot) * ld + j] = G - x;
            }
#pragma unroll
            for (int i = 0; i < DEPTH; i++)
                if (step == 1 && i < depth)
                    y -= g[i] * col[(DG + i) * ld + j];
            col[LAST * ld + j] = f;
            col[IMAGE * ld + j] = G;
            x = y;
        }
        far |= scale_column(S, col, ld, v, j, x, p.shift);
        sum += col[Q * ld + j];
    }
    join_next(W, sum);
    return far;
}

// Scalar work and sweep 2, by every warp that has columns; what warp 0 finds goes to W.report.  odd: the pass does not
// count, K is to be rebuilt around the same x.  Returns whether K is to be rebuilt.
__device__ __forceinline__ bool finish_columns(const Batch &S, Work &W, double *col, int ld, double *v,
                                               const Move &move, bool odd)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = column_warps((int)S.n);
    Standing &at = W.standing[warp];
    Standing p = at;
    double t = 0;
#pragma unroll 1
    for (int w = 0; w < warps; w++)
        t += lane < SUMS ? W.part[w][lane] : 0;
    Report out = odd ? W.report : certify(S, W, p, move, t);
    out.passes = p.passes + 1;
    out.status = RUNNING;
    int step = 3, slot = -1, depth = 0;
    double c = 0, gamma = 0;
    if (odd) {
        out.status = p.since_build == 0 ? NOT_FINITE : RUNNING;
    } else {
        const double worth = S.k2 > 0 ? __shfl_sync(FULL, t, WORTH) : p.mass_b;
        const double slack = 1e-13 * fabs(p.best_dual);
        const double rounding = 2e-15 * (S.rho1 * p.mass_a + S.rho2 * p.mass_b);
        c = S.mu_rate > 0 ? S.mu_rate * (log(worth) - log(out.mass)) : 0;
        const bool rejected = p.extrapolated > 0 && !(out.dual >= p.best_dual - slack - rounding);
        p.shift += move.off;
        if (rejected) {
            p.depth = p.head = p.have = p.extrapolated = 0;
            step = 2;
        } else {
            p.best_dual = p.extrapolated > 0 ? fmax(p.best_dual, out.dual) : out.dual;
            step = S.memory > 0 && p.have > 0;
            p.extrapolated = step;
            if (step) {
                slot = (int)p.head;
                p.depth = p.depth < S.memory && p.head == p.depth ? p.depth + 1 : p.depth;
                p.head = p.head + 1 < S.memory ? p.head + 1 : 0;
            }
            p.have = 1;
        }
        depth = (int)p.depth;
        out.status = judge(S, p, out, rejected);
    }
    p.passes += 1;
    p.since_build += 1;
    __syncwarp();
    if (lane == 0) {
        at.shift = p.shift, at.best_dual = p.best_dual, at.best_error = p.best_error;
        at.progress_dual = p.progress_dual, at.since_best = p.since_best, at.since_build = p.since_build;
        at.passes = p.passes, at.depth = p.depth, at.head = p.head, at.have = p.have;
        at.extrapolated = p.extrapolated;
    }
    __syncwarp();
    if (step == 1)
        gamma = anderson(at, t, c, slot, depth);
    const bool far = step < 3 && second_sweep(S, W, col, ld, v, at, step, slot, c, gamma);
    if (threadIdx.x == 0)
        W.report = out;
    return odd || far;
}
#endif
