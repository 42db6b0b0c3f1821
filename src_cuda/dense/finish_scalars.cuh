// The scalar work between the two sweeps of finish_pass, by common/rules.h; twin of src_c/finish.c.
//
// Every block does it on the same numbers. One warp finds Anderson's weights, while one thread finds the dual value
// and guards the last step. The certified error and the status come later (verdict): the next
// sweep does not wait for them.
#include "anderson.cuh"

// Factor of the columns' terms: with one potential the rows have the same terms.
FN double both(const State &S) { return S.limits.symmetric ? 2.0 : 1.0; }

// The statistics that the guard needs.
FN void measure(const State &S, Finish &F, const Translation &move) {
    const double *t = F.total, *row = F.row;
    mapuot_stats &out = F.stats;
    out.mass = move.kappa * row[ROW_MASS];
    out.dual = F.p.dual_constant + move.kappa * row[ROW_SOFT] + row[ROW_DUAL] +
               S.hard_weight * S.limits.reg * (F.p.shift + S.limits.fi_rows * move.lam) + both(S) * t[SUM_DUAL] -
               S.limits.reg * out.mass;
    out.dead = row[ROW_DEAD] + t[SUM_DEAD];
    out.lost = lost_mass(&S.limits, row[ROW_SCALE], row[NEXT_SCALE], row[ROW_MASS]);
    out.rejected = 0;
}

FN bool in_range(double x) { return x <= NARROW_LIMIT && x >= 1 / NARROW_LIMIT; }

FN double largest_scale(const Finish &F) { return fmax(F.row[ROW_SCALE], F.row[NEXT_SCALE]); }

// May the numbers of a float32 pass be used at all?
FN bool usable(const Finish &F) {
    const mapuot_stats &out = F.stats;
    return in_range(F.row[ROW_SCALE]) && in_range(F.row[NEXT_SCALE]) && out.dead == 0 && isfinite(out.dual) &&
           isfinite(F.total[SUM_GAP] + F.total[SUM_HARD]) && out.mass > 0;
}

// Dual value and guard of the pass, or the reason to repeat it; one thread.
FN void settle_pass(const State &S, Finish &F, const Translation &move, double common) {
    Progress &p = F.p;
    const double shift = p.shift;
    measure(S, F, move);
    p.turn = p.turn < 5 ? p.turn + 1 : 0; // modulo 6, for sets of three and of two buffers
    p.step = MAPUOT_REPEAT;
    if (p.narrow > 0 && !usable(F)) { // float32 may hold the numbers of a K around the potentials of now
        if (S.limits.made && p.since_absorb > 0) p.status = MAPUOT_ABSORB;
        else widen_passes(&p);
        return;
    }
    const bool left = p.since_absorb > 0 && leaves_range(&S.limits, F.row[NEXT_SCALE]);
    if (left || outgrown(&S.limits, &p, &F.stats, largest_scale(F))) {
        p.status = MAPUOT_ABSORB;
        return;
    }
    p.common = common;
    p.lam = move.lam;
    p.shift += move.lam;
    p.offset = move.off;
    p.kappa = move.kappa;
    settle(&S.limits, &p, &F.stats);
    if (F.stats.rejected > 0 && !isfinite(p.shift)) p.shift = shift;
}

// The limits of passes, with the errors of the current K
FN mapuot_limits limits_of(const State &S, const Progress &p) {
    mapuot_limits limits = S.limits;
    limits.exponent_error = p.exponent_error;
    limits.dual_constant = p.dual_constant;
    return limits;
}

// Certified error and status, while the second sweep runs: by the warp before the last, which then writes the trace.
FN void verdict(const State &S, Finish &F, bool keep) {
    const double *t = F.total;
    mapuot_stats &out = F.stats;
    Progress &p = F.p;
    if (threadIdx.x / 32 != blockDim.x / 32 - 2 || p.step == MAPUOT_REPEAT) return;
    if (threadIdx.x % 32 == 0) {
        const mapuot_limits limits = limits_of(S, p);
        certify(&limits, &p, &out, both(S) * t[SUM_GAP], both(S) * t[SUM_HARD], t[SUM_MISFIT], largest_scale(F));
        out.residual = out.rejected > 0 ? INF : fmax(t[MAX_F] + p.common, t[MAX_MINUS] - p.common);
        judge(&S.limits, &p, &out, largest_scale(F), 1); // the next pass checks its own v
    }
    __syncwarp();
    const int q = threadIdx.x % 32;
    if (keep && q < (int)(sizeof(mapuot_stats) / 8))
        ((double *)(S.trace + ((int)p.passes - 1) % TRACE_PASSES))[q] = ((const double *)&out)[q];
}

#if COARSE
// Twin of src_c/coarse.c (coarse_correct): correction = T (R F - sum gamma R dF), a team for each cluster; all threads.
FN void coarse_step(const State &S, Finish &F, bool keep) {
    const Progress &p = F.p;
    const int J = threadIdx.x / TEAM, lane = threadIdx.x % TEAM, slot = (int)p.slot;
    const double mean = F.mean[J] + p.common, newest = mean - F.last_mean[J];
    double left = lane == 0 ? mean : 0, y = 0;
    for (int k = lane; k < (p.step > 0 ? (int)p.depth : 0); k += TEAM)
        left -= p.gamma[k] * (k == slot ? newest : __ldcg(S.coarse.mean_dF + k * CLUSTERS + J));
    left = warp_sum<TEAM>(left);
    __syncwarp(); // the team has read last_mean
    if (lane == 0) {
        F.left[J] = left;
        F.last_mean[J] = mean;
        if (keep && slot >= 0) S.coarse.mean_dF[slot * CLUSTERS + J] = newest;
    }
    __syncthreads();
    UNROLLED (int K = lane; K < CLUSTERS; K += TEAM) y = fma(S.coarse.matrix[J * CLUSTERS + K], F.left[K], y);
    y = warp_sum<TEAM>(y);
    if (lane == 0) F.correction[J] = y;
    __syncthreads();
}
#endif

// The scalar work between the sweeps; every block does it on the same numbers, the weights beside the rest.
FN void finish_scalars(const State &S, Finish &F) {
    const int warp = threadIdx.x / 32, slot = (int)F.p.head, depth = new_depth(&S.limits, &F.p);
    const bool weights = S.limits.anderson_depth > 0 && F.p.have > 0;
    __syncthreads();
    if (warp < 2) {
        const Translation move = F.move;
        double common = 0;
        if (S.limits.mu_rate > 0 && !(SPARSE && S.apart.count > 0)) {
            const double mass = move.kappa * F.row[ROW_MASS];
            common = next_translation(&S.limits, far_log(F.total[SUM_NEXT] * inverse(mass)));
        }
        if (warp == 1 && weights) {
            const double *t = F.total;
            const Moments sums = {t[SUM_ONES], t[SUM_F], t[SUM_P], t[SUM_PP], t[SUM_PF], t + SUM_DOT, t + SUM_RHS};
            solve_gamma(F.p.gram, depth, normal_equations(F.p, sums, common, slot, depth), F.p.gamma);
        }
        if (threadIdx.x == 0) settle_pass(S, F, move, common);
    }
    __syncthreads();
#if COARSE
    if (F.p.coarse > 0 && F.p.step < 2) coarse_step(S, F, blockIdx.x == 0);
#endif
}
