// Mirrors src_c/finish_tmpl.c: the O(n) half of a pass, every column with one thread of one block.
//
// With k = reg / rho, everything on logarithms; the numbers are the meetings of all blocks that lie between:
//   1 marginal    lam from A = mass and B = sum b e^(-k log v);  s = v K^T u, q = b e^(-k log v)
//     prox        gap = rho q h(log s/q), G(x) = log v' = fi log(b / K^T u);  all sums at once:
//                 F = G - x + c with c = fi mu not yet known, so that <F, .> = <G - x, .> + c <1, .>
//   2 difference  every block: mu, dual value, guard, status, Anderson's weights gamma
//     advance     x = G - sum gamma dG, v = e^x, B of the new x
// Sources: Sejourne, Vialard, Peyre 2022 (translation); Walker, Ni 2011 (Anderson, type II).
#ifndef FINISH_PASS_CUH
#define FINISH_PASS_CUH
#include "prox.cuh"

enum {
    SUM_GAP, SUM_HARD, SUM_DUAL, SUM_NEXT, SUM_DEAD, SUM_MASS, SUM_ONES, SUM_F, SUM_P, SUM_PP, SUM_PF,
    MAX_F, MIN_F, HALF = VALUES / 2, SUM_DOT = HALF, SUM_RHS = SUM_DOT + MEMORY
};
#define STALL_PASSES 250

struct Finish {
    double warp[32][VALUES];
    double total[VALUES];
    double row[ROW_SCALARS];
    double log_B, scale_v;
    double lam, off, kappa;
    int parity;  // which half of row_scalars, next and progress this pass reads
    Progress p;
    Trace trace;
};

__device__ __forceinline__ int64_t column_share(const State &S) { return (S.n + S.parts * 16 - 1) / (S.parts * 16) * 16; }

// The same numbers for every thread: to and from global memory, 8 bytes each
template <typename T>
__device__ __forceinline__ void copy_record(T *to, const T *from) {
    for (int q = threadIdx.x; q < (int)(sizeof(T) / 8); q += blockDim.x) ((double *)to)[q] = ((const double *)from)[q];
}

// What the last finish_advance left: log B and sum v; one warp.
__device__ __forceinline__ void finish_next(const State &S, Finish &F) {
    const double *next = S.next + F.parity * 2 * S.parts;
    double B = 0, scale = 0;
#pragma unroll 4
    for (int64_t q = threadIdx.x % 32; q < S.parts; q += 32) {
        B += __ldcg(next + 2 * q);
        scale += __ldcg(next + 2 * q + 1);
    }
    B = warp_sum(B);
    scale = warp_sum(scale);
    if (threadIdx.x % 32 == 0) F.log_B = log(B), F.scale_v = scale;
}

// lam = (log A - log B) / (fi1 k1 + k2): u *= e^(fi1 lam), v *= e^-lam; the shift takes u's part.  Every thread.
__device__ __forceinline__ void finish_begin(const State &S, Finish &F) {
    const double *row = S.row_scalars + F.parity * ROW_SCALARS, mass = __ldcg(row + ROW_MASS);
    if (threadIdx.x < ROW_SCALARS) F.row[threadIdx.x] = __ldcg(row + threadIdx.x);
    if (threadIdx.x < 32) {
        const double lam = S.lam_rate > 0 ? S.lam_rate * (log(mass) - F.log_B) : 0, off = S.fi_rows * lam;
        if (threadIdx.x == 0) F.lam = lam, F.off = off, F.kappa = exp(off - lam);
    }
    __syncthreads();
}

// One column: its certificate and its image, into out[SUM_GAP .. SUM_MASS]; returns G, x is translated.
__device__ __forceinline__ double finish_column(const State &S, const Finish &F, int64_t j, double &x, double *out) {
    const double e = S.cols.absorbed[j], b = S.cols.weight[j], rho = S.cols.rho[j], sum = __ldcg(S.sums + j);
    const double log_b = S.cols.log_weight[j], k = S.cols.rate[j], fi = S.cols.fi[j];
    const double shift = F.p.shift + F.off, s = __ldcg(S.v_scale + j) * sum * F.kappa;
    const int kind = KL_COLS ? (int)KL : (int)S.cols.kind;
    double G;
    x = __ldcg(S.x_next + j) - F.lam;
    if (isinf(e)) return x;
    const double log_sum = log(sum);
    if (kind <= BALANCED) {
        const double q = b * exp(-k * x), t = x - e + shift + log_sum - log_b + k * x;
        G = fi * (log_b - log_sum + e - shift);
        out[SUM_GAP] = isinf(rho) ? 0 : rho * (sum >= TINY ? kl_gap(q, s, t) : q);
        out[SUM_DUAL] = isinf(rho) ? S.reg * b * x : rho * (b - q);
        out[SUM_NEXT] = b * exp(-k * G);
    } else {
        const double upper = kind == RANGE ? S.cols.upper[j] : 0, f = S.reg * x;
        G = prox(kind, log_sum - e + shift, b, log(b), rho, upper, S.reg);
        out[SUM_GAP] = gap_term(kind, f, s, b, rho, upper);
        out[SUM_DUAL] = dual_term(kind, f, b, rho, upper);
        out[SUM_NEXT] = 0;
    }
    out[SUM_HARD] = violation(kind, s, b, rho, kind == RANGE ? S.cols.upper[j] : 0);
    out[SUM_MASS] = s;
    if (!(sum >= TINY)) { // dead in this pass: it keeps its x
        out[SUM_DEAD] = sum == sum;
        out[SUM_NEXT] = 0;
        G = x;
    }
    S.x[j] = x;
    S.s[j] = s;
    return G;
}

