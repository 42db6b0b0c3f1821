// Mirrors batch.cu in float32: passes that bring log v near the answer. batch.cu goes on from there and certifies.
//
// Latency limits a pass: so the warps share the column half, a pass is judged while the next one runs (a rejected
// pass costs half a pass), logarithms are binary, and the block meets three times.
// Plans are u_i K_ij v_j with u = w_a 2^x, v = w_b 2^y (w = a, b; a^fi, b^fi without the reference a b^T), so that
// x and y are potentials, not logarithms of masses: their rounding stays near 1e-7.  log v = E_j - shift + y in nats, E
// the potential absorbed by K. A constant in log v does not change the translated iterate, so the second translation
// of finish_pass is left out, and Anderson takes residuals without their mean.
#include "batch_narrow.cuh"

// 2^x, 0 below 2^-125; 2^52 + 2^51 leaves the whole part in the low word
FN float exp_2(double x) {
    const double whole = x + 0x1.8p52;
    const float part = power_of((float)(x - (whole - 0x1.8p52)));
    return (float)x < -125 ? 0 : __int_as_float(__float_as_int(part) + (__double2loint(whole) << 23));
}

FN void open_problem(const Batch &S, Shared &all, int64_t problem) {
    double a = 0, b = 0;
    ROLLED (int i = threadIdx.x; i < ROWS; i += THREADS) {
        all.a[i] = i < (int)S.m ? S.A[problem * S.m + i] : 0;
        a += all.a[i];
    }
    ROLLED (int j = threadIdx.x; j < COLUMNS; j += THREADS) {
        const double w = j < (int)S.n ? S.B[problem * S.n + j] : 0;
        for (int kind = 0; kind < KINDS; kind++) all.col[kind][j] = 0;
        all.col[MASS][j] = (float)w;
        all.col[WEIGHT_B][j] = w > 0 && !S.product ? (float)exp(S.fi2 * log(w)) : (float)w;
        all.x[j] = w > 0 ? S.x[problem * S.n + j] : 0;
        all.E[j] = 0;
#if ONE_POTENTIAL
        all.s[ROWS + j] = 1; // columns beyond the last row read these
#endif
        b += w;
    }
    restart(all, 0);
    a = block_sum(a, all.scratch);
    b = block_sum(b, all.scratch);
    if (threadIdx.x == 0) {
        all.mass_a = a;
        all.mass_b = b;
        const double c = S.product ? a * b : (double)S.m * (double)S.n, fi = S.limits.fi_rows * S.fi2;
        Rates &rate = all.rates;
        rate = {(float)S.limits.fi_rows, (float)S.fi2,    (float)(1 - S.limits.fi_rows),
                (float)(1 - S.fi2),      (float)(1 - fi), (float)S.limits.rate_cols};
        rate.lam_rate = (float)S.limits.lam_rate;
        rate.mass_a = (float)a;
        rate.mass_b = (float)b;
        rate.share = ONE_POTENTIAL ? 0 : (float)(1 / b); // with one potential no translation corrects a constant
        const double own = ONE_POTENTIAL ? own_part(S.fi2) : 1, sides = ONE_POTENTIAL ? 2 : 1;
        const double half = LN2 * (1 + S.limits.rate_cols) / own;
        rate.own = (float)own;
        rate.error =
            (float)(sides * half * (rate.k2 > 0 ? 0.5 * S.limits.rho_cols * S.limits.inv_reg * half : S.limits.missed));
        rate.tol = (float)fmax(S.limits.tol, S.limits.narrow_floor);
        rate.dual_0 = S.limits.reg * c + S.limits.rho_rows * a + S.limits.rho_cols * b;
        rate.dual_mass = S.limits.reg + (ONE_POTENTIAL ? 0 : S.limits.rho_rows);
        rate.mass_slack = 1e-6 * S.limits.reg;
        rate.slack = 4e-7 * (S.limits.rho_rows * a + S.limits.rho_cols * b);
        all.best_dual = -INF;
        all.best_error = (float)INF;
        all.since_best = 0;
        all.last = NOTHING;
        all.fresh = 3;
    }
    __syncthreads();
}

// Column q of lane c of 16: groups of four side by side, the remaining columns 16 apart
FN constexpr int column_of(int c, int q) {
    return q < CT / 4 * 4 ? q / 4 * 64 + 4 * c + q % 4 : CT / 4 * 64 + q % 4 * 16 + c;
}

