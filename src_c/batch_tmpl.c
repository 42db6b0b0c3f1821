/* batch_tmpl.c - row_pass for several problems that share K; compiled once per instruction set and dtype of K.
 *
 * For each tile of rows: s = K V^T as a small matrix product in registers, u = prox(s) problem by problem, and, while
 * the tile is in cache, sums_q += u_q^T K for every problem. Sums have the order of a single solve, so that an answer
 * does not depend on the other problems. With one potential K v is all that is needed. Contract: kernels.h; twin:
 * row_pass in kernels_tmpl.c.
 */
#include <string.h>

#include "kernels.h"
#include "prox_rows.h"
#include "vec.h"

enum { PROBLEMS = VL == 8 ? 4 : 2, DOT_ROWS = 4 };

/* s[q][r] = K_r . v_q for R rows and Q problems */
ALWAYS_INLINE void batch_dots(const real *K, int64_t ld, int64_t np, mapuot_state *const *states, double (*s)[TILE],
                              const int R, const int Q) {
    vd sum[PROBLEMS][DOT_ROWS];
    const double *v[PROBLEMS];
    UNROLLED (int q = 0; q < Q; q++) {
        v[q] = states[q]->cols.scale;
        UNROLLED (int r = 0; r < R; r++) sum[q][r] = v_set(0);
    }
    for (int64_t j = 0; j < np; j += VL) {
        vd row[DOT_ROWS];
        UNROLLED (int r = 0; r < R; r++) row[r] = v_load_real(K + r * ld + j);
        UNROLLED (int q = 0; q < Q; q++) {
            vd x = v_load(v[q] + j);
            UNROLLED (int r = 0; r < R; r++) sum[q][r] = v_fma(row[r], x, sum[q][r]);
        }
    }
    UNROLLED (int q = 0; q < Q; q++)
        UNROLLED (int r = 0; r < R; r++) s[q][r] = v_sum(sum[q][r]);
}

/* sums_q += sum_r u_qr K_r for R rows and all problems */
ALWAYS_INLINE void batch_sums(const real *K, int64_t ld, int64_t np, mapuot_state *const *states, int count, int64_t i,
                              const int R) {
    for (int64_t j = 0; j < np; j += VL) {
        vd row[TILE];
        UNROLLED (int r = 0; r < R; r++) row[r] = v_load_real(K + r * ld + j);
        for (int q = 0; q < count; q++) {
            const double *u = states[q]->rows.scale + i;
            double *sums = states[q]->sums + j;
            vd sum = v_load(sums);
            UNROLLED (int r = 0; r < R; r++) sum = v_fma(row[r], v_set(u[r]), sum);
            v_store(sums, sum);
        }
    }
}

ALWAYS_INLINE void batch_tile(mapuot_state *const *states, int count, int64_t i, const int R) {
    const int64_t n = states[0]->n, np = padded(n), ld = states[0]->ld;
    const int step = R < DOT_ROWS ? R : DOT_ROWS;
    const real *K = (const real *)states[0]->kernel + i * ld;
    for (int q = 0; q < count; q += PROBLEMS) {
        const int left = count - q < PROBLEMS ? count - q : PROBLEMS;
        double s[PROBLEMS][TILE] = {{0}};
        for (int r = 0; r < R; r += step) {
            double part[PROBLEMS][TILE];
            if (left == PROBLEMS) batch_dots(K + r * ld, ld, np, states + q, part, step, PROBLEMS);
            else
                for (int k = 0; k < left; k++) batch_dots(K + r * ld, ld, np, states + q + k, part + k, step, 1);
            for (int k = 0; k < left; k++) memcpy(s[k] + r, part[k], sizeof(double) * (size_t)step);
        }
        for (int k = 0; k < left; k++)
            if (states[0]->limits.symmetric) memcpy(states[q + k]->sums + i, s[k], R * sizeof(double));
            else prox_rows(states[q + k], i, R, s[k], states[q + k]->sums + np);
    }
    if (!states[0]->limits.symmetric) batch_sums(K, ld, np, states, count, i, R);
}

/* one read of K for count problems; sums are zero on entry */
void KERNEL(batch_pass)(mapuot_state *const *states, int count) {
    const int64_t m = states[0]->m;
    int64_t i = 0;
    for (; i + TILE <= m; i += TILE) batch_tile(states, count, i, TILE);
    for (; i < m; i++) batch_tile(states, count, i, 1);
}
