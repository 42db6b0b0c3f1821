/* check_streams.h - everything that streams over M: build_kernel, form_plan, apply, apply_transpose, plan_sums, extrema,
 * balance; on layouts that no BLAS would take. tests/core/test_kernels.py holds the scalar ones to numpy.
 */
#pragma once
#include "check_buffers.h"
#include "common/mask.h"

static const double narrow[] = {0, 3e-9}; /* allowance for the short exponential of a narrow K */

typedef struct {
    int64_t m, n;
    mapuot_matrix M, c;
    double reg, *alpha, *beta;
} problem;

/* layouts: 0 C order; 1 unaligned, wide rows; 2 transposed; 3 backwards; 4 every second column of float32;
 * 5 float32, unaligned and backwards; 6 one row repeated (stride 0); 7 and on: points, by metric; the last two:
 * stored pairs */
enum { DENSE_LAYOUTS = 7, PAIRS = DENSE_LAYOUTS + MAPUOT_WFR + 1, LAYOUTS = PAIRS + 2 };

/* clouds of 1 to 5 coordinates, some pairs further apart than WFR allows */
static mapuot_matrix clouds(int64_t m, int64_t n, mapuot_metric metric) {
    const int64_t d = 1 + (m + n) % 5, ld = padded(n);
    double *x = vector(m * d, 8), *y = vector(d * ld, 0);
    for (int64_t k = 0; k < m * d; k++) x[k] = uniform(0, 1.2);
    for (int64_t k = 0; k < d * ld; k++) y[k] = k % ld < n ? uniform(0.4, 1.8) : y[k - 1];
    return (mapuot_matrix){.points = {.x = x, .y = y, .d = d, .ld = ld, .scale = 0.3, .metric = metric}};
}

static mapuot_matrix laid_out(int64_t m, int64_t n, int layout, double special) {
    if (layout >= DENSE_LAYOUTS) return clouds(m, n, (mapuot_metric)(layout - DENSE_LAYOUTS));
    const mapuot_dtype dtype = layout == 4 || layout == 5 ? MAPUOT_F32 : MAPUOT_F64;
    const int64_t step = layout == 4 ? 2 : 1, wide = step * n + (layout == 1 || layout == 5 ? 3 : 0);
    const size_t skew = layout == 1 || layout == 5 ? width[dtype] : 0;
    void *data = guarded((size_t)((layout == 6 ? 1 : m) * wide) * width[dtype], skew);
    mapuot_matrix M = {.data = data, .row_stride = wide, .col_stride = step, .dtype = dtype};
    for (int64_t k = 0; k < (layout == 6 ? 1 : m) * wide; k++)
        store(data, dtype, k, uniform(0, 1) < 0.1 ? special : uniform(0.0, 2.0));
    if (layout == 2) M.row_stride = 1, M.col_stride = m;
    if (layout == 6) M.row_stride = 0;
    if (layout == 3 || layout == 5)
        M = (mapuot_matrix){.data = (char *)data + ((m - 1) * wide + n - 1) * (int64_t)width[dtype],
                            .row_stride = -wide,
                            .col_stride = -1,
                            .dtype = dtype};
    return M;
}

/* allowed error of a cost: near pi / 2 the cosine of WFR has few digits left */
static double cost_error(const mapuot_matrix *M) {
    return M->points.x == NULL ? 0 : M->points.metric == MAPUOT_WFR ? 1e-9 : 4e-15;
}

/* a third of the rows has nearly all of its pairs, a seventh none; c, where it is given, has the same pairs */
static problem new_pairs(int64_t m, int64_t n, mapuot_dtype dtype) {
    problem p = {.m = m, .n = n, .reg = 0.3};
    int64_t count = 0, *start = guarded((size_t)(m + 1) * sizeof *start, 0);
    int32_t *column = guarded((size_t)(m * n) * sizeof *column, sizeof *column);
    start[0] = 1000; /* rows from the middle of a matrix */
    for (int64_t i = 0; i < m; i++, start[i] = 1000 + count)
        for (int64_t j = 0; j < n; j++)
            if (i % 7 != 6 && uniform(0, 1) < (i % 3 ? 0.2 : 0.95)) column[count++] = (int32_t)j;
    mapuot_matrix *const matrices[] = {&p.M, &p.c};
    for (int q = 0; q < 1 + m % 2; q++) {
        void *data = guarded((size_t)count * width[dtype], width[dtype]);
        for (int64_t k = 0; k < count; k++) store(data, dtype, k, uniform(0.1, 1));
        *matrices[q] = (mapuot_matrix){.data = data, .dtype = dtype, .start = start, .column = column};
    }
    return p;
}

