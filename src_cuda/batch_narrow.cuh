// Mirrors batch_finish.cuh in float32: what a narrow pass does once K^T u is summed, by one warp, four columns a lane.
// Included by batch_narrow.cu, whose header explains the quantities.
#ifndef BATCH_NARROW_CUH
#define BATCH_NARROW_CUH
#include "batch_build.cuh"

#define RP ((RT + 3) / 4 * 4) // rows of a group, padded to 16 bytes
#define LIMIT 1e12f           // a scale beyond it: K is rebuilt
#define DEAD 1e-30f           // a sum below it: no mass is in reach
#define PATIENCE 20           // passes without progress
#define RIDGE 1e-6f
#define NONE __int_as_float(0x7fffffff)

// G_BEFORE: two, the last image and the one before it, in turn
enum {
    Y,
    F_BEFORE,
    G_BEFORE,
    MASS = G_BEFORE + 2,
    WEIGHT_B,
    BASE,
    WEIGHT_Q,
    DIFF_F,
    DIFF_G = DIFF_F + DEPTH,
    KINDS = DIFF_G + DEPTH
};
// sums over the columns: v (K^T u), q = b v^-k2 and its moments of f; b-weighted ones of f, P = change of f, and y
enum { PLAN, SUM_Q, SUM_QF, SUM_QFF, OF_F, OF_P, OF_PP, OF_PF, OF_Y, OF_DOT, TOTALS = 16 };
enum { GO_ON, REBUILD, REJECT, STOP };

// Constants of a problem.  dual = dual_0 - dual_mass mass - rho2 sum q where both sides are KL.
struct Rates {
    float fi1, fi2, rest1, rest2, both, k2, lam_rate, mass_a, mass_b, share; // rest = 1 - fi, both = 1 - fi1 fi2
    float error, tol; // gap / (reg mass) = error sum q f^2 / mass
    double dual_0, dual_mass, slack;
};

// The column half tells the warp that judges beside it that the sums are there; with RACECHECK the whole block meets.
__device__ __forceinline__ void tell()
{
#if RACECHECK
    __syncthreads();
#else
    asm volatile("bar.arrive 1, 64;" ::: "memory");
#endif
}

__device__ __forceinline__ void hear()
{
#if RACECHECK
    __syncthreads();
#else
    asm volatile("bar.sync 1, 64;" ::: "memory");
#endif
}

struct Shared {
    double x[COLUMNS], E[COLUMNS], beta[COLUMNS], alpha[ROWS], a[ROWS], scratch[WARPS];
    double mass_a, mass_b, offset_a, offset_b; // sum a D, sum b E
    alignas(16) float v[COLUMNS], col[KINDS][COLUMNS], partial[GROUPS][COLUMNS + 16];
    alignas(16) float rows[WARPS][16][2 * RP + 4], u[WARPS][2 * RP];
    float row_base[WARPS][2 * RP], row_weight[WARPS][2 * RP], row_mass[WARPS][2 * RP], row_logs[WARPS];
    float gram[DEPTH * DEPTH], rhs[DEPTH], ones[DEPTH], sums[TOTALS];
    float shift[2], best_error; // shift: binary, of this pass and the next in turn
    int order, far, since_best, since_build, depth, head, have, extrapolated[2];
    double best_dual;
    Rates rates;
};

__device__ __forceinline__ float pow_2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float root(float x)
{
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2 x, x > 0 and normal: the mantissa in [.75, 1.5), where the device's logarithm errs by 2^-22 at most
__device__ __forceinline__ float log_2(float x)
{
    const int e = (__float_as_int(x) - 0x3f400000) >> 23;
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(__int_as_float(__float_as_int(x) - (e << 23))));
    return (float)e + y;
}

__device__ __forceinline__ void load(const float *from, float (&x)[4])
{
    const float4 t = *(const float4 *)from;
    x[0] = t.x, x[1] = t.y, x[2] = t.z, x[3] = t.w;
}

__device__ __forceinline__ void store(float *to, const float (&x)[4])
{
    *(float4 *)to = make_float4(x[0], x[1], x[2], x[3]);
}