// Empty value q: what the sums and the two extremes start from.
__device__ __forceinline__ double nothing(int q) { return q == MAX_F ? -INF : q == MIN_F ? INF : 0; }
__device__ __forceinline__ double joined(int q, double x, double y) {
    return q == MAX_F ? fmax(x, y) : q == MIN_F ? fmin(x, y) : x + y;
}

// F.warp[warp][first ..] = this warp's sums
__device__ __forceinline__ void warp_values(Finish &F, double (&value)[HALF], int first) {
    const int lane = threadIdx.x % 32;
    const double total = warp_sums<HALF>(value, lane);
    if (lane % 2 == 0) F.warp[threadIdx.x / 32][first + lane / 2] = total;
    __syncwarp();
}

// Anderson's sums over this thread's columns, from what column_values left in work
__device__ __forceinline__ void history_values(const State &S, Finish &F, int64_t first, int64_t end) {
    double value[HALF] = {};
    const int depth = F.p.have > 0 ? (int)F.p.depth : 0;
    for (int64_t j = first + threadIdx.x; j < end; j += blockDim.x) {
        const double w = S.cols.weight[j], f = S.work[j], p = f - S.residual[j]; // w = 0 where left out
        double d[MEMORY];
#pragma unroll
        for (int i = 0; i < MEMORY; i++) d[i] = i < depth ? w * S.dF[i * S.n + j] : 0;
#pragma unroll
        for (int i = 0; i < MEMORY; i++) {
            value[i] = fma(d[i], p, value[i]);
            value[MEMORY + i] = fma(d[i], f, value[MEMORY + i]);
        }
    }
    warp_values(F, value, HALF);
}

// Certificate and image of this thread's columns
__device__ __forceinline__ void column_values(const State &S, Finish &F, int64_t first, int64_t end) {
    double value[HALF];
#pragma unroll
    for (int q = 0; q < HALF; q++) value[q] = nothing(q);
    for (int64_t j = first + threadIdx.x; j < end; j += blockDim.x) {
        double x, out[SUM_MASS + 1] = {};
        const double w = S.cols.weight[j], last = F.p.have > 0 ? S.residual[j] : 0;
        const double G = finish_column(S, F, j, x, out), f = G - x;
        if (isinf(S.cols.absorbed[j])) continue;
        S.work[j] = f;
        S.work[S.n + j] = G;
#pragma unroll
        for (int q = 0; q <= SUM_MASS; q++) value[q] += out[q];
        value[SUM_ONES] += w;
        value[SUM_F] += w * f;
        value[MAX_F] = fmax(value[MAX_F], f);
        value[MIN_F] = fmin(value[MIN_F], f);
        const double p = F.p.have > 0 ? f - last : 0;
        value[SUM_P] += w * p;
        value[SUM_PP] += w * p * p;
        value[SUM_PF] += w * p * f;
    }
    const double high = warp_max(value[MAX_F]), low = -warp_max(-value[MIN_F]);
    warp_values(F, value, 0);
    if (threadIdx.x % 32 == 0) F.warp[threadIdx.x / 32][MAX_F] = high, F.warp[threadIdx.x / 32][MIN_F] = low;
}

// Sweep 1 over the columns of block `part`: certificate, image, and every sum that Anderson needs.
__device__ __forceinline__ void finish_columns(const State &S, Finish &F, int64_t part) {
    const int64_t share = column_share(S), first = part * share, end = first + share < S.n ? first + share : S.n;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    if (first + warp * 32 < end) {
        column_values(S, F, first, end);
        history_values(S, F, first, end);
    } else F.warp[warp][lane] = nothing(lane);
    __syncthreads();
    if (warp == 0) {
        double total = F.warp[0][lane];
        
#pragma unroll 15
        for (int q = 1; q < warps; q++) total = joined(lane, total, F.warp[q][lane]);
        S.partial[part * VALUES + lane] = total;
    }
}

