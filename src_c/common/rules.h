/* rules.h - the decisions of a pass: translation, certificate, guard and stopping rule, with scalars in and out.
 *
 * One pass calls, in this order: translation, settle (the state that the guard and the next step depend on), certify
 * and judge. Formulas and bounds: docs/mathematics.md. The oracle, backends/reference.py, shares no code.
 * src_cuda/batch/batch_narrow.cuh mirrors these rules in float32 and certifies nothing. */
#pragma once
#include "common/record.h"

#define STALL_PASSES 250   /* passes without progress before a solve is given up */
#define NARROW_PATIENCE 20 /* the same, before float32 passes give way to float64 ones or clipped ones are given up */
#define FLOOR_PASSES 6     /* the same near the estimated float32 floor, without a fall of the error by a fifth */
#define NEAR_FLOOR 10      /* times the estimated floor: the floor grows with the number of terms of a sum */
#define MOST_DROPPED 2     /* one potential stalls after so many dropped steps: its kernel is not positive */
#define NARROW_LIMIT 1e20  /* sums of u or v beyond it, or below its inverse, are not safe in float32 */
#define SUMS_NOISE 1e-6    /* relative error of float32 sums */
#define GAP_NOISE 1e-13    /* rounding of a gap, relative to the plan's mass: a gap below minus it proves nothing */
#define GAP_LEAST 1e-316   /* rounding of a gap near the smallest number: some 1e7 terms of 5e-324 */
#define SUM_NOISE 4.5e-16  /* relative error of the sum of a column, by its last additions */
#define LEAST_MASS 1e-290  /* a plan of less mass has marginals that lose their digits at TINY */
#define STILL 1e-9         /* dead points stay dead once a pass changes log v by less */
#define MOST_LOST 1e-3     /* relative mass that an outgrown K may hide before the pass is repeated on a fresh K */
#define RIDGE 1e-10        /* added to Anderson's normal equations with normalised columns */
#define LARGEST 1.7976931348623157e308

/* log(x / y), from the quotient if it is in range: for x near y, log x - log y would lose digits */
FN double log_ratio_of(double x, double y) {
    const double ratio = x / y;
    return ratio > 1e-290 && ratio < 1e290 ? log(ratio) : log(x) - log(y);
}

/* lam = (log A - log B) / (fi1 reg/rho1 + reg/rho2), the best common translation: u *= e^(fi1 lam), v *= e^(-lam).
 * A: the mass, B = sum b e^(-k log v). B comes as sum b e^(-k x), x = log v + shift, so that its terms stay near 1
 * however large log v is; log_ratio = log(A / that sum). Return 0 without a translation, and if a sum has left the
 * range of float64: the pass then goes without one. */
FN double translation(const mapuot_limits *limits, double log_ratio, double shift) {
    const double lam = limits->lam_rate * (log_ratio - limits->rate_cols * shift);
    return limits->lam_rate > 0 && isfinite(lam) ? lam : 0;
}

/* The shift takes lam, so that log v + shift stays. Return the part left for log u: the plan grows by e^this. */
FN double left_of_rows(const mapuot_limits *limits, double lam) { return (limits->fi_rows - 1) * lam; }

/* fi2 mu, mu = (log B' - log A') / (reg/rho1 + fi2 reg/rho2), the translation of the image; log_ratio = log(B' / A') */
FN double next_translation(const mapuot_limits *limits, double log_ratio) {
    const double common = limits->mu_rate * log_ratio;
    return limits->mu_rate > 0 && isfinite(common) ? common : 0;
}

/* |P - P*|_1 / mass from d = gap / (reg mass) >= KL(P* | P) / mass: |p - q|_1^2 <= (2/3 |p| + 4/3 |q|) KL(p | q) */
FN double plan_error(double d) {
    if (d > 1e100) return 0.7 * d;
    return d > 0 ? d * (1.0 / 3) + sqrt(2 * d + d * d * (1.0 / 9)) : d == d ? 0 : d;
}

/* Relative rounding error of an entry of K. A plan in place is rounded again in every pass; `passes` were made on this
 * K. */
FN double entry_error(const mapuot_limits *limits, int64_t passes) {
    return limits->storage_error * (limits->in_place ? 1 + (double)passes : 1);
}

