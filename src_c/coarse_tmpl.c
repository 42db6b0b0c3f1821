/* coarse_tmpl.c - translation invariance cluster by cluster: what is slow in the iteration moves groups of points as wholes.
 *
 * A labelled pass is a row_pass that takes the rows cluster by cluster and so finds P_IJ, the plan's mass between clusters
 * of rows and of columns, with one addition a column and row cluster.  The derivative of G between clusters is
 *     J = fi1 fi2 D^-1 S,   S = sum_I P_I^T P_I / r_I,   r, s the sums of P_IJ,   D = diag(s)
 * and x_next = G + E ((I - J)^-1 - I) R (F - sum gamma dF), R means over a cluster, E a cluster's value to its columns,
 * solves for clusters as wholes.  I - J is D^-1 times a symmetric positive definite matrix, kept as its Cholesky factor.
 * Formulas: docs/mathematics.md.  When it is done: backends/coarse.py.  Oracle: backends/reference.py.
 */
#include <string.h>

#include "common/words.h"
#include "kernels.h"
#include "vec.h"

#define LEAST_PIVOT 1e-10 /* of the diagonal: what exchanges nothing is moved by at most 1e10 of its residual */

/* the rows of every cluster of this thread: their pass, and the plan's mass between it and those of the columns */
void ISA_OP(coarse_rows)(const mapuot_state *state, pass_fn pass, int thread, int threads, double *sums)
{
    const mapuot_coarse *coarse = &state->coarse;
    const int64_t len = padded(state->n) + SCALARS, count = coarse->row_clusters;
    double *own = coarse->sums + thread * len;
    for (int64_t I = count * thread / threads; I < count * (thread + 1) / threads; I++) {
        double *block = coarse->blocks + I * coarse->clusters;
        memset(own, 0, (size_t)len * sizeof(double));
        for (int64_t k = coarse->first[I]; k < coarse->first[I + 1]; k++)
            pass(state, coarse->order[k], coarse->order[k] + 1, own);
        memset(block, 0, (size_t)coarse->clusters * sizeof(double));
        for (int64_t j = 0; j < state->n; j++)
            block[coarse->label[j]] += own[j] * state->cols.scale[j];
        for (int64_t j = 0; j < len; j++)
            sums[j] += own[j];
    }
}

/* y += a x */
static inline void axpy(int64_t len, double a, const double *x, double *y)
{
    for (int64_t i = 0; i < len; i++)
        y[i] += a * x[i];
}

/* S by its upper half, and s behind it */
void ISA_OP(coarse_sums)(mapuot_state *state)
{
    const mapuot_coarse *coarse = &state->coarse;
    const int64_t k = coarse->clusters;
    double *S = coarse->matrix, *s = S + k * k;
    memset(S, 0, (size_t)(k * k + k) * sizeof(double));
    for (int64_t I = 0; I < coarse->row_clusters; I++) {
        const double *row = coarse->blocks + I * k;
        double r = 0.0;
        for (int64_t J = 0; J < k; J++)
            r += row[J];
        axpy(k, 1.0, row, s);
        for (int64_t J = 0; J < k; J++)
            if (row[J] > 0.0)
                axpy(k - J, row[J] / r, row + J, S + J * k + J);
    }
}

/* U^T U = D (I - J) + fi s s^T / |s|, U by its upper half: what is common to all clusters is left to the translation */
static void factor(int64_t k, double fi, double total, double *A, const double *s)
{
    for (int64_t i = 0; i < k; i++)
        for (int64_t j = i; j < k; j++)
            A[i * k + j] = (i == j ? s[i] : 0.0) + fi * (s[i] * s[j] / total - A[i * k + j]);
    for (int64_t q = 0; q < k; q++) {
        double *row = A + q * k;
        row[q] = sqrt(fmax(row[q], fmax(LEAST_PIVOT * s[q], TINY)));
        for (int64_t j = q + 1; j < k; j++)
            row[j] /= row[q];
        for (int64_t i = q + 1; i < k; i++)
            if (row[i] != 0.0)
                axpy(k - i, -row[i], row + i, A + i * k + i);
    }
}

/* the factor, and the columns' parts in their clusters; from the next pass on steps are corrected */
void ISA_OP(coarse_factor)(mapuot_state *state, double fi)
{
    const mapuot_coarse *coarse = &state->coarse;
    const int64_t k = coarse->clusters;
    double *s = coarse->matrix + k * k, *mass = coarse->mean, total = 0.0;
    for (int64_t J = 0; J < k; J++)
        total += s[J];
    factor(k, fi, total, coarse->matrix, s);
    memset(mass, 0, (size_t)k * sizeof(double));
    for (int64_t j = 0; j < state->n; j++)
        mass[coarse->label[j]] += state->cols.marginal[j];
    for (int64_t j = 0; j < state->n; j++) {
        const double of = mass[coarse->label[j]];
        coarse->share[j] = of > 0.0 ? state->cols.marginal[j] / of : 0.0;
    }
    state->progress.coarse = total > 0.0 && isfinite(total) && isfinite(coarse->matrix[k * k - 1]);
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

/* G += E (y - mean), D (I - J) y = D mean, mean = R (F - sum gamma dF) */
void ISA_OP(coarse_correct)(mapuot_state *state, const sweep_args *args)
{
    const mapuot_coarse *coarse = &state->coarse;
    const int64_t n = state->n, np = padded(n), k = coarse->clusters;
    const double *dF = state->history + 2 * np, *s = coarse->matrix + k * k;
    double *F = state->work + np, *image = F + np, *mean = coarse->mean, *y = mean + k;
    memcpy(F, state->history, (size_t)n * sizeof(double));
    for (int64_t i = 0; i < args->depth; i++)
        axpy(n, -args->gamma[i], dF + i * np, F);
    memset(mean, 0, (size_t)k * sizeof(double));
    for (int64_t j = 0; j < n; j++)
        mean[coarse->label[j]] += coarse->share[j] * F[j];
    for (int64_t i = 0; i < k; i++)
        y[i] = s[i] * mean[i];
    solve(k, coarse->matrix, y);
    for (int64_t i = 0; i < k; i++)
        y[i] -= mean[i];
    for (int64_t j = 0; j < n; j++)
        image[j] += y[coarse->label[j]];
}
