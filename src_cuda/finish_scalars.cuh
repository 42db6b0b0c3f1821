// Mirrors src_c/finish.c (anderson_weights, certify, judge): the scalar work between the two sweeps of finish_pass.
//
// Every block does it on the same numbers: one warp finds Anderson's weights, beside it one thread finds the dual value
// and guards the last step.  What the next sweep does not wait for, the certified error and the status, comes later
// (verdict).  Included by finish_pass.cuh.
#ifndef FINISH_SCALARS_CUH
#define FINISH_SCALARS_CUH
#include "progress.cuh"

#define NARROW_PATIENCE 20
#define NARROW_LIMIT 1e20 // sums of u or v beyond it, or below its inverse: float32 is not safe
#define SCALE_LIMIT 1e30  // and beyond it K is rebuilt
#define MOST_SCALE 8e36   // e^BOUND: a scaling beyond it is clipped
#define MOST_LOST 1e-3    // relative mass hidden by a K that has been outgrown

// gamma: (D gram D + 1e-10) D^-1 gamma = D rhs, D = diag(gram)^-1/2, by Gauss and Jordan: lane 6 i + k of one warp holds
// entry (i, k), k = 5 the right-hand side of row i.  Lane i of the warp brings rhs_i; lane 6 i + 5 returns gamma_i.
__device__ __forceinline__ double solve_gamma(const Progress &p, int depth, double rhs, int i, int k)
{
    const bool in = i < depth, diagonal = i == k;
    const double scale = in ? rsqrt(fmax(p.gram[i * (MEMORY + 1)], TINY)) : 0;
    const double right = __shfl_sync(FULL, rhs, i), other = __shfl_sync(FULL, scale, (MEMORY + 1) * k % 32);
    double A = k == MEMORY ? right * scale : in && k < depth ? p.gram[i * MEMORY + k] * scale * other : 0;
    A += diagonal ? 1e-10 : 0;
#pragma unroll 1
    for (int row = 0; row < depth; row++) {
        const double pivot = inverse(__shfl_sync(FULL, A, row * (MEMORY + 2)));
        const double upper = __shfl_sync(FULL, A, row * (MEMORY + 1) + k) * pivot;
        const double factor = __shfl_sync(FULL, A, i * (MEMORY + 1) + row);
        A = i == row ? upper : fma(-factor, upper, A);
    }
    return A * scale;
}

// How many differences count once the newest one is in `slot`
__device__ __forceinline__ int new_depth(const State &S, double depth, double head)
{
    return (int)(depth < S.memory && head == depth ? depth + 1 : depth);
}

// Put the newest difference in the Gram matrix and find the weights: <F, .> = <f, .> + c <1, .>.  One warp.
__device__ __forceinline__ void anderson(Finish &F, double c, int slot, int depth)
{
    Progress &p = F.p;
    const double *t = F.total;
    const int lane = threadIdx.x % 32;
    double rhs = 0, dot = 0;
    if (lane == slot) {
        p.ones[slot] = t[SUM_P] + c * t[SUM_ONES];
        dot = t[SUM_PP] + c * (2 * t[SUM_P] + c * t[SUM_ONES]);
        rhs = t[SUM_PF] + c * (t[SUM_P] + t[SUM_F] + c * t[SUM_ONES]);
    } else if (lane < depth) {
        dot = t[SUM_DOT + lane] + c * p.ones[lane];
        rhs = t[SUM_RHS + lane] + c * p.ones[lane];
    }
    if (lane < depth)
        p.gram[lane * MEMORY + slot] = p.gram[slot * MEMORY + lane] = dot;
    __syncwarp();
    const int i = lane < MEMORY * (MEMORY + 1) ? lane / (MEMORY + 1) : MEMORY - 1, k = lane % (MEMORY + 1);
    const double gamma = solve_gamma(p, depth, rhs, i, k);
    if (k == MEMORY && i < depth)
        p.gamma[i] = gamma;
}

