/* tree.c - the pass of messages along a tree of pairwise costs, from the leaves to the root, which reads K of each edge
 * once. The O(n) work of an edge (marginals_tmpl.c) is done with its row_pass, so that a pass is one call for all
 * edges. It mirrors LogKernel.through of mapuot/backends/kernel.py within the pass of mapuot/marginals/tree.py. Edges
 * that need a new K or products entry by entry are left to that code. Device side: src_cuda/many/tree_pass.cu.
 */
#include <float.h>
#include <math.h>

#include "kernels.h"
#include "marginals.h"

static int through(mapuot_pool *pool, mapuot_edge *edge, const mapuot_messages *x) {
    const marginal_kernels *kernels = mapuot_active_kernels()->marginals;
    mapuot_state *state = edge->state;
    const mapuot_side *rows = &state->rows;
    const int64_t m = state->m, n = state->n, child = edge->child, parent = edge->parent, message = edge->message;
    const double rest = 1 - edge->fi;
    double y = 0, a = 0, late = 0, up = 0, largest = 0; /* largest sizes, and the largest u */
    const double top =
        kernels->factors(n, x->log_weight + parent, x->sent + message, edge->q, x->flush, state->cols.scale, &y);
    const double own = kernels->base(m, x->log_weight + child, x->near + child, edge->p, rest, edge->base, &a);
    state->progress.narrow = x->narrow && edge->narrow;
    state->progress.passes ^= 1; /* start with the rows read last */
    if (!isfinite(top) || !isfinite(own) || mapuot_row_pass(pool, state) != MAPUOT_RUNNING ||
        !kernels->late(m, rows, x->near + child, edge->p, edge->fi, top, edge->least, x->late + child, x->log_u + child,
                       &late, &largest) ||
        !kernels->up(n, state->sums, edge->q, own - edge->fi * top, edge->least * largest, x->up + message,
                     x->near + parent, &up))
        return 0;
    const double sizes = edge->sizes + fmax(y, a + up) + late;
    edge->error = DBL_EPSILON / 2 * (4 * sizes + (double)(m + n + 16)) + (x->narrow ? x->noise : 0);
    return 1;
}

int64_t mapuot_tree_pass(int64_t first, int64_t count, mapuot_edge *edges, const mapuot_messages *x) {
    while (first < count && edges[first].state && through(edges[first].pool, edges + first, x)) first++;
    return first;
}
