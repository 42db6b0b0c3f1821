// Newton's steps with a factor, for the problems of a batch: plans that meet their rows, the equations of a step, and
// the numbers that judge both. Twin of mapuot/backends/array_plans.py; the formulas are in mapuot/backends/factored.py.
#include "common.cuh"

#define THREADS 256
#define COLUMNS 32 // of a block of sum_columns, and COLUMNS * GROUPS threads
#define GROUPS 16
#define TILE 32 // rows of a factor that solve_triangles reads at once, a warp each

struct Factored {
    int64_t m, n, all_hard;
    double level, rounding, exponents, constant,
        residual;                                       // level: reg / requested reg; the others: backends/factored.py
    const double *requests;                             // three for each entry: problem, slot, step length or shift
    const double *costs, *log_c_rows, *log_c_cols;      // M / requested reg; logarithms of the reference
    const double *a, *b, *k_rows, *k_cols;              // k_*: k at the requested reg
    double *log_u, *log_v, *r, *s, *q;                  // of the last accepted step
    double *next_u, *next_v, *next_r, *next_s, *next_q; // of the last trial step
    double *weighed, *back;                             // P_ij sqrt(fi_i / r_i), and sqrt(r_i / fi_i)
    double *soft;                                       // sum_i (1 - fi_i) P_ij
    double *row_gain, *col_gain;                        // each point's change of the dual value
    double *added;                                      // for each problem: added * size_i * size_j is added to S_ij
    double *own, *size, *right;                         // diagonals of S and of the shift (0: unused); q - s
    double *y;                                          // the Newton steps of log v
    double *numbers;                                    // four for each entry: the results of a launch
    const double *gram;                                 // weighed^T weighed of each slot
    double *shifted, *wanted, *rest;                    // equations and right sides of each entry; residuals
    const double *factor;                               // L of each entry's equations, L L^T
};

// A launch works on entries: a problem, the slot of its equations, and a number
struct Entry {
    int64_t problem, slot;
    double number;
};

FN Entry entry_of(const Factored &F, int64_t entry) {
    const double *x = F.requests + 3 * entry;
    return {(int64_t)x[0], (int64_t)x[1], x[2]};
}

// log v of a step of this length
FN double moved(const Factored &F, int64_t at, double length) {
    return length > 0 ? F.log_v[at] + length * F.y[at] : F.log_v[at];
}

// See LogarithmicMargin.lift in backends/margins.py; mass: 1 where the mass of the plan changes with the side
FN double gain_of(double marginal, double k, double change, double mass) {
    return marginal * (k > 0 ? -expm1(-k * change) * (1 / k + mass) : change);
}

FN double change_of(double next, double before) { return isfinite(before) ? next - before : 0; }

// A block for each row: its plan, scaled to the row's prox
extern "C" __global__ void __launch_bounds__(THREADS) meet_rows(const __grid_constant__ Factored F) {
    const Entry E = entry_of(F, blockIdx.x / F.m);
    const int64_t row = E.problem * F.m + blockIdx.x % F.m, first = E.problem * F.n;
    const double *costs = F.costs + row * F.n;
    double *weighed = F.weighed + row * F.n;
    const double log_u = F.log_u[row], offset = F.log_c_rows[row] + log_u, a = F.a[row];
    double top = -INF;
    for (int64_t j = threadIdx.x; j < F.n; j += THREADS) {
        const double log_v = F.log_c_cols[first + j] + moved(F, first + j, E.number);
        weighed[j] = offset + (log_v - costs[j] / F.level);
        top = fmax(top, weighed[j]);
    }
    top = block_max(top);
    if (!isfinite(top)) top = 0;
    double sum = 0;
    for (int64_t j = threadIdx.x; j < F.n; j += THREADS) {
        weighed[j] = exp(weighed[j] - top);
        sum += weighed[j];
    }
    sum = block_sum(sum);
    const double k = F.level * F.k_rows[row], fi = 1 / (1 + k);
    const double change = a > 0 && sum > 0 ? fi * (log(a) - k * log_u - log(sum) - top) : 0;
    const double scale = exp(top + change), r = sum * scale, back = sqrt(r / fi);
    const double weight = r > 0 ? scale / back : 0;
    for (int64_t j = threadIdx.x; j < F.n; j += THREADS) weighed[j] *= weight;
    if (threadIdx.x > 0) return;
    F.next_u[row] = log_u + change;
    F.next_r[row] = r;
    F.back[row] = back;
    F.row_gain[row] = gain_of(F.r[row], k, change_of(log_u + change, log_u), 1);
}

