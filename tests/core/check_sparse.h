/* check_sparse.h - stored pairs against the dense matrix that has inf, or 0 in K, everywhere else: K, the plan, a pass and
 * all streams.  Entries are equal bit for bit, sums within their rounding.
 */
#ifndef CHECK_SPARSE_H
#define CHECK_SPARSE_H
#include "check_made.h"

/* some pairs of a dense C-ordered matrix; a third of the rows has nearly all of them, a seventh none */
static mapuot_matrix some_pairs(mapuot_matrix *dense, int64_t m, int64_t n)
{
    const mapuot_dtype dtype = dense->dtype;
    int64_t count = 0, *start = guarded((size_t)(m + 1) * sizeof *start, 0);
    unsigned char *kept = guarded((size_t)(m * n), 0);
    for (int64_t k = 0; k < m * n; k++)
        count += kept[k] = k / n % 7 != 6 && uniform(0, 1) < (k / n % 3 ? 0.2 : 0.95);
    int32_t *column = guarded((size_t)count * sizeof *column, sizeof *column);
    void *data = guarded((size_t)count * width[dtype], width[dtype]);
    start[0] = 1000; /* rows from the middle of a matrix */
    for (int64_t i = 0, k = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            if (kept[i * n + j]) {
                store(data, dtype, k, stored(dense->data, dtype, i * n + j));
                column[k++] = (int32_t)j;
            } else
                store((void *)dense->data, dtype, i * n + j, INFINITY);
        }
        start[i + 1] = 1000 + k;
    }
    return (mapuot_matrix){.data = data, .dtype = dtype, .start = start, .column = column};
}

/* the entries of a sparse matrix are those of the dense one that they stand for */
static void expect_entries(const char *what, const mapuot_matrix *M, int64_t m, const void *got, const void *want,
                           int64_t ld, mapuot_dtype dtype)
{
    for (int64_t i = 0; i < m; i++)
        for (int64_t k = M->start[i] - M->start[0]; k < M->start[i + 1] - M->start[0]; k++)
            expect(what, k, stored(got, dtype, k), stored(want, dtype, i * ld + M->column[k]), 0, 0);
}

static void expect_all(const char *what, const double *got, const double *want, int64_t len, double rtol)
{
    for (int64_t k = 0; k < len; k++)
        expect(what, k, got[k], want[k], rtol, 1e-300);
}

static void check_sparse_pass(const problem *p, mapuot_matrix M, mapuot_matrix c, mapuot_dtype dtype, int kind,
                              mapuot_pool *pool)
{
    const int threads = mapuot_pool_threads(pool);
    const int64_t m = p->m, n = p->n, np = padded(n), nnz = M.start[m] - M.start[0], len = np + SCALARS + 2 * m;
    mapuot_state whole = new_state(m, n, dtype, kind, MAPUOT_KL, 1, threads), pairs = whole;
    double *want = vector(len, 0), *got = vector(len, 0);
    pairs.kernel = guarded((size_t)nnz * width[dtype], width[dtype]);
    pairs.M = M;
    mapuot_build_kernel(pool, m, n, p->M, p->c, p->reg, p->alpha, p->beta, 0, dtype, whole.kernel, whole.ld);
    mapuot_build_kernel(pool, m, n, M, c, p->reg, p->alpha, p->beta, 0, dtype, pairs.kernel, 0);
    expect_entries("K", &M, m, pairs.kernel, whole.kernel, whole.ld, dtype);
    for (int turn = 0; turn < 2; turn++) {
        whole.progress.passes = pairs.progress.passes = turn;
        mapuot_row_pass(pool, &whole);
        keep_rows(&whole, want);
        mapuot_row_pass(pool, &pairs);
        keep_rows(&pairs, got);
        want[np + ROW_DUAL] = got[np + ROW_DUAL] = 0.0; /* may cancel; it is made as it is of dense rows */
        expect_all("a pass", got, want, len, 1e-12 * (double)(8 + n + m));
    }
    mapuot_row_dots(pool, &whole);
    mapuot_row_dots(pool, &pairs);
    expect_all("row_dots", pairs.rows.marginal, whole.rows.marginal, m, 1e-12 * (double)(8 + n + m));
}

