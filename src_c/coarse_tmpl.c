/* coarse_tmpl.c - translation invariance cluster by cluster: slow modes of the iteration move whole groups of points.
 *
 * A labelled pass is a row_pass that takes the rows cluster by cluster and thereby finds B_Ij, the plan's mass between
 * cluster I of rows and column j. If every cluster counts as one row, the derivative of G is, with C = fi1 fi2 and the
 * marginals r and s of B,
 *     J = C D^-1 B^T R^-1 B,   R = diag(r), D = diag(s),
 * and the step gains ((I - J)^-1 - I) (F - sum gamma dF), which with W = B D^-1/2 is
 *     C D^-1/2 W^T (R - C W W^T)^-1 W D^1/2 (F - sum gamma dF).
 * The matrix in the middle has the size of the clusters and is symmetric positive definite; its Cholesky factor is
 * kept. B is relative to its sum, W is float32: steps need not be exact, the guard is.
 * Formulas: docs/mathematics.md.  When it is used: backends/coarse.py.  Oracle: backends/reference.py.
 */
#include <string.h>

#include "common/words.h"
#include "kernels.h"
#include "vec.h"

/* share of the diagonal: a cluster that exchanges no mass moves by at most 1e10 of its residual */
#define LEAST_PIVOT 1e-10
/* of a column in a cluster's mass: products of smaller shares are subnormal float32, which is slow */
#define LEAST_SHARE 1e-20
enum { TOGETHER = 4 }; /* clusters processed at a time */

/* For every cluster of this thread: the pass over its rows, r_I, and the shares of the columns in r_I. */
static void coarse_rows(const mapuot_state *state, pass_fn pass, int thread, int threads, double *sums) {
    const mapuot_coarse *coarse = &state->coarse;
    const int64_t np = padded(state->n), len = np + SCALARS, count = coarse->own;
    double *own = coarse->sums + thread * len;
    for (int64_t I = count * thread / threads; I < count * (thread + 1) / threads; I++) {
        float *block = coarse->own_blocks + I * np;
        vd mass = v_set(0);
        memset(own, 0, (size_t)len * sizeof(double));
        for (int64_t k = coarse->first[I]; k < coarse->first[I + 1]; k++)
            pass(state, coarse->order[k], coarse->order[k] + 1, own);
        for (int64_t j = 0; j < np; j += VL) mass = v_fma(v_load(own + j), v_load(state->cols.scale + j), mass);
        const double r = coarse->own_mass[I] = v_sum(mass), over = r > 0.0 ? 1.0 / r : 0.0;
        for (int64_t j = 0; j < np; j += VL) {
            const vd share = v_mul(v_mul(v_load(own + j), v_load(state->cols.scale + j)), v_set(over));
            v_store_f32(block + j, v_if_less(share, v_set(LEAST_SHARE), v_set(0), share));
        }
        for (int64_t j = 0; j < len; j++) sums[j] += own[j];
    }
}

/* Compute D^1/2 and W for the columns j0 to j1. */
static void weigh(const mapuot_coarse *coarse, int64_t np, int64_t j0, int64_t j1) {
    double *r = coarse->part, *root = coarse->root;
    memset(root + j0, 0, (size_t)(j1 - j0) * sizeof(double));
    for (int64_t I = 0; I < coarse->clusters; I++)
        for (int64_t j = j0; j < j1; j += VL)
            v_store(root + j, v_fma(v_set(r[I]), v_load_f32(coarse->blocks + I * np + j), v_load(root + j)));
    for (int64_t j = j0; j < j1; j += VL) v_store(root + j, v_sqrt(v_load(root + j)));
    for (int64_t I = 0; I < coarse->clusters; I++)
        for (int64_t j = j0; j < j1; j += VL) { /* a column that receives no mass has shares of 0 */
            const vd mass = v_mul(v_set(r[I]), v_load_f32(coarse->blocks + I * np + j));
            v_store_f32(coarse->weights + I * np + j, v_div(mass, v_max(v_load(root + j), v_set(TINY))));
        }
}

