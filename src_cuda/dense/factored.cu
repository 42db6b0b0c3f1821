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
    const double *requests;                             // three for each entry: problem, slot, step length or shift;
    double problem, slot, number;                       // null where a launch has one entry: its three numbers
    uint32_t *arrived;                                  // blocks of each entry's problem that have ended
    const double *costs, *log_c_rows, *log_c_cols;      // M / requested reg; logarithms of the reference
    const double *a, *b, *k_rows, *k_cols;              // k_*: k at the requested reg
    double *log_u, *log_v, *r, *s, *q;                  // of the last accepted step
    double *next_u, *next_v, *next_r, *next_s, *next_q; // of the last trial step
    double *size, *next_size;                           // diagonal of the shift (0: unused), of both
    double *weighed, *back;                             // P_ij sqrt(fi_i / r_i), and sqrt(r_i / fi_i)
    double *soft;                                       // sum_i (1 - fi_i) P_ij
    double *row_gain, *col_gain;                        // each point's change of the dual value
    double *added;                                      // for each problem: added * size_i * size_j is added to S_ij
    double *own;                                        // diagonal of S
    double *y;                                          // the Newton steps of log v
    double *numbers;                                    // four for each entry, on the host: the results of a launch
    double *gram;                                       // weighed^T weighed of each slot
    double *shifted, *wanted, *rest;                    // equations and right sides of each entry; residuals
    const double *factor;                               // L of each entry's equations, L L^T
};

// A launch works on entries: a problem, the slot of its equations, and a number
struct Entry {
    int64_t problem, slot;
    double number;
};

FN Entry entry_of(const Factored &F, int64_t entry) {
    if (!F.requests) return {(int64_t)F.problem, (int64_t)F.slot, F.number};
    const double *x = F.requests + 3 * entry;
    return {(int64_t)x[0], (int64_t)x[1], x[2]};
}

// Whether this is the last block of an entry to come here: the others have written their numbers. All threads call it.
FN bool is_last(const Factored &F, int64_t problem, int64_t blocks) {
    __shared__ uint32_t before;
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        before = atomicAdd(F.arrived + problem, 1u);
        if (before == blocks - 1) F.arrived[problem] = 0;
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
    }
    __syncthreads();
    return before == blocks - 1;
}

// q - s, what columns miss; 0 where a column has no equation
FN double missing(const Factored &F, int64_t at) { return F.size[at] > 0 ? F.q[at] - F.s[at] : 0; }

// log v of a step of this length
FN double moved(const Factored &F, int64_t at, double length) {
    return length > 0 ? F.log_v[at] + length * F.y[at] : F.log_v[at];
}

// See LogarithmicMargin.lift in backends/margins.py; mass: 1 where the mass of the plan changes with the side
FN double gain_of(double marginal, double k, double change, double mass) {
    return marginal * (k > 0 ? -expm1(-k * change) * (1 / k + mass) : change);
}

FN double change_of(double next, double before) { return isfinite(before) ? next - before : 0; }

// Form the plan of one row by one block, scaled so that its sum meets the row's prox.
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

FN double finite_size(double x) { return isfinite(x) ? fabs(x) : 0; }

// By one block: the share of the mass that the columns miss, the gain, its rounding, and that of exponents
FN void judge_plan(const Factored &F, const Entry &E, double *numbers) {
    double gain = 0, size = 0, before = 0, mass = 0, missed = 0, diagonal = 0, far_u = 0, far_v = 0;
    for (int64_t i = threadIdx.x; i < F.m; i += blockDim.x) {
        const int64_t at = E.problem * F.m + i;
        gain += F.row_gain[at];
        size += fabs(F.row_gain[at]);
        before += F.r[at];
        mass += F.next_r[at];
        far_u = fmax(far_u, finite_size(F.next_u[at]));
    }
    for (int64_t j = threadIdx.x; j < F.n; j += blockDim.x) {
        const int64_t at = E.problem * F.n + j;
        gain += F.col_gain[at];
        size += fabs(F.col_gain[at]);
        missed += fabs(F.next_q[at] - F.next_s[at]);
        diagonal += F.next_size[at];
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
    numbers[0] = missed / mass;
    numbers[1] = gain;
    numbers[2] = F.rounding * (size + before) + exponents * before;
    numbers[3] = exponents;
    F.added[E.problem] = F.all_hard && diagonal > 0 ? F.constant / diagonal : 0; // 0: no column takes part
}

// A block for COLUMNS columns: the sums of the plan, and the marginal that log v asks for; the last one judges the plan
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
    if (group == 0 && j < F.n) {
        for (int other = 1; other < GROUPS; other++) {
            s += sums[0][other][lane];
            soft += sums[1][other][lane];
        }
        const double k = F.level * F.k_cols[at], log_v = F.log_v[at], next = moved(F, at, E.number);
        const double q = F.b[at] > 0 ? F.b[at] * exp(-k * next) : 0;
        F.next_v[at] = next;
        F.next_s[at] = s;
        F.next_q[at] = q;
        F.next_size[at] = fmax(s, q) + k * q;
        F.soft[at] = soft;
        F.col_gain[at] = gain_of(F.q[at], k, change_of(next, log_v), 0);
    }
    if (is_last(F, E.problem, blocks)) judge_plan(F, E, F.numbers + 4 * (blockIdx.x / blocks));
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
        F.size[at] = F.next_size[at];
    }
}