/* how many entries K or a plan has, with so many from one row to the next */
static int64_t entries_of(const problem *p, int64_t ld) {
    return p->M.start ? p->M.start[p->m] - p->M.start[0] : p->m * ld;
}

static problem new_problem(int64_t m, int64_t n, int layout) {
    problem p = {.m = m, .n = n, .reg = 0.013};
    if (layout >= PAIRS) p = new_pairs(m, n, (mapuot_dtype)(layout - PAIRS));
    else p.M = laid_out(m, n, layout, layout % 2 ? INFINITY : 0.5);
    if (layout < PAIRS && layout % 3 == 1) p.c = laid_out(m, n, (layout + 2) % DENSE_LAYOUTS, 0.0);
    if (layout < PAIRS && layout % 4 >= 2) /* two thirds of the pairs, their numbers beyond 32 bits */
        p.c.mask = (mapuot_mask){.key = 11 + layout,
                                 .limit = -6148914691236517206,
                                 .weight = 1.5,
                                 .row = (int64_t)layout << 31,
                                 .col = 4294967290,
                                 .turned = layout % 2};
    p.alpha = vector(m, 8);
    p.beta = vector(n, 24);
    for (int64_t i = 0; i < m; i++) p.alpha[i] = i % 5 == 4 ? -INFINITY : uniform(-3, 42);
    for (int64_t j = 0; j < n; j++) p.beta[j] = j % 7 == 6 ? -INFINITY : uniform(-3, 42);
    return p;
}

/* All streams over a problem. Instruction sets may differ by the rounding of an exponent or of a sum. */
static void run_streams(int64_t m, int64_t n, int layout, int form, mapuot_pool *pool) {
    const problem p = new_problem(m, n, layout);
    const int64_t np = padded(n), d = 1 + m % 3;
    const double error = cost_error(&p.M) / p.reg, rtol = 1e-12 + error, least[] = {7e-308, 2.5e-38};
    for (int plan = 0; plan < 2; plan++) {
        const mapuot_dtype dtype = (mapuot_dtype)((form + plan) % 2);
        const int64_t ld = plan ? n + m % 3 : np + 16 * (m % 2), skew = plan ? n % 4 : 0;
        void *out = guarded((size_t)entries_of(&p, ld) * width[dtype], (size_t)skew * width[dtype]);
        written(out, dtype, rtol + 2 * rounding[dtype] + (plan ? 0 : narrow[dtype]), least[dtype]);
        if ((m + n) % 2 && layout < PAIRS) {
            const dtype_kernels *kernels = mapuot_active_kernels()->dtype[dtype];
            stream_args args = {.m = m,
                                .n = n,
                                .M = p.M,
                                .c = p.c,
                                .inv_reg = 1 / p.reg,
                                .alpha = p.alpha,
                                .beta = p.beta,
                                .out = out,
                                .ld = ld,
                                .nontemporal = 1};
            (plan ? kernels->form_plan : kernels->build_kernel)(&args, 0, m);
        } else
            plan ? mapuot_form_plan(pool, m, n, p.M, p.c, p.reg, p.alpha, p.beta, dtype, out, ld)
                 : mapuot_build_kernel(pool, m, n, p.M, p.c, p.reg, p.alpha, p.beta, 0, dtype, out, ld);
    }
    double *Xt = vector(d * np, 0), *Y = vector(m * d, 8), *PX = vector(m * d, 8), *PY = vector(d * np, 8);
    double *r = vector(m, 8), *s = vector(n, 8), *alpha = vector(m, 8), *top = vector(n, 8), *told = vector(6, 0);
    double *const outputs[] = {PX, PY, r, s}, *const logs[] = {alpha, top, told};
    for (int k = 0; k < 4; k++) written(outputs[k], MAPUOT_F64, rtol, 1e-300);
    for (int k = 0; k < 3; k++) written(logs[k], MAPUOT_F64, rtol, k < 2 ? rtol : 0);
    for (int64_t k = 0; k < d * np; k++) Xt[k] = k % np < n ? uniform(0, 1) : 0.0;
    for (int64_t k = 0; k < m * d; k++) Y[k] = uniform(0, 1);
    mapuot_apply(pool, m, n, p.M, p.c, p.reg, p.alpha, p.beta, d, Xt, PX);
    mapuot_apply_transpose(pool, m, n, p.M, p.c, p.reg, p.alpha, p.beta, d, Y, PY);
    mapuot_plan_sums(pool, m, n, p.M, p.c, p.reg, p.alpha, p.beta, told, r, s);
    mapuot_extrema(pool, m, n, p.M, told + 2);
    for (int64_t i = 0; i < m; i++) alpha[i] = isinf(p.alpha[i]) ? -INFINITY : 0.0;
    mapuot_balance(pool, m, n, p.M, p.c, p.reg, p.beta, alpha, top);
}
