/* check_streams.h - everything that streams over M against plain long double loops: build_kernel, form_plan, apply,
 * apply_transpose, plan_sums, extrema, balance; on layouts that no BLAS would take.
 */
#ifndef CHECK_STREAMS_H
#define CHECK_STREAMS_H
#include "check_buffers.h"
#include "common/mask.h"

static const double narrow[] = {0, 3e-9}; /* what the short exponential of a narrow K may add */

typedef struct {
    int64_t m, n;
    mapuot_matrix M, c;
    double reg, *alpha, *beta;
} problem;

/* layouts: 0 C order; 1 unaligned, wide rows; 2 transposed; 3 backwards; 4 every second column of float32;
 * 5 float32, unaligned and backwards; 6 one row repeated (stride 0); 7 and on: points, by metric */
enum { DENSE_LAYOUTS = 7, LAYOUTS = DENSE_LAYOUTS + MAPUOT_WFR + 1 };

/* clouds of 1 to 5 coordinates, some pairs further apart than WFR allows */
static mapuot_matrix clouds(int64_t m, int64_t n, mapuot_metric metric)
{
    const int64_t d = 1 + (m + n) % 5, ld = padded(n);
    double *x = vector(m * d, 8), *y = vector(d * ld, 0);
    for (int64_t k = 0; k < m * d; k++)
        x[k] = uniform(0, 1.2);
    for (int64_t k = 0; k < d * ld; k++)
        y[k] = k % ld < n ? uniform(0.4, 1.8) : y[k - 1];
    return (mapuot_matrix){.points = {.x = x, .y = y, .d = d, .ld = ld, .scale = 0.3, .metric = metric}};
}

static double distance(const mapuot_points *points, int64_t i, int64_t j)
{
    long double sum = 0, taxi = 0;
    for (int64_t k = 0; k < points->d; k++) {
        const long double t = (long double)points->x[i * points->d + k] - points->y[k * points->ld + j];
        sum += t * t;
        taxi += fabsl(t);
    }
    switch (points->metric) {
    case MAPUOT_SQEUCLIDEAN:
        return (double)(points->scale * sum);
    case MAPUOT_EUCLIDEAN:
        return (double)(points->scale * sqrtl(sum));
    case MAPUOT_CITYBLOCK:
        return (double)(points->scale * taxi);
    default:
        return sqrtl(sum) < acosl(0) - 0x1p-13L ? (double)(points->scale * -2 * logl(cosl(sqrtl(sum)))) : INFINITY;
    }
}

static mapuot_matrix laid_out(int64_t m, int64_t n, int layout, double special)
{
    if (layout >= DENSE_LAYOUTS)
        return clouds(m, n, (mapuot_metric)(layout - DENSE_LAYOUTS));
    const mapuot_dtype dtype = layout == 4 || layout == 5 ? MAPUOT_F32 : MAPUOT_F64;
    const int64_t step = layout == 4 ? 2 : 1, wide = step * n + (layout == 1 || layout == 5 ? 3 : 0);
    const size_t skew = layout == 1 || layout == 5 ? width[dtype] : 0;
    void *data = guarded((size_t)((layout == 6 ? 1 : m) * wide) * width[dtype], skew);
    mapuot_matrix M = {.data = data, .row_stride = wide, .col_stride = step, .dtype = dtype};
    for (int64_t k = 0; k < (layout == 6 ? 1 : m) * wide; k++)
        store(data, dtype, k, uniform(0, 1) < 0.1 ? special : uniform(0.0, 2.0));
    if (layout == 2)
        M.row_stride = 1, M.col_stride = m;
    if (layout == 6)
        M.row_stride = 0;
    if (layout == 3 || layout == 5)
        M = (mapuot_matrix){.data = (char *)data + ((m - 1) * wide + n - 1) * (int64_t)width[dtype],
                            .row_stride = -wide,
                            .col_stride = -1,
                            .dtype = dtype};
    return M;
}

static double at(const mapuot_matrix *M, int64_t i, int64_t j)
{
    if (M->points.x)
        return distance(&M->points, i, j);
    const double given = M->data ? stored(M->data, M->dtype, i * M->row_stride + j * M->col_stride) : 1.0;
    return M->mask.weight > 0 ? given * mask_weight(&M->mask, i, j) : given;
}