// A block for COLUMNS columns: the sums of the plan, and the marginal that log v asks for
extern "C" __global__ void __launch_bounds__(COLUMNS *GROUPS) sum_columns(const __grid_constant__ Factored F) {
    __shared__ double sums[2][GROUPS][COLUMNS];
    const int64_t blocks = (F.n + COLUMNS - 1) / COLUMNS;
    const Entry E = entry_of(F, blockIdx.x / blocks);
    const int lane = threadIdx.x % COLUMNS, group = threadIdx.x / COLUMNS;
    const int64_t j = blockIdx.x % blocks * COLUMNS + lane, at = E.problem * F.n + j;
    double s = 0, soft = 0;
    if (j < F.n)
        for (int64_t i = group; i < F.m; i += GROUPS) {
            const int64_t row = E.problem * F.m + i;
            const double k = F.level * F.k_rows[row], P = F.weighed[row * F.n + j] * F.back[row];
            s += P;
            soft += k / (1 + k) * P;
        }
    sums[0][group][lane] = s;
    sums[1][group][lane] = soft;
    __syncthreads();
    if (group > 0 || j >= F.n) return;
    for (int other = 1; other < GROUPS; other++) {
        s += sums[0][other][lane];
        soft += sums[1][other][lane];
    }
    const double k = F.level * F.k_cols[at], log_v = F.log_v[at], next = moved(F, at, E.number);
    F.next_v[at] = next;
    F.next_s[at] = s;
    F.next_q[at] = F.b[at] > 0 ? F.b[at] * exp(-k * next) : 0;
    F.soft[at] = soft;
    F.col_gain[at] = gain_of(F.q[at], k, change_of(next, log_v), 0);
}

// A block for COLUMNS columns: log v by their prox for log u
extern "C" __global__ void __launch_bounds__(COLUMNS *GROUPS) meet_columns(const __grid_constant__ Factored F) {
    __shared__ double of_group[GROUPS][COLUMNS];
    const int64_t blocks = (F.n + COLUMNS - 1) / COLUMNS;
    const Entry E = entry_of(F, blockIdx.x / blocks);
    const int lane = threadIdx.x % COLUMNS, group = threadIdx.x / COLUMNS;
    const int64_t j = blockIdx.x % blocks * COLUMNS + lane, at = E.problem * F.n + j;
    auto exponent = [&](int64_t i) {
        const int64_t row = E.problem * F.m + i;
        return F.log_c_rows[row] + F.log_u[row] + (F.log_c_cols[at] - F.costs[row * F.n + j] / F.level);
    };
    double top = -INF;
    if (j < F.n)
        for (int64_t i = group; i < F.m; i += GROUPS) top = fmax(top, exponent(i));
    of_group[group][lane] = top;
    __syncthreads();
    for (int other = 0; other < GROUPS; other++) top = fmax(top, of_group[other][lane]);
    if (!isfinite(top)) top = 0;
    __syncthreads();
    double sum = 0;
    if (j < F.n)
        for (int64_t i = group; i < F.m; i += GROUPS) sum += exp(exponent(i) - top);
    of_group[group][lane] = sum;
    __syncthreads();
    if (group > 0 || j >= F.n) return;
    for (int other = 1; other < GROUPS; other++) sum += of_group[other][lane];
    if (F.b[at] > 0 && sum > 0) F.log_v[at] = (log(F.b[at]) - log(sum) - top) / (1 + F.level * F.k_cols[at]);
}

FN double finite_size(double x) { return isfinite(x) ? fabs(x) : 0; }