// The partial values of all blocks, joined by every block in the same order.
__device__ __forceinline__ void finish_totals(const State &S, Finish &F) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    double total = nothing(lane);
#pragma unroll 9
    for (int64_t q = warp; q < S.parts; q += warps) total = joined(lane, total, __ldcg(S.partial + q * VALUES + lane));
    F.warp[warp][lane] = total;
    __syncthreads();
    if (warp == 0) {
        
#pragma unroll 15
        for (int q = 1; q < warps; q++) total = joined(lane, total, F.warp[q][lane]);
        F.total[lane] = total;
        __syncwarp();
    }
}

// gamma: (D gram D + 1e-10) D^-1 gamma = D rhs, D = diag(gram)^-1/2; lane i of one warp eliminates row i.
__device__ __forceinline__ double solve_gamma(const Progress &p, int d, double rhs) {
    const int lane = threadIdx.x % 32, row = lane < d ? lane : 0;
    const double scale = lane < d ? rsqrt(fmax(p.gram[row * MEMORY + row], TINY)) : 0;
    double A[MEMORY], y = rhs * scale, inverse = 0;
#pragma unroll
    for (int k = 0; k < MEMORY; k++)
        A[k] = p.gram[row * MEMORY + k] * scale * __shfl_sync(FULL, scale, k) + (k == lane ? 1e-10 : 0);
#pragma unroll
    for (int i = 0; i < MEMORY; i++) {
        if (i >= d) break;
        const double pivot = 1 / __shfl_sync(FULL, A[i], i), factor = lane == i ? 0 : A[i] * pivot;
        inverse = lane == i ? pivot : inverse;
#pragma unroll
        for (int k = i + 1; k < MEMORY; k++) A[k] -= factor * __shfl_sync(FULL, A[k], i);
        y -= factor * __shfl_sync(FULL, y, i);
    }
    return y * inverse * scale;
}

// How many differences count once the newest one is in `slot`
__device__ __forceinline__ int new_depth(const State &S, const Progress &p) {
    return (int)(p.depth < S.memory && p.head == p.depth ? p.depth + 1 : p.depth);
}

// Put the newest difference in the Gram matrix and find the weights: <F, .> = <f, .> + c <1, .>.  One warp.
__device__ __forceinline__ void anderson(const State &S, Finish &F, double c) {
    Progress &p = F.p;
    const double *t = F.total;
    const int lane = threadIdx.x % 32, slot = (int)p.head, depth = new_depth(S, p);
    double rhs = 0, dot = 0;
    if (lane == slot) {
        p.ones[slot] = t[SUM_P] + c * t[SUM_ONES];
        dot = t[SUM_PP] + c * (2 * t[SUM_P] + c * t[SUM_ONES]);
        rhs = t[SUM_PF] + c * (t[SUM_P] + t[SUM_F] + c * t[SUM_ONES]);
    } else if (lane < depth) {
        dot = t[SUM_DOT + lane] + c * p.ones[lane];
        rhs = t[SUM_RHS + lane] + c * p.ones[lane];
    }
    if (lane < depth) p.gram[lane * MEMORY + slot] = p.gram[slot * MEMORY + lane] = dot;
    __syncwarp();
    const double gamma = solve_gamma(p, depth, rhs);
    if (lane < depth) p.gamma[lane] = gamma;
}

// What the state is worth: certificate, dual value, lost mass; the words are those of mapuot_stats.
__device__ __forceinline__ void certify(const State &S, Finish &F, double common) {
    const double *t = F.total, *row = F.row;
    Trace &out = F.trace;
    const double shift = F.p.shift + F.off;
    out.mass = F.kappa * row[ROW_MASS];
    out.gap = t[SUM_GAP];
    out.dual = S.dual_constant + F.kappa * row[ROW_SOFT] + row[ROW_DUAL] + S.hard_weight * S.reg * shift + t[SUM_DUAL] - S.reg * out.mass;
    out.lost = S.flush * row[ROW_SCALE] * F.scale_v / row[ROW_MASS];
    out.error = sqrt(2 * fmax(out.gap, 0.0) / (S.reg * out.mass)) + t[SUM_HARD] / out.mass + 3 * S.storage_error +
                out.lost;
    out.dead = row[ROW_DEAD] + t[SUM_DEAD];
    out.residual = fmax(t[MAX_F] + common, -(t[MIN_F] + common));
}

