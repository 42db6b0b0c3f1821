// Is a pass to be skipped? Yes if the solve has ended or, with POINTS 1, if it is the turn of passes in the
// other precision.
#include "state.cuh"

#pragma option POINTS 0

FN bool stopped(const State &S, int parity) {
#if POINTS
    if (POINTS_NARROW != (S.progress[parity].narrow > 0)) return true;
#endif
    return S.progress[parity].status != MAPUOT_RUNNING;
}