static void check_sparse_streams(const problem *p, mapuot_matrix M, mapuot_matrix c, mapuot_pool *pool)
{
    const int64_t m = p->m, n = p->n, np = padded(n), nnz = M.start[m] - M.start[0], d = 2;
    const double rtol = 1e-13 * (double)(8 + n + m);
    for (int dtype = 0; dtype < 2; dtype++) {
        void *want = guarded((size_t)(m * n) * width[dtype], 0), *got = guarded((size_t)nnz * width[dtype], 0);
        mapuot_form_plan(pool, m, n, p->M, p->c, p->reg, p->alpha, p->beta, (mapuot_dtype)dtype, want, n);
        mapuot_form_plan(pool, m, n, M, c, p->reg, p->alpha, p->beta, (mapuot_dtype)dtype, got, 0);
        expect_entries("P", &M, m, got, want, n, (mapuot_dtype)dtype);
    }
    double *X = vector(d * np, 0), *Y = vector(m * d, 0), *out[2], total[2][2];
    for (int64_t k = 0; k < d * np; k++)
        X[k] = k % np < n ? uniform(0, 1) : 0.0;
    for (int64_t k = 0; k < m * d; k++)
        Y[k] = uniform(0, 1);
    for (int q = 0; q < 2; q++) {
        const mapuot_matrix *A = q ? &M : &p->M, *C = q ? &c : &p->c;
        double *all = out[q] = vector(m * d + d * np + 2 * m + 2 * n, 0);
        mapuot_apply(pool, m, n, *A, *C, p->reg, p->alpha, p->beta, d, X, all);
        mapuot_apply_transpose(pool, m, n, *A, *C, p->reg, p->alpha, p->beta, d, Y, all + m * d);
        all += m * d + d * np;
        mapuot_plan_sums(pool, m, n, *A, *C, p->reg, p->alpha, p->beta, total[q], all, all + m);
        for (int64_t i = 0; i < m; i++)
            all[m + n + i] = i % 5 == 4 ? -INFINITY : 0.0;
        mapuot_balance(pool, m, n, *A, *C, p->reg, p->beta, all + m + n, all + 2 * m + n);
    }
    expect_all("products, sums and balance", out[1], out[0], m * d + d * np + 2 * m + 2 * n, rtol);
    expect_all("<P, M> and the mass", total[1], total[0], 2, rtol);
}

static void check_sparse(int64_t m, int64_t n, int turn, mapuot_pool *pool)
{
    const int from = buffer_count;
    const mapuot_dtype dtype = turn % 2 ? MAPUOT_F32 : MAPUOT_F64;
    problem p = {.m = m, .n = n, .reg = 0.3, .alpha = vector(m, 8), .beta = vector(n, 8)};
    mapuot_matrix *matrices[] = {&p.M, &p.c}, c = {0};
    for (int q = 0; q < (turn % 3 ? 1 : 2); q++) {
        void *data = guarded((size_t)(m * n) * width[dtype], 0);
        *matrices[q] = (mapuot_matrix){.data = data, .row_stride = n, .col_stride = 1, .dtype = dtype};
        for (int64_t k = 0; k < m * n; k++)
            store(data, dtype, k, uniform(0.1, 1));
    }
    for (int64_t i = 0; i < m; i++)
        p.alpha[i] = i % 6 == 5 ? -INFINITY : uniform(-1, 1);
    for (int64_t j = 0; j < n; j++)
        p.beta[j] = j % 6 == 5 ? -INFINITY : uniform(-1, 1);
    const mapuot_matrix M = some_pairs(&p.M, m, n);
    if (p.c.data) {
        void *data = guarded((size_t)(M.start[m] - M.start[0]) * width[dtype], 0);
        c = M;
        c.data = data;
        for (int64_t i = 0; i < m; i++)
            for (int64_t k = M.start[i] - M.start[0]; k < M.start[i + 1] - M.start[0]; k++)
                store(data, dtype, k, stored(p.c.data, dtype, i * n + M.column[k]));
    }
    check_sparse_streams(&p, M, c, pool);
    for (int k = 0; k < 2; k++)
        check_sparse_pass(&p, M, c, (mapuot_dtype)k, turn % SIDE_KINDS, pool);
    release(from);
}
#endif
