// Return whether this pass is skipped: the solve has ended or, with POINTS 1, passes in the other precision are due.
#include "state.cuh"

#pragma option POINTS 0

FN bool stopped(const State &S, int parity) {
#if POINTS
    if (POINTS_NARROW != (S.progress[parity].narrow > 0)) return true;
#endif
    return S.progress[parity].status != MAPUOT_RUNNING;
}