/* what a cost may be off by: near pi / 2 the cosine of WFR has few digits left */
static double cost_error(const mapuot_matrix *M)
{
    return M->points.x == NULL ? 0 : M->points.metric == MAPUOT_WFR ? 1e-9 : 4e-15;
}

static problem new_problem(int64_t m, int64_t n, int layout)
{
    problem p = {.m = m, .n = n, .reg = 0.013};
    p.M = laid_out(m, n, layout, layout % 2 ? INFINITY : 0.5);
    if (layout % 3 == 1)
        p.c = laid_out(m, n, (layout + 2) % DENSE_LAYOUTS, 0.0);
    if (layout % 4 >= 2) /* two thirds of the pairs, their numbers beyond 32 bits */
        p.c.mask = (mapuot_mask){.key = 11 + layout,
                                 .limit = -6148914691236517206,
                                 .weight = 1.5,
                                 .row = (int64_t)layout << 31,
                                 .col = 4294967290,
                                 .turned = layout % 2};
    p.alpha = vector(m, 8);
    p.beta = vector(n, 24);
    for (int64_t i = 0; i < m; i++)
        p.alpha[i] = i % 5 == 4 ? -INFINITY : uniform(-3, 42);
    for (int64_t j = 0; j < n; j++)
        p.beta[j] = j % 7 == 6 ? -INFINITY : uniform(-3, 42);
    return p;
}

static double entry(const problem *p, int64_t i, int64_t j)
{
    long double c = at(&p->c, i, j), x = (long double)p->alpha[i] + p->beta[j] - (long double)at(&p->M, i, j) / p->reg;
    return c > 0 ? (double)(c * expl(x)) : 0.0;
}

static void check_entries(const problem *p, const double *want, mapuot_dtype dtype, int plan, mapuot_pool *pool,
                          int stream)
{
    const int64_t np = padded(p->n), ld = plan ? p->n + p->m % 3 : np + 16 * (p->m % 2), skew = plan ? p->n % 4 : 0;
    const dtype_kernels *kernels = mapuot_active_kernels()->dtype[dtype];
    const double tiny = dtype == MAPUOT_F64 ? 7e-308 : 2.5e-38,
                 rtol = 1e-13 + 1.01 * rounding[dtype] + (plan ? 0 : narrow[dtype]) + cost_error(&p->M) / p->reg;
    const int from = buffer_count;
    void *out = guarded((size_t)(p->m * ld) * width[dtype], (size_t)skew * width[dtype]);
    if (stream) {
        stream_args args = {.m = p->m,
                            .n = p->n,
                            .M = p->M,
                            .c = p->c,
                            .inv_reg = 1 / p->reg,
                            .alpha = p->alpha,
                            .beta = p->beta,
                            .out = out,
                            .ld = ld,
                            .nontemporal = 1};
        (plan ? kernels->form_plan : kernels->build_kernel)(&args, 0, p->m);
    } else
        (plan ? mapuot_form_plan : mapuot_build_kernel)(pool, p->m, p->n, p->M, p->c, p->reg, p->alpha, p->beta, dtype,
                                                        out, ld);
    for (int64_t i = 0; i < p->m; i++)
        for (int64_t j = 0; j < ld; j++) {
            double got = stored(out, dtype, i * ld + j);
            if (j < p->n)
                expect(plan ? "form_plan" : "build_kernel", i * p->n + j, got, want[i * p->n + j], rtol, tiny);
            else if (!plan && j < np)
                expect("zero behind the row", j, got, 0.0, 0, 0);
            else
                expect("untouched behind the row", j, isnan(got), 1, 0, 0);
        }
    release(from);
}