/* Error of the plan by that rounding: one unit directly, and two since the rounded K has another optimum. */
FN double storage_error(const mapuot_limits *limits, int64_t passes) { return 3 * entry_error(limits, passes); }

/* Relative error of e^y when y is off by x: e^x - 1 <= x (1 + x) up to x = 1. Beyond 1 no digit is left. */
FN double exponent_growth(double x) { return x <= 1 ? x * (1 + x) : x == x ? INF : x; }

/* An upper bound of |log x| for x > 0, from its binary exponent */
FN double size_of_log(double x) { return 0.7 * (1 + fabs((double)ilogb(x))); }

/* Bound the gap of the plan of the exact K by the gap of the plan of the rounded K: the marginals r differ by up to
 * d r. sqrt(gap) then grows by at most d sqrt(rho mass) (KL: rho r is the second derivative; L2: rho / 2 sum
 * r^2 <= rho / 2 mass^2). The gap of total variation grows by 2 rho d r, that of a hard side by d r |f|,
 * |f| / reg <= log_size. */
FN double gap_of_rounded(const mapuot_limits *limits, double gap, double mass, double d, double log_size) {
    const double root = sqrt(gap) + d * sqrt(mass * (limits->rho_kl + 0.5 * limits->rho_l2 * mass));
    const double linear = 2 * limits->rho_tv + limits->hard_sides * limits->reg * log_size;
    return root * root * (1 + 3 * d) + d * mass * linear;
}

/* Bound on the relative mass that zeros hide: entries of K below flush, and u and products below TINY. LEAST_MASS
 * stands for many numbers below TINY. */
FN double lost_mass(const mapuot_limits *limits, double scale_u, double scale_v, double mass) {
    return ((limits->flush * scale_u + LEAST_MASS) * scale_v + LEAST_MASS * scale_u) * OVER(mass);
}

/* Is a scaling of u or v clipped, so that it is not a prox? */
FN int is_clipped(const mapuot_limits *limits, double scale) { return !(scale < limits->most_scale); }

/* Has the plan outgrown K: are points in use dead, is mass hidden or a scaling clipped, and would a fresh K help?
 * scale: the larger of sum u and sum v. */
FN int outgrown(const mapuot_limits *limits, const mapuot_progress *p, const mapuot_stats *out, double scale) {
    return p->since_absorb > 0 &&
           (out->dead > p->dead || is_clipped(limits, scale) > (p->clipped > 0) || out->lost > MOST_LOST);
}

FN int leaves_range(const mapuot_limits *limits, double sum_v) {
    return !(sum_v <= limits->scale_limit && sum_v * limits->scale_limit >= 1);
}

/* How far a step may lower the dual value before the guard drops it: by the size of rounding. Float32 sums of some
 * thousand terms err by SUMS_NOISE of the mass and, through the marginals, by 1e-7 of rho a; without the second term
 * small reg took half as many passes again. */
FN double guard_slack(const mapuot_limits *limits, const mapuot_progress *p, double mass) {
    return p->narrow > 0 ? SUMS_NOISE * limits->reg * mass + 1e-7 * limits->dual_scale
                         : 1e-13 * fabs(p->best_dual) + 2e-15 * limits->dual_scale;
}

FN int new_depth(const mapuot_limits *limits, const mapuot_progress *p) {
    return (int)(p->depth < limits->anderson_depth && p->head == p->depth ? p->depth + 1 : p->depth);
}

FN void forget(mapuot_progress *p) { p->depth = p->head = p->have = p->extrapolated = 0; }

/* The guard: drop a step that lowers the dual value, else choose the next step, which needs a last image. If a step
 * with a coarse correction is dropped, the correction was wrong: it rests until a new one is built. */
FN void settle(const mapuot_limits *limits, mapuot_progress *p, mapuot_stats *out) {
    p->slot = -1;
    if (out->dead > p->dead) out->dual = -INF; /* a point in use counted as unreached, so this is no dual value */
    out->rejected = p->extrapolated > 0 && !(out->dual >= p->best_dual - guard_slack(limits, p, out->mass));
    if (out->rejected > 0) {
        forget(p);
        p->dropped += 1;
        p->coarse = 0;
        p->step = MAPUOT_GO_BACK;
        return;
    }
    p->best_dual = p->extrapolated > 0 ? fmax(p->best_dual, out->dual) : out->dual;
    p->step = limits->anderson_depth > 0 && p->have > 0;
    p->extrapolated = p->step > 0 || p->coarse > 0;
    if (p->step > 0) {
        p->depth = new_depth(limits, p);
        p->slot = p->head;
        p->head = p->head + 1 < limits->anderson_depth ? p->head + 1 : 0;
    }
    p->have = 1;
}

