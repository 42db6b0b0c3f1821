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

enum { Y, F_BEFORE, G_BEFORE, MASS, WEIGHT_B, BASE, WEIGHT_Q, DIFF_F, DIFF_G = DIFF_F + DEPTH, KINDS = DIFF_G + DEPTH };
// sums over the columns, v (K^T u), q = b v^-k2 and its moments of f, b-weighted ones of f, P = change of f, and y
enum { PLAN, SUM_Q, SUM_QF, SUM_QFF, OF_F, OF_P, OF_PP, OF_PF, OF_Y, OF_DOT, TOTALS = 16 };
enum { GO_ON, REBUILD, STOP };

struct Rates {
    float fi1, fi2, rest1, rest2, k2, lam_rate; // rest = 1 - fi
};

struct Course {
    double best_dual, progress_dual;
    float best_error;
    int passes, since_best, since_build, depth, head, have, extrapolated;
};

struct Shared {
    double x[COLUMNS], E[COLUMNS], beta[COLUMNS], alpha[ROWS], a[ROWS], scratch[WARPS];
    double mass_a, mass_b, offset_a, offset_b; // sum a D, sum b E
    alignas(16) float v[COLUMNS], col[KINDS][COLUMNS], partial[GROUPS][COLUMNS + 16];
    alignas(16) float rows[WARPS][16][2 * RP + 4], u[WARPS][2 * RP];
    float row_base[WARPS][2 * RP], row_weight[WARPS][2 * RP], row_mass[WARPS][2 * RP], row_logs[WARPS];
    float gram[DEPTH * DEPTH], rhs[DEPTH], ones[DEPTH];
    float shift; // binary
    int order;
    Rates rates;
    Course course;
};

