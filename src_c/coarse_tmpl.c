/* coarse_tmpl.c - translation invariance cluster by cluster: what is slow in the iteration moves groups of points as wholes.
 *
 * A labelled pass is a row_pass that takes the rows cluster by cluster and so finds B_Ij, the plan's mass between cluster I of
 * rows and column j.  With every cluster taken for one row the derivative of G is, C = fi1 fi2, r and s the sums of B,
 *     J = C D^-1 B^T R^-1 B,   R = diag(r), D = diag(s),
 * and the step gains ((I - J)^-1 - I) (F - sum gamma dF), which with W = B D^-1/2 is
 *     C D^-1/2 W^T (R - C W W^T)^-1 W D^1/2 (F - sum gamma dF):
 * a matrix of clusters, symmetric and positive definite, kept as its Cholesky factor.  B is kept relative to its sum, W in
 * float32: steps need not be exact, the guard is.
 * Formulas: docs/mathematics.md.  When it is done: backends/coarse.py.  Oracle: backends/reference.py.
 */
#include <string.h>

#include "common/words.h"
#include "kernels.h"
#include "vec.h"

#define LEAST_PIVOT 1e-10 /* of the diagonal: what exchanges nothing is moved by at most 1e10 of its residual */
#define LEAST_SHARE 1e-20 /* of a column in a cluster's mass: its products would be slow, as denormal float32 are */
enum { TOGETHER = 4 };    /* clusters at a time */

/* the rows of every cluster of this thread: their pass, r_I, and the shares of the columns in it */
void ISA_OP(coarse_rows)(const mapuot_state *state, pass_fn pass, int thread, int threads, double *sums)
{
    const mapuot_coarse *coarse = &state->coarse;
    const int64_t np = padded(state->n), len = np + SCALARS, count = coarse->own;
    double *own = coarse->sums + thread * len;
    for (int64_t I = count * thread / threads; I < count * (thread + 1) / threads; I++) {
        float *block = coarse->own_blocks + I * np;
        vd mass = v_set(0);
        memset(own, 0, (size_t)len * sizeof(double));
        for (int64_t k = coarse->first[I]; k < coarse->first[I + 1]; k++)
            pass(state, coarse->order[k], coarse->order[k] + 1, own);
        for (int64_t j = 0; j < np; j += VL)
            mass = v_fma(v_load(own + j), v_load(state->cols.scale + j), mass);
        const double r = coarse->own_mass[I] = v_sum(mass), over = r > 0.0 ? 1.0 / r : 0.0;
        for (int64_t j = 0; j < np; j += VL) {
            const vd share = v_mul(v_mul(v_load(own + j), v_load(state->cols.scale + j)), v_set(over));
            v_store_f32(block + j, v_if_less(share, v_set(LEAST_SHARE), v_set(0), share));
        }
        for (int64_t j = 0; j < len; j++)
            sums[j] += own[j];
    }
}

/* r relative to its sum, D^1/2 and W; returns whether there is any mass */
static int weigh(const mapuot_coarse *coarse, int64_t np)
{
    double total = 0.0, *r = coarse->part, *root = coarse->root;
    for (int64_t I = 0; I < coarse->clusters; I++)
        total += coarse->mass[I];
    memset(root, 0, (size_t)np * sizeof(double));
    for (int64_t I = 0; I < coarse->clusters; I++) {
        r[I] = coarse->mass[I] / total;
        for (int64_t j = 0; j < np; j += VL)
            v_store(root + j, v_fma(v_set(r[I]), v_load_f32(coarse->blocks + I * np + j), v_load(root + j)));
    }
    for (int64_t j = 0; j < np; j += VL)
        v_store(root + j, v_sqrt(v_load(root + j)));
    for (int64_t I = 0; I < coarse->clusters; I++)
        for (int64_t j = 0; j < np; j += VL) { /* what nobody sends mass to has shares of 0 */
            const vd mass = v_mul(v_set(r[I]), v_load_f32(coarse->blocks + I * np + j));
            v_store_f32(coarse->weights + I * np + j, v_div(mass, v_max(v_load(root + j), v_set(TINY))));
        }
    return total > 0.0 && isfinite(total);
}

/* the rows of W from the k-th on, the last one again behind it */
static void some_rows(const mapuot_coarse *coarse, int64_t np, int64_t k, const float **rows)
{
    for (int i = 0; i < TOGETHER; i++)
        rows[i] = coarse->weights + (k + i < coarse->clusters ? k + i : coarse->clusters - 1) * np;
}

/* the upper half of W W^T */
static void products(const mapuot_coarse *coarse, int64_t np)
{
    const int64_t clusters = coarse->clusters;
    const float *left[TOGETHER], *right[TOGETHER];
    for (int64_t I = 0; I < clusters; I += TOGETHER)
        for (int64_t L = I; L < clusters; L += TOGETHER) {
            vd sum[TOGETHER][TOGETHER];
            some_rows(coarse, np, I, left);
            some_rows(coarse, np, L, right);
            UNROLL
            for (int i = 0; i < TOGETHER * TOGETHER; i++)
                sum[i / TOGETHER][i % TOGETHER] = v_set(0);
            for (int64_t j = 0; j < np; j += VL) {
                vd x[TOGETHER];
                UNROLL
                for (int i = 0; i < TOGETHER; i++)
                    x[i] = v_load_f32(right[i] + j);
                UNROLL
                for (int i = 0; i < TOGETHER; i++) {
                    const vd y = v_load_f32(left[i] + j);
                    UNROLL
                    for (int k = 0; k < TOGETHER; k++)
                        sum[i][k] = v_fma(x[k], y, sum[i][k]);
                }
            }
            for (int i = 0; i < TOGETHER && I + i < clusters; i++)
                for (int k = 0; k < TOGETHER && L + k < clusters; k++)
                    coarse->matrix[(I + i) * clusters + L + k] = v_sum(sum[i][k]);
        }
}

