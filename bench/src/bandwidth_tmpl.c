/* bandwidth_tmpl.c - what the benchmark compares the pass with; compiled once per instruction set and dtype of K.
 *
 * two_dots, two_sums: the pass as two separate sweeps over K (POT's two products, with our arithmetic).
 * shared_rows: the pass row by row, the threads' column sums interleaved `chunk` doubles at a time in one array:
 * 8 gives each thread its own cache lines, 4 makes two threads write every line (false sharing, on purpose).
 * read, copy, scale: bandwidth, on float64 whatever K is.  Contract: bandwidth.c.
 */
#include "kernels.h"
#include "vec.h"

enum { LINE = 8 }; /* doubles */

ALWAYS_INLINE double dot_row(const real *K, const double *v, int64_t np)
{
    vd sum[4];
    UNROLL
    for (int q = 0; q < 4; q++)
        sum[q] = v_set(0.0);
    for (int64_t j = 0; j < np; j += 16)
        UNROLL
    for (int q = 0; q < 16; q += VL)
        sum[q / VL % 4] = v_fma(v_load_real(K + j + q), v_load(v + j + q), sum[q / VL % 4]);
    return v_sum(v_add(v_add(sum[0], sum[1]), v_add(sum[2], sum[3])));
}

static double prox(const mapuot_state *state, int64_t i, double s)
{
    return exp(state->rows.base[i] - (1.0 - state->rows.fi[i]) * state->progress.shift - state->rows.fi[i] * log(s));
}

/* u = prox(K v) */
void KERNEL(two_dots)(const mapuot_state *state, int64_t i0, int64_t i1)
{
    const real *K = (const real *)state->kernel;
    for (int64_t i = i0; i < i1; i++)
        state->rows.scale[i] = prox(state, i, dot_row(K + i * state->ld, state->cols.scale, padded(state->n)));
}

/* sums += K^T u, four rows at a time */
void KERNEL(two_sums)(const mapuot_state *state, int64_t i0, int64_t i1, double *sums)
{
    const int64_t np = padded(state->n), ld = state->ld;
    const double *u = state->rows.scale;
    for (int64_t i = i0; i < i1; i += 4) {
        const real *K = (const real *)state->kernel + i * ld;
        const int rows = i1 - i < 4 ? (int)(i1 - i) : 4;
        for (int64_t j = 0; j < np; j += VL) {
            vd sum = v_load(sums + j);
            if (rows == 4) {
                UNROLL
                for (int r = 0; r < 4; r++)
                    sum = v_fma(v_load_real(K + r * ld + j), v_set(u[i + r]), sum);
            } else {
                for (int r = 0; r < rows; r++)
                    sum = v_fma(v_load_real(K + r * ld + j), v_set(u[i + r]), sum);
            }
            v_store(sums + j, sum);
        }
    }
}

/* sums of thread t: column j stands at (j / chunk) chunk threads + t chunk + j % chunk */
ALWAYS_INLINE void shared_rows(const mapuot_state *state, int64_t i0, int64_t i1, double *sums, int thread, int threads,
                               const int chunk)
{
    const int64_t np = padded(state->n);
    for (int64_t i = i0; i < i1; i++) {
        const real *K = (const real *)state->kernel + i * state->ld;
        const double u = prox(state, i, dot_row(K, state->cols.scale, np));
        double *mine = sums + thread * chunk;
        for (int64_t j = 0; j < np; j += chunk, mine += threads * chunk)
            UNROLL
        for (int q = 0; q < chunk; q++)
            mine[q] += u * (double)K[j + q];
    }
}

void KERNEL(shared_rows)(const mapuot_state *state, int64_t i0, int64_t i1, double *sums, int thread, int threads,
                         int chunk)
{
    if (chunk == 4)
        shared_rows(state, i0, i1, sums, thread, threads, 4);
    else
        shared_rows(state, i0, i1, sums, thread, threads, 8);
}

#ifdef MAPUOT_DTYPE_F64

/* the sum of len doubles, read as `streams` equal parts side by side, 8 lines a step */
ALWAYS_INLINE double read_streams(const double *x, int64_t len, int64_t ahead, const int streams)
{
    enum { SUMS = 64 / VL < 8 ? 64 / VL : 8 };
    const int lines = 8 / streams;
    const int64_t part = len / streams;
    vd sum[SUMS];
    UNROLL
    for (int q = 0; q < SUMS; q++)
        sum[q] = v_set(0.0);
    for (int64_t k = 0; k + lines * LINE <= part; k += lines * LINE) {
        UNROLL
        for (int s = 0; s < 8; s++) {
            const double *p = x + s / lines * part + k + s % lines * LINE;
            if (ahead)
                __builtin_prefetch(p + ahead * LINE, 0, 3);
            UNROLL
            for (int q = 0; q < LINE; q += VL)
                sum[(s * LINE + q) / VL % SUMS] = v_add(sum[(s * LINE + q) / VL % SUMS], v_load(p + q));
        }
    }
    double total = 0.0;
    UNROLL
    for (int q = 0; q < SUMS; q++)
        total += v_sum(sum[q]);
    return total;
}

double ISA_OP(read)(const double *x, int64_t len, int streams, int64_t ahead)
{
    if (streams == 1)
        return read_streams(x, len, ahead, 1);
    return streams == 4 ? read_streams(x, len, ahead, 4) : read_streams(x, len, ahead, 8);
}

void ISA_OP(copy)(const double *x, double *y, int64_t len)
{
    for (int64_t k = 0; k + LINE <= len; k += LINE)
        UNROLL
    for (int q = 0; q < LINE; q += VL)
        v_store(y + k + q, v_load(x + k + q));
}

void ISA_OP(copy_nontemporal)(const double *x, double *y, int64_t len)
{
    for (int64_t k = 0; k + LINE <= len; k += LINE)
        UNROLL
    for (int q = 0; q < LINE; q += VL)
        v_stream(y + k + q, v_load(x + k + q));
}

/* x = -x: a read and a write of the same line, as in the in-place pass */
void ISA_OP(scale)(double *x, int64_t len)
{
    const vd minus = v_set(-1.0);
    for (int64_t k = 0; k + LINE <= len; k += LINE)
        UNROLL
    for (int q = 0; q < LINE; q += VL)
        v_store(x + k + q, v_mul(v_load(x + k + q), minus));
}
#endif
