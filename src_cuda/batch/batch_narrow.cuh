// The work of a narrow pass after K^T u is summed, in float32: the rules of common/rules.h (translation, guard,
// stopping) for an estimate that certifies nothing. Two warps have the columns, two columns a lane. Meanwhile one warp
// judges the last pass and one prepares Anderson's weights. batch_narrow.cu includes this file and explains the
// quantities.
#define ANDERSON_DEPTH 5 // differences of float32 passes
#include "batch_build.cuh"

#define RP ((RT + 3) / 4 * 4) // rows of a group, padded to 16 bytes
// the part that a warp joins for its first 16 lanes; the padding puts the others into other banks
#define HALF ((20 * RP + 31) / 32 * 32 + 16)
#define JOIN (2 * HALF > 2 * (COLUMNS + 16) ? 2 * HALF : 2 * (COLUMNS + 16))
#define OLD (ANDERSON_DEPTH - 1)             // differences beside the newest
#define AT(i, k) ((i) * ((i) + 1) / 2 + (k)) // index into a lower triangle, k <= i
#define LIMIT 1e12f                          // with a larger scale K is rebuilt
#define DEAD 1e-30f                          // with a smaller sum no mass is in reach
#define NARROW_RIDGE 1e-6f
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
    DIFF_G = DIFF_F + ANDERSON_DEPTH,
    KINDS = DIFF_G + ANDERSON_DEPTH
};
// sums over the columns, P = change of f: b-weighted sums of P times the old differences, f, P and y; v (K^T u),
// q = b v^-k2 and its moments of f
enum { OF_DOT, OF_F = OF_DOT + OLD, OF_P, OF_PP, OF_PF, PLAN, SUM_Q, SUM_QF, SUM_QFF, OF_Y, TOTALS = 16 };
// orders to the block after a pass; BACK: the pass does not count
enum { GO_ON, BACK = 1, BUILD = 2, REJECT = 4, STOP = 8 };
// state of the last pass
enum { NOTHING, SOUND, UNSOUND };
// the warps of a block in the column half: two with columns, one that judges, one for the differences
enum { COLUMN_HALVES = 2, JUDGE = COLUMN_HALVES, DIFFERENCES };

// Constants of a problem.  dual = dual_0 - dual_mass mass - rho2 sum q where both sides are KL.
struct Rates {
    float fi1, fi2, rest1, rest2, both, k2, lam_rate, mass_a, mass_b, share, own; // rest = 1 - fi, both = 1 - fi1 fi2
    float error, tol; // gap / (reg mass) = error sum q f^2 / mass, balanced |s - b|_1 = error (sum q f^2 mass)^1/2
    double dual_0, dual_mass, slack, mass_slack;
};

// The start of a pass; two, in turn. Differences D (of f, without their mean) by age, the oldest first; a difference
// not yet made is a row of the unit matrix and zeros.
struct alignas(16) Step {
    float rhs[OLD], solved[OLD];                 // <f, D_i>; inverse rhs
    float inverse[AT(OLD, 0)], gram[AT(OLD, 0)]; // of gram + NARROW_RIDGE diag
    int slot[ANDERSON_DEPTH];                    // offsets of the differences, the newest last
    int known;                                   // 0: first pass or no Anderson, 1: second pass, 2: extrapolated passes
    float shift;                                 // log2 of the common translation
};

struct Shared {
    double x[COLUMNS], E[COLUMNS], beta[COLUMNS], alpha[ROWS], a[ROWS], scratch[WARPS];
    double mass_a, mass_b, offset_a, offset_b, dual, best_dual; // offset_a: sum a D, offset_b: sum b E
    alignas(16) float v[COLUMNS], col[KINDS][COLUMNS], join[WARPS][JOIN], u[WARPS][2 * RP];
    alignas(16) float fold[COLUMN_HALVES][TOTALS][36], sums[COLUMN_HALVES][TOTALS];
#if ONE_POTENTIAL
    alignas(16) float s[ROWS + COLUMNS]; // K v
#endif
    float row_base[WARPS][2 * RP], row_weight[WARPS][2 * RP], row_mass[WARPS][2 * RP], row_logs[WARPS];
    Step step[2];
    float mass, loss, best_error; // mass: of the last pass's plan; loss: sum q f^2; best_error: least error so far
    int order, since_best, last;  // order and last: see the enums above
    int fresh; // 3: no K yet, 2: K around zeros, 1: K around these potentials, 0: a sound pass was made
    Rates rates;
};

