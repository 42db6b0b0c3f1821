// Anderson's weights by one warp: the twin of anderson_weights in src_c/finish.c, for single solves and batches.
//
// gamma = argmin |F - sum gamma_i dF_i| weighted by b: normal equations with normalised columns and a small ridge. The
// translation of a pass adds a constant c to its residuals. c is unknown when they are summed, so that
// <F, .> = <f, .> + c <1, .>.
#include "state.cuh"

// Sums over the columns, weighted by b: of 1, f, P (the change of f), P P, P f, and of the products of P and f with the
// held differences
struct Moments {
    double ones, F, P, PP, PF;
    const double *dot, *rhs;
};

// Lane WIDE a + b of the warp holds the entries (HIGH q + a, WIDE c + b) of the equations; column ANDERSON_DEPTH is the
// right-hand side. With 5 differences 30 lanes hold one entry each.
#define WIDE (ANDERSON_DEPTH == 5 ? 6 : 8)
#define HIGH (32 / WIDE)
#define ROWS_A_LANE ((ANDERSON_DEPTH + HIGH - 1) / HIGH)
#define COLUMNS_A_LANE (ANDERSON_DEPTH / WIDE + 1)

// gamma: (D gram D + RIDGE) D^-1 gamma = D rhs, D = diag(gram)^-1/2, for up to 23 differences by Gauss and Jordan.
// Lane i brings rhs_i.
FN void solve_gamma(const double *gram, int depth, double rhs, double *gamma) {
    const int lane = threadIdx.x % 32, b = lane % WIDE, a = lane < WIDE * HIGH ? lane / WIDE : HIGH - 1;
    const double scale = lane < depth ? rsqrt(fmax(gram[lane * (ANDERSON_DEPTH + 1)], TINY)) : 0, right = rhs * scale;
    double A[ROWS_A_LANE][COLUMNS_A_LANE];
    UNROLLED (int q = 0; q < ROWS_A_LANE; q++)
        UNROLLED (int c = 0; c < COLUMNS_A_LANE; c++) {
            const int i = HIGH * q + a, k = WIDE * c + b;
            const double left = __shfl_sync(FULL, scale, i), other = __shfl_sync(FULL, scale, k);
            const double last = __shfl_sync(FULL, right, i);
            A[q][c] = k == ANDERSON_DEPTH      ? last
                      : i < depth && k < depth ? gram[i * ANDERSON_DEPTH + k] * left * other
                                               : 0;
            A[q][c] += i == k ? RIDGE : 0;
        }
    UNROLLED (int q = 0; q < ROWS_A_LANE; q++) // unrolled, since registers cannot be indexed at run time
        ROLLED (int s = 0; s < HIGH && HIGH * q + s < depth; s++) {
            const int own = HIGH * q / WIDE, column = HIGH * q % WIDE + s; // the place of the diagonal
            const double pivot = inverse(__shfl_sync(FULL, A[q][own], WIDE * s + column));
            double upper[COLUMNS_A_LANE], factor[ROWS_A_LANE];
            UNROLLED (int c = 0; c < COLUMNS_A_LANE; c++) upper[c] = __shfl_sync(FULL, A[q][c], WIDE * s + b) * pivot;
            UNROLLED (int p = 0; p < ROWS_A_LANE; p++) factor[p] = __shfl_sync(FULL, A[p][own], WIDE * a + column);
            UNROLLED (int p = 0; p < ROWS_A_LANE; p++)
                UNROLLED (int c = 0; c < COLUMNS_A_LANE; c++)
                    A[p][c] = p == q && a == s ? upper[c] : fma(-factor[p], upper[c], A[p][c]);
        }
    UNROLLED (int q = 0; q < ROWS_A_LANE; q++) {
        const double own = __shfl_sync(FULL, scale, HIGH * q + a);
        if (b == ANDERSON_DEPTH % WIDE) gamma[HIGH * q + a] = A[q][ANDERSON_DEPTH / WIDE] * own;
    }
}

// Put the newest difference, in `slot`, into the Gram matrix of p; lane i returns the right-hand side of row i.
template <typename Held> FN double normal_equations(Held &p, const Moments &t, double c, int slot, int depth) {
    const int lane = threadIdx.x % 32;
    double rhs = 0, dot = 0;
    if (lane == slot) {
        p.ones[slot] = t.P + c * t.ones;
        dot = t.PP + c * (2 * t.P + c * t.ones);
        rhs = t.PF + c * (t.P + t.F + c * t.ones);
    } else if (lane < depth) {
        dot = t.dot[lane] + c * p.ones[lane];
        rhs = t.rhs[lane] + c * p.ones[lane];
    }
    if (lane < depth) p.gram[lane * ANDERSON_DEPTH + slot] = p.gram[slot * ANDERSON_DEPTH + lane] = dot;
    __syncwarp();
    return rhs;
}