/* TOGETHER rows of W from the k-th on; behind the end, the last row again */
static void some_rows(const mapuot_coarse *coarse, int64_t np, int64_t k, const float **rows) {
    for (int i = 0; i < TOGETHER; i++)
        rows[i] = coarse->weights + (k + i < coarse->clusters ? k + i : coarse->clusters - 1) * np;
}

/* The upper half of W W^T. Threads take groups of rows in turn, since rows have unequal lengths. */
static void products(const mapuot_coarse *coarse, int64_t np, int thread, int threads) {
    const int64_t clusters = coarse->clusters;
    const float *left[TOGETHER], *right[TOGETHER];
    for (int64_t I = TOGETHER * (int64_t)thread; I < clusters; I += TOGETHER * (int64_t)threads)
        for (int64_t L = I; L < clusters; L += TOGETHER) {
            vd sum[TOGETHER][TOGETHER];
            some_rows(coarse, np, I, left);
            some_rows(coarse, np, L, right);
            UNROLLED (int i = 0; i < TOGETHER * TOGETHER; i++) sum[i / TOGETHER][i % TOGETHER] = v_set(0);
            for (int64_t j = 0; j < np; j += VL) {
                vd x[TOGETHER];
                UNROLLED (int i = 0; i < TOGETHER; i++) x[i] = v_load_f32(right[i] + j);
                UNROLLED (int i = 0; i < TOGETHER; i++) {
                    const vd y = v_load_f32(left[i] + j);
                    UNROLLED (int k = 0; k < TOGETHER; k++) sum[i][k] = v_fma(x[k], y, sum[i][k]);
                }
            }
            for (int i = 0; i < TOGETHER && I + i < clusters; i++)
                for (int k = 0; k < TOGETHER && L + k < clusters; k++)
                    coarse->matrix[(I + i) * clusters + L + k] = v_sum(sum[i][k]);
        }
}

/* y += a x */
static inline void axpy(int64_t len, double a, const double *x, double *y) {
    for (int64_t i = 0; i < len; i++) y[i] += a * x[i];
}

/* U^T U = R - C W W^T + C r r^T, upper half. The last term leaves the component common to all columns to the
 * translation. */
static void coarse_factor(const mapuot_state *state) {
    const int64_t k = state->coarse.clusters;
    const double fi = state->coarse.fi, *r = state->coarse.part;
    double *A = state->coarse.matrix;
    for (int64_t i = 0; i < k; i++)
        for (int64_t j = i; j < k; j++) A[i * k + j] = (i == j ? r[i] : 0.0) + fi * (r[i] * r[j] - A[i * k + j]);
    for (int64_t q = 0; q < k; q++) {
        double *row = A + q * k;
        row[q] = sqrt(fmax(row[q], fmax(LEAST_PIVOT * r[q], TINY)));
        for (int64_t j = q + 1; j < k; j++) row[j] /= row[q];
        for (int64_t i = q + 1; i < k; i++)
            if (row[i] != 0.0) axpy(k - i, -row[i], row + i, A + i * k + i);
    }
}

/* y = A^-1 y, A = U^T U */
static void solve(int64_t k, const double *U, double *y) {
    for (int64_t i = 0; i < k; i++) {
        y[i] /= U[i * k + i];
        axpy(k - i - 1, -y[i], U + i * k + i + 1, y + i + 1);
    }
    for (int64_t i = k - 1; i >= 0; i--) {
        vd sum = v_set(0.0);
        double rest = y[i];
        int64_t j = i + 1;
        for (; j + VL <= k; j += VL) sum = v_fma(v_load(U + i * k + j), v_load(y + j), sum);
        for (; j < k; j++) rest -= U[i * k + j] * y[j];
        y[i] = (rest - v_sum(sum)) / U[i * k + i];
    }
}

/* y = W D^1/2 (F - sum gamma dF) for the columns from j0 to j1. It is summed in float64: the matrix amplifies slow
 * modes by up to rho / reg, and with them the rounding of y. */