/* P X, P^T Y, <P, M> and the marginals */
static void check_products(const problem *p, const double *want, mapuot_pool *pool)
{
    const int64_t m = p->m, n = p->n, np = padded(n), d = 1 + m % 3;
    const double rtol = 1e-13 + cost_error(&p->M) / p->reg;
    const int from = buffer_count;
    double *Xt = vector(d * np, 0), *Y = vector(m * d, 8), *PX = vector(m * d, 8), *PY = vector(d * np, 8);
    double *r = vector(m, 8), *s = vector(n, 8), out[2], cost = 0, mass = 0;
    for (int64_t k = 0; k < d * np; k++)
        Xt[k] = k % np < n ? uniform(-1, 1) : 0.0;
    for (int64_t k = 0; k < m * d; k++)
        Y[k] = uniform(-1, 1);
    mapuot_apply(pool, m, n, p->M, p->c, p->reg, p->alpha, p->beta, d, Xt, PX);
    mapuot_apply_transpose(pool, m, n, p->M, p->c, p->reg, p->alpha, p->beta, d, Y, PY);
    mapuot_plan_sums(pool, m, n, p->M, p->c, p->reg, p->alpha, p->beta, out, r, s);
    for (int64_t i = 0; i < m; i++)
        for (int64_t x = 0; x <= d; x++) { /* x = d: the marginal */
            long double sum = 0, size = 0;
            for (int64_t j = 0; j < n; j++) {
                sum += (long double)want[i * n + j] * (x < d ? Xt[x * np + j] : 1);
                size += want[i * n + j];
            }
            expect(x < d ? "apply" : "row_sum", i, x < d ? PX[i * d + x] : r[i], (double)sum, 0, rtol * (double)size);
        }
    for (int64_t j = 0; j < n; j++)
        for (int64_t x = 0; x <= d; x++) {
            long double sum = 0, size = 0;
            for (int64_t i = 0; i < m; i++) {
                sum += (long double)want[i * n + j] * (x < d ? Y[i * d + x] : 1);
                size += want[i * n + j];
            }
            expect(x < d ? "apply_transpose" : "col_sum", j, x < d ? PY[x * np + j] : s[j], (double)sum, 0,
                   rtol * (double)size);
        }
    for (int64_t k = 0; k < m * n; k++)
        if (want[k] > 0) {
            cost += want[k] * at(&p->M, k / n, k % n);
            mass += want[k];
        }
    expect("<P, M>", 0, out[0], cost, 10 * rtol, 0);
    expect("mass", 0, out[1], mass, 10 * rtol, 0);
    release(from);
}

static void check_extrema_balance(const problem *p, mapuot_pool *pool)
{
    const int64_t m = p->m, n = p->n;
    const int from = buffer_count;
    double *alpha = vector(m, 8), *top = vector(n, 8), *right = vector(m, 0), out[4], lo = INFINITY, hi = -INFINITY,
           inf = 0;
    mapuot_extrema(pool, m, n, p->M, out);
    for (int64_t i = 0; i < m; i++) {
        double best = -INFINITY;
        for (int64_t j = 0; j < n; j++) {
            double x = at(&p->M, i, j);
            lo = isfinite(x) ? fmin(lo, x) : lo;
            hi = isfinite(x) ? fmax(hi, x) : hi;
            inf += isinf(x);
            best = fmax(best, p->beta[j] - x / p->reg + log(at(&p->c, i, j)));
        }
        alpha[i] = isinf(p->alpha[i]) ? -INFINITY : 0.0;
        right[i] = isinf(p->alpha[i]) ? INFINITY : -best;
    }
    expect("min", 0, out[0], lo, 0, cost_error(&p->M));
    expect("max", 0, out[1], hi, 0, cost_error(&p->M));
    expect("number of NaN", 0, out[2], 0, 0, 0);
    expect("number of inf", 0, out[3], inf, 0, 0);
    mapuot_balance(pool, m, n, p->M, p->c, p->reg, p->beta, alpha, top);
    for (int64_t i = 0; i < m; i++)
        expect("balance: alpha", i, alpha[i], right[i], 1e-14, 1e-12 + cost_error(&p->M) / p->reg);
    for (int64_t j = 0; j < n; j++) {
        double best = -INFINITY;
        for (int64_t i = 0; i < m; i++)
            if (isfinite(right[i]))
                best = fmax(best, right[i] + p->beta[j] - at(&p->M, i, j) / p->reg + log(at(&p->c, i, j)));
        expect("balance: col_max", j, top[j], best, 1e-14, 1e-12 + cost_error(&p->M) / p->reg);
    }
    release(from);
}

static void check_streams(int64_t m, int64_t n, int layout, mapuot_pool *pool)
{
    const int from = buffer_count;
    problem p = new_problem(m, n, layout);
    double *want = vector(m * n, 0);
    for (int64_t k = 0; k < m * n; k++)
        want[k] = entry(&p, k / n, k % n);
    for (int dtype = 0; dtype < 2; dtype++)
        for (int plan = 0; plan < 2; plan++)
            check_entries(&p, want, (mapuot_dtype)dtype, plan, pool, (int)(m + n) % 2);
    check_products(&p, want, pool);
    check_extrema_balance(&p, pool);
    release(from);
}
#endif
