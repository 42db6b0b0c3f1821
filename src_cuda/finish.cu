// The O(n) half of a pass in a launch of its own, after the row half of portable.cu: cooperative, a block a multiprocessor
// at most.  The blocks post to each other as in iterate.cu.
// Options: STORE, KL_COLS, MEMORY; POINTS, POINTS_NARROW and SPARSE as in portable.cu.
#define PERSISTENT 0
#define STAGE 0
typedef double column_total;
#include "finish_pass.cuh"
#include "stopped.cuh"

extern __shared__ __align__(128) unsigned char memory[]; // a Finish

// The row half of launches before this one; from: null, or where the sums of several devices are
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