/* Discard the pass and repeat it on a fresh K. The guard may still drop its step then: without the guard one
 * extrapolation far off could cost ten times the passes, or a stall (632 passes, now 62). */
FN void repeat(mapuot_progress *p, mapuot_stats *out) {
    p->step = MAPUOT_REPEAT;
    out->rejected = 1;
    out->dual = -INF;
}

/* How far below 0 rounding may bring a gap. Its terms rho (r log(r / q) - r + q) are of the size of rho |P|, however
 * large rho |a| is. */
FN double gap_noise(const mapuot_limits *limits, double mass) {
    return GAP_NOISE * mass * (limits->reg + limits->rho_kl);
}

/* A gap is a sum of terms >= 0, and a dual value is finite. Numbers that violate this by more than rounding prove
 * nothing. */
FN int is_sound(const mapuot_limits *limits, const mapuot_stats *out, double gap) {
    return isfinite(out->dual) && isfinite(out->mass) && gap >= -gap_noise(limits, out->mass);
}

/* The gap, or its rounding where that is larger */
FN double sound_gap(const mapuot_limits *limits, double mass, double gap) {
    return (gap < 0 ? gap_noise(limits, mass) : gap) + GAP_LEAST * (1 + limits->rho_kl);
}

/* Is u of some row not the prox of its sum, because it is clipped or left out as dead? The gap and the dual value then
 * lack the terms of this row. */
FN int proves_nothing(const mapuot_limits *limits, const mapuot_stats *out, double scale) {
    return out->dead > 0 || is_clipped(limits, scale);
}

/* Rounding of the sums of m terms in each column, relative to the mass of the plan */
FN double sums_rounding(double m) { return 2e-16 * (8 + sqrt(m)); }

/* The certified plan error for K as stored. At a kink the gap is linear in the misfit of a marginal, times rho / reg,
 * so that its root turns the rounding of marginals into 1e-8 and more. A second bound is linear: the state is optimal
 * for marginals moved by the misfit, and the resulting change of the plan flows along falling potentials, on paths of
 * at most `path` edges (docs/mathematics.md). The smaller bound counts. */
FN double certified_error(const mapuot_limits *limits, const mapuot_stats *out, double gap, double hard,
                          double misfit) {
    const double over = OVER(out->mass), error = plan_error(gap * over * limits->inv_reg) +
                                                 limits->missed * (hard * over + (limits->missed > 1) * SUM_NOISE);
    if (!(limits->path > 0)) return error;
    return fmin(error, limits->path * (misfit * over + SUM_NOISE));
}

/* Add the errors that the caller knows of and a pass cannot see: to the plan error, and on either side of the
 * optimum. */
FN void count_extra(const mapuot_limits *limits, mapuot_stats *out) {
    out->error += limits->extra_error;
    out->gap += limits->extra_gap;
    out->dual -= limits->extra_gap;
}

/* Certify the state. gap: the sum of the Fenchel-Young terms, hard: of the violations, misfit: of the misfits. On entry
 * out holds the dual value as it was summed, on return a lower bound of the optimum.
 *
 * The rounding of K changes the dual value by reg times the mass that it moves. In rho (a - r), r stands for a e^(-f /
 * rho) and differs from it by the rounding of log u. With e = 2^-53, fi is off by 2 e, so that (1 - fi) shift is off by
 * 2 e of the shift before the translation and (1 - fi) lam by 2 e lam; the terms of log u, its logarithms and
 * exponentials are off by at most 4 e of their sizes. All of log u, log v, shift and lam count with 4 e = 4.5e-16.
 * exponent_error counts the part that K absorbed with 8 e of all its terms. At most half of these terms are in u, and M
 * / reg is in s of the rows as well, so that a quarter, 4 e, remains. */