FN float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2 x, x > 0 and normal: the mantissa in [.75, 1.5), where the device's logarithm errs by 2^-22 at most
FN float log_2(float x) {
    const int e = (__float_as_int(x) - 0x3f400000) >> 23;
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(__int_as_float(__float_as_int(x) - (e << 23))));
    return (float)e + y;
}

FN void load(const float *from, float (&x)[4]) {
    const float4 t = *(const float4 *)from;
    x[0] = t.x;
    x[1] = t.y;
    x[2] = t.z;
    x[3] = t.w;
}

FN void load(const float *from, float (&x)[2]) {
    const float2 t = *(const float2 *)from;
    x[0] = t.x;
    x[1] = t.y;
}

FN void store(float *to, const float (&x)[2]) { *(float2 *)to = make_float2(x[0], x[1]); }

FN void store(float *to, const float (&x)[4]) { *(float4 *)to = make_float4(x[0], x[1], x[2], x[3]); }

// G = the next y, f = G - y of the lane's columns j and j + 1, before the translation; the warp's part of the sums: 16
// lanes a sum, through shared memory.
FN void column_sums(Shared &all, const Step &at, int half, int j, float (&G)[2], float (&f)[2]) {
    const float move = all.rates.rest2 * at.shift, fi = all.rates.fi2, k2 = all.rates.k2;
    const int lane = threadIdx.x % 32;
    float value[OF_Y + 1] = {}, sum[2] = {0, 0}, part[2];
    if (COLUMNS == 128 || j < COLUMNS) {
#if ONE_POTENTIAL
        load(&all.s[j], sum);
#else
        UNROLLED (int g = 0; g < GROUPS; g++) {
            load(&all.join[g / 2][g % 2 * (COLUMNS + 16) + j], part);
            sum[0] += part[0];
            sum[1] += part[1];
        }
#endif
        float v[2], y[2], w[2], base[2], weight[2], before[2], wP[2];
        load(&all.v[j], v), load(&all.col[Y][j], y), load(&all.col[MASS][j], w), load(&all.col[BASE][j], base);
        load(&all.col[WEIGHT_Q][j], weight), load(&all.col[F_BEFORE][j], before);
        UNROLLED (int q = 0; q < 2; q++) {
            const float next = base[q] + move - fi * log_2(sum[q]), Q = weight[q] * power_of(-k2 * y[q]);
            G[q] = !(sum[q] > DEAD) ? NONE : ONE_POTENTIAL ? y[q] + all.rates.own * (next - y[q]) : next;
            f[q] = G[q] - y[q];
            const float P = f[q] - before[q], Qf = Q * f[q];
            wP[q] = w[q] * P;
            value[PLAN] += v[q] * sum[q];
            value[SUM_Q] += Q;
            value[SUM_QF] += Qf;
            value[SUM_QFF] += Qf * f[q];
            value[OF_F] += w[q] * f[q];
            value[OF_Y] += w[q] * y[q];
            value[OF_P] += wP[q];
            value[OF_PP] += wP[q] * P;
            value[OF_PF] += wP[q] * f[q];
        }
        UNROLLED (int i = 0; i < OLD; i++) {
            load(&all.col[DIFF_F][at.slot[i] + j], part);
            value[OF_DOT + i] = wP[0] * part[0] + wP[1] * part[1];
        }
    }
    UNROLLED (int q = 0; q <= OF_Y; q++) all.fold[half][q][lane] = value[q];
    __syncwarp();
    float joined = 0;
    UNROLLED (int k = 0; k < 4; k++) {
        float x[4];
        load(&all.fold[half][lane % TOTALS][lane / TOTALS * 16 + 4 * k], x);
        joined += x[0] + x[1] + (x[2] + x[3]);
    }
    joined += __shfl_xor_sync(FULL, joined, 16);
    if (lane < TOTALS) all.sums[half][lane] = joined;
}

