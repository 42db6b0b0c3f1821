// Mirrors src_c/finish.c (plan_error, stalled): what a gap says of the plan, and when no pass helps any more; for
// finish_scalars.cuh and batch_finish.cuh.
#ifndef PROGRESS_CUH
#define PROGRESS_CUH

#define STALL_PASSES 250

// |P - P*|_1 / mass from d = gap / (reg mass)
__device__ __forceinline__ double plan_error(double d)
{
    return d > 0 ? d * (1.0 / 3) + sqrt(2 * d + d * d * (1.0 / 9)) : d == d ? 0 : d;
}

// Counts the passes since the error or the dual value got better.
template <typename Standing, typename Found> __device__ __forceinline__ bool stalled(Standing &p, const Found &out)
{
    p.since_best += 1;
    if (out.error < p.best_error * (1 - 1e-3) || out.dual > p.progress_dual + 1e-9 * fabs(out.dual)) {
        p.best_error = fmin(p.best_error, out.error);
        p.progress_dual = fmax(p.progress_dual, out.dual);
        p.since_best = 0;
    }
    return p.since_best >= STALL_PASSES;
}
#endif