// Build K in registers from alpha and beta, 1 in rows and columns left out: their sums are unused, but must not be 0.
// A row is loaded while the one before is used. Loads outside M go to its edge, which avoids branches.
FN void fill_kernel(const Batch &S, const Shared &all, const cost *M, float (&K)[RT][CT]) {
    const int g = threadIdx.x / 16, c = threadIdx.x % 16, last = (int)S.m - 1;
    const double scale = -S.limits.inv_reg * LOG2E;
    cost next[CT], row[CT];
    UNROLLED (int k = -1; k < RT; k++) {
        const int i = g * RT + k + 1;
        const cost *from = M + (i < last ? i : last) * S.M_row;
        UNROLLED (int q = 0; q < CT; q++) {
            row[q] = next[q];
            const int j = column_of(c, q);
            if (k + 1 < RT) next[q] = from[(j < (int)S.n ? j : 0) * S.M_col];
        }
        __syncwarp(); // all loads are issued before the first is used
        UNROLLED (int q = 0; k >= 0 && q < CT; q++) {
            const double potential = all.alpha[i - 1] + all.beta[column_of(c, q)];
            const float entry = exp_2(fma((double)row[q], scale, LOG2E * potential));
            K[k < 0 ? 0 : k][q] = potential > -INF ? entry : 1;
        }
    }
}

// Set the potentials that K has absorbed: E, base, weights; the history stays. x holds log v.
FN void absorb_columns(const Batch &S, Shared &all, int turn, bool plain) {
    double top = -INF, sum = 0;
    ROLLED (int j = threadIdx.x; j < COLUMNS; j += THREADS) {
        const double w = j < (int)S.n ? (double)all.col[MASS][j] : 0, before = all.E[j];
        if (!(w > 0)) continue;
        const double E = all.beta[j] + (S.product ? 0 : S.fi2 * log(w));
        all.E[j] = E;
        all.col[BASE][j] = (float)(-(1 - S.fi2) * LOG2E * all.beta[j]);
        all.col[WEIGHT_Q][j] = (float)(w * exp(-S.limits.rate_cols * E));
        all.col[G_BEFORE][j] += (float)((before - E) * LOG2E);
        all.col[G_BEFORE + 1][j] += (float)((before - E) * LOG2E);
        top = fmax(top, all.x[j] - E);
        sum += w * E;
    }
    top = ONE_POTENTIAL ? 0 : block_max(top, all.scratch);
    sum = block_sum(sum, all.scratch);
    ROLLED (int j = threadIdx.x; j < COLUMNS; j += THREADS) {
        const float y = all.col[MASS][j] > 0 ? (float)((all.x[j] - all.E[j] - top) * LOG2E) : 0;
        all.col[Y][j] = y;
        all.v[j] = all.col[WEIGHT_B][j] * power_of(y);
    }
    if (threadIdx.x == 0) {
        all.offset_b = sum;
        all.step[turn].shift = (float)(-top * LOG2E);
        all.fresh = 1 + plain;
    }
}

FN void absorb_rows(const Batch &S, Shared &all) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, k = lane % RP, i = (2 * warp + lane / RP) * RT + k;
    double sum = 0;
    if (lane < 2 * RP) {
        const bool used = k < RT && all.a[i] > 0;
        const double a = used ? all.a[i] : 0, log_a = used && !S.product ? S.limits.fi_rows * log(a) : 0;
        all.row_base[warp][lane] = used ? (float)(-(1 - S.limits.fi_rows) * LOG2E * all.alpha[i]) : 0;
        all.row_weight[warp][lane] = used && !S.product ? (float)exp(log_a) : (float)a;
        all.row_mass[warp][lane] = (float)a;
        sum = used ? a * (all.alpha[i] + log_a) : 0;
    }
    sum = block_sum(sum, all.scratch);
    if (threadIdx.x == 0) all.offset_a = sum;
    __syncthreads();
}

// Build K around log v, or around zeros; then y and v.
FN void build_kernel(const Batch &S, Shared &all, const cost *M, int turn, float (&K)[RT][CT]) {
    const bool first = all.fresh > 1, plain = all.fresh > 2 && S.safe > 0;
    ROLLED (int j = threadIdx.x; j < COLUMNS; j += THREADS) {
        const double w = all.col[MASS][j];
        if (!first) all.x[j] = all.E[j] + LN2 * ((double)all.col[Y][j] - (double)all.step[turn].shift);
        all.beta[j] = !(w > 0) ? -INF : plain ? 0 : all.x[j] + (S.product ? log(w) : 0);
    }
    for (int i = threadIdx.x; plain && i < ROWS; i += THREADS) all.alpha[i] = all.a[i] > 0 ? S.low : -INF;
    __syncthreads();
    if (!plain) balance(S, M, all.a, all.alpha, all.beta, all.join[0]);
    share_potentials(S, all.alpha, all.beta);
    absorb_columns(S, all, turn, plain);
    absorb_rows(S, all);
    fill_kernel(S, all, M, K);
}

