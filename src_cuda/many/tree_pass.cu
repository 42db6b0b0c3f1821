// Mirrors src_c/tree.c: the pass of messages along a tree, on vectors that stay on the device from the first edge to
// the last.  A pass is open_pass, then fused_pass and close_edge for each edge in turn, all in one stream, and nothing
// waits for the host; the way back from the root is open_back, fused_pass and close_back for each edge.
//
// The host judges an edge, by the rule of LogKernel (mapuot/backends/kernel.py), from the largest of some
// numbers, kept as ranks: integers in the order of the numbers, a NaN above them all. An edge with unsound sums
// makes the edges after it meaningless; the host takes none of them.
#include "common.cuh"

struct Edge {
    int64_t m, n, ld, streams;
    int64_t child, parent, message; // first points of both ends; first number of the message between them
    int64_t above;                  // this edge, the last below that one, completes its base; -1: none
    double fi;
    const double *p, *q, *s; // scalings in K, and the sums of its last pass
    double *v, *base;        // input of fused_pass; base is not scaled: its largest is in `own`
};

struct Messages {
    const double *log_weight, *sent;
    double *near, *late, *up, *log_u;
    double *back; // 0 at the root
    double *sums; // a row of ld for each stream of the edge that was read last
    double flush;
};

// Largest values, as ranks, of ...
struct Largest {
    int64_t y, top, a, own;         // |y|, y - q, |a| and base
    int64_t low_s, late, u;         // -log s, |late| and u
    int64_t low_sum, high_sum, out; // -sums, sums and |up|
};
#define WORDS ((int)(sizeof(Largest) / 8))

FN void begin(Largest *found) {
    if (threadIdx.x < WORDS) ((int64_t *)found)[threadIdx.x] = rank_of(-INF);
}

FN void raise(int64_t *rank, double x) {
    x = warp_max(isnan(x) ? INF : x);
    if (threadIdx.x % 32 == 0) atomicMax(rank, rank_of(x));
}

FN double larger(double x, double y) { return x > y || isnan(x) ? x : y; }

// v = e^(y - q - top), y from `y_of`, with largest 1, and 0 below flush. One block
template <typename F> __device__ void factors(const Edge &edge, double flush, Largest *found, F y_of) {
    double size = 0, top = -INF;
    for (int64_t j = threadIdx.x; j < edge.n; j += blockDim.x) {
        const double y = y_of(j);
        size = larger(fabs(y), size);
        top = larger(edge.v[j] = y - edge.q[j], top);
    }
    raise(&found->y, size);
    raise(&found->top, top);
    top = block_max(top);
    for (int64_t j = threadIdx.x; j < edge.n; j += blockDim.x) {
        const double v = exp(edge.v[j] - top);
        edge.v[j] = v < flush ? 0 : v;
    }
}

// base of point i of an edge's child; updates the largest sizes
FN void open_row(const Edge &edge, double log_weight, double near, int64_t i, double &a_size, double &own) {
    const double rest = 1 - edge.fi, a = log_weight + rest * near;
    edge.base[i] = a - rest * edge.p[i];
    a_size = larger(fabs(a), a_size);
    own = larger(edge.base[i], own);
}

// v of all edges from `first` on, a block each, and base of the edges that no later edge completes
extern "C" __global__ void __launch_bounds__(1024)
    open_pass(const __grid_constant__ Messages x, const Edge *edges, Largest *largest, int first) {
    const Edge edge = edges[first + blockIdx.x];
    Largest *found = largest + first + blockIdx.x;
    begin(found);
    __shared__ int waits;
    if (threadIdx.x == 0) waits = 0;
    __syncthreads();
    for (int e = first + threadIdx.x; e < first + (int)blockIdx.x; e += blockDim.x)
        if (edges[e].above == first + blockIdx.x) waits = 1;
    const double *weight = x.log_weight + edge.parent, *sent = x.sent + edge.message;
    factors(edge, x.flush, found, [=](int64_t j) { return weight[j] + sent[j]; });
    if (waits) return;
    double a_size = 0, own = -INF;
    for (int64_t i = threadIdx.x; i < edge.m; i += blockDim.x)
        open_row(edge, x.log_weight[edge.child + i], x.near[edge.child + i], i, a_size, own);
    raise(&found->a, a_size);
    raise(&found->own, own);
}

