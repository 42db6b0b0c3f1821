/* marginals.c - the O(n) work of a pass over many marginals, one marginal or message after the other.
 *
 * Callers: mapuot/backends/cpu/marginals.py (translation), mapuot/marginals/certificate.py (certify) and tree.py.
 * Formulas: docs/mathematics.md, "Many marginals".
 */
#include "marginals.h"

#include <string.h>

#include "kernels.h"

static const marginal_kernels *kernels(void) { return mapuot_active_kernels()->marginals; }

static double rate_of(const mapuot_marginals *x, int64_t k) { return x->rho[k] > 0 ? x->reg / x->rho[k] : 0; }

/* for each part: log of the sum of a e^(-reg / rho log u) over its points */
static void log_amounts_of_parts(const mapuot_marginals *x, const double *log_u, double *top, double *out) {
    const int64_t cells = x->count * x->parts;
    for (int64_t c = 0; c < cells; c++) {
        top[c] = -INFINITY;
        out[c] = 0;
    }
    for (int64_t k = 0; k < x->count; k++)
        for (int64_t i = x->start[k]; i < x->start[k + 1]; i++)
            top[x->cell[i]] = fmax(top[x->cell[i]], x->log_weight[i] - rate_of(x, k) * log_u[i]);
    for (int64_t k = 0; k < x->count; k++)
        for (int64_t i = x->start[k]; i < x->start[k + 1]; i++)
            out[x->cell[i]] += exp(x->log_weight[i] - rate_of(x, k) * log_u[i] - top[x->cell[i]]);
    for (int64_t c = 0; c < cells; c++) out[c] = top[c] + log(out[c]);
}

void mapuot_log_amounts(const mapuot_marginals *x, const double *log_u, double *room, double *out) {
    if (x->cell) {
        log_amounts_of_parts(x, log_u, room, out);
        return;
    }
    for (int64_t k = 0; k < x->count; k++) {
        const int64_t i = x->start[k];
        out[k] = kernels()->log_amount(x->start[k + 1] - i, x->log_weight + i, log_u + i, rate_of(x, k));
    }
}

void mapuot_worth_of(const mapuot_marginals *x, const double *log_u, const double *log_s, mapuot_worth *out) {
    for (int64_t k = 0; k < x->count; k++) {
        const int64_t i = x->start[k];
        out[k] = kernels()->worth(x->start[k + 1] - i, x->log_weight + i, x->weight + i, log_u + i,
                                  log_s ? log_s + i : NULL, x->rho[k], x->reg);
    }
}

void mapuot_moved(int64_t count, const int64_t *start, const int64_t *cell, const double *by, const double *x,
                  double *out) {
    for (int64_t k = 0; k < count; k++)
        for (int64_t i = start[k]; i < start[k + 1]; i++) out[i] = x[i] + by[cell ? cell[i] : k];
}

void mapuot_at_edges(const mapuot_marginals *x, const double *log_u, const double *back, const double *near,
                     const double *by, const double *up, double *out) {
    for (int64_t e = 0; e < x->edges; e++) {
        const int64_t i = x->start[x->parent[e]], *cell = x->cell ? x->cell + i : NULL;
        const double *parts[] = {log_u + i, back + i, near + i, up + x->message[e]};
        double *to = out + x->message[e];
        for (int64_t j = 0; j < x->message[e + 1] - x->message[e]; j++)
            to[j] = parts[0][j] + parts[1][j] + parts[2][j] + by[cell ? cell[j] : x->parent[e]] - parts[3][j];
    }
}

void mapuot_mass_shares(const mapuot_marginals *x, const double *log_u, const double *near, const double *late,
                        double *room, double *out) {
    for (int64_t k = 0; k < x->count; k++) {
        const int64_t i = x->start[k], n = x->start[k + 1] - i;
        const double *terms[] = {x->log_weight + i, log_u + i, near + i, late + i};
        const double total = kernels()->shares(n, terms, room + i);
        for (int64_t j = 0; j < n; j++) room[i + j] /= total;
    }
    for (int64_t e = 0; e < x->edges; e++)
        memcpy(out + x->message[e], room + x->start[x->parent[e]],
               (size_t)(x->message[e + 1] - x->message[e]) * sizeof *out);
}

void mapuot_change_sums(const mapuot_marginals *x, const double *weight, const double *change, double *out) {
    for (int64_t e = 0; e < x->edges; e++) {
        const int64_t j = x->message[e];
        kernels()->change_sums(x->message[e + 1] - j, weight + j, change + j, out + 2 * e);
    }
}
