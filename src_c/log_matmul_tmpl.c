/* log_matmul_tmpl.c - the log-semiring product out_ij = log sum_k exp(A_ik + B_kj); compiled once per ISA and dtype.
 *
 * log_matmul.h has the mathematics, the bound of the fast path and the policy for zeros. S is accumulated in runs of
 * RUN_LENGTH products and held for ROW_BLOCK rows at a time. In float32 the runs are short, and their totals are
 * float64.
 * Oracle: right_of in tests/core/test_log_matmul.py.
 */
#include "log_matmul.h"
#include "vec.h"

#if defined(MAPUOT_DTYPE_F64)
typedef vd lanes;
enum { LANES = VL };
#define w_set v_set
#define w_load v_load
#define w_fma v_fma
#define w_add_to(p, x) v_store(p, v_add(v_load(p), x))
#define REAL_EPS 0x1p-53
#else
typedef vf lanes;
enum { LANES = FL };
#define w_set f_set
#define w_load f_load
#define w_fma f_fma
#define w_add_to f_add_to
#define REAL_EPS 0x1p-24
#endif
enum { ROWS = VL == 8 ? 8 : 4, VECS = VL == 8 ? 2 : 3, COLS = VECS * LANES };

/* c_j = max_k B_kj and F_kj = exp(B_kj - c_j) for one panel of columns */
void KERNEL(pack_columns)(const log_product *job, int64_t panel) {
    const int64_t j0 = panel * COLS, count = job->n - j0 < COLS ? job->n - j0 : COLS;
    const real *B = (const real *)job->B + j0;
    real *F = (real *)job->F + panel * COLS * job->k, row[COLS];
    vd top[COLS / VL], odd[COLS / VL];
    for (int q = 0; q < COLS / VL; q++) {
        top[q] = v_set(-INFINITY);
        odd[q] = v_set(0);
    }
    for (int j = 0; j < COLS; j++) row[j] = -INFINITY;
    for (int64_t k = 0; k < job->k; k++) {
        memcpy(row, B + k * job->n, (size_t)count * sizeof(real));
        for (int q = 0; q < COLS / VL; q++) {
            vd x = v_load_real(row + q * VL);
            top[q] = v_max(x, top[q]);
            odd[q] = v_add(odd[q], v_if_less(x, v_set(INFINITY), v_set(0), v_set(1)));
        }
    }
    for (int q = 0; q < COLS / VL; q++) {
        top[q] = v_if_less(v_set(-INFINITY), top[q], top[q], v_set(0));
        v_store(job->col_shift + j0 + q * VL, v_if_less(v_set(0), odd[q], v_set(INFINITY), top[q]));
    }
    for (int64_t k = 0; k < job->k; k++) {
        memcpy(row, B + k * job->n, (size_t)count * sizeof(real));
        for (int q = 0; q < COLS / VL; q++) {
            vd x = v_sub(v_load_real(row + q * VL), top[q]);
            v_store_real(F + k * COLS + q * VL, v_exp_above(x, REAL_MIN_LOG, REAL_NARROW));
        }
    }
}

/* r = max_k A_k, 0 for a row of zeros, +inf for a row with +inf or NaN; E_k = exp(A_k - r), at stride ROWS */
static double pack_row(const real *A, int64_t count, real *E) {
    enum { CHUNK = 64 };
    double top = -INFINITY;
    real part[CHUNK];
    for (int64_t k = 0; k < count; k++) {
        if (!(A[k] < INFINITY)) return INFINITY;
        top = A[k] > top ? (double)A[k] : top;
    }
    top = top > -INFINITY ? top : 0.0;
    for (int64_t k0 = 0; k0 < count; k0 += CHUNK) {
        const int64_t size = count - k0 < CHUNK ? count - k0 : CHUNK;
        memset(part, 0, sizeof part);
        memcpy(part, A + k0, (size_t)size * sizeof(real));
        for (int64_t k = 0; k < size; k += VL)
            v_store_real(part + k, v_exp_above(v_sub(v_load_real(part + k), v_set(top)), REAL_MIN_LOG, REAL_NARROW));
        for (int64_t k = 0; k < size; k++) E[(k0 + k) * ROWS] = part[k];
    }
    return top;
}

/* S += E F over a run of k, for ROWS x COLS sums in registers */
ALWAYS_INLINE void multiply(const real *E, const real *F, int64_t run, double *S, int64_t ld) {
    lanes sum[ROWS][VECS];
    UNROLLED (int r = 0; r < ROWS; r++)
        UNROLLED (int q = 0; q < VECS; q++) sum[r][q] = w_set(0);
    for (int64_t k = 0; k < run; k++) {
        lanes f[VECS];
        UNROLLED (int q = 0; q < VECS; q++) f[q] = w_load(F + k * COLS + q * LANES);
        UNROLLED (int r = 0; r < ROWS; r++) {
            lanes e = w_set(E[k * ROWS + r]);
            UNROLLED (int q = 0; q < VECS; q++) sum[r][q] = w_fma(e, f[q], sum[r][q]);
        }
    }
    UNROLLED (int r = 0; r < ROWS; r++)
        UNROLLED (int q = 0; q < VECS; q++) w_add_to(S + r * ld + q * LANES, sum[r][q]);
}

