/* narrow_points.h - rows of K between points in float32, computed for narrow passes together with their products with
 * v:
 *
 *     K_ij = 2^(row_i + col_j - c_ij),   c the metric between coordinates that are centred and scaled by log2(e) / reg
 *
 * row and col are multiples of 2^-8 below 2^15, so that their sum is exact: the scalings of K were chosen so. For
 * PRODUCTS they include the squares of the rounded coordinates. Only c is rounded. mapuot/backends/narrow_points.py
 * fills the record. The float64 form: points.h through cost.h.
 */
#pragma once
#include "kernels.h"
#include "vec.h"

enum { STEPS = PAD / FL, MADE_ROWS = STEPS == 1 ? 8 : 4 }; /* rows a step: their sums fill the registers */
enum { SHORT = 512 };                                      /* columns with float32 sums of their products with v */

/* the sums over the coordinates, for R rows from i on and 16 columns from j on */
ALWAYS_INLINE void narrow_metric(const mapuot_narrow_points *points, int64_t i, int64_t j, vf sum[][STEPS],
                                 const int64_t d, const mapuot_narrow_form form, const int R) {
    const float *x = points->x + i * d, *y = points->y + j * d;
    UNROLLED (int r = 0; r < R; r++)
        UNROLLED (int q = 0; q < STEPS; q++) sum[r][q] = f_set(0.0f);
    for (int64_t k = 0; k < d; k++, y += PAD)
        UNROLLED (int q = 0; q < STEPS; q++) {
            const vf yk = f_load(y + q * FL);
            UNROLLED (int r = 0; r < R; r++) {
                const vf xk = f_set(x[r * d + k]), t = f_sub(yk, xk); /* in this order x can be a memory operand */
                if (form == MAPUOT_PRODUCTS) sum[r][q] = f_fma(xk, yk, sum[r][q]);
                else if (form == MAPUOT_SIZES) sum[r][q] = f_add(sum[r][q], f_max(t, f_sub(xk, yk)));
                else sum[r][q] = f_fma(t, t, sum[r][q]);
            }
        }
}

/* R rows from i on, in the columns that they are kept with, to out with stride ld, and s_r = K_r . v, written up to a
 * multiple of VL */
ALWAYS_INLINE void made_dots(const mapuot_state *state, int64_t i, float *out, double *s, const int64_t d,
                             const mapuot_narrow_form form, const int R) {
    const mapuot_narrow_points *points = &state->narrow_points;
    int32_t whole[2];
    const kept_runs runs = runs_made(state, i, whole);
    vd total[TILE];
    UNROLLED (int r = 0; r < R; r++) total[r] = v_set(0.0);
    for (int64_t k = 0, j = 0, end = 0; k < runs.count || j < end;) { /* SHORT columns of one run at a time */
        if (j >= end) j = runs.run[2 * k], end = runs.run[2 * k + 1], k++;
        const int64_t stop = j + SHORT < end ? j + SHORT : end;
        vf dot[MADE_ROWS];
        UNROLLED (int r = 0; r < R; r++) dot[r] = f_set(0.0f);
        for (; j < stop; j += PAD, out += PAD) {
            vf sum[MADE_ROWS][STEPS];
            narrow_metric(points, i, j, sum, d, form, R);
            UNROLLED (int q = 0; q < STEPS; q++) {
                const vf col = f_load(points->col + j + q * FL), v = f_load(state->narrow_v + j + q * FL);
                UNROLLED (int r = 0; r < R; r++) {
                    const vf c = form == MAPUOT_ROOTS ? f_sqrt(sum[r][q]) : sum[r][q];
                    const vf known = f_add(f_set(points->row[i + r]), col);
                    const vf K = f_exp2(form == MAPUOT_PRODUCTS ? f_add(known, c) : f_sub(known, c));
                    f_store(out + r * state->ld + q * FL, K);
                    dot[r] = f_fma(K, v, dot[r]);
                }
            }
        }
        UNROLLED (int r = 0; r < R; r++) total[r] = v_add(total[r], f_fold(dot[r]));
    }
    UNROLLED (int r = 0; r < R; r += VL) v_store(s + r, v_sum_each(total + r, R - r));
}

/* Choose the specialisation by form, and by d for few coordinates, where a loop would take longer than its body. */
ALWAYS_INLINE void made_rows(const mapuot_state *state, int64_t i, float *out, double *s, const int R) {
    const int64_t d = state->narrow_points.d;
    const mapuot_narrow_form form = state->narrow_points.form;
    if (form == MAPUOT_PRODUCTS) made_dots(state, i, out, s, d, MAPUOT_PRODUCTS, R);
    else if (form == MAPUOT_SIZES) made_dots(state, i, out, s, d, MAPUOT_SIZES, R);
    else if (form == MAPUOT_ROOTS) made_dots(state, i, out, s, d, MAPUOT_ROOTS, R);
    else if (d == 2) made_dots(state, i, out, s, 2, MAPUOT_SQUARES, R);
    else if (d == 3) made_dots(state, i, out, s, 3, MAPUOT_SQUARES, R);
    else made_dots(state, i, out, s, d, MAPUOT_SQUARES, R);
}

static __attribute__((noinline)) void made_tile(const mapuot_state *state, int64_t i, float *out, double *s, int R) {
    int r = 0;
    for (; r + MADE_ROWS <= R; r += MADE_ROWS) made_rows(state, i + r, out + r * state->ld, s + r, MADE_ROWS);
    if (MADE_ROWS > 4 && r + 4 <= R) {
        made_rows(state, i + r, out + r * state->ld, s + r, 4);
        r += 4;
    }
    if (r + 2 <= R) {
        made_rows(state, i + r, out + r * state->ld, s + r, 2);
        r += 2;
    }
    for (; r < R; r++) {
        double one[8]; /* VL numbers are written */
        made_rows(state, i + r, out + r * state->ld, one, 1);
        s[r] = one[0];
    }
}