// G = the next y, f = G - y of the lane's columns j .. j + 3, before the translation; lane l returns sum l / 2.
__device__ __forceinline__ float column_sums(const Shared &all, float shift, int j, float (&G)[4], float (&f)[4])
{
    const float move = all.rates.rest2 * shift, fi = all.rates.fi2, k2 = all.rates.k2;
    float value[TOTALS], sum[4] = {0, 0, 0, 0}, part[4], y[4], w[4], wP[4];
#pragma unroll
    for (int q = 0; q < TOTALS; q++)
        value[q] = 0;
    if (j < COLUMNS) {
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            load(&all.partial[g][j], part);
#pragma unroll
            for (int q = 0; q < 4; q++)
                sum[q] += part[q];
        }
        load(&all.v[j], part);
#pragma unroll
        for (int q = 0; q < 4; q++)
            value[PLAN] += part[q] * sum[q];
        load(&all.col[BASE][j], part);
        load(&all.col[Y][j], y);
        load(&all.col[MASS][j], w);
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const float next = part[q] + move - fi * log_2(sum[q]);
            G[q] = !(w[q] > 0) ? 0 : sum[q] > DEAD ? next : NONE;
            f[q] = G[q] - y[q];
        }
        load(&all.col[WEIGHT_Q][j], part);
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const float Q = part[q] * pow_2(-k2 * y[q]), Qf = Q * f[q];
            value[SUM_Q] += Q, value[SUM_QF] += Qf, value[SUM_QFF] += Qf * f[q];
        }
        load(&all.col[F_BEFORE][j], part);
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const float P = f[q] - part[q];
            wP[q] = w[q] * P;
            value[OF_F] += w[q] * f[q], value[OF_Y] += w[q] * y[q];
            value[OF_P] += wP[q], value[OF_PP] += wP[q] * P, value[OF_PF] += wP[q] * f[q];
        }
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            load(&all.col[DIFF_F + i][j], part);
#pragma unroll
            for (int q = 0; q < 4; q++)
                value[OF_DOT + i] += wP[q] * part[q];
        }
    }
    return warp_sums<TOTALS>(value, threadIdx.x % 32);
}

// lam of the translation, binary; Q = sum q without its part of the shift
__device__ __forceinline__ float translation(const Shared &all, float shift, float plan, float Q)
{
    const Rates &rate = all.rates;
    return rate.lam_rate > 0 ? rate.lam_rate * (log_2(plan) - log_2(Q) - rate.k2 * shift) : 0;
}

__device__ __forceinline__ bool sound(float plan, float QFF) { return plan > 0 && isfinite(plan) && isfinite(QFF); }

// What the block does after this pass, from the sums, beside the column half and by another warp.  The error is
// estimated from the residual; no answer is certified here.
__device__ __forceinline__ int judge_state(const Batch &S, Shared &all, int turn)
{
    const Rates &rate = all.rates;
    const float plan = S.k1 > 0 ? all.sums[PLAN] : rate.mass_a, Q = all.sums[SUM_Q], shift = all.shift[turn];
    const float lam = translation(all, shift, plan, Q), common = rate.both * lam;
    const float grow = pow_2(rate.k2 * (shift + lam)), mass = plan * pow_2(-rate.rest1 * lam);
    const float square = (all.sums[SUM_QFF] + common * (2 * all.sums[SUM_QF] + common * Q)) * grow;
    const float loss = fmaxf(square, 0), d = rate.error * loss * reciprocal(mass);
    const float error = S.k2 > 0 ? d * (1.0f / 3) + root(2 * d + d * d * (1.0f / 9))
                                 : (float)LN2 * root(loss * rate.mass_b) * reciprocal(mass);
    double dual = rate.dual_0 - rate.dual_mass * (double)mass;
    if (S.k1 > 0 && S.k2 > 0) {
        dual -= S.rho2 * (double)(Q * grow);
    } else {
        double logs = 0, moved = (double)(shift + rate.fi1 * lam) * all.mass_a;
        for (int k = 0; k < WARPS; k++)
            logs += (double)all.row_logs[k];
        dual += S.k1 > 0 ? 0 : S.reg * (all.offset_a + LN2 * (logs + moved));
        moved = (double)(shift + lam) * all.mass_b;
        dual -=
            S.k2 > 0 ? S.rho2 * (double)(Q * grow) : S.reg * (LN2 * (moved - (double)all.sums[OF_Y]) - all.offset_b);
    }
    if (!sound(plan, all.sums[SUM_QFF]))
        return all.since_build == 0 ? STOP : REBUILD; // K does not do
    const bool extrapolated = all.extrapolated[turn] != 0;
    if (extrapolated && !(dual >= all.best_dual - rate.slack - 1e-6 * S.reg * (double)mass))
        return REJECT;
    const bool better = error < all.best_error * (1 - 1e-3f);
    const int since_best = better ? 0 : all.since_best + 1;
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        all.best_dual = extrapolated ? fmax(all.best_dual, dual) : dual;
        all.best_error = fminf(all.best_error, error);
        all.since_best = since_best;
        all.since_build++;
    }
    const double gap = S.reg * (double)(d * mass);
    const bool done = error <= rate.tol || (S.k2 > 0 && gap <= S.tol_gap * fabs(dual));
    return done || since_best >= PATIENCE || !isfinite(dual) ? STOP : GO_ON;
}