// A block for each tile of each slot's products: their upper triangle from the lower one
extern "C" __global__ void __launch_bounds__(TILE *TILE) mirror_products(const __grid_constant__ Factored F) {
    __shared__ double T[TILE][TILE + 1];
    const int64_t tiles = (F.n + TILE - 1) / TILE, tile = blockIdx.x % (tiles * tiles);
    const int64_t low = tile / tiles * TILE, left = tile % tiles * TILE;
    const int lane = threadIdx.x % TILE, warp = threadIdx.x / TILE;
    double *gram = F.gram + blockIdx.x / (tiles * tiles) * F.n * F.n;
    if (left > low) return;
    if (low + warp < F.n && left + lane < F.n) T[warp][lane] = gram[(low + warp) * F.n + left + lane];
    __syncthreads();
    if (low + lane < F.n && left + warp < low + lane) gram[(left + warp) * F.n + low + lane] = T[lane][warp];
}

// Return entry i of row j of a problem's equations with their shift. `first`: the problem's first column.
FN double entry_of_equations(const Factored &F, const double *gram, double added, double shift, int64_t first,
                             int64_t j, int64_t i) {
    const double size = F.size[first + j];
    const double own = i == j ? F.own[first + j] + shift * (size > 0 ? size : 1) : -gram[i];
    return own + added * size * F.size[first + i];
}

// A block for each row of each entry: the equations with their shift. The diagonal is a sum of positive terms.
extern "C" __global__ void __launch_bounds__(THREADS) shift_rows(const __grid_constant__ Factored F) {
    const int64_t entry = blockIdx.x / F.n, j = blockIdx.x % F.n;
    const Entry E = entry_of(F, entry);
    const int64_t at = E.problem * F.n + j;
    const double *gram = F.gram + (E.slot * F.n + j) * F.n, added = F.added[E.problem];
    double *shifted = F.shifted + (entry * F.n + j) * F.n;
    double others = 0;
    for (int64_t i = threadIdx.x; i < F.n; i += THREADS) others += i == j ? 0 : gram[i];
    others = block_sum(others);
    if (threadIdx.x == 0) F.own[at] = F.size[at] > 0 ? others + F.level * F.k_cols[at] * F.q[at] + F.soft[at] : 1;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < F.n; i += THREADS)
        shifted[i] = entry_of_equations(F, gram, added, E.number, at - j, j, i);
    if (threadIdx.x == 0) F.wanted[entry * F.n + j] = missing(F, at);
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

// By one block: whether the equations are solved, the largest step, and its slope
FN void judge_step(const Factored &F, const Entry &E, const double *remains, double *numbers) {
    double rest = 0, right = 0, far = 0, slope = 0;
    for (int64_t j = threadIdx.x; j < F.n; j += THREADS) {
        const int64_t at = E.problem * F.n + j;
        const double wanted = missing(F, at);
        rest += remains[j] * remains[j];
        right += wanted * wanted;
        far = fmax(far, fabs(F.y[at]));
        slope += F.y[at] * wanted;
    }
    rest = block_sum(rest);
    right = block_sum(right);
    far = block_max(far);
    slope = block_sum(slope);
    if (threadIdx.x > 0) return;
    numbers[0] = rest <= F.residual * F.residual * right; // false if a number is NaN
    numbers[1] = far;
    numbers[2] = slope;
}

// A block for each row of each entry: the residual of the solutions, which are in `wanted`; the last one judges them
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
        F.rest[entry * F.n + j] = missing(F, at) - product;
        F.y[at] = y[j];
    }
    if (is_last(F, E.problem, F.n)) judge_step(F, E, F.rest + entry * F.n, F.numbers + 4 * entry);
}
