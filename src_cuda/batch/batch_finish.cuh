// The scalar work of a problem of a batch, by common/rules.h, and the second sweep over its columns.
// Included after batch.cuh.
#include "batch.cuh"

FN double c_mass_of(const Batch &S, const Standing &p) {
    return S.product ? p.mass_a * p.mass_b : (double)S.m * (double)S.n;
}

// The dual value as summed, after the translation; t: the sums of the first sweep.
FN double dual_value(const Batch &S, const Work &W, const Standing &p, const Move &move, double mass, const double *t) {
    const mapuot_limits &limits = S.limits;
    const double shift = p.shift + move.lam;
    double dual = limits.reg * (c_mass_of(S, p) - mass);
    if (!ONE_POTENTIAL)
        dual += S.k1 > 0 ? limits.rho_rows * (p.mass_a - mass) : limits.reg * (total(W.row, WARPS) + shift * p.mass_a);
    dual += (ONE_POTENTIAL ? 2 : 1) *
            (limits.rate_cols > 0 ? limits.rho_cols * (p.mass_b - move.weight * move.grow) : t[WORTH]);
    return dual;
}

// Sweep 2: the next x, extrapolated (step 1), the image (0) or the last image again (2). Returns true if v leaves the
// range.
FN bool second_sweep(const Batch &S, Work &W, double *col, int ld, double *v, const Standing &p, int step, int slot,
                     double c) {
    const int depth = step == MAPUOT_EXTRAPOLATE ? (int)p.depth : 0;
    double sum = 0;
    bool far = false;
    ROLLED (int j = threadIdx.x; j < (int)S.n; j += THREADS) {
        double x = col[IMAGE * ld + j];
        if (!(col[WEIGHT * ld + j] > 0)) continue;
        if (step < MAPUOT_GO_BACK) {
            const double G = col[NEW_G * ld + j] + c, f = col[NEW_F * ld + j] + c;
            double y = G;
            if (slot >= 0) {
                col[(DF + slot) * ld + j] = f - col[LAST * ld + j];
                col[(DG + slot) * ld + j] = G - x;
            }
#pragma unroll 4
            for (int i = 0; i < depth; i++) y -= p.gamma[i] * col[(DG + i) * ld + j];
            col[LAST * ld + j] = f;
            col[IMAGE * ld + j] = G;
            x = y;
        }
        far |= scale_column(S, col, ld, v, j, x, sum);
    }
    join_next(W, sum);
    return far;
}

// The decisions of the pass, into p and out; t: sums of the first sweep. Returns the translation of the image.
FN double settle_pass(const Batch &S, const Work &W, Standing &p, const Move &move, const double *t, Report &out) {
    mapuot_limits limits = S.limits;
    const bool soft = limits.rate_cols > 0;
    limits.dual_scale = limits.rho_rows * p.mass_a + limits.rho_cols * p.mass_b;
    limits.dual_constant = limits.reg * c_mass_of(S, p);
    if (limits.missed > 1) limits.extra_error += (ONE_POTENTIAL ? 2 : 1) * limits.missed * sums_rounding((double)S.m);
    limits.exponent_error += S.rounding * t[LOGS] / p.mass_b; // of the mean size of potentials
    out.mass = move.kappa * move.mass;
    out.dual = dual_value(S, W, p, move, out.mass, t);
    out.lost = out.dead = out.rejected = out.residual = 0;
    p.lam = move.lam;
    p.shift += move.lam;
    settle(&limits, &p, &out);
    const double loss =
        (ONE_POTENTIAL ? 2 : 1) * t[LOSS]; // with one potential the rows have the same loss as the columns
    // two hard sides: the optimum is that of b scaled to the mass of a, which may differ by rounding
    const double uneven = S.k1 > 0 ? 0 : fabs(p.mass_a - p.mass_b);
    certify(&limits, &p, &out, soft ? loss : 0, soft ? 0 : loss + uneven, 0,
            1); // scale 1: a pass on an outgrown K does not come here
    judge(&limits, &p, &out, 1, 1);
    out.passes = (double)p.passes;
    return next_translation(&limits, log_ratio_of(soft ? t[WORTH] : p.mass_b, out.mass));
}

// Scalar work and sweep 2, by every warp that has columns; warp 0 writes W.report. odd: the pass does not
// count, and K is rebuilt around the same x. Returns true if K is to be rebuilt.
FN bool finish_columns(const Batch &S, Work &W, double *col, int ld, double *v, const Move &move, bool odd) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = column_warps((int)S.n);
    Standing &at = W.standing[warp];
    double *t = W.sums[warp], sum = 0, common = 0;
    ROLLED (int w = 0; w < warps; w++) sum += lane < SUMS ? W.part[w][lane] : 0;
    if (lane < SUMS) t[lane] = sum;
    __syncwarp();
    Standing p = at;
    p.step = MAPUOT_REPEAT;
    if (odd) {
        if (threadIdx.x == 0) {
            W.report.status = p.since_absorb == 0 ? MAPUOT_NOT_FINITE : MAPUOT_RUNNING;
            W.report.passes = (double)(p.passes + 1);
        }
        p.passes += 1;
        p.since_absorb += 1;
    } else {
        Report out;
        common = settle_pass(S, W, p, move, t, out);
        if (threadIdx.x == 0) W.report = out;
    }
    __syncwarp();
    if (lane == 0) (mapuot_progress &)at = p;
    __syncwarp();
    const int step = (int)p.step, slot = (int)p.slot;
    if (step == MAPUOT_EXTRAPOLATE) {
        const Moments sums = {p.mass_b, t[SUM_F], t[SUM_P], t[SUM_PP], t[SUM_PF], W.dot, W.rhs};
        const int depth = (int)p.depth;
        solve_gamma(at.gram, depth, normal_equations(at, sums, common, slot, depth), at.gamma);
        __syncwarp();
        const double gamma = lane < depth ? at.gamma[lane] : 0;
        const bool finite = __all_sync(FULL, isfinite(gamma));
        if (lane < depth) at.gamma[lane] = finite ? gamma : 0;
        __syncwarp();
    }
    const bool far = step < MAPUOT_REPEAT && second_sweep(S, W, col, ld, v, at, step, slot, common);
    return odd || far;
}