// Anderson's weights gamma, without the mean of the residuals: (gram + RIDGE diag) gamma = rhs by elimination, every lane
// for itself; rhs_i = <f, D_i> = its last value + <P, D_i>.  What has no difference yet is a row of the unit matrix.
__device__ __forceinline__ void anderson(Shared &all, float t, int slot, int depth, float (&gamma)[DEPTH])
{
    const int lane = threadIdx.x % 32;
    const float F = __shfl_sync(FULL, t, 2 * OF_F), P = __shfl_sync(FULL, t, 2 * OF_P);
    const float PP = __shfl_sync(FULL, t, 2 * OF_PP), PF = __shfl_sync(FULL, t, 2 * OF_PF);
    const float D = __shfl_sync(FULL, t, 2 * (OF_DOT + (lane < DEPTH ? lane : 0))), over = P * all.rates.share;
    if (lane < depth) {
        const bool newest = lane == slot;
        const float dot = newest ? fmaxf(PP - P * over, 1e-36f) : D - over * all.ones[lane];
        all.rhs[lane] = newest ? PF - over * F : all.rhs[lane] + dot;
        all.gram[lane * DEPTH + slot] = all.gram[slot * DEPTH + lane] = dot;
        if (newest)
            all.ones[lane] = P;
    }
    __syncwarp();
    float A[DEPTH][DEPTH], inverse[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        gamma[i] = all.rhs[i];
#pragma unroll
        for (int k = 0; k <= i; k++)
            A[i][k] = all.gram[i * DEPTH + k] * (i == k ? 1 + RIDGE : 1);
    }
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        inverse[k] = reciprocal(A[k][k]);
#pragma unroll
        for (int i = k + 1; i < DEPTH; i++) {
            const float factor = A[i][k] * inverse[k];
#pragma unroll
            for (int j = k + 1; j <= i; j++)
                A[i][j] = fmaf(-factor, A[j][k], A[i][j]);
            gamma[i] = fmaf(-factor, gamma[k], gamma[i]);
        }
    }
    bool finite = true;
#pragma unroll
    for (int k = DEPTH - 1; k >= 0; k--) {
#pragma unroll
        for (int i = k + 1; i < DEPTH; i++)
            gamma[k] = fmaf(-A[i][k], gamma[i], gamma[k]);
        gamma[k] *= inverse[k];
        finite &= isfinite(gamma[k]) != 0;
    }
#pragma unroll
    for (int k = 0; k < DEPTH; k++)
        gamma[k] = finite ? gamma[k] : 0;
}

