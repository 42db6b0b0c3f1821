/* sparse.h - rows with stored pairs only: K v, K^T u and entries of K and the plan, over stored entries.
 *
 * A row is a run of entries with their columns. Column numbers are gathered, and sums are scattered. On Zen 4 a pass
 * takes 1.5 ns an entry (n = 20000, 1 %), 1.4 ns in longer rows and 1.1 ns if rows of 32 have nearby columns; AVX-512's
 * scatters take half as long again. A column occurs once in a row, so that its sums do not collide.
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

/* the blocks of a run: count entries each, k entries behind its first one */
#define BLOCKS_OF(row)                                                                                                 \
    for (int64_t k = 0, count; (count = row.count - k < BLOCK ? row.count - k : BLOCK) > 0; k += BLOCK)

/* Arguments of cost.h for a block of a row's entries: a matrix of one row. */
typedef struct {
    stream_args args;
    panel near;
    double beta[BLOCK];
} stored;

ALWAYS_INLINE void open_stored(const stream_args *args, stored *block) {
    block->args = *args;
    block->args.M.start = block->args.c.start = NULL;
    block->args.M.row_stride = block->args.c.row_stride = 0;
    block->args.M.col_stride = block->args.c.col_stride = 1;
    block->args.beta = block->beta;
}

/* Load count entries from the k-th of a run on, at most BLOCK, as the columns from 0 on. */
ALWAYS_INLINE void take_stored(const stream_args *args, const run row, int64_t k, int64_t count, stored *block) {
    const int32_t *column = row.column + k;
    block->args.M.data = entry_at(&args->M, row.first + k);
    if (args->c.data) block->args.c.data = entry_at(&args->c, row.first + k);
    for (int64_t q = 0; q < count; q++) block->beta[q] = args->beta[column[q]];
}
