/* cost.h - the only code in C that reads M: the kinds of rows, a block of a row as float64, and the entries c
 * exp(alpha + beta - M / reg) of a block. Streams over M and the passes that compute rows of K share it. A new kind of
 * cost is one more cost_kind and one more case in row_block; a mask is applied in share_block. An M that lies column by
 * column is transposed some rows at a time (panel.h). Only count entries of a block of M may be read (v_cost); output
 * blocks are written up to a multiple of VL, meaningless behind count.
 */
#pragma once
#include "common/mask.h"
#include "kernels.h"
#include "points.h"
#include "panel.h"
#include "vec.h"

typedef enum { WHOLE_F64, WHOLE_F32, STRIDED_F64, STRIDED_F32, POINTS } cost_kind;

ALWAYS_INLINE cost_kind kind_of(const mapuot_matrix *M) {
    if (M->points.x) return POINTS;
    if (M->dtype == MAPUOT_F64) return M->col_stride == 1 ? WHOLE_F64 : STRIDED_F64;
    return M->col_stride == 1 ? WHOLE_F32 : STRIDED_F32;
}

/* The number of rows to read together, block by block: one if a row of M is contiguous, else a tile, with cache lines
 * that stay in L1, or the rows of a panel. */
ALWAYS_INLINE int64_t rows_together(const mapuot_matrix *M) {
    const cost_kind kind = kind_of(M);
    return is_turned(M) ? PANEL_ROWS : kind == WHOLE_F64 || kind == WHOLE_F32 ? 1 : TILE;
}

ALWAYS_INLINE int64_t columns_together(const mapuot_matrix *M) { return is_turned(M) ? PANEL_COLUMNS : BLOCK; }

enum { AHEAD = 1024 }; /* entries of M requested before they are needed: two pages */

/* M[i, j .. j + count) as float64: a pointer into M if it is contiguous float64, else a copy in buffer (BLOCK
 * entries) */
ALWAYS_INLINE const double *row_block(const mapuot_matrix *M, int64_t i, int64_t j, int64_t count, double *buffer) {
    const int64_t start = i * M->row_stride + j * M->col_stride;
    const float *narrow = (const float *)M->data + start;
    switch (kind_of(M)) {
    case WHOLE_F64:
        return (const double *)M->data + start;
    case WHOLE_F32:
        for (int64_t k = 0; k < count; k += VL) {
            __builtin_prefetch(narrow + k + AHEAD, 0, 2);
            v_store(buffer + k, v_load_part_f32(narrow + k, (int)(count - k)));
        }
        break;
    case STRIDED_F64:
    case STRIDED_F32:
        for (int64_t k = 0; k < count; k++) buffer[k] = one_entry(M, start + k * M->col_stride);
        break;
    case POINTS:
        points_block(&M->points, i, j, count, buffer);
    }
    return buffer;
}

/* A block of row i; an M that lies column by column is read together with the rows below. */
ALWAYS_INLINE const double *cost_block(const mapuot_matrix *M, int64_t i, int64_t j, int64_t count, panel *near) {
    return is_turned(M) ? panel_row(M, i, j, count, near) : row_block(M, i, j, count, near->at);
}

/* Does the reference differ from ones (a matrix or a mask)? */
ALWAYS_INLINE int has_shares(const mapuot_matrix *c) { return c->data || c->mask.weight > 0.0; }

/* c[i, j .. j + count), as in row_block: the matrix, its mask, or the product of both */
ALWAYS_INLINE const double *share_block(const mapuot_matrix *c, int64_t i, int64_t j, int64_t count, double *buffer) {
    const mapuot_mask mask = c->mask; /* a copy, which writes to buffer cannot change */
    if (mask.weight == 0.0) return row_block(c, i, j, count, buffer);
    for (int64_t k = 0; k < count; k++) buffer[k] = mask_weight(&mask, i, j + k);
    if (c->data) {
        double given[BLOCK];
        const double *shares = row_block(c, i, j, count, given);
        for (int64_t k = 0; k < count; k++) buffer[k] *= shares[k];
    }
    return buffer;
}

/* the entries of a block from k on, `rest` behind its count */
ALWAYS_INLINE vd v_cost(const double *block, int64_t k, int64_t count, double rest) {
    return v_load_part(block + k, (int)(count - k), v_set(rest));
}

/* x = alpha_i + beta_j - M_ij / reg, or with `raise` e^x (0 below e^lo), to out */
ALWAYS_INLINE void powers(const stream_args *args, int64_t i, int64_t j, int64_t count, const int raise, double lo,
                          const int narrow, panel *near, double *out) {
    const double *M = cost_block(&args->M, i, j, count, near), *beta = args->beta + j;
    const vd alpha = v_set(args->alpha[i]), inv = v_set(args->inv_reg);
    const int in_place = kind_of(&args->M) == WHOLE_F64;
    for (int64_t k = 0; k < count; k += VL) {
        vd x = v_fnma(v_cost(M, k, count, 0.0), inv, v_add(alpha, v_cost(beta, k, count, 0.0)));
        if (in_place) __builtin_prefetch(M + k + AHEAD, 0, 2);
        v_store(out + k, raise ? v_exp_above(x, lo, narrow) : x);
    }
}

ALWAYS_INLINE void exponents(const stream_args *args, int64_t i, int64_t j, int64_t count, panel *near, double *out) {
    powers(args, i, j, count, 0, 0.0, 0, near, out);
}

/* c e^x to out. Entries below e^lo are 0 (with c: also entries with e^x below e^-708). */
ALWAYS_INLINE void entries(const stream_args *args, int64_t i, int64_t j, int64_t count, double lo, int narrow,
                           panel *near, double *out) {
    if (!has_shares(&args->c)) {
        powers(args, i, j, count, 1, lo, narrow, near, out);
        return;
    }
    exponents(args, i, j, count, near, out);
    _Alignas(64) double buffer[BLOCK];
    const double *c = share_block(&args->c, i, j, count, buffer);
    const vd least = v_set(exp(lo));
    for (int64_t k = 0; k < count; k += VL) {
        vd p = v_mul(v_exp(v_load(out + k)), v_cost(c, k, count, 0.0));
        v_store(out + k, v_if_less(p, least, v_set(0.0), p));
    }
}