// u = prox(K v) for the rows of a warp, a row a lane: the sums of 16 lanes are joined in shared memory
FN void find_scales(const Batch &S, Shared &all, float shift, const float (&K)[RT][CT]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = lane % 16;
    float v[CT];
    UNROLLED (int q = 0; q < CT; q++) v[q] = all.v[column_of(c, q)];
    UNROLLED (int k = 0; k < RT; k++) {
        float s = 0;
        UNROLLED (int q = 0; q < CT; q++) s = fmaf(K[k][q], v[q], s);
        all.join[warp][lane / 16 * HALF + 20 * k + c] = s;
    }
    __syncwarp();
    [[maybe_unused]] float log_u = 0;
    if (lane < 2 * RP) {
        float sum = 0;
        UNROLLED (int q = 0; q < 16; q += 4) {
            float x[4];
            load(&all.join[warp][lane / RP * HALF + lane % RP * 20 + q], x);
            sum += x[0] + x[1] + (x[2] + x[3]);
        }
#if ONE_POTENTIAL
        if (lane % RP < RT) all.s[(2 * warp + lane / RP) * RT + lane % RP] = sum;
    }
#else
        log_u = all.row_base[warp][lane] - all.rates.rest1 * shift - all.rates.fi1 * log_2(sum);
        const float u = all.row_weight[warp][lane] * power_of(log_u);
        all.u[warp][lane] = sum > DEAD && u < LIMIT ? u : NONE; // NONE, a NaN, spreads: K is outgrown
        const float mass = all.row_mass[warp][lane];
        log_u = mass > 0 ? log_u * mass : 0;
    }
    if (!(S.k1 > 0)) {
        const float logs = warp_sums<1>(&log_u, lane);
        if (lane == 0) all.row_logs[warp] = logs;
    }
    __syncwarp();
#endif
}

// The row half: u, and the parts of K^T u of each group
FN void row_half(const Batch &S, Shared &all, float shift, const float (&K)[RT][CT]) {
    find_scales(S, all, shift, K);
    if (ONE_POTENTIAL) return;
    const int warp = threadIdx.x / 32, g = threadIdx.x / 16, c = threadIdx.x % 16;
    float sums[CT];
    UNROLLED (int q = 0; q < CT; q++) sums[q] = 0;
    UNROLLED (int k = 0; k < RP; k += 4) {
        float u[4];
        load(&all.u[warp][g % 2 * RP + k], u);
        UNROLLED (int r = 0; r < 4; r++)
            if (k + r < RT)
                UNROLLED (int q = 0; q < CT; q++) sums[q] = fmaf(K[k + r < RT ? k + r : 0][q], u[r], sums[q]);
    }
    UNROLLED (int q = 0; q < CT; q++) all.join[warp][g % 2 * (COLUMNS + 16) + column_of(c, q)] = sums[q];
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) batch_narrow(const __grid_constant__ Batch S) {
    __shared__ Shared all;
    const int64_t problem = blockIdx.x;
    const cost *M = S.M + problem * S.M_problem;
    uint32_t processors;
    asm("mov.u32 %0, %%nsmid;" : "=r"(processors));
    // blocks that share a multiprocessor have their roles in different warps, so that each scheduler has its part
    const int role = (threadIdx.x / 32 + blockIdx.x / processors) % WARPS, j = 64 * role + 2 * (threadIdx.x % 32);
    int passes = (int)S.report[problem].passes, turn = 0;
    float K[RT][CT];
    if (S.report[problem].status != MAPUOT_RUNNING || passes + 1 >= (int)S.count) return;
    open_problem(S, all, problem);
    int order = BUILD;
#pragma unroll 1
    while (order & (BUILD | REJECT)) {
        if (order & BUILD) build_kernel(S, all, M, turn, K);
        else restart(all, turn);
        ROLLED (;;) {
            Step &at = all.step[turn], &next = all.step[turn ^ 1];
            row_half(S, all, at.shift, K);
            __syncthreads();
            float G[2] = {0, 0}, f[2] = {0, 0};
            if (role < COLUMN_HALVES) column_sums(all, at, role, j, G, f);
            else if (role == JUDGE) judge(S, all, next.known > 1);
            else invert(at);
            __syncthreads();
            order = all.order;
            if (order != GO_ON || passes + 1 >= (int)S.count) // batch.cu makes the last pass in float64
                break;
            if (role < COLUMN_HALVES) advance(all, at, turn, j, G, f);
            else if (role == JUDGE) assess(S, all, at, next);
            else if (at.known > 0) shift_differences(all, at, next);
            __syncthreads();
            passes++;
            turn ^= 1;
        }
        turn ^= order & BACK;
    }
    for (int i = threadIdx.x; i < (int)S.n; i += THREADS) {
        const double x = all.E[i] + LN2 * ((double)all.col[Y][i] - (double)all.step[turn].shift);
        if (all.col[MASS][i] > 0 && isfinite(x)) S.x[problem * S.n + i] = x;
    }
    if (threadIdx.x == 0) S.report[problem].passes = passes;
}