/* y += a x */
static inline void axpy(int64_t len, double a, const double *x, double *y)
{
    for (int64_t i = 0; i < len; i++)
        y[i] += a * x[i];
}

/* U^T U = R - C W W^T + C r r^T by its upper half: what is common to all columns is left to the translation */
static void factor(int64_t k, double fi, double *A, const double *r)
{
    for (int64_t i = 0; i < k; i++)
        for (int64_t j = i; j < k; j++)
            A[i * k + j] = (i == j ? r[i] : 0.0) + fi * (r[i] * r[j] - A[i * k + j]);
    for (int64_t q = 0; q < k; q++) {
        double *row = A + q * k;
        row[q] = sqrt(fmax(row[q], fmax(LEAST_PIVOT * r[q], TINY)));
        for (int64_t j = q + 1; j < k; j++)
            row[j] /= row[q];
        for (int64_t i = q + 1; i < k; i++)
            if (row[i] != 0.0)
                axpy(k - i, -row[i], row + i, A + i * k + i);
    }
}

/* the factor, of what the labelled passes of all processes left; from the next pass on steps are corrected */
void ISA_OP(coarse_matrix)(mapuot_state *state, double fi)
{
    mapuot_coarse *coarse = &state->coarse;
    const int64_t k = coarse->clusters, np = padded(state->n);
    const int any = weigh(coarse, np);
    products(coarse, np);
    factor(k, fi, coarse->matrix, coarse->part);
    coarse->fi = fi;
    state->progress.coarse = any && isfinite(coarse->matrix[k * k - 1]);
}

/* y = A^-1 y, A = U^T U */
static void solve(int64_t k, const double *U, double *y)
{
    for (int64_t i = 0; i < k; i++) {
        y[i] /= U[i * k + i];
        axpy(k - i - 1, -y[i], U + i * k + i + 1, y + i + 1);
    }
    for (int64_t i = k - 1; i >= 0; i--) {
        vd sum = v_set(0.0);
        double rest = y[i];
        int64_t j = i + 1;
        for (; j + VL <= k; j += VL)
            sum = v_fma(v_load(U + i * k + j), v_load(y + j), sum);
        for (; j < k; j++)
            rest -= U[i * k + j] * y[j];
        y[i] = (rest - v_sum(sum)) / U[i * k + i];
    }
}

/* y = W x of clusters, less r times what is common to all columns, which is the sum of y.  In float64: what is slow in the
 * iteration is what the matrix grows by up to rho / reg, the rounding of y with it. */
static void gather(const mapuot_coarse *coarse, int64_t np, const double *x, double *y)
{
    const int64_t clusters = coarse->clusters;
    const float *rows[TOGETHER];
    double common = 0.0;
    for (int64_t I = 0; I < clusters; I += TOGETHER) {
        vd sum[TOGETHER];
        some_rows(coarse, np, I, rows);
        UNROLL
        for (int i = 0; i < TOGETHER; i++)
            sum[i] = v_set(0);
        for (int64_t j = 0; j < np; j += VL)
            UNROLL
        for (int i = 0; i < TOGETHER; i++)
            sum[i] = v_fma(v_load_f32(rows[i] + j), v_load(x + j), sum[i]);
        for (int i = 0; i < TOGETHER && I + i < clusters; i++)
            common += y[I + i] = v_sum(sum[i]);
    }
    axpy(clusters, -common, coarse->part, y);
}

/* x = W^T y */
static void spread(const mapuot_coarse *coarse, int64_t np, const double *y, double *x)
{
    const float *rows[TOGETHER];
    memset(x, 0, (size_t)np * sizeof(double));
    for (int64_t I = 0; I < coarse->clusters; I += TOGETHER) {
        vd part[TOGETHER];
        some_rows(coarse, np, I, rows);
        for (int i = 0; i < TOGETHER; i++)
            part[i] = v_set(I + i < coarse->clusters ? y[I + i] : 0.0);
        for (int64_t j = 0; j < np; j += VL) {
            vd sum = v_load(x + j);
            UNROLL
            for (int i = 0; i < TOGETHER; i++)
                sum = v_fma(part[i], v_load_f32(rows[i] + j), sum);
            v_store(x + j, sum);
        }
    }
}

/* G += C D^-1/2 W^T (R - C W W^T)^-1 W D^1/2 (F - sum gamma dF) */
void ISA_OP(coarse_correct)(mapuot_state *state, const sweep_args *args)
{
    const mapuot_coarse *coarse = &state->coarse;
    const int64_t n = state->n, np = padded(n);
    const double *dF = state->history + 2 * np, *root = coarse->root;
    double *F = state->work + np, *image = F + np, *y = coarse->step;
    memcpy(F, state->history, (size_t)np * sizeof(double));
    for (int64_t i = 0; i < args->depth; i++)
        axpy(n, -args->gamma[i], dF + i * np, F);
    for (int64_t j = 0; j < n; j++)
        F[j] *= root[j];
    gather(coarse, np, F, y);
    solve(coarse->clusters, coarse->matrix, y);
    spread(coarse, np, y, F);
    for (int64_t j = 0; j < n; j++)
        image[j] += root[j] > 0.0 ? coarse->fi * F[j] / root[j] : 0.0;
}
