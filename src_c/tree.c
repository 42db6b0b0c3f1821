/* tree.c - the pass of messages along a tree of pairwise costs, from its leaves to its root: K of each edge is read once.
 * The O(n) work of an edge stands beside its row_pass, so that a pass is one call, however many edges there are.
 * Mirrors LogKernel.through of mapuot/backends/kernel.py, with the pass of mapuot/marginals/tree.py around it; whatever
 * that would make anew, or entry by entry, is left to it.  Device side: src_cuda/tree_pass.cu.
 */
#include <float.h>
#include <math.h>

#include "mapuot.h"

static double larger(double x, double y) { return x > y ? x : y; }

/* v = e^(y - q - top), y what the parent sends; its largest is 1, and what lies below flush is 0 */
static double parent_factors(const mapuot_edge *edge, const mapuot_messages *x, double *y_size)
{
    const double *weight = x->log_weight + edge->parent, *sent = x->sent + edge->message;
    double *v = edge->state->cols.scale, top = -INFINITY;
    for (int64_t j = 0; j < edge->state->n; j++) {
        const double y = weight[j] + sent[j];
        *y_size = larger(*y_size, fabs(y));
        v[j] = y - edge->q[j];
        top = larger(top, v[j]);
    }
    for (int64_t j = 0; j < edge->state->n; j++) {
        v[j] = exp(v[j] - top);
        if (v[j] < x->flush)
            v[j] = 0;
    }
    return top;
}

/* base of the child's u, the largest 0 */
static double child_base(const mapuot_edge *edge, const mapuot_messages *x, double *a_size)
{
    const double *weight = x->log_weight + edge->child, *near = x->near + edge->child, rest = 1 - edge->fi;
    double *base = edge->base, own = -INFINITY;
    for (int64_t i = 0; i < edge->state->m; i++) {
        const double a = weight[i] + rest * near[i];
        *a_size = larger(*a_size, fabs(a));
        base[i] = a - rest * edge->p[i];
        own = larger(own, base[i]);
    }
    for (int64_t i = 0; i < edge->state->m; i++)
        base[i] -= own;
    return own;
}

/* late = log s, log u = -fi log (s near); 0: sums of K may lack entries that were flushed */
static int child_half(const mapuot_edge *edge, const mapuot_messages *x, double top, double *size, double *largest)
{
    const mapuot_side *rows = &edge->state->rows;
    const double *near = x->near + edge->child, lowest = log(edge->least);
    double *late = x->late + edge->child, *log_u = x->log_u + edge->child;
    for (int64_t i = 0; i < edge->state->m; i++) {
        const double r = rows->marginal[i], log_s = log(r) - rows->log_scale[i];
        if (!(r > 1e-280 && r < 1e280 && log_s >= lowest))
            return 0;
        late[i] = log_s + (top - edge->p[i]);
        log_u[i] = edge->fi > 0 ? -edge->fi * (near[i] + late[i]) : 0;
        *size = larger(*size, fabs(late[i]));
        *largest = larger(*largest, rows->scale[i]);
    }
    return 1;
}

/* the message to the parent, added to what it has; 0 as above */
static int parent_half(const mapuot_edge *edge, const mapuot_messages *x, double own, double least, double *size)
{
    const double *sums = edge->state->sums;
    double *up = x->up + edge->message, *near = x->near + edge->parent;
    for (int64_t j = 0; j < edge->state->n; j++)
        if (!(sums[j] >= least && sums[j] > 0 && sums[j] < INFINITY))
            return 0;
    for (int64_t j = 0; j < edge->state->n; j++) {
        up[j] = log(sums[j]) + (own - edge->q[j]);
        near[j] += up[j];
        *size = larger(*size, fabs(up[j]));
    }
    return 1;
}

static int through(mapuot_pool *pool, mapuot_edge *edge, const mapuot_messages *x)
{
    mapuot_state *state = edge->state;
    double y_size = 0, a_size = 0, late_size = 0, up_size = 0, largest = 0;
    const double top = parent_factors(edge, x, &y_size), own = child_base(edge, x, &a_size);
    state->progress.narrow = x->narrow && edge->narrow;
    state->progress.passes ^= 1; /* the rows read last come first */
    if (!isfinite(top) || !isfinite(own) || mapuot_row_pass(pool, state) != MAPUOT_RUNNING ||
        !child_half(edge, x, top, &late_size, &largest) ||
        !parent_half(edge, x, own - edge->fi * top, edge->least * largest, &up_size))
        return 0;
    const double sizes = edge->sizes + larger(y_size, a_size + up_size) + late_size;
    edge->error = DBL_EPSILON / 2 * (4 * sizes + (double)(state->m + state->n + 16)) + (x->narrow ? x->noise : 0);
    return 1;
}

int64_t mapuot_tree_pass(int64_t first, int64_t count, mapuot_edge *edges, const mapuot_messages *x)
{
    while (first < count && edges[first].state && through(edges[first].pool, edges + first, x))
        first++;
    return first;
}