// What the guard needs of the state; the words are those of mapuot_stats.
__device__ __forceinline__ void certify(const State &S, Finish &F, const Translation &move)
{
    const double *t = F.total, *row = F.row;
    Trace &out = F.trace;
    out.mass = move.kappa * row[ROW_MASS];
    out.gap = t[SUM_GAP];
    out.dual = S.dual_constant + move.kappa * row[ROW_SOFT] + row[ROW_DUAL] +
               S.hard_weight * S.reg * (F.p.shift + S.fi_rows * move.lam) + t[SUM_DUAL] - S.reg * out.mass;
    out.dead = row[ROW_DEAD] + t[SUM_DEAD];
    // entries of K below flush, and u below the least number: LEAST_MASS stands for so many of these
    out.lost = (S.flush * row[ROW_SCALE] + LEAST_MASS) * row[NEXT_SCALE] * move.kappa * inverse(out.mass);
    out.rejected = 0;
}

__device__ __forceinline__ bool in_range(double x) { return x <= NARROW_LIMIT && x >= 1 / NARROW_LIMIT; }

__device__ __forceinline__ double largest_scale(const Finish &F) { return fmax(F.row[ROW_SCALE], F.row[NEXT_SCALE]); }

__device__ __forceinline__ bool clipped(const Finish &F) { return !(largest_scale(F) < MOST_SCALE); }

// v has left the range of this K, or points in use are dead, u is clipped or mass is hidden for want of a fresh one.
__device__ __forceinline__ bool outgrown(const Finish &F)
{
    const double scale = F.row[NEXT_SCALE];
    const bool held = scale <= SCALE_LIMIT && scale >= 1 / SCALE_LIMIT;
    const bool worse = F.trace.dead > F.p.dead || clipped(F) > (F.p.clipped > 0);
    return F.p.since_absorb > 0 && (!held || worse || F.trace.lost > MOST_LOST);
}

// May the numbers of a float32 pass be used at all?
__device__ __forceinline__ bool usable(const Finish &F)
{
    const Trace &out = F.trace;
    return in_range(F.row[ROW_SCALE]) && in_range(F.row[NEXT_SCALE]) && out.dead == 0 && isfinite(out.dual) &&
           isfinite(out.gap + F.total[SUM_HARD]) && out.mass > 0;
}

__device__ __forceinline__ double judge(const State &S, Finish &F)
{
    const Trace &out = F.trace;
    Progress &p = F.p;
    const bool done = out.error <= S.tol || (out.dual > -INF && out.gap <= S.tol_gap * fabs(out.dual));
    const double storage = 3 * S.storage_error;
    if (out.rejected > 0)
        return RUNNING; // the last image, from which the next pass starts, is finite
    if (!isfinite(out.mass) || isnan(out.dual))
        return NOT_FINITE;
    if (out.mass < LEAST_MASS)
        return p.since_absorb == 1 ? UNDERFLOW : ABSORB;
    if (stalled(p, out) && !done)
        return out.dead > 0 ? UNDERFLOW : STALLED;
    if (done && !(p.narrow > 0))
        return CONVERGED;
    if (!done && S.finer > 0 && storage >= S.tol / 4 && out.error - storage <= fmax(S.tol, storage) / 2)
        return COARSE;
    if (p.narrow > 0 && S.tol >= 0 && (done || out.error <= S.narrow_floor || p.since_best >= NARROW_PATIENCE)) {
        p.narrow = 0; // only a pass in float64 certifies
        p.best_dual = -INF;
    }
    if (p.since_absorb == 1) { // what a fresh K leaves dead or clipped stays so
        p.dead = out.dead;
        p.clipped = clipped(F);
    } else if (out.lost > S.flush_tol || largest_scale(F) > SCALE_LIMIT)
        return ABSORB;
    return RUNNING;
}

