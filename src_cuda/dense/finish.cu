// The O(n) half of a pass in a launch of its own, after the row half of portable.cu: a cooperative launch with at most
// one block a multiprocessor. The blocks post to each other as in iterate.cu.
// Options: STORE, KL_COLS, ANDERSON_DEPTH; POINTS, POINTS_NARROW and SPARSE as in portable.cu.
#define PERSISTENT 0
#define STAGE 0
typedef double column_total;
#include "finish_pass.cuh"
#include "stopped.cuh"

extern __shared__ __align__(128) unsigned char memory[]; // a Finish

// The results of the row half, from earlier launches; from: null, or the sums over several devices
struct RowsDone {
    const double *from;

    FN void arrive() const {}
    FN void wait() const {}
    FN double sum(const State &S, int turn, int j) const { return (from ? from : sums_of(S, turn))[j]; }
    FN const double *scalars(const State &S) const { return from ? from + S.ld : nullptr; }
};

extern "C" __global__ void __launch_bounds__(512)
    finish(const __grid_constant__ State S, int parity, const double *from) {
    Finish &F = *(Finish *)memory;
    Progress *const to = S.progress + 1 - parity;
    if (stopped(S, parity)) {
        if (blockIdx.x == 0) copy_record(to, S.progress + parity);
        return;
    }
    const bool corrected = open_finish(S, F, S.progress + parity);
    __syncthreads();
    double *const next = scalars_of(S, (int)F.p.turn + 1);
    RowsDone done = {from};
    finish_half(S, F, done);
    if (blockIdx.x > 0) return;
    if (threadIdx.x < NEXT_B) next[threadIdx.x] = 0;
    close_finish(S, F, to, corrected);
}

extern "C" __global__ void ring_offset(int *out) { out[0] = (int)sizeof(Finish); }
