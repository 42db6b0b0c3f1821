/* barycenter_tmpl.c - the O(n) part of an iteration of barycenter.c, in vectors; compiled once per instruction set.
 * Vectors over the columns; the last one, shorter than VL, is loaded and stored in part.
 */
#include "barycenter.h"
#include "vec.h"

static const double LANES[] = {0, 1, 2, 3, 4, 5, 6, 7};

/* the least and largest entries that are not -inf */
static void range(int64_t n, const double *x, double *low, double *high)
{
    const vd none = v_set(-INFINITY);
    vd least = none, most = none; /* the largest -x and x */
    for (int64_t j = 0; j < n; j += VL) {
        const vd y = v_load_part(x + j, v_part(n, j), none);
        least = v_max(least, v_if_less(none, y, v_sub(v_set(0.0), y), none));
        most = v_max(most, y);
    }
    *low = -v_top(least);
    *high = v_top(most);
}

/* e^(x - high) */
static void scales(int64_t n, const double *x, double high, double *out)
{
    for (int64_t j = 0; j < n; j += VL)
        v_store_part(out + j, v_exp(v_sub(v_load_part(x + j, v_part(n, j), v_set(high)), v_set(high))), v_part(n, j));
}

/* log x + shift */
static void logs(int64_t n, const double *x, double shift, double *out)
{
    for (int64_t j = 0; j < n; j += VL) {
        const vd y = v_max(v_load_part(x + j, v_part(n, j), v_set(1.0)), v_set(DBL_MIN));
        v_store_part(out + j, v_add(v_log(y), v_set(shift)), v_part(n, j));
    }
}

/* log sum_s w_s e^((1 - fi) x_s) / (1 - fi), the mean sum_s w_s x_s for fi = 1; x at stride n */
ALWAYS_INLINE vd power_mean(const mapuot_barycenter_run *run, const double *x, int count)
{
    const vd power = v_set(1.0 - run->fi), zero = v_set(0.0);
    vd top = v_set(-INFINITY), mean = zero, sum = zero;
    for (int64_t s = 0; s < run->k; s++)
        if (run->weights[s] > 0.0) {
            const vd y = v_load_part(x + s * run->n, count, zero);
            top = v_max(top, y);
            mean = v_fma(v_set(run->weights[s]), y, mean);
        }
    if (run->fi == 1.0)
        return mean;
    for (int64_t s = 0; s < run->k; s++)
        if (run->weights[s] > 0.0) {
            const vd y = v_load_part(x + s * run->n, count, zero);
            sum = v_fma(v_set(run->weights[s]), v_exp(v_mul(power, v_sub(y, top))), sum);
        }
    return v_add(v_div(v_log(v_max(sum, v_set(DBL_MIN))), power), top);
}

/* q and log v from log_s = log K^T u, k x n; max|q - q'| / max(max q, max q', 1) */
static double columns(mapuot_barycenter_run *run, const double *log_s)
{
    const vd fi = v_set(run->fi), zero = v_set(0.0);
    vd change = zero, top = v_set(1.0);
    for (int64_t j = 0; j < run->n; j += VL) {
        const int count = v_part(run->n, j);
        const vd log_q = power_mean(run, log_s + j, count), old = v_load_part(run->q + j, count, zero);
        const vd inside = v_if_less(v_load(LANES), v_set(count), v_exp(log_q), zero);
        change = v_max(change, v_max(v_sub(inside, old), v_sub(old, inside)));
        top = v_max(top, v_max(inside, old));
        v_store_part(run->q + j, inside, count);
        for (int64_t s = 0; s < run->k; s++) {
            const vd x = v_load_part(log_s + s * run->n + j, count, zero);
            v_store_part(run->log_v + s * run->n + j, v_mul(fi, v_sub(log_q, x)), count);
        }
    }
    return v_top(change) / v_top(top);
}

void PASTE2(batch_pass_f64, MAPUOT_ISA)(mapuot_state *const *states, int count);

const barycenter_kernels ISA_OP(barycenter) = {range, scales, logs, columns, PASTE2(batch_pass_f64, MAPUOT_ISA)};
