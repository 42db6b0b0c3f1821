// Do the kernels of a pass pass by?  Where the solve has ended or, POINTS 1, where it is the turn of the passes in the
// other precision.
#include "state.cuh"

#pragma option POINTS 0

FN bool stopped(const State &S, int parity) {
#if POINTS
    if (POINTS_NARROW != (S.progress[parity].narrow > 0)) return true;
#endif
    return S.progress[parity].status != MAPUOT_RUNNING;
}