__device__ __forceinline__ double judge(const State &S, Finish &F) {
    const Trace &out = F.trace;
    Progress &p = F.p;
    if (!isfinite(out.mass) || !isfinite(out.dual) || !(out.mass > 0)) return NOT_FINITE;
    if (out.error <= S.tol || out.gap <= S.tol_gap * fabs(out.dual)) return CONVERGED;
    p.since_best = out.error < p.best_error * (1 - 1e-3) ? 0 : p.since_best + 1;
    p.best_error = fmin(p.best_error, out.error);
    if (p.since_absorb == 1) p.dead = out.dead;  // what a fresh K leaves dead stays so
    else if (out.lost > S.flush_tol || out.dead > p.dead || fmax(F.row[ROW_SCALE], F.scale_v) > 1e30) return ABSORB;
    return p.since_best >= STALL_PASSES ? STALLED : RUNNING;
}

// The step that the certificate allows; p.step: 0 take G, 1 extrapolate, 2 go back to the last image.
__device__ __forceinline__ void decide(const State &S, Finish &F, double common) {
    Progress &p = F.p;
    const double slack = 1e-13 * fabs(F.trace.dual) + 4e-16 * S.dual_scale;
    p.slot = -1;
    p.common = common;
    p.shift += F.off;
    p.kappa = F.kappa;
    if (p.extrapolated > 0 && !(F.trace.dual >= p.best_dual - slack)) {
        F.trace.rejected = 1;
        F.trace.residual = INF;
        p.depth = p.head = p.have = p.extrapolated = 0;
        p.step = 2;
        return;
    }
    F.trace.rejected = 0;
    p.best_dual = p.extrapolated > 0 ? fmax(p.best_dual, F.trace.dual) : F.trace.dual;
    p.step = p.extrapolated = S.memory > 0 && p.have > 0;
    if (p.step > 0) {
        p.depth = new_depth(S, p);
        p.slot = p.head;
        p.head = p.head + 1 < S.memory ? p.head + 1 : 0;
    }
    p.have = 1;
}

// The scalar work between the sweeps; every block does it on the same numbers, the weights beside the certificate.
__device__ __forceinline__ void finish_scalars(const State &S, Finish &F) {
    finish_totals(S, F);
    __syncthreads();
    const int warp = threadIdx.x / 32;
    if (warp < 2) {
        const double common = S.mu_rate * (S.mu_rate > 0 ? log(F.total[SUM_NEXT]) - log(F.kappa * F.row[ROW_MASS]) : 0);
        if (warp == 1 && S.memory > 0 && F.p.have > 0) anderson(S, F, common);
        if (threadIdx.x == 0) {
            Progress &p = F.p;
            p.passes += 1;
            p.since_absorb += 1;
            certify(S, F, common);
            F.trace.status = p.status = judge(S, F);
            p.common = common;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) decide(S, F, F.p.common);
    __syncthreads();
}

// Sweep 2: differences, the next x and v, and what the next pass needs of them (in half `parity` of next).
__device__ __forceinline__ void finish_advance(const State &S, Finish &F, int64_t part, int parity) {
    const int64_t share = column_share(S), first = part * share, end = first + share < S.n ? first + share : S.n;
    const Progress &p = F.p;
    const int slot = (int)p.slot, depth = (int)p.depth;
    double B = 0, scale = 0;
    for (int64_t j = first + threadIdx.x; j < end; j += blockDim.x) {
        const double e = S.cols.absorbed[j], b = S.cols.weight[j], last = S.residual[j], held = S.v_scale[j];
        const double f = S.work[j] + p.common, G = S.work[S.n + j] + p.common;
        double x = S.image[j], g[MEMORY];
#pragma unroll
        for (int i = 0; i < MEMORY; i++) g[i] = i >= depth || i == slot ? G - x : S.dG[i * S.n + j];
        S.sums[j] = 0;
        if (isinf(e)) continue;
        if (p.step < 2) {
            if (slot >= 0) {
                S.dF[slot * S.n + j] = f - last;
                S.dG[slot * S.n + j] = G - x;
            }
            S.residual[j] = f;
            S.image[j] = x = G;
#pragma unroll
            for (int i = 0; i < MEMORY; i++)
                if (i < depth && p.step > 0) x -= p.gamma[i] * g[i];
        }
        const double y = x - e + p.shift, v = exp(y < BOUND ? y : y == y ? BOUND : y);
        if (S.ratio) S.ratio[j] = held > 0 ? v / held : 0;
        S.x_next[j] = x;
        S.v_scale[j] = v;
        B += b * exp(-S.rate_cols * x);
        scale += v;
    }
    B = warp_sum(B);
    scale = warp_sum(scale);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) F.warp[warp][0] = B, F.warp[warp][1] = scale;
    __syncthreads();
    if (threadIdx.x < 2) {
        double total = 0;
        for (int q = 0; q < blockDim.x / 32; q++) total += F.warp[q][threadIdx.x];
        S.next[parity * 2 * S.parts + 2 * part + threadIdx.x] = total;
    }
}
#endif