// log2 x, x > 0 and normal: the mantissa in [.75, 1.5), where the device's logarithm errs by 2^-22 at most
__device__ __forceinline__ float log_2(float x)
{
    const int e = (__float_as_int(x) - 0x3f400000) >> 23;
    return (float)e + __log2f(__int_as_float(__float_as_int(x) - (e << 23)));
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
__device__ __forceinline__ float column_sums(const Shared &all, int j, float (&G)[4], float (&f)[4])
{
    const float move = all.rates.rest2 * all.shift, fi = all.rates.fi2, k2 = all.rates.k2;
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
            const float Q = part[q] * exp2f(-k2 * y[q]), Qf = Q * f[q];
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

struct Worth {
    float off, mass, error; // error: estimated from the residual, the plan's relative one
    double gap, dual;
};

// What the translated iterate is worth; t as column_sums returns it.
__device__ __forceinline__ Worth judge_state(const Batch &S, const Shared &all, float t)
{
    const float plan = __shfl_sync(FULL, t, 2 * PLAN), Q = __shfl_sync(FULL, t, 2 * SUM_Q);
    const float QF = __shfl_sync(FULL, t, 2 * SUM_QF), QFF = __shfl_sync(FULL, t, 2 * SUM_QFF);
    const float sum_y = __shfl_sync(FULL, t, 2 * OF_Y), shift = all.shift;
    const Rates &rate = all.rates;
    const float A = S.k1 > 0 ? plan : (float)all.mass_a;
    const float lam = rate.lam_rate > 0 ? rate.lam_rate * (log_2(A) - log_2(Q) - rate.k2 * shift) : 0;
    const float grow = exp2f(rate.k2 * (shift + lam)), common = (1 - rate.fi1 * rate.fi2) * lam;
    const float square = (QFF + common * (2 * QF + common * Q)) * grow * (float)(LN2 * LN2);
    const float loss = square > 0 ? square : square - square; // NaN stays
    Worth w;
    w.off = rate.fi1 * lam;
    w.mass = A * exp2f(-rate.rest1 * lam);
    w.gap = S.k2 > 0 ? 0.5 * S.rho2 * (1 + S.k2) * (1 + S.k2) * (double)loss : INF;
    const float d = (float)(w.gap * S.inv_reg) / w.mass;
    w.error = S.k2 > 0 ? d * (1.0f / 3) + sqrtf(2 * d + d * d * (1.0f / 9)) : sqrtf(loss * (float)all.mass_b) / w.mass;
    w.dual = S.reg * ((S.product ? all.mass_a * all.mass_b : (double)S.m * (double)S.n) - (double)w.mass);
    if (S.k1 > 0) {
        w.dual += S.rho1 * (all.mass_a - (double)w.mass);
    } else {
        double logs = 0;
        for (int k = 0; k < WARPS; k++)
            logs += (double)all.row_logs[k];
        w.dual += S.reg * (all.offset_a + LN2 * (logs + (double)(shift + w.off) * all.mass_a));
    }
    if (S.k2 > 0)
        w.dual += S.rho2 * (all.mass_b - (double)(Q * grow));
    else
        w.dual += S.reg * (all.offset_b + LN2 * ((double)sum_y - (double)(shift + lam) * all.mass_b));
    return w;
}

// Anderson's weights, without the mean of the residuals: columns normalised, by Gauss and Jordan; lane 6 i + k holds
// entry (i, k), k = 5 the right-hand side <f, D_i> = its last value + <P, D_i>.  Lane 6 i + 5 returns weight i.
__device__ __forceinline__ float anderson(Shared &all, float t, int slot, int depth)
{
    const int lane = threadIdx.x % 32, i = lane < 30 ? lane / 6 : 4, k = lane % 6;
    const float F = __shfl_sync(FULL, t, 2 * OF_F), P = __shfl_sync(FULL, t, 2 * OF_P), over = 1 / (float)all.mass_b;
    const float PP = __shfl_sync(FULL, t, 2 * OF_PP), PF = __shfl_sync(FULL, t, 2 * OF_PF);
    const float D = __shfl_sync(FULL, t, 2 * (OF_DOT + (lane < DEPTH ? lane : 0)));
    if (lane < depth) {
        const bool newest = lane == slot;
        const float dot = newest ? PP - P * P * over : D - P * all.ones[lane] * over;
        all.rhs[lane] = newest ? PF - P * F * over : all.rhs[lane] + dot;
        all.gram[lane * DEPTH + slot] = all.gram[slot * DEPTH + lane] = dot;
        if (newest)
            all.ones[lane] = P;
    }
    __syncwarp();
    const bool in = i < depth;
    const float scale = in ? rsqrtf(fmaxf(all.gram[i * (DEPTH + 1)], 1e-37f)) : 0;
    const float other = __shfl_sync(FULL, scale, 6 * k % 32);
    float A = k == DEPTH        ? (in ? all.rhs[i] * scale : 0)
              : in && k < depth ? all.gram[i * DEPTH + k] * scale * other
                                : 0;
    A += i == k ? RIDGE : 0;
#pragma unroll 1
    for (int row = 0; row < depth; row++) {
        const float pivot = __fdividef(1, __shfl_sync(FULL, A, 7 * row));
        const float upper = __shfl_sync(FULL, A, 6 * row + k) * pivot, factor = __shfl_sync(FULL, A, 6 * i + row);
        A = i == row ? upper : fmaf(-factor, upper, A);
    }
    A *= scale;
    return __all_sync(FULL, isfinite(A)) ? A : 0;
}

// The next y and v: extrapolated (step 1), G (0), or the last image again (2); whether v goes too far.
__device__ __forceinline__ bool advance(Shared &all, int j, const float (&G)[4], const float (&f)[4], float move,
                                        float gamma, int step, int slot)
{
    const int depth = all.course.depth;
    float weight[DEPTH], y[4], part[4], image[4];
    bool far = false;
#pragma unroll
    for (int i = 0; i < DEPTH; i++)
        weight[i] = __shfl_sync(FULL, gamma, 6 * i + 5);
    if (j >= COLUMNS)
        return false;
    load(&all.col[G_BEFORE][j], y);
    if (step < 2) {
        load(&all.col[F_BEFORE][j], part);
#pragma unroll
        for (int q = 0; q < 4; q++) {
            image[q] = G[q] + move;
            part[q] = f[q] - part[q];
            y[q] = image[q] - y[q];
        }
        if (slot >= 0) {
            store(&all.col[DIFF_F + slot][j], part);
            store(&all.col[DIFF_G + slot][j], y);
        }
        store(&all.col[F_BEFORE][j], f);
        store(&all.col[G_BEFORE][j], image);
#pragma unroll
        for (int q = 0; q < 4; q++)
            y[q] = image[q];
#pragma unroll
        for (int i = 0; i < DEPTH; i++)
            if (step == 1 && i < depth) {
                load(&all.col[DIFF_G + i][j], part);
#pragma unroll
                for (int q = 0; q < 4; q++)
                    y[q] = fmaf(-weight[i], part[q], y[q]);
            }
    }
    load(&all.col[WEIGHT_B][j], part);
    store(&all.col[Y][j], y);
#pragma unroll
    for (int q = 0; q < 4; q++) {
        part[q] = part[q] > 0 ? part[q] * exp2f(y[q]) : 0;
        far |= !(part[q] < LIMIT);
    }
    store(&all.v[j], part);
    return far;
}

// Whether float32 has done what it can
__device__ __forceinline__ bool finished(const Batch &S, Course &p, const Worth &w)
{
    p.since_best++;
    if (w.error < p.best_error * (1 - 1e-3f) || w.dual > p.progress_dual + 1e-6 * fabs(w.dual)) {
        p.best_error = fminf(p.best_error, w.error);
        p.progress_dual = fmax(p.progress_dual, w.dual);
        p.since_best = 0;
    }
    return w.error <= fmax(S.tol, S.narrow_floor) || w.gap <= S.tol_gap * fabs(w.dual) || p.since_best >= PATIENCE;
}

// The column half, by one warp; all.order: what the block does next.
__device__ __forceinline__ void column_half(const Batch &S, Shared &all)
{
    const int lane = threadIdx.x % 32, j = 4 * lane;
    float G[4] = {0, 0, 0, 0}, f[4] = {0, 0, 0, 0}, gamma = 0;
    const float t = column_sums(all, j, G, f);
    const Worth w = judge_state(S, all, t);
    Course p = all.course;
    int step = 0, slot = -1, order = GO_ON;
    p.passes++;
    if (!(isfinite(w.error) && isfinite(w.mass) && isfinite(w.dual) && w.mass > 0)) {
        order = p.since_build == 0 ? STOP : REBUILD; // K does not do
    } else {
        const double slack = 1e-6 * S.reg * (double)w.mass + 4e-7 * (S.rho1 * all.mass_a + S.rho2 * all.mass_b);
        if (p.extrapolated && !(w.dual >= p.best_dual - slack)) {
            p.depth = p.head = p.have = p.extrapolated = 0;
            step = 2;
        } else {
            p.best_dual = p.extrapolated ? fmax(p.best_dual, w.dual) : w.dual;
            step = p.extrapolated = S.memory > 0 && p.have;
            if (step) {
                slot = p.head;
                p.depth += p.depth < (int)S.memory && p.head == p.depth;
                p.head = p.head + 1 < (int)S.memory ? p.head + 1 : 0;
            }
            p.have = 1;
            order = finished(S, p, w) ? STOP : GO_ON;
        }
        p.since_build++;
        __syncwarp();
        if (lane == 0)
            all.course = p;
        __syncwarp();
        if (step == 1)
            gamma = anderson(all, t, slot, p.depth);
        const bool far = __any_sync(FULL, advance(all, j, G, f, all.rates.rest2 * w.off, gamma, step, slot));
        order = order == GO_ON && far ? REBUILD : order;
    }
    __syncwarp();
    if (lane == 0) {
        all.shift += step < 3 && isfinite(w.off) ? w.off : 0;
        all.course.passes = p.passes;
        all.order = p.passes + 1 >= (int)S.count ? STOP : order; // the last pass is that of batch.cu
    }
}
#endif