// A block for each entry: the share of the mass that the columns miss, the gain, its rounding, and that of exponents
extern "C" __global__ void __launch_bounds__(THREADS) judge_plans(const __grid_constant__ Factored F) {
    const Entry E = entry_of(F, blockIdx.x);
    double gain = 0, size = 0, before = 0, mass = 0, missed = 0, diagonal = 0, far_u = 0, far_v = 0;
    for (int64_t i = threadIdx.x; i < F.m; i += THREADS) {
        const int64_t at = E.problem * F.m + i;
        gain += F.row_gain[at];
        size += fabs(F.row_gain[at]);
        before += F.r[at];
        mass += F.next_r[at];
        far_u = fmax(far_u, finite_size(F.next_u[at]));
    }
    for (int64_t j = threadIdx.x; j < F.n; j += THREADS) {
        const int64_t at = E.problem * F.n + j;
        gain += F.col_gain[at];
        size += fabs(F.col_gain[at]);
        missed += fabs(F.next_q[at] - F.next_s[at]);
        diagonal += fmax(F.next_s[at], F.next_q[at]) + F.level * F.k_cols[at] * F.next_q[at];
        far_v = fmax(far_v, finite_size(F.next_v[at]));
    }
    gain = block_sum(gain);
    size = block_sum(size);
    before = block_sum(before);
    mass = block_sum(mass);
    missed = block_sum(missed);
    diagonal = block_sum(diagonal);
    const double exponents = F.exponents * (block_max(far_u) + block_max(far_v));
    if (threadIdx.x > 0) return;
    double *numbers = F.numbers + 4 * blockIdx.x;
    numbers[0] = missed / mass;
    numbers[1] = gain;
    numbers[2] = F.rounding * (size + before) + exponents * before;
    numbers[3] = exponents;
    F.added[E.problem] = F.all_hard ? F.constant / diagonal : 0;
}

// A block for each entry: take over its last trial
extern "C" __global__ void __launch_bounds__(THREADS) accept_trials(const __grid_constant__ Factored F) {
    const Entry E = entry_of(F, blockIdx.x);
    for (int64_t i = threadIdx.x; i < F.m; i += THREADS) {
        const int64_t at = E.problem * F.m + i;
        F.log_u[at] = F.next_u[at];
        F.r[at] = F.next_r[at];
    }
    for (int64_t j = threadIdx.x; j < F.n; j += THREADS) {
        const int64_t at = E.problem * F.n + j;
        F.log_v[at] = F.next_v[at];
        F.s[at] = F.next_s[at];
        F.q[at] = F.next_q[at];
    }
}

// A block for each row of the equations: its diagonal, a sum of positive terms, and its right side
extern "C" __global__ void __launch_bounds__(THREADS) form_rows(const __grid_constant__ Factored F) {
    const Entry E = entry_of(F, blockIdx.x / F.n);
    const int64_t j = blockIdx.x % F.n, at = E.problem * F.n + j;
    const double *gram = F.gram + (E.slot * F.n + j) * F.n;
    double others = 0;
    for (int64_t i = threadIdx.x; i < F.n; i += THREADS) others += i == j ? 0 : gram[i];
    others = block_sum(others);
    if (threadIdx.x > 0) return;
    const double more = F.level * F.k_cols[at] * F.q[at], size = fmax(F.s[at], F.q[at]) + more;
    const bool used = size > 0;
    F.own[at] = used ? others + more + F.soft[at] : 1;
    F.size[at] = size;
    F.right[at] = used ? F.q[at] - F.s[at] : 0;
}

// Return entry i of row j of a problem's equations with their shift. `first`: the problem's first column.
FN double entry_of_equations(const Factored &F, const double *gram, double added, double shift, int64_t first,
                             int64_t j, int64_t i) {
    const double size = F.size[first + j];
    const double own = i == j ? F.own[first + j] + shift * (size > 0 ? size : 1) : -gram[i];
    return own + added * size * F.size[first + i];
}

// A block for each row of each entry: the equations with their shift
extern "C" __global__ void __launch_bounds__(THREADS) shift_rows(const __grid_constant__ Factored F) {
    const int64_t entry = blockIdx.x / F.n, j = blockIdx.x % F.n;
    const Entry E = entry_of(F, entry);
    const int64_t at = E.problem * F.n + j;
    const double *gram = F.gram + (E.slot * F.n + j) * F.n, added = F.added[E.problem];
    double *shifted = F.shifted + (entry * F.n + j) * F.n;
    for (int64_t i = threadIdx.x; i < F.n; i += THREADS)
        shifted[i] = entry_of_equations(F, gram, added, E.number, at - j, j, i);
    if (threadIdx.x == 0) F.wanted[entry * F.n + j] = F.right[at];
}

