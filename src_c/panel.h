/* panel.h - row access to a matrix that lies in memory column by column, such as a transposed one.
 *
 * A cache line holds one column of several rows there. When its first row is read, a block of rows is transposed into
 * the thread's own panel. Each row then prefetches its part of the next panel's lines into L2: all at once they would
 * stall everything else, and L1 is too small. 64 rows are pieces of 512 bytes, which memory delivers twice as fast as
 * pieces of 8 rows. Rows are read in order, panel by panel.
 * Contract: the entries themselves, as float64, so that no bit depends on the layout of M.
 */
#pragma once
#include "kernels.h"
#include "vec.h"

enum { PANEL = 4096, PANEL_ROWS = 64, PANEL_COLUMNS = PANEL / PANEL_ROWS, LINE_BYTES = 64 };

typedef struct {
    int64_t rows, end, n;      /* at most so many rows; the row of M behind the last one to read; number of columns */
    int64_t i, j, held, width; /* `held` rows of `width` entries from (i, j) on */
    int64_t asked;             /* the row that prefetches next */
    _Alignas(64) double at[PANEL];
} panel;

ALWAYS_INLINE void open_panel(panel *near, int64_t rows, int64_t end, int64_t n) {
    near->rows = rows;
    near->end = end;
    near->n = n;
    near->i = near->j = near->held = near->asked = 0;
}

/* address of number k of M */
ALWAYS_INLINE const char *entry_at(const mapuot_matrix *M, int64_t k) {
    return (const char *)M->data + k * entry_bytes(M->dtype);
}

/* number k of M */
ALWAYS_INLINE double one_entry(const mapuot_matrix *M, int64_t k) {
    return M->dtype == MAPUOT_F64 ? ((const double *)M->data)[k] : (double)((const float *)M->data)[k];
}

/* Transpose VL x VL entries from number k on, with contiguous columns. */
ALWAYS_INLINE void turn_block(const mapuot_matrix *M, int64_t k, double *out, int64_t width) {
    vd x[VL];
    UNROLLED (int q = 0; q < VL; q++, k += M->col_stride)
        x[q] = M->dtype == MAPUOT_F64 ? v_load((const double *)M->data + k) : v_load_f32((const float *)M->data + k);
    v_transpose(x);
    UNROLLED (int r = 0; r < VL; r++) v_store(out + r * width, x[r]);
}

/* Fill the panel with the columns [j, j + count) of the rows from i on. */
static __attribute__((noinline, unused)) void fill_panel(const mapuot_matrix *M, int64_t i, int64_t j, int64_t count,
                                                         panel *near) {
    const int64_t down = M->row_stride, step = M->col_stride, start = i * down + j * step;
    const int64_t rows = near->end - i < near->rows ? near->end - i : near->rows, width = (count + VL - 1) / VL * VL;
    near->i = near->asked = i;
    near->j = j;
    near->held = rows;
    near->width = width;
    for (int64_t k = 0; k < count; k += VL) {
        const int64_t end = k + VL < count ? k + VL : count;
        int64_t r = 0;
        for (; down == 1 && k + VL == end && r + VL <= rows; r += VL)
            turn_block(M, start + r + k * step, near->at + r * width + k, width);
        for (; r < rows; r++)
            for (int64_t q = k; q < end; q++) near->at[r * width + q] = one_entry(M, start + r * down + q * step);
    }
}

/* Prefetch row i's part of the lines of the next panel: to the right of this one, or the first panel of the rows
 * below. */
static __attribute__((noinline, unused)) void request_part(const mapuot_matrix *M, int64_t i, panel *near) {
    const int64_t right = near->j + near->width, part = (near->width + near->held - 1) / near->held;
    const int64_t first = right < near->n ? near->i : near->i + near->held;
    const int64_t rows = near->end - first < near->rows ? near->end - first : near->rows;
    const int64_t from = (right < near->n ? right : 0) + (i - near->i) * part;
    near->asked = i + 1;
    for (int64_t j = from; rows > 0 && j < from + part && j < near->n; j++) {
        const int64_t top = first * M->row_stride + j * M->col_stride, bottom = top + (rows - 1) * M->row_stride;
        const uintptr_t low = (uintptr_t)entry_at(M, top < bottom ? top : bottom);
        const uintptr_t high = (uintptr_t)entry_at(M, top < bottom ? bottom : top);
        for (uintptr_t line = low / LINE_BYTES * LINE_BYTES; line <= high; line += LINE_BYTES)
            __builtin_prefetch((const void *)line, 0, 2);
    }
}

/* M[i, j .. j + count) */
ALWAYS_INLINE const double *panel_row(const mapuot_matrix *M, int64_t i, int64_t j, int64_t count, panel *near) {
    if (j != near->j || i < near->i || i >= near->i + near->held) fill_panel(M, i, j, count, near);
    if (i == near->asked && (M->row_stride == 1 || M->row_stride == -1)) request_part(M, i, near);
    return near->at + (i - near->i) * near->width;
}