/* one entry by plain loops: few columns, +inf, NaN */
static double entry(const log_product *job, int64_t i, int64_t j) {
    const real *a = (const real *)job->A + i * job->k, *b = (const real *)job->B + j;
    double top = -INFINITY, sum = 0.0;
    for (int64_t k = 0; k < job->k; k++) {
        double x = (double)a[k] + (double)b[k * job->n];
        if (isnan(x)) return x;
        top = fmax(top, x);
    }
    if (isinf(top)) return top;
    for (int64_t k = 0; k < job->k; k++) sum += exp((double)a[k] + (double)b[k * job->n] - top);
    return top + log(sum);
}

/* VL entries of a row, each from its own maximum: out = t_j + log sum_k exp(A_ik + B_kj - t_j) */
ALWAYS_INLINE vd exact_entries(const log_product *job, int64_t i, int64_t j) {
    const real *a = (const real *)job->A + i * job->k, *b = (const real *)job->B + j;
    vd top = v_set(-INFINITY), sum = v_set(0);
    for (int64_t k = 0; k < job->k; k++) top = v_max(top, v_add(v_set(a[k]), v_load_real(b + k * job->n)));
    vd shift = v_if_less(v_set(-INFINITY), top, top, v_set(0));
    for (int64_t k = 0; k < job->k; k++) {
        vd x = v_sub(v_add(v_set(a[k]), v_load_real(b + k * job->n)), shift);
        sum = v_add(sum, v_exp_above(x, -708.0, REAL_NARROW));
    }
    return v_add(top, v_log(v_max(sum, v_set(DBL_MIN))));
}

/* out = r_i + c_j + log S_ij for VL columns from j (fewer at the end), or exact entries if S is below the limit */
ALWAYS_INLINE void finish_entries(const log_product *job, int64_t i, int64_t j, double row_shift, const double *S) {
    const vd limit = v_set((double)job->k * exp(REAL_MIN_LOG) / REAL_EPS);
    const int64_t count = job->n - j < VL ? job->n - j : VL;
    const vd c = v_load(job->col_shift + j), s = v_load(S);
    const vd odd = v_if_less(v_add(c, v_set(row_shift)), v_set(INFINITY), v_set(0), v_set(1));
    real *out = (real *)job->out + i * job->n + j, part[VL];
    double low[VL];
    v_store(low, v_if_less(s, limit, v_set(1), v_set(0)));
    double flagged = job->exact, strange = v_sum(odd);
    for (int q = 0; q < count; q++) flagged += low[q];
    if (flagged > 0 && strange == 0 && count == VL) {
        v_store_real(out, exact_entries(job, i, j));
    } else if (flagged > 0 || strange > 0) {
        for (int q = 0; q < count; q++) out[q] = (real)entry(job, i, j + q);
    } else {
        v_store_real(part, v_add(v_log(v_max(s, v_set(DBL_MIN))), v_add(c, v_set(row_shift))));
        memcpy(out, part, (size_t)count * sizeof(real));
    }
}

void KERNEL(log_rows)(const log_product *job, int64_t i0, int64_t i1) {
    const int64_t k = job->k, panels = (job->n + COLS - 1) / COLS, ld = panels * COLS;
    real *E = (real *)job->E;
    double row_shift[ROW_BLOCK];
    memset(job->S, 0, (size_t)(ROW_BLOCK * ld) * sizeof(double));
    for (int64_t i = 0; i < ROW_BLOCK; i++) {
        real *row = E + i / ROWS * ROWS * k + i % ROWS;
        if (i < i1 - i0) row_shift[i] = pack_row((const real *)job->A + (i0 + i) * k, k, row);
        if (i >= i1 - i0 || row_shift[i] == INFINITY)
            for (int64_t q = 0; q < k; q++) row[q * ROWS] = 0;
    }
    for (int64_t k0 = 0; k0 < k && !job->exact && !stopped(job); k0 += RUN_LENGTH) {
        const int64_t run = k - k0 < RUN_LENGTH ? k - k0 : RUN_LENGTH;
        for (int64_t panel = 0; panel < panels; panel++)
            for (int64_t i = 0; i < i1 - i0; i += ROWS)
                multiply(E + i * k + k0 * ROWS, (const real *)job->F + (panel * k + k0) * COLS, run,
                         job->S + i * ld + panel * COLS, ld);
    }
    for (int64_t j = 0; j < job->n && !stopped(job); j += VL)
        for (int64_t i = i0; i < i1; i++) finish_entries(job, i, j, row_shift[i - i0], job->S + (i - i0) * ld + j);
}

const log_matmul_kernels KERNEL(log_matmul) = {ROWS, COLS, KERNEL(pack_columns), KERNEL(log_rows)};
