/* sparse.h - rows of which only some pairs are stored: K v, K^T u and what is made of them, over stored entries only.
 *
 * A row is a run of entries with their columns; what belongs to the columns is gathered, and sums are scattered to them.
 * A pass takes 1.5 ns an entry so on Zen 4 (n = 20000, 1 %), 1.4 in longer rows, 1.1 where rows of 32 meet near columns;
 * AVX-512's scatters take half as long again.  A column occurs once in a row, so that its sums do not collide.
 * Contract: mapuot_matrix in mapuot.h.  Twin: backends/reference.py, which fills in the forbidden pairs.
 */
#pragma once
#include "cost.h"

/* entries [first, first + count) of data, K and column */
typedef struct {
    int64_t first, count;
    const int32_t *column;
} run;

ALWAYS_INLINE run run_of(const mapuot_matrix *M, int64_t i) {
    const int64_t first = M->start[i] - M->start[0];
    return (run){first, M->start[i + 1] - M->start[i], M->column + first};
}

/* the blocks of a run: k entries behind its first one, count of them */
#define BLOCKS_OF(row)                                                                                                 \
    for (int64_t k = 0, count; (count = row.count - k < BLOCK ? row.count - k : BLOCK) > 0; k += BLOCK)

/* count numbers of a matrix from entry k on, as float64: in place where they are that */
ALWAYS_INLINE const double *stored_block(const mapuot_matrix *M, int64_t k, int64_t count, double *buffer) {
    if (M->dtype == MAPUOT_F64) return (const double *)M->data + k;
    for (int64_t q = 0; q < count; q += VL)
        v_store(buffer + q, v_load_part_f32((const float *)M->data + k + q, (int)(count - q)));
    return buffer;
}

/* x = alpha_i + beta_j - M_ij / reg of count entries of row i from k on, at most BLOCK */
ALWAYS_INLINE void run_exponents(const stream_args *args, int64_t i, int64_t k, int64_t count, double *out) {
    _Alignas(64) double buffer[BLOCK], beta[BLOCK];
    const int32_t *column = args->M.column + k;
    const double *M = stored_block(&args->M, k, count, buffer);
    const vd alpha = v_set(args->alpha[i]), inv = v_set(args->inv_reg);
    for (int64_t q = 0; q < count; q++) beta[q] = args->beta[column[q]];
    for (int64_t q = 0; q < count; q += VL)
        v_store(out + q, v_fnma(v_cost(M, q, count, 0.0), inv, v_add(alpha, v_cost(beta, q, count, 0.0))));
}

/* c e^x of the same entries; those below e^lo are 0 */
ALWAYS_INLINE void run_entries(const stream_args *args, int64_t i, int64_t k, int64_t count, double lo, int narrow,
                               double *out) {
    _Alignas(64) double buffer[BLOCK];
    run_exponents(args, i, k, count, out);
    if (!args->c.data) {
        for (int64_t q = 0; q < count; q += VL) v_store(out + q, v_exp_above(v_load(out + q), lo, narrow));
        return;
    }
    const double *c = stored_block(&args->c, k, count, buffer);
    const vd least = v_set(exp(lo));
    for (int64_t q = 0; q < count; q += VL) {
        vd p = v_mul(v_exp(v_load(out + q)), v_cost(c, q, count, 0.0));
        v_store(out + q, v_if_less(p, least, v_set(0.0), p));
    }
}

/* x = log c_ij + alpha_i + beta_j - M_ij / reg of the same entries */
ALWAYS_INLINE void run_log_entries(const stream_args *args, int64_t i, int64_t k, int64_t count, double *out) {
    _Alignas(64) double buffer[BLOCK];
    run_exponents(args, i, k, count, out);
    if (!args->c.data) return;
    const double *c = stored_block(&args->c, k, count, buffer);
    for (int64_t q = 0; q < count; q++) out[q] += log(c[q]);
}