FN float total(const Shared &all, int q) { return all.sums[0][q] + all.sums[1][q]; }

// lam of the translation, binary; Q = sum q without the factor of the shift
FN float translation(const Shared &all, float shift, float plan, float Q) {
    const Rates &rate = all.rates;
    return rate.lam_rate > 0 ? rate.lam_rate * (log_2(plan) - log_2(Q) - rate.k2 * shift) : 0;
}

FN bool sound(const Shared &all) {
    const float plan = total(all, PLAN); // NaN and inf fail every comparison
    return (plan > 0) & (plan < 1e38f) & (fabsf(total(all, SUM_QFF)) < 1e38f);
}

// Dual value, mass and loss of the pass, and the translation, so that the next pass can start. One warp.
FN void assess(const Batch &S, Shared &all, const Step &at, Step &next) {
    const Rates &rate = all.rates;
    const float shift = at.shift;
    const float plan = S.k1 > 0 || ONE_POTENTIAL ? total(all, PLAN) : rate.mass_a, Q = total(all, SUM_Q);
    const float lam = translation(all, shift, plan, Q), common = rate.both * lam;
    const float grow = power_of(rate.k2 * (shift + lam)), mass = plan * power_of(-rate.rest1 * lam);
    const float square = total(all, SUM_QFF) + common * (2 * total(all, SUM_QF) + common * Q);
    double dual = rate.dual_0 - rate.dual_mass * (double)mass, cols = S.limits.rho_cols * (double)(Q * grow);
    if (!(S.limits.rate_cols > 0))
        cols = S.limits.reg * (LN2 * ((double)(shift + lam) * all.mass_b - (double)total(all, OF_Y)) - all.offset_b);
    dual -= ONE_POTENTIAL ? 2 * cols : cols;
    if (!(S.k1 > 0) && !ONE_POTENTIAL) {
        double logs = 0, moved = (double)(shift + rate.fi1 * lam) * all.mass_a;
        for (int k = 0; k < WARPS; k++) logs += (double)all.row_logs[k];
        dual += S.limits.reg * (all.offset_a + LN2 * (logs + moved));
    }
    const int lane = threadIdx.x % 32, moved_on = at.known > 0, known = S.limits.anderson_depth > 0 ? 1 + moved_on : 0;
    if (lane < ANDERSON_DEPTH) next.slot[lane] = at.slot[lane + moved_on < ANDERSON_DEPTH ? lane + moved_on : 0];
    if (lane > 0) return;
    all.last = sound(all) ? SOUND : UNSOUND;
    all.dual = dual;
    all.mass = mass;
    all.loss = fmaxf(square * grow, 0);
    next.shift = shift + rate.fi1 * lam;
    next.known = known;
}