// The step that the guard allows; p.step: 0 take G, 1 extrapolate, 2 go back to the last image.
__device__ __forceinline__ void decide(const State &S, Finish &F, const Translation &move, double common)
{
    Progress &p = F.p;
    const double shift = p.shift;
    const double slack = p.narrow > 0
                             ? 1e-6 * S.reg * F.trace.mass + 1e-7 * S.dual_scale // rho times float32's rounding
                             : 1e-13 * fabs(p.best_dual) + 2e-15 * S.dual_scale;
    p.slot = -1;
    p.common = common;
    p.shift += move.lam;
    p.offset = move.off;
    p.kappa = move.kappa;
    if (p.extrapolated > 0 && !(F.trace.dual >= p.best_dual - slack)) {
        F.trace.rejected = 1;
        p.depth = p.head = p.have = p.extrapolated = 0;
        p.step = 2;
        if (!isfinite(p.shift))
            p.shift = shift;
        return;
    }
    p.best_dual = p.extrapolated > 0 ? fmax(p.best_dual, F.trace.dual) : F.trace.dual;
    p.step = p.extrapolated = S.memory > 0 && p.have > 0;
    if (p.step > 0) {
        p.depth = new_depth(S, p.depth, p.head);
        p.slot = p.head;
        p.head = p.head + 1 < S.memory ? p.head + 1 : 0;
    }
    p.have = 1;
}

// Dual value and guard of the pass; one thread.
__device__ __forceinline__ void settle(const State &S, Finish &F, const Translation &move, double common)
{
    Progress &p = F.p;
    certify(S, F, move);
    p.turn = p.turn < 5 ? p.turn + 1 : 0; // modulo 6: of three and of two buffers
    p.step = 3;
    if (p.narrow > 0 && !usable(F)) {
        p.narrow = 0;
        p.best_dual = -INF;
        return;
    }
    if (outgrown(F)) {
        p.status = ABSORB;
        return;
    }
    decide(S, F, move, common);
}

// Certified error and status, while the second sweep goes on; the warp before the last one, then it keeps the trace.
__device__ __forceinline__ void verdict(const State &S, Finish &F, bool keep)
{
    const double *t = F.total;
    Trace &out = F.trace;
    Progress &p = F.p;
    if (threadIdx.x / 32 != blockDim.x / 32 - 2 || p.step > 2)
        return;
    if (threadIdx.x % 32 == 0) {
        const double over = 1 / out.mass;
        const double storage = 3 * S.storage_error * (S.ratio ? 1 + p.since_absorb : 1); // in place: once a pass
        out.error = plan_error(out.gap * over * S.inv_reg) + t[SUM_HARD] * over + storage + out.lost +
                    4.5e-16 * fabs(p.shift); // log u and log v hold it: 4 roundings
        if (clipped(F) || isnan(out.error))
            out.gap = out.error = INF; // u is no prox then
        if (t[SUM_HARD] > (S.tol_gap >= 0 ? S.tol_gap : fmax(S.tol, 0.0)) * out.mass)
            out.gap = INF;
        out.residual = out.rejected > 0 ? INF : fmax(t[MAX_F] + p.common, t[MAX_MINUS] - p.common);
        p.passes += 1;
        p.since_absorb += 1;
        out.status = p.status = judge(S, F);
        if (p.status == NOT_FINITE || p.status == UNDERFLOW)
            out.error = INF;
    }
    __syncwarp();
    const int q = threadIdx.x % 32;
    if (keep && q < (int)(sizeof(Trace) / 8))
        ((double *)(S.trace + ((int)p.passes - 1) % TRACE_PASSES))[q] = ((const double *)&out)[q];
}

// The scalar work between the sweeps; every block does it on the same numbers, the weights beside the rest.
__device__ __forceinline__ void finish_scalars(const State &S, Finish &F)
{
    const int warp = threadIdx.x / 32, slot = (int)F.p.head, depth = new_depth(S, F.p.depth, F.p.head);
    const bool weights = S.memory > 0 && F.p.have > 0;
    __syncthreads();
    if (warp < 2) {
        const Translation move = F.move;
        double common = 0;
        if (S.mu_rate > 0) {
            const double mass = move.kappa * F.row[ROW_MASS];
            common = S.mu_rate * far_log(F.total[SUM_NEXT] * inverse(mass));
        }
        if (warp == 1 && weights)
            anderson(F, common, slot, depth);
        if (threadIdx.x == 0)
            settle(S, F, move, common);
    }
    __syncthreads();
}
#endif
