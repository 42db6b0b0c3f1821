/* limits.c - numbers and rules for every backend, before and between passes: the members of mapuot_limits that follow
 * from the problem, the options and the storage of K (mapuot/backends/limits.py), and the rules of a pass for callers
 * that make their own passes (mapuot/backends/rules.py).
 */
#include <math.h>

#include "common/rules.h"
#include "kernels.h"

static const double ROUNDING[] = {0x1p-53, 0x1p-24}; /* by mapuot_dtype: half a unit of the last of 53 and 24 digits */
static const double FLUSH_LOG[] = {-708.0, -87.3};   /* entries of K below e^this are zero */
enum { EXACT_ROUNDINGS = 12 }; /* a tol below this many roundings of K's entries needs a finer K */

void mapuot_limits_of(const mapuot_terms *terms, mapuot_limits *limits) {
    const double reg = terms->reg, tol = terms->tol, rounding = ROUNDING[terms->dtype];
    const int one = !isnan(terms->rho_rows) && !isnan(terms->rho_cols);
    const double k1 = isnan(terms->rho_rows) ? 0.0 : reg / terms->rho_rows;
    const double k2 = isnan(terms->rho_cols) ? 0.0 : reg / terms->rho_cols;
    const double fi1 = 1.0 / (1.0 + k1), fi2 = 1.0 / (1.0 + k2);
    const int translate = terms->translate && one && k1 + k2 > 0.0 && !terms->symmetric;
    *limits = (mapuot_limits){.reg = reg, .inv_reg = 1.0 / reg, .fi_rows = fi1, .rate_cols = k2};
    limits->rho_rows = k1 > 0.0 ? reg / k1 : 0.0;
    limits->rho_cols = k2 > 0.0 ? reg / k2 : 0.0;
    limits->lam_rate = translate ? 1.0 / (fi1 * k1 + k2) : 0.0;
    limits->mu_rate = translate ? fi2 / (k1 + fi2 * k2) : 0.0;
    limits->rho_kl = terms->rho_kl;
    limits->rho_tv = terms->rho_tv;
    limits->rho_l2 = terms->rho_l2;
    limits->hard_sides = terms->hard_sides;
    limits->path = terms->symmetric ? 2.0 * terms->path : terms->path; /* both sides miss their marginals */
    limits->missed =
        terms->missed > 1.0 ? terms->missed : 1.0; /* hard sides of one potential are counted twice already */
    limits->symmetric = terms->symmetric;
    limits->tol = tol;
    limits->tol_gap = terms->tol_gap;
    limits->anderson_depth = terms->anderson_depth;
    limits->in_place = terms->in_place;
    limits->storage_error = rounding;
    limits->flush = exp(FLUSH_LOG[terms->dtype]);
    limits->flush_tol = fmax(1e-12, fmin(1e-8, tol / 100.0));
    limits->finer = tol < EXACT_ROUNDINGS * rounding && !terms->in_place && terms->dtype != MAPUOT_F64;
    /* float32 passes cannot resolve their noise in a marginal, amplified by sqrt(rho / reg) */
    limits->narrow_floor = terms->noise * sqrt(1.0 + terms->largest_rho / reg);
}

int64_t mapuot_leading(int64_t n, int64_t entry_bytes) {
    const int64_t ld = padded(n);
    return ld * entry_bytes % 4096 == 0 ? ld + PAD : ld;
}

double mapuot_plan_error(double d) { return plan_error(d); }

void mapuot_settle(const mapuot_limits *limits, mapuot_progress *progress, mapuot_stats *stats) {
    settle(limits, progress, stats);
}

int mapuot_judge(const mapuot_limits *limits, mapuot_progress *progress, mapuot_stats *stats, double scale,
                 double next_v) {
    judge(limits, progress, stats, scale, next_v);
    return (int)progress->status;
}

int mapuot_judge_again(const mapuot_limits *limits, const mapuot_progress *progress, mapuot_stats *stats) {
    count_extra(limits, stats);
    return is_enough(limits, progress, stats);
}