// Choose the block's next step after the last pass. The residual gives an estimate of the error, not a certificate. One
// warp runs this during the next pass.
FN void judge(const Batch &S, Shared &all, bool extrapolated) {
    const Rates &rate = all.rates;
    const double dual = all.dual, best = all.best_dual;
    const float mass = all.mass, loss = all.loss, best_error = all.best_error, over = reciprocal(mass);
    const int last = all.last, lane = threadIdx.x % 32, missed = all.since_best + 1, fresh = all.fresh;
    bool far = false;
    for (int j = lane; j < COLUMNS; j += 32) far |= !(all.v[j] < LIMIT);
    far = __any_sync(FULL, far);
    const float d = rate.error * loss * over;
    const float error = rate.k2 > 0 ? d * (1.0f / 3) + root_of(2 * d + d * d * (1.0f / 9))
                                    : rate.error * root_of(loss * rate.mass_b) * over;
    const int since_best = error < best_error * (1 - 1e-3f) ? 0 : missed;
    const bool rejected = extrapolated && !(dual >= best - rate.slack - rate.mass_slack * (double)mass);
    bool done = error <= rate.tol || since_best >= NARROW_PATIENCE || !isfinite(dual);
    if (S.limits.tol_gap >= 0 && S.limits.rate_cols > 0)
        done |= S.limits.reg * (double)(d * mass) <= S.limits.tol_gap * fabs(dual);
    __syncwarp(); // every lane has read its data
    if (lane > 0) return;
    // a K around these same potentials would be rebuilt for ever: stop, since batch.cu has a wider range
    const bool again = last == NOTHING && fresh == 1;
    const int kernel = !far ? GO_ON : again ? STOP : BUILD, unsound = BACK | (fresh ? STOP : BUILD);
    all.order = last == NOTHING ? kernel : last == UNSOUND ? unsound : rejected ? REJECT : done ? STOP : kernel;
    all.last = NOTHING;
    if (last == SOUND && !rejected) {
        all.best_dual = extrapolated ? fmax(best, dual) : dual;
        all.best_error = fminf(best_error, error);
        all.since_best = since_best;
        all.fresh = 0;
    }
}

#include "batch_weights.cuh"

// The next y = G - sum gamma_i (difference of images)_i, v and the history. If the sums are unusable, nothing changes.
FN void advance(Shared &all, const Step &at, int turn, int j, const float (&G)[2], const float (&f)[2]) {
    float gamma[ANDERSON_DEPTH], y[2] = {G[0], G[1]}, w[2], v[2], dF[2], dG[2], part[2];
    const bool usable = sound(all), extrapolate = at.known > 0;
    const Products now = products(all);
    anderson(at, now, gamma);
    if (!usable || (COLUMNS < 128 && j >= COLUMNS)) return;
    load(&all.col[F_BEFORE][j], dF), load(&all.col[G_BEFORE + (turn ^ 1)][j], dG), load(&all.col[WEIGHT_B][j], w);
    UNROLLED (int i = 0; i < OLD; i++) {
        load(&all.col[DIFF_G][at.slot[i] + j], part);
        y[0] = fmaf(-gamma[i], part[0], y[0]);
        y[1] = fmaf(-gamma[i], part[1], y[1]);
    }
    UNROLLED (int q = 0; q < 2; q++) {
        dF[q] = f[q] - dF[q] - now.mean;
        dG[q] = G[q] - dG[q];
        y[q] = extrapolate ? fmaf(-gamma[OLD], dG[q], y[q]) : G[q];
        y[q] = w[q] > 0 ? y[q] : 0;
        v[q] = w[q] * power_of(y[q]);
    }
    const int slot = at.slot[OLD] + j; // without extrapolation nothing reads this difference
    store(&all.v[j], v), store(&all.col[Y][j], y);
    store(&all.col[F_BEFORE][j], f), store(&all.col[G_BEFORE + turn][j], G);
    store(&all.col[DIFF_F][slot], dF), store(&all.col[DIFF_G][slot], dG);
}

// After a step that lost dual value, and before the first: go on from the last image, without a history.
FN void restart(Shared &all, int turn) {
    ROLLED (int j = threadIdx.x; j < COLUMNS; j += THREADS) {
        const float y = all.col[G_BEFORE + turn][j], w = all.col[WEIGHT_B][j];
        all.col[Y][j] = y;
        all.v[j] = w > 0 ? w * power_of(y) : 0;
        for (int i = 0; i < ANDERSON_DEPTH; i++) all.col[DIFF_F + i][j] = all.col[DIFF_G + i][j] = 0;
    }
    if (threadIdx.x < 2) {
        Step &step = all.step[threadIdx.x];
        for (int i = 0; i < OLD; i++) step.rhs[i] = 0;
        for (int i = 0; i < OLD; i++)
            for (int k = 0; k <= i; k++) step.gram[AT(i, k)] = i == k;
        for (int i = 0; i < ANDERSON_DEPTH; i++) step.slot[i] = i * COLUMNS;
        step.known = 0;
    }
    __syncthreads();
}