// Solve T y = x for a tile of L (transposed: T^T y = x) and write y over x; each lane has an entry.
template <bool TRANSPOSED> FN double solved_tile(const double (*T)[TILE + 1], double x, int lane) {
    for (int step = 0; step < TILE; step++) {
        const int i = TRANSPOSED ? TILE - 1 - step : step;
        const double found = __shfl_sync(FULL, x, i) / T[i][i];
        const bool later = TRANSPOSED ? lane < i : lane > i;
        if (lane == i) x = found;
        if (later) x -= (TRANSPOSED ? T[i][lane] : T[lane][i]) * found;
    }
    return x;
}

// A block for each entry: solve L L^T y = right side by both triangles, y in place of the right side in `wanted`. The
// batched solver of cuSOLVER takes as long for this as for the factor.
extern "C" __global__ void __launch_bounds__(TILE *TILE) solve_triangles(const __grid_constant__ Factored F) {
    __shared__ double T[TILE][TILE + 1], of_tile[TILE];
    const double *L = F.factor + blockIdx.x * F.n * F.n;
    double *x = F.wanted + blockIdx.x * F.n;
    const int lane = threadIdx.x % TILE, warp = threadIdx.x / TILE;
    const int64_t tiles = (F.n + TILE - 1) / TILE;
    for (int64_t step = 0; step < 2 * tiles; step++) {
        const bool back = step >= tiles; // first down the rows of L, then up the rows of L^T
        const int64_t first = (back ? 2 * tiles - 1 - step : step) * TILE, row = first + warp, column = first + lane;
        if (row < F.n && column < F.n && column <= row) T[warp][lane] = L[row * F.n + column];
        else T[warp][lane] = warp == lane;
        if (!back) {
            double known = 0;
            if (row < F.n)
                for (int64_t j = lane; j < first; j += TILE) known += L[row * F.n + j] * x[j];
            known = warp_sum(known);
            if (lane == 0) of_tile[warp] = row < F.n ? x[row] - known : 0;
        } else if (warp == 0) {
            of_tile[lane] = column < F.n ? x[column] : 0;
        }
        __syncthreads();
        if (warp == 0) {
            const double found =
                back ? solved_tile<true>(T, of_tile[lane], lane) : solved_tile<false>(T, of_tile[lane], lane);
            of_tile[lane] = found;
            if (column < F.n) x[column] = found;
        }
        __syncthreads();
        if (back)
            for (int64_t j = threadIdx.x; j < first; j += TILE * TILE) {
                double known = 0;
                for (int i = 0; i < TILE && first + i < F.n; i++) known += L[(first + i) * F.n + j] * of_tile[i];
                x[j] -= known;
            }
        __syncthreads();
    }
}

// A block for each row of each entry: the residual of the solutions, which are in `wanted`
extern "C" __global__ void __launch_bounds__(THREADS) find_residuals(const __grid_constant__ Factored F) {
    const int64_t entry = blockIdx.x / F.n, j = blockIdx.x % F.n;
    const Entry E = entry_of(F, entry);
    const int64_t at = E.problem * F.n + j;
    const double *gram = F.gram + (E.slot * F.n + j) * F.n, added = F.added[E.problem];
    const double *y = F.wanted + entry * F.n;
    double product = 0;
    for (int64_t i = threadIdx.x; i < F.n; i += THREADS)
        product += entry_of_equations(F, gram, added, E.number, at - j, j, i) * y[i];
    product = block_sum(product);
    if (threadIdx.x == 0) {
        F.rest[entry * F.n + j] = F.right[at] - product;
        F.y[at] = y[j];
    }
}

// A block for each entry: whether the equations are solved, the largest step, and its slope
extern "C" __global__ void __launch_bounds__(THREADS) judge_steps(const __grid_constant__ Factored F) {
    const Entry E = entry_of(F, blockIdx.x);
    double rest = 0, right = 0, far = 0, slope = 0;
    for (int64_t j = threadIdx.x; j < F.n; j += THREADS) {
        const int64_t at = E.problem * F.n + j;
        rest += F.rest[blockIdx.x * F.n + j] * F.rest[blockIdx.x * F.n + j];
        right += F.right[at] * F.right[at];
        far = fmax(far, fabs(F.y[at]));
        slope += F.y[at] * F.right[at];
    }
    rest = block_sum(rest);
    right = block_sum(right);
    far = block_max(far);
    slope = block_sum(slope);
    if (threadIdx.x > 0) return;
    double *numbers = F.numbers + 4 * blockIdx.x;
    numbers[0] = rest <= F.residual * F.residual * right; // false if a number is NaN
    numbers[1] = far;
    numbers[2] = slope;
}