// The next y = G - sum gamma_i (difference of images)_i and v, the history; whether v goes too far.
__device__ __forceinline__ bool advance(Shared &all, int j, const float (&G)[4], const float (&f)[4],
                                        const float (&gamma)[DEPTH], int slot, int turn)
{
    float y[4], part[4];
    bool far = false;
    if (j >= COLUMNS)
        return false;
#pragma unroll
    for (int q = 0; q < 4; q++)
        y[q] = G[q];
    if (slot >= 0) {
        float newest[4];
        load(&all.col[F_BEFORE][j], part);
        load(&all.col[G_BEFORE + (turn ^ 1)][j], newest);
#pragma unroll
        for (int q = 0; q < 4; q++) {
            part[q] = f[q] - part[q];
            newest[q] = G[q] - newest[q];
        }
        store(&all.col[DIFF_F + slot][j], part);
        store(&all.col[DIFF_G + slot][j], newest);
#pragma unroll
        for (int i = 0; i < DEPTH; i++) { // no difference yet: gamma 0, zeros
            load(&all.col[DIFF_G + i][j], part);
#pragma unroll
            for (int q = 0; q < 4; q++)
                y[q] = fmaf(-gamma[i], part[q], y[q]);
        }
    }
    store(&all.col[F_BEFORE][j], f);
    store(&all.col[G_BEFORE + turn][j], G);
    store(&all.col[Y][j], y);
    load(&all.col[WEIGHT_B][j], part);
#pragma unroll
    for (int q = 0; q < 4; q++) {
        part[q] = part[q] > 0 ? part[q] * pow_2(y[q]) : 0;
        far |= !(part[q] < LIMIT);
    }
    store(&all.v[j], part);
    return far;
}

// The column half, by one warp, as if the pass were accepted.
__device__ __forceinline__ void column_half(const Batch &S, Shared &all, int turn)
{
    const int lane = threadIdx.x % 32, j = 4 * lane;
    float G[4] = {0, 0, 0, 0}, f[4] = {0, 0, 0, 0}, gamma[DEPTH] = {0, 0, 0, 0, 0};
    const float shift = all.shift[turn], t = column_sums(all, shift, j, G, f);
    if (lane % 2 == 0)
        all.sums[lane / 2] = t;
    tell();
    const float plan = S.k1 > 0 ? __shfl_sync(FULL, t, 2 * PLAN) : all.rates.mass_a;
    const float Q = __shfl_sync(FULL, t, 2 * SUM_Q), QFF = __shfl_sync(FULL, t, 2 * SUM_QFF);
    const bool usable = sound(plan, QFF);
    if (lane == 0)
        all.shift[turn ^ 1] = shift + (usable ? all.rates.fi1 * translation(all, shift, plan, Q) : 0);
    if (!usable)
        return;
    int slot = -1, head = all.head, depth = all.depth;
    if (S.memory > 0 && all.have) {
        slot = head;
        depth += depth < (int)S.memory && head == depth;
        head = head + 1 < (int)S.memory ? head + 1 : 0;
    }
    if (slot >= 0)
        anderson(all, t, slot, depth, gamma);
    const bool far = __any_sync(FULL, advance(all, j, G, f, gamma, slot, turn));
    __syncwarp(); // a vote orders no reads: every lane has read head, depth and have
    if (lane == 0)
        all.head = head, all.depth = depth, all.have = 1, all.extrapolated[turn ^ 1] = slot >= 0, all.far = far;
}

// After a step that lost dual value: on from the last image, without a history.
__device__ __forceinline__ void restart(Shared &all, int turn)
{
#pragma unroll 1
    for (int j = threadIdx.x; j < COLUMNS; j += THREADS) {
        const float y = all.col[G_BEFORE + turn][j], w = all.col[WEIGHT_B][j];
        all.col[Y][j] = y;
        all.v[j] = w > 0 ? w * pow_2(y) : 0;
        for (int i = 0; i < DEPTH; i++)
            all.col[DIFF_G + i][j] = 0;
    }
    if (threadIdx.x < DEPTH * DEPTH)
        all.gram[threadIdx.x] = threadIdx.x % (DEPTH + 1) == 0;
    if (threadIdx.x < DEPTH)
        all.rhs[threadIdx.x] = 0;
    if (threadIdx.x == 0)
        all.depth = all.head = all.have = all.far = all.extrapolated[0] = all.extrapolated[1] = 0;
    __syncthreads();
}
#endif
