/* marginals_tmpl.c - the O(n) work on the points of one marginal; compiled once per instruction set.
 * The last vector, shorter than VL, is loaded and stored in part; numbers behind the end have no effect.
 */
#include "marginals.h"

#include "kernels.h"
#include "kl.h"

#define NOTHING (-1e300) /* the logarithm used behind the end: its exponential is 0 beside any other */

ALWAYS_INLINE vd at(const double *x, int64_t n, int64_t j) { return v_load_part(x + j, v_part(n, j), v_set(0)); }
ALWAYS_INLINE vd size_of(vd x) { return v_max(x, v_sub(v_set(0), x)); }

/* sound + 0 x: sound stays 0 until an x is not finite, then it is NaN */
ALWAYS_INLINE vd sound_too(vd x, vd sound) { return v_fma(x, v_set(0), sound); }

/* The largest lane, at least `before`, even if a lane is NaN: v_max then takes its second operand. */
ALWAYS_INLINE double largest_of(vd x, double before) { return v_top(v_max(x, v_set(before))); }

static double log_amount(int64_t n, const double *x, const double *log_u, double rate) {
    const vd nothing = v_set(NOTHING);
    vd most = nothing, sum = v_set(0);
    for (int64_t j = 0; j < n; j += VL)
        most = v_max(most, v_fnma(v_set(rate), at(log_u, n, j), v_load_part(x + j, v_part(n, j), nothing)));
    const double top = largest_of(most, NOTHING);
    for (int64_t j = 0; j < n; j += VL) {
        const vd y = v_fnma(v_set(rate), at(log_u, n, j), v_load_part(x + j, v_part(n, j), nothing));
        sum = v_add(sum, v_exp(v_sub(y, v_set(top))));
    }
    return top + log(v_sum(sum));
}

static mapuot_worth worth(int64_t n, const double *log_weight, const double *weight, const double *log_u,
                          const double *log_s, double rho, double reg) {
    const int hard = isinf(rho), soft = rho > 0 && !hard;
    const double rate = soft ? reg / rho : 0;
    const vd zero = v_set(0), slope = v_set(-rate);
    vd most = zero, value = zero, size = zero, amount = zero, gap = zero, both = zero, missed = zero;
    vd sound = zero, highest = zero; /* largest exponent: v_exp clamps exponents */
    for (int64_t j = 0; j < n; j += VL) {
        const vd a = at(weight, n, j), x = at(log_u, n, j);
        vd q = a, term = hard ? v_mul(a, v_mul(v_set(reg), x)) : zero;
        most = v_max(most, size_of(x));
        sound = sound_too(x, sound);
        if (soft) { /* in two factors, since v_exp is 0 below -708, where a may be 1e300; rho a alone may underflow */
            const vd y = v_mul(slope, x), half = v_exp(v_mul(y, v_set(0.5)));
            highest = v_max(highest, y);
            q = v_mul(v_mul(a, half), half);
            term = v_mul(v_set(-rho), v_mul(a, v_expm1_of(y, v_mul(half, half))));
        }
        value = v_add(value, term);
        size = v_add(size, size_of(term));
        amount = v_add(amount, q);
        if (!log_s) continue;
        const vd y = v_add(x, at(log_s, n, j));
        const vd log_r = v_add(v_load_part(log_weight + j, v_part(n, j), v_set(NOTHING)), y), r = v_exp(log_r);
        sound = sound_too(y, sound);
        highest = v_max(highest, log_r);
        gap = v_add(gap, v_kl_gap(q, r, v_fnma(slope, x, y)));
        both = v_add(both, v_add(r, q));
        missed = v_add(missed, size_of(v_sub(r, a)));
    }
    const int told = v_sum(sound) == 0 && largest_of(highest, 0) < 709;
    const double largest = told ? largest_of(most, 0) : INFINITY;
    return (mapuot_worth){largest, v_sum(value), v_sum(size), v_sum(amount), v_sum(gap), v_sum(both), v_sum(missed)};
}

static double shares(int64_t n, const double *const *x, double *out) {
    const vd nothing = v_set(NOTHING);
    vd most = nothing, sum = v_set(0);
    for (int64_t j = 0; j < n; j += VL) {
        const vd y = v_add(v_add(v_load_part(x[0] + j, v_part(n, j), nothing), at(x[1], n, j)),
                           v_add(at(x[2], n, j), at(x[3], n, j)));
        most = v_max(most, y);
        v_store_part(out + j, y, v_part(n, j));
    }
    const vd top = v_set(largest_of(most, NOTHING));
    for (int64_t j = 0; j < n; j += VL) {
        const vd e = v_exp(v_sub(v_load_part(out + j, v_part(n, j), nothing), top));
        v_store_part(out + j, e, v_part(n, j));
        sum = v_add(sum, e);
    }
    return v_sum(sum);
}

