/* column.h - the scalar formulas of finish_pass for one column: marginal, gap and image.
 *
 * Each thread of the CUDA core applies them to its column, in single solves and in batches. The C core applies them to
 * penalties without a vector form, and tests compare its vector sweeps (finish_tmpl.c) with them. */
#pragma once
#include "common/penalty.h"

/* log v = x - shift. v is relative to K, which holds the potential e = absorbed. k = reg / rho, fi = rho / (rho +
 * reg). */
typedef struct {
    double absorbed, weight, log_weight, rho, upper, k, fi;
    double x, v;
} mapuot_column;

typedef struct {
    double marginal, image;
    double gap, hard, dual; /* this column's terms of the certificate */
    double misfit;          /* the same for total variation and range; 0 for other penalties */
    double next;            /* b e^(-k G), for the translation of the image */
    double kappa;           /* e^offset */
} mapuot_column_out;

/* One potential x = log u = log v: the fraction of the step from x to its prox that a pass takes. The derivative of the
 * prox is -fi P / r, and the eigenvalues of fi P / r lie in [0, fi] where the kernel is positive. This fraction makes
 * the largest factor of an error smallest, fi / (2 + fi), and no kernel makes an error grow. fi is 1 for a penalty
 * without one. */
FN double own_part(double fi) { return 1 / (1 + 0.5 * fi); }

/* The image G of a KL or balanced column */
FN double kl_image(const mapuot_column *c, double log_sum, double shift, double offset) {
    return fma(1 - c->fi, shift, c->fi * (c->log_weight - (log_sum - c->absorbed + offset)));
}

/* The values of a KL or balanced column from its image, q = b e^(-k log v), b e^(-k G) and kappa. */
FN mapuot_column_out kl_column(const mapuot_column *c, double sum, double log_sum, double shift, double offset,
                               double reg, double image, double q, double next, double kappa) {
    mapuot_column_out out = {c->v * sum * kappa, image, 0, 0, 0, 0, next, kappa};
    const double log_v = c->x - shift;
    if (isinf(c->rho)) {
        out.dual = reg * c->weight * log_v;
        out.hard = fabs(out.marginal - c->weight);
    } else {
        const double t = c->x + (log_sum - c->absorbed + offset) - c->log_weight + c->k * log_v; /* log(s / q) */
        out.gap = c->rho * (sum >= TINY ? kl_gap(q, out.marginal, t) : q);
        out.dual = c->rho * (c->weight - q);
    }
    return out;
}

/* sum: K^T u of the column before the translation, log_sum: its logarithm. shift: after the translation, offset: log of
 * the factor of the plan in the translation.
 *     s = v K^T u,  G = fi log(b / K^T u),  gap = rho q h(log(s / q)),  q = b e^(-k log v),  h(t) = t e^t - e^t + 1
 * A column that this pass found without mass keeps its x. */
FN mapuot_column_out column_values(int penalty, const mapuot_column *c, double sum, double log_sum, double shift,
                                   double offset, double reg) {
    mapuot_column_out out;
    const double log_v = c->x - shift;
    const int dead = !(sum >= TINY);
    if (penalty <= MAPUOT_BALANCED) {
        const double image = dead ? c->x : kl_image(c, log_sum, shift, offset);
        const mapuot_three e = exponentials(-c->k * log_v, -c->k * (image - shift), offset);
        out = kl_column(c, sum, log_sum, shift, offset, reg, image, c->weight * e.x, c->weight * e.y, e.z);
    } else {
        const double g = reg * log_v, part = log_sum - c->absorbed + offset; /* log K^T u - shift */
        out.next = 0;
        out.kappa = exp(offset);
        out.marginal = c->v * sum * out.kappa;
        out.image =
            dead ? c->x : prox_log(penalty, part + shift, c->weight, c->log_weight, c->rho, c->upper, reg) + shift;
        out.gap = gap_term(penalty, g, out.marginal, c->weight, c->rho, c->upper);
        out.dual = dual_term(penalty, g, c->weight, c->rho, c->upper);
        out.hard = violation(penalty, out.marginal, c->weight, c->rho, c->upper);
        out.misfit = penalty == MAPUOT_L2 ? 0 : misfit(penalty, g, out.marginal, c->weight, c->rho, c->upper);
    }
    return out;
}
