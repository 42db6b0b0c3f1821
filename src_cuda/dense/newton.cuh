// Mirrors mapuot_newton_begin and mapuot_newton_next of src_c/newton.c for rough steps, and HostWorkspace.leap of
// mapuot/backends/cpu/workspace.py: Newton's step from the last pass over stored pairs, the start of the next pass.
//
//     S y = D y - P^T ((fi / r) o P y) = q - s,     D = s + k q,     q = b e^(-k log v),  b where a column is hard
//
// by conjugate gradients on the whole grid, with three meetings a product: after v d, after the rows' products, after
// the sums. The size of the residual is summed anew each time, and its next size follows from these sums.
#define ROUGH 0.1      // largest relative residual of a step's equations
#define REACH 3.0      // nats that a step moves a column, at most: far off its direction is meaningless
#define SINGULAR 1e-14 // times D: a direction of less curvature is singular

// A column of the equations; the marginal is 0 if it has no mass
struct Equation {
    double diagonal, left, d, v;
};

// The sums of N numbers over all threads of the grid, in a fixed order: every block gets the same bits. Calls use the
// two buffers alternately.
template <int N>
FN void grid_sums(const State &S, Finish &F, double (&x)[N], int &turn, uint32_t *counter, uint32_t &ended) {
    double(*part)[8] = (double(*)[8])F.value, *to = S.leap.sums + turn * BLOCKS * 8, all[8] = {};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    turn = 1 - turn;
    UNROLLED (int q = 0; q < N; q++) all[q] = x[q];
    const double own = warp_sums<8>(all, lane);
    if (lane % 4 == 0) part[warp][lane / 4] = own;
    __syncthreads();
    if (warp < N) {
        const double sum = warp_sum(lane < THREADS / 32 ? part[lane][warp] : 0);
        if (lane == 0) to[blockIdx.x * 8 + warp] = sum;
    }
    grid_barrier(counter, ended);
    if (warp < N) {
        double sum = 0;
        for (int q = lane; q < (int)gridDim.x; q += 32) sum += __ldcg(to + q * 8 + warp);
        sum = warp_sum(sum);
        if (lane == 0) part[0][warp] = sum;
    }
    __syncthreads();
    UNROLLED (int q = 0; q < N; q++) x[q] = part[0][q];
    __syncthreads();
}

// The translations of the parts of K that no pair connects; twin of part_sums and part_moves
FN void translate_parts(const State &S, const Finish &F, uint32_t *counter, uint32_t &ended) {
    const int warps = THREADS / 32, own = blockIdx.x * warps + threadIdx.x / 32, all = gridDim.x * warps;
    if (S.apart.count == 0) return;
    grid_barrier(counter, ended); // the columns' sums are complete
    for (int k = own; k < (int)S.apart.pieces; k += all) sum_piece(S, k, sums_of(S, (int)F.p.turn), F.p.shift);
    grid_barrier(counter, ended);
    for (int k = own; k < (int)S.apart.count; k += all) move_part(S, k);
}

// Call use(j) for the columns of this thread
template <typename Use> FN void own_columns(const State &S, Use use) {
    for (int j = blockIdx.x * THREADS + threadIdx.x; j < (int)S.n; j += gridDim.x * THREADS) use(j);
}

// Set up the equations from the last pass, and the factors (fi / r) u kappa u of its rows. Returns the size of the
// residual, INF if there are no equations.
FN double open_equations(const State &S, Finish &F, int &turn, uint32_t *counter, uint32_t &ended) {
    double asked[3] = {}, size[1] = {};
    const auto hard = [&](int j) { return isinf(S.cols.rho[j]) && S.cols.weight[j] > 0; };
    own_columns(S, [&](int j) {
        const double s = S.s[j];
        asked[0] += s;
        asked[1] += s > 0 ? S.cols.weight[j] : 0;
        asked[2] += !(s > 0) && hard(j);
    });
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < (int)S.m; i += gridDim.x * THREADS) {
        const double r = S.r[i], u = S.u_scale[i];
        S.leap.factor[i] = r > 0 ? F.p.kappa * S.point[i].y * u * (u / r) : 0;
    }
    grid_sums(S, F, asked, turn, counter, ended);
    if (!(asked[0] > 0) || asked[2] > 0) return INF;
    const double even = S.leap.even ? asked[0] / asked[1] : 1;
    own_columns(S, [&](int j) {
        const double s = S.s[j], log_v = S.x[j], absorbed = S.cols.absorbed[j], rate = hard(j) ? 0 : S.cols.rate[j];
        const double q = S.cols.weight[j] * (hard(j) ? even : exp(-rate * log_v));
        const bool in = s > 0 && q > 0;
        const double diagonal = in ? s + rate * q : 1, left = in ? q - s : 0, d = left / diagonal;
        const double v = isfinite(absorbed) ? exp(log_v + F.p.shift - absorbed) : 0;
        S.leap.equation[j] = {diagonal, left, d, v};
        S.leap.y[j] = 0;
        S.leap.vd[j] = v * d;
        size[0] += left * d;
    });
    grid_sums(S, F, size, turn, counter, ended);
    return size[0];
}