// late = log s, log u = -fi log (s near), of the child's point i
FN void close_row(const Messages &x, const Edge &edge, Largest *found, int64_t i) {
    double low = -INF, size = 0, u = 0;
    if (i < edge.m) {
        const double log_s = log(edge.s[i]), late = log_s + (number_of(found->top) - edge.p[i]);
        x.late[edge.child + i] = late;
        x.log_u[edge.child + i] = edge.fi > 0 ? -edge.fi * (x.near[edge.child + i] + late) : 0;
        low = -log_s;
        size = fabs(late);
        u = exp(edge.base[i] - number_of(found->own) - edge.fi * log_s);
    }
    raise(&found->low_s, low);
    raise(&found->late, size);
    raise(&found->u, u);
}

// The message to the parent's point j, added to the parent's sum, and base of the edge above; -1: none
FN void close_column(const Messages &x, const Edge &edge, const Edge *edges, Largest *largest, Largest *found,
                     int64_t above, int64_t j) {
    double low = -INF, high = -INF, size = 0, a_size = 0, own = -INF;
    if (j < edge.n) {
        double sum = 0;
#pragma unroll 8
        for (int64_t q = 0; q < edge.streams; q++) sum += x.sums[q * edge.ld + j];
        const double up = log(sum) + (number_of(found->own) - edge.fi * number_of(found->top) - edge.q[j]);
        const double near = x.near[edge.parent + j] += up;
        x.up[edge.message + j] = up;
        low = -sum;
        high = sum;
        size = fabs(up);
        if (above >= 0) open_row(edges[above], x.log_weight[edge.parent + j], near, j, a_size, own);
    }
    raise(&found->low_sum, low);
    raise(&found->high_sum, high);
    raise(&found->out, size);
    if (above >= 0) {
        raise(&largest[above].a, a_size);
        raise(&largest[above].own, own);
    }
}

// After fused_pass over edge e: the first blocks have its rows, the others its columns. Nothing may be written for
// edges from `end` on, which the pass does not reach: their vectors may be freed.
extern "C" __global__ void __launch_bounds__(256)
    close_edge(const __grid_constant__ Messages x, const Edge *edges, Largest *largest, int e, int end) {
    const Edge &edge = edges[e];
    const int64_t rows = (edge.m + 255) / 256, block = blockIdx.x;
    if (block < rows) close_row(x, edge, largest + e, block * 256 + threadIdx.x);
    else
        close_column(x, edge, edges, largest, largest + e, edge.above < end ? edge.above : -1,
                     (block - rows) * 256 + threadIdx.x);
}

// v of edge e on the way back, from all that the parent has except the child's own message. One block
extern "C" __global__ void __launch_bounds__(1024)
    open_back(const __grid_constant__ Messages x, const Edge *edges, Largest *largest, int e) {
    const Edge edge = edges[e];
    begin(largest + e);
    __syncthreads();
    const double *up = x.up + edge.message;
    const int64_t at = edge.parent;
    factors(edge, x.flush, largest + e, [=](int64_t j) {
        return x.log_weight[at + j] + x.log_u[at + j] + (x.near[at + j] + x.back[at + j]) - up[j];
    });
}

// The message back to the child
extern "C" __global__ void __launch_bounds__(256)
    close_back(const __grid_constant__ Messages x, const Edge *edges, Largest *largest, int e) {
    const Edge &edge = edges[e];
    const int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x;
    double low = -INF, size = 0;
    if (i < edge.m) {
        const double log_s = log(edge.s[i]), back = log_s + (number_of(largest[e].top) - edge.p[i]);
        x.back[edge.child + i] = back;
        low = -log_s;
        size = fabs(back);
    }
    raise(&largest[e].low_s, low);
    raise(&largest[e].late, size);
}