FN void certify(const mapuot_limits *limits, mapuot_progress *p, mapuot_stats *out, double gap, double hard,
                double misfit, double scale) {
    const double allowed = limits->tol_gap >= 0 ? limits->tol_gap : fmax(limits->tol, 0.0), mass = out->mass;
    const double logs = fabs(p->shift) + fabs(p->lam) + size_of_log(scale) + size_of_log(mass);
    const double log_size =
        logs + limits->exponent_error * 1.1e15; /* the sizes of log u and log v: see EXPONENT_ROUNDING */
    const double rounding = exponent_growth(limits->exponent_error + 4.5e-16 * logs);
    const double entries = entry_error(limits, p->since_absorb) + rounding + out->lost;
    const double noise = p->narrow > 0 ? SUMS_NOISE : 0; /* float32 sums certify nothing */
    const double terms = limits->dual_scale + fabs(limits->dual_constant) + fabs(out->dual) +
                         limits->hard_sides * limits->reg * log_size * (mass + hard);
    const double prox = exponent_growth(0.25 * limits->exponent_error + 4.5e-16 * logs); /* without M / reg */
    p->moved = mass * (limits->reg * entries + limits->rho_kl * prox) + 1e-15 * terms;
    /* All rows may err in one direction: 199 equal rows of 180 columns erred by 1.1e-7 of rho a, more than
     * guard_slack. The prox errs relative to the plan's mass: with 13 times the mass of a, the dual value of a
     * pass was above the optimum. */
    if (p->narrow > 0) p->moved += SUMS_NOISE * (mass * (limits->reg + limits->rho_kl) + limits->dual_scale);
    /* a bound as large as 1e278 has a relative error, too: its mass is a sum of such entries */
    const double known = sound_gap(limits, mass, gap);
    out->error = certified_error(limits, out, known, hard, misfit) * (1 + 2 * entries) +
                 storage_error(limits, p->since_absorb) + rounding + out->lost;
    out->gap = hard > allowed * mass ? INF : gap_of_rounded(limits, known, mass, entries + noise, log_size);
    if (!is_sound(limits, out, gap) || proves_nothing(limits, out, scale) || !(out->error + p->moved < INF))
        out->gap = out->error = INF;
    out->dual = p->moved < INF ? out->dual - p->moved : -INF;
    count_extra(limits, out);
}

/* Is the value known to tol_gap?  The optimum lies above the dual value, by at most twice the sum of its rounding and
 * extra_gap: beside a negative dual value it may be 0.  The gap is inf while hard columns miss more than tol_gap. */
FN int has_value(const mapuot_limits *limits, const mapuot_progress *p, const mapuot_stats *out) {
    const double lost = p->moved + limits->extra_gap, least = fmax(out->dual - lost, -out->dual - 2 * lost);
    return limits->tol_gap >= 0 && isfinite(out->dual) && out->gap <= limits->tol_gap * least;
}

/* May the solve end? */
FN int is_enough(const mapuot_limits *limits, const mapuot_progress *p, const mapuot_stats *out) {
    return out->error <= limits->tol || has_value(limits, p, out);
}

/* Has the certificate stood still for long, or beside a clipped scaling for a while?  Slow progress of the dual value
 * adds up until it counts. */
FN int stalled(mapuot_progress *p, const mapuot_stats *out, int clipped) {
    p->since_best += 1;
    if (out->error < p->best_error * (1 - 1e-3) || out->dual > p->progress_dual + 1e-9 * fabs(out->dual)) {
        p->best_error = fmin(p->best_error, out->error);
        p->progress_dual = fmax(p->progress_dual, out->dual);
        p->since_best = 0;
    }
    return p->since_best >= (clipped ? NARROW_PATIENCE : STALL_PASSES);
}

/* Go on with float64 passes, since only these certify: the float32 passes have done their work or can do no more. The
 * guard stays for the step under way, lowered by the possible error of float32 sums in the dual value: without it one
 * step went to log v = -1e6. */
FN void widen_passes(mapuot_progress *p) {
    p->narrow = 0;
    p->best_dual = fmax(p->best_dual - 2 * p->moved, -INF); /* NaN becomes -INF */
}