// S d to Sd, and the sums of d S d, d D d and, for the residual l in the norm of 1 / D, of l l, l S d and S d S d
FN void newton_product(const State &S, Finish &F, const Half &rows, const Half &cols, Scratch &scratch,
                       double (&sums)[5], int &turn, uint32_t *counter, uint32_t &ended) {
    half_sums(
        rows, Met(S.leap.vd, (int)S.n), scratch.part, [&](int64_t i) { return S.leap.factor[i]; },
        [&](int64_t i, double factor, double sum) {
            if (i >= 0) S.leap.mid[i] = factor * sum;
        });
    grid_barrier(counter, ended);
    UNROLLED (int q = 0; q < 5; q++) sums[q] = 0;
    half_sums(
        cols, Met(S.leap.mid, (int)S.m), scratch.part, [&](int64_t j) { return S.leap.equation[j]; },
        [&](int64_t j, const Equation &e, double sum) {
            if (j < 0) return;
            const double Dd = e.diagonal * e.d, Sd = S.s[j] > 0 ? Dd - e.v * sum : 0, share = 1 / e.diagonal;
            S.leap.Sd[j] = Sd;
            sums[0] += e.d * Sd;
            sums[1] += e.d * Dd;
            sums[2] += e.left * (e.left * share); // e.left^2 is 0 for masses of 1e-160
            sums[3] += e.left * (Sd * share);
            sums[4] += Sd * (Sd * share);
        });
    grid_sums(S, F, sums, turn, counter, ended);
}

// Start the next pass from log v + y; the guard may drop that step. Each block writes B and sum v of its columns.
FN void move_on(const State &S, Finish &F) {
    double(*part)[2] = (double(*)[2])F.value, value[2] = {};
    const double reach = F.p.reach;
    const int lane = threadIdx.x % 32;
    own_columns(S, [&](int j) {
        const double absorbed = S.cols.absorbed[j], y = S.leap.y[j];
        if (!isfinite(absorbed)) return;
        const double x = S.x[j] + F.p.shift + (y == y ? fmin(fmax(y, -reach), reach) : 0);
        const double v = exp(fmin(x - absorbed, BOUND));
        S.x_next[j] = x;
        S.v_scale[j] = v;
        S.narrow_v[j] = (float)v;
        value[0] += S.cols.weight[j] * exp(-S.limits.rate_cols * x);
        value[1] += v;
    });
    const double own = warp_sums<2>(value, lane);
    if (lane % 16 == 0) part[threadIdx.x / 32][lane / 16] = own;
    __syncthreads();
    if (threadIdx.x < 2) {
        double sum = 0;
        for (int q = 0; q < THREADS / 32; q++) sum += part[q][threadIdx.x];
        scalars_of(S, (int)F.p.turn)[blockIdx.x * SCALARS + NEXT_B + threadIdx.x] = sum;
    }
    if (threadIdx.x == 0) {
        F.p.have = F.p.depth = F.p.head = 0;
        F.p.extrapolated = F.p.since_absorb = 1;
    }
    __syncthreads();
}

// Adjust Newton's steps to the last pass: after the guard dropped one, the next goes half as far, after a plain pass.
FN void look_ahead(Finish &F) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const bool dropped = F.p.step == MAPUOT_GO_BACK;
        const double reach = F.p.reach == 0 ? REACH : F.p.reach;
        F.p.reach = dropped ? 0.5 * reach : reach > 0 ? fmin(REACH, 1.5 * reach) : reach;
        F.p.leaps = !dropped && reach > 0;
    }
    __syncthreads();
}

// Make Newton's step from the last pass, if a step is due.
FN void leap(const State &S, Finish &F, const Half &rows, const Half &cols, Scratch &scratch, uint32_t *counter,
             uint32_t &ended) {
    if (!F.p.leaps) return;
    const double error = __ldcg(&S.trace[((int)F.p.passes - 1) % TRACE_PASSES].error), rough = fmin(ROUGH, sqrt(error));
    int turn = 0, products = 0;
    double sums[5];
    const double first = open_equations(S, F, turn, counter, ended);
    const bool found = first > 0 && first < INF;
    for (bool open = found; open;) {
        newton_product(S, F, rows, cols, scratch, sums, turn, counter, ended);
        if (!(sums[0] > SINGULAR * sums[1])) break;
        const double step = sums[2] / sums[0], next = fmax(sums[2] - step * (2 * sums[3] - step * sums[4]), 0.0);
        own_columns(S, [&](int j) {
            Equation e = S.leap.equation[j];
            S.leap.y[j] += step * e.d;
            e.left -= step * __ldcg(S.leap.Sd + j);
            e.d = e.left / e.diagonal + next / sums[2] * e.d;
            S.leap.equation[j] = e;
            S.leap.vd[j] = e.v * e.d;
        });
        products++;
        open = next > rough * rough * first && products < S.leap.most;
        if (open) grid_barrier(counter, ended);
    }
    if (found) move_on(S, F);
    if (threadIdx.x == 0) {
        F.p.products += products;
        F.p.leaps = 0;
        if (!found) F.p.reach = -1; // -1: the launch tries no further step
    }
    grid_barrier(counter, ended);
}
