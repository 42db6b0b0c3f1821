// Anderson's weights of a narrow pass. A separate warp inverts the matrix of the old differences
// during the column half, so that few operations wait for the newest difference.
// Included by batch_narrow.cuh.

// Inner products of the newest difference P without its mean: dot_i = <P, D_i>, index OLD: with itself; rhs = <f, P>
struct Products {
    float dot[ANDERSON_DEPTH], rhs, mean;
};

FN Products products(const Shared &all) {
    Products out;
    const float P = total(all, OF_P);
    out.mean = P * all.rates.share;
    UNROLLED (int i = 0; i < OLD; i++) out.dot[i] = total(all, OF_DOT + i);
    out.dot[OLD] = fmaxf(total(all, OF_PP) - P * out.mean, 1e-36f);
    out.rhs = total(all, OF_PF) - out.mean * total(all, OF_F);
    return out;
}

// The differences of the next pass: drop the oldest. One warp.
FN void shift_differences(const Shared &all, const Step &at, Step &next) {
    const Products now = products(all);
    if (threadIdx.x % 32 > 0) return;
    UNROLLED (int i = 0; i < OLD; i++) {
        next.rhs[i] = i + 1 < OLD ? at.rhs[i + 1 < OLD ? i + 1 : 0] + now.dot[i + 1] : now.rhs;
        UNROLLED (int k = 0; k <= i; k++)
            next.gram[AT(i, k)] = i + 1 < OLD ? at.gram[i + 1 < OLD ? AT(i + 1, k + 1) : 0] : now.dot[k + 1];
    }
}

// (gram + NARROW_RIDGE diag)^-1 by sweeps: A is minus the inverse in the rows and columns up to p. One warp does
// this during the next pass.
FN void invert(Step &at) {
    float A[AT(OLD, 0)], least[OLD];
    UNROLLED (int i = 0; i < OLD; i++) {
        UNROLLED (int k = 0; k <= i; k++) A[AT(i, k)] = at.gram[AT(i, k)];
        least[i] = NARROW_RIDGE * A[AT(i, i)];
        A[AT(i, i)] += least[i];
    }
    UNROLLED (int p = 0; p < OLD; p++) {
        const float inverse = reciprocal(fmaxf(A[AT(p, p)], least[p]));
        float row[OLD];
        UNROLLED (int i = 0; i < OLD; i++) row[i] = i < p ? A[AT(p, i)] : A[AT(i, p)];
        UNROLLED (int i = 0; i < OLD; i++)
            UNROLLED (int k = 0; k <= i; k++)
                A[AT(i, k)] = i == p && k == p ? -inverse
                              : i == p         ? row[k] * inverse
                              : k == p         ? row[i] * inverse
                                               : fmaf(-row[i] * inverse, row[k], A[AT(i, k)]);
    }
    if (threadIdx.x % 32 > 0) return;
    UNROLLED (int i = 0; i < OLD; i++) {
        float sum = 0;
        UNROLLED (int k = 0; k < OLD; k++) sum = fmaf(-A[k < i ? AT(i, k) : AT(k, i)], at.rhs[k], sum);
        at.solved[i] = sum;
    }
    UNROLLED (int i = 0; i < AT(OLD, 0); i++) at.inverse[i] = -A[i];
}

// Anderson's weights, the newest last: solve (gram + NARROW_RIDGE diag) gamma = rhs by blocks, given the inverse of the
// old block. With h = inverse dot and rhs_old = rhs + dot, inverse rhs_old is solved + h.
FN void anderson(const Step &at, const Products &now, float (&gamma)[ANDERSON_DEPTH]) {
    float h[OLD], s = now.dot[OLD] * (1 + NARROW_RIDGE), last = now.rhs, finite = 0;
    UNROLLED (int i = 0; i < OLD; i++) {
        h[i] = 0;
        UNROLLED (int k = 0; k < OLD; k++) h[i] = fmaf(at.inverse[k < i ? AT(i, k) : AT(k, i)], now.dot[k], h[i]);
        gamma[i] = at.solved[i] + h[i];
        s = fmaf(-now.dot[i], h[i], s);
        last = fmaf(-now.dot[i], gamma[i], last);
    }
    gamma[OLD] = last * reciprocal(fmaxf(s, NARROW_RIDGE * now.dot[OLD]));
    UNROLLED (int i = 0; i < OLD; i++) {
        gamma[i] = fmaf(-h[i], gamma[OLD], gamma[i]);
        finite += gamma[i];
    }
    finite += gamma[OLD];
    UNROLLED (int i = 0; i < ANDERSON_DEPTH; i++) gamma[i] = isfinite(finite) ? gamma[i] : 0;
}