static void gather(const mapuot_state *state, const sweep_args *args, int64_t j0, int64_t j1, double *y) {
    const mapuot_coarse *coarse = &state->coarse;
    const int64_t np = padded(state->n), clusters = coarse->clusters, end = j1 < state->n ? j1 : state->n;
    const double *dF = state->history + 2 * np;
    double *F = state->work + np;
    const float *rows[TOGETHER];
    memcpy(F + j0, state->history + j0, (size_t)(j1 - j0) * sizeof(double));
    for (int64_t i = 0; i < args->depth; i++) axpy(end - j0, -args->gamma[i], dF + i * np + j0, F + j0);
    for (int64_t j = j0; j < end; j++) F[j] *= coarse->root[j];
    for (int64_t I = 0; I < clusters; I += TOGETHER) {
        vd sum[TOGETHER];
        some_rows(coarse, np, I, rows);
        UNROLLED (int i = 0; i < TOGETHER; i++) sum[i] = v_set(0);
        for (int64_t j = j0; j < j1; j += VL)
            UNROLLED (int i = 0; i < TOGETHER; i++) sum[i] = v_fma(v_load_f32(rows[i] + j), v_load(F + j), sum[i]);
        for (int i = 0; i < TOGETHER && I + i < clusters; i++) y[I + i] = v_sum(sum[i]);
    }
}

/* step = A^-1 (y - r sum y), with y summed over the threads: minus the component common to all columns */
static void coarse_solve(const mapuot_state *state, int threads) {
    const mapuot_coarse *coarse = &state->coarse;
    const int64_t clusters = coarse->clusters;
    double common = 0.0, *y = coarse->step;
    memcpy(y, coarse->sums, (size_t)clusters * sizeof(double));
    for (int t = 1; t < threads; t++) axpy(clusters, 1.0, coarse->sums + t * clusters, y);
    for (int64_t I = 0; I < clusters; I++) common += y[I];
    axpy(clusters, -common, coarse->part, y);
    solve(clusters, coarse->matrix, y);
}

/* G += C D^-1/2 W^T step in the columns from j0 to j1 */
static void spread(const mapuot_state *state, int64_t j0, int64_t j1) {
    const mapuot_coarse *coarse = &state->coarse;
    const int64_t np = padded(state->n);
    const double *y = coarse->step, *root = coarse->root;
    double *x = state->work + np, *image = x + np;
    const float *rows[TOGETHER];
    memset(x + j0, 0, (size_t)(j1 - j0) * sizeof(double));
    for (int64_t I = 0; I < coarse->clusters; I += TOGETHER) {
        vd part[TOGETHER];
        some_rows(coarse, np, I, rows);
        for (int i = 0; i < TOGETHER; i++) part[i] = v_set(I + i < coarse->clusters ? y[I + i] : 0.0);
        for (int64_t j = j0; j < j1; j += VL) {
            vd sum = v_load(x + j);
            UNROLLED (int i = 0; i < TOGETHER; i++) sum = v_fma(part[i], v_load_f32(rows[i] + j), sum);
            v_store(x + j, sum);
        }
    }
    for (int64_t j = j0; j < j1; j++) image[j] += root[j] > 0.0 ? coarse->fi * x[j] / root[j] : 0.0;
}

/* one thread's columns, or rows of the matrix, in one step of building the matrix or of the correction */
static void coarse_part(const mapuot_state *state, const sweep_args *args, int part, int thread, int threads) {
    const mapuot_coarse *coarse = &state->coarse;
    const int64_t np = padded(state->n), blocks = np / PAD;
    const int64_t j0 = blocks * thread / threads * PAD, j1 = blocks * (thread + 1) / threads * PAD;
    if (part == COARSE_WEIGH) weigh(coarse, np, j0, j1);
    else if (part == COARSE_PRODUCTS) products(coarse, np, thread, threads);
    else if (part == COARSE_GATHER) gather(state, args, j0, j1, coarse->sums + thread * coarse->clusters);
    else spread(state, j0, j1);
}

const coarse_kernels ISA_OP(coarse) = {coarse_rows, coarse_part, coarse_factor, coarse_solve};