static void change_sums(int64_t n, const double *weight, const double *change, double *out) {
    vd squares = v_set(0), sizes = v_set(0);
    for (int64_t j = 0; j < n; j += VL) {
        const vd x = size_of(at(change, n, j)), once = v_mul(at(weight, n, j), x);
        sizes = v_add(sizes, once);
        squares = v_fma(once, x, squares);
    }
    out[0] = v_sum(squares);
    out[1] = v_sum(sizes);
}

static double factors(int64_t n, const double *x, const double *y, const double *q, double flush, double *v,
                      double *size) {
    vd most = v_set(NOTHING), sizes = v_set(0), sound = sizes;
    for (int64_t j = 0; j < n; j += VL) {
        const vd sent = v_add(at(x, n, j), at(y, n, j)), z = v_sub(sent, at(q, n, j));
        v_store_part(v + j, z, v_part(n, j));
        sizes = v_max(sizes, size_of(sent));
        sound = sound_too(z, sound);
        most = v_max(most, v_load_part(v + j, v_part(n, j), most));
    }
    const double top = largest_of(most, NOTHING) + v_sum(sound);
    for (int64_t j = 0; j < n; j += VL) {
        const vd e = v_exp(v_sub(at(v, n, j), v_set(top)));
        v_store_part(v + j, v_if_less(e, v_set(flush), v_set(0), e), v_part(n, j));
    }
    *size = largest_of(sizes, *size);
    return top;
}

static double base_of(int64_t n, const double *x, const double *y, const double *p, double rest, double *base,
                      double *size) {
    const vd share = v_set(rest);
    vd most = v_set(NOTHING), sizes = v_set(0), sound = sizes;
    for (int64_t i = 0; i < n; i += VL) {
        const vd a = v_fma(share, at(y, n, i), at(x, n, i)), z = v_fnma(share, at(p, n, i), a);
        v_store_part(base + i, z, v_part(n, i));
        sizes = v_max(sizes, size_of(a));
        sound = sound_too(z, sound);
        most = v_max(most, v_load_part(base + i, v_part(n, i), most));
    }
    const double own = largest_of(most, NOTHING) + v_sum(sound);
    for (int64_t i = 0; i < n; i += VL) v_store_part(base + i, v_sub(at(base, n, i), v_set(own)), v_part(n, i));
    *size = largest_of(sizes, *size);
    return own;
}

static int late_of(int64_t n, const mapuot_side *rows, const double *near, const double *p, double fi, double shift,
                   double least, double *late, double *log_u, double *size, double *largest) {
    const vd one = v_set(1), zero = v_set(0), lowest = v_set(log(least)), low = v_set(1e-280), high = v_set(1e280);
    vd failed = zero, sizes = zero, scale = zero;
    for (int64_t i = 0; i < n; i += VL) {
        const int count = v_part(n, i);
        const vd r = v_load_part(rows->marginal + i, count, one);
        const vd log_s = v_sub(v_log(v_min(v_max(r, low), high)), at(rows->log_scale, n, i));
        const vd bad = v_if_less(low, r, v_if_less(r, high, zero, one), one);
        failed = v_max(failed, v_max(bad, v_if_less(lowest, log_s, zero, one)));
        v_store_part(late + i, v_add(log_s, v_sub(v_set(shift), at(p, n, i))), count);
        const vd x = at(late, n, i);
        sizes = v_max(sizes, size_of(x));
        scale = v_max(scale, at(rows->scale, n, i));
        v_store_part(log_u + i, v_mul(v_set(-fi), v_add(at(near, n, i), x)), count);
    }
    *size = largest_of(sizes, *size);
    *largest = largest_of(scale, *largest);
    return !(largest_of(failed, 0) > 0);
}

static int up_of(int64_t n, const double *sums, const double *q, double shift, double least, double *up, double *near,
                 double *size) {
    const vd lowest = v_set(least > DBL_MIN ? least : DBL_MIN), none = v_set(INFINITY), zero = v_set(0), one = v_set(1);
    vd failed = zero, sizes = zero;
    for (int64_t j = 0; j < n; j += VL) {
        const vd sum = v_load_part(sums + j, v_part(n, j), v_set(DBL_MAX));
        failed = v_max(failed, v_if_less(lowest, sum, v_if_less(sum, none, zero, one), one));
    }
    if (largest_of(failed, 0) > 0) return 0;
    for (int64_t j = 0; j < n; j += VL) {
        const int count = v_part(n, j);
        const vd sum = v_load_part(sums + j, count, one);
        v_store_part(up + j, v_add(v_log(sum), v_sub(v_set(shift), at(q, n, j))), count);
        const vd x = at(up, n, j);
        v_store_part(near + j, v_add(at(near, n, j), x), count);
        sizes = v_max(sizes, size_of(x));
    }
    *size = largest_of(sizes, *size);
    return 1;
}

const marginal_kernels ISA_OP(marginals) = {log_amount, worth, shares, change_sums, factors, base_of, late_of, up_of};