/* Have float32 passes reached their floor? Near it the error stood for 100 of 640 passes, while it still crept. The few
 * passes of one potential end above the floor: differences of float32 passes with float64 ones led the next three
 * astray. */
FN int at_floor(const mapuot_limits *limits, mapuot_progress *p, const mapuot_stats *out) {
    const int fell = !(p->floor_error > 0) || out->error < 0.8 * p->floor_error;
    const double near = limits->symmetric ? NEAR_FLOOR : 1;
    p->floor_passes = fell ? 0 : p->floor_passes + 1;
    p->floor_error = fell ? out->error : p->floor_error;
    return out->error <= near * limits->narrow_floor ||
           (p->floor_passes >= FLOOR_PASSES && out->error <= NEAR_FLOOR * limits->narrow_floor);
}

/* Return the status after a pass; the pass is counted already. scale: the larger of sum u and sum v. next_v: sum v of
 * the next pass, or 1 if the next pass checks it. */
FN int status_of(const mapuot_limits *limits, mapuot_progress *p, const mapuot_stats *out, double scale,
                 double next_v) {
    const int done = is_enough(limits, p, out);
    const int floor =
        limits->extra_error > 0 && out->error <= 2 * limits->extra_error; /* the remaining error does not fall */
    const int clipped = is_clipped(limits, scale), fresh = p->since_absorb == 1, left = leaves_range(limits, next_v);
    const double storage = storage_error(limits, p->since_absorb - 1);
    if (out->rejected > 0 && (left || p->step == MAPUOT_REPEAT)) /* the next pass starts from finite numbers */
        return MAPUOT_ABSORB;
    if (out->rejected > 0) return limits->symmetric && p->dropped >= MOST_DROPPED ? MAPUOT_STALLED : MAPUOT_RUNNING;
    if (isnan(out->mass) || (isnan(out->dual) && out->mass <= LARGEST)) return MAPUOT_NOT_FINITE;
    if (out->mass < LEAST_MASS || (out->dead > 0 && out->residual < STILL)) /* nothing but a fresh K may help */
        return fresh ? MAPUOT_UNDERFLOW : MAPUOT_ABSORB;
    if (stalled(p, out, clipped) && !done)
        return out->mass > LARGEST || clipped ? MAPUOT_NOT_FINITE : out->dead > 0 ? MAPUOT_UNDERFLOW : MAPUOT_STALLED;
    if (left && !((done || floor) && fresh)) return MAPUOT_ABSORB; /* the next v has left the range of this K */
    if (out->mass > LARGEST) return MAPUOT_NOT_FINITE;
    if ((done || floor) && !(p->narrow > 0)) return done ? MAPUOT_CONVERGED : MAPUOT_STALLED;
    /* float64 passes over a K that is made take three times as long */
    if (p->narrow > 0 && limits->made && !fresh && scale > NARROW_LIMIT) return MAPUOT_ABSORB;
    /* the error without the rounding of K is at most half of that rounding or of tol: only a finer K can help */
    if (!done && limits->finer && out->error - storage <= fmax(limits->tol, storage) / 2) return MAPUOT_COARSE;
    if (p->narrow > 0 && limits->tol >= 0 &&
        (done || at_floor(limits, p, out) || p->since_best >= NARROW_PATIENCE || scale > NARROW_LIMIT || out->dead > 0))
        widen_passes(p); /* dead points may have mass below the range of float32 */
    if (fresh) {         /* points that are dead or clipped on a fresh K stay so */
        p->dead = out->dead;
        p->clipped = clipped;
    } else if (out->lost > limits->flush_tol || scale > limits->scale_limit) return MAPUOT_ABSORB;
    return MAPUOT_RUNNING;
}

FN void judge(const mapuot_limits *limits, mapuot_progress *p, mapuot_stats *out, double scale, double next_v) {
    p->passes += 1;
    p->since_absorb += 1;
    out->status = (double)(p->status = status_of(limits, p, out, scale, next_v));
    if (p->status == MAPUOT_NOT_FINITE || p->status == MAPUOT_UNDERFLOW) {
        out->gap = out->error = INF;
        out->dual = -INF;
        out->mass = isnan(out->mass) ? INF : out->mass;
    }
    if (proves_nothing(limits, out, scale)) /* only now: its progress may be that of a solve which recovers */
        out->dual = -INF;
}
