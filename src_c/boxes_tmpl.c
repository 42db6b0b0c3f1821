/* boxes_tmpl.c - upper bounds on the plan's mass between boxes of points, and the pairs of boxes that they allow to
 * skip.
 *
 * f, g are log scalings with the masses and 1 / reg in them, costs are in units of reg. For slopes p of box I and q of
 * box J,
 *     f_i + g_j - c_ij <= f~_i + g~_j + E_IJ,   f~_i = f_i - p (x_i - mid_I),  g~_j = g_j - q (y_j - mid_J).
 * E for |x - y|^2, in each coordinate, with s = x - y = D + t, |t| <= H, D = mid_I - mid_J, H = half_I + half_J,
 * r = (p - q) / 2:
 *     p (x - mid_I) + q (y - mid_J) - s^2 <= max_s (r (s - D) - s^2) + |p + q| / 2 H,
 * with the maximum at s = r / 2 or at the end of its interval next to it. Slopes that follow the potentials keep f~ and
 * g~ flat across a box; the potentials of displaced clouds rise by tens of nats there. EUCLIDEAN and CITYBLOCK have
 * slopes 0 and the least distance of the boxes; the bound of a metric unknown here is inf, which skips nothing. Sums of e^f~ and e^g~ over the boxes then bound the mass between them.
 * mapuot/backends/boxes.py fills the record; docs/mathematics.md has the consequences for the certificate.
 */
#include <string.h>

#include "kernels.h"
#include "vec.h"

/* log of the bound for VL boxes of y from j on */
ALWAYS_INLINE vd log_bound(const mapuot_boxes *boxes, int64_t i, int64_t j) {
    const double *mid = boxes->x_mid + i * boxes->d, *half = boxes->x_half + i * boxes->d,
                 *slope = boxes->x_slope + i * boxes->d;
    const vd zero = v_set(0.0), by_2 = v_set(0.5);
    const int known = boxes->metric == MAPUOT_EUCLIDEAN || boxes->metric == MAPUOT_CITYBLOCK;
    if (!known && boxes->metric != MAPUOT_SQEUCLIDEAN) return v_set(INFINITY);
    vd sum = zero;
    for (int64_t k = 0; k < boxes->d; k++) {
        const int64_t at = k * boxes->n + j;
        const vd D = v_sub(v_set(mid[k]), v_load(boxes->y_mid + at)),
                 H = v_add(v_set(half[k]), v_load(boxes->y_half + at));
        const vd least = v_sub(D, H), most = v_add(D, H);
        if (boxes->metric == MAPUOT_SQEUCLIDEAN) {
            const vd p = v_set(slope[k]), q = v_load(boxes->y_slope + at), r = v_mul(by_2, v_sub(p, q));
            const vd s = v_min(v_max(v_mul(by_2, r), least), most), both = v_add(p, q);
            sum = v_fma(r, v_sub(s, D), v_fnma(s, s, sum));
            sum = v_fma(v_mul(by_2, v_max(both, v_sub(zero, both))), H, sum);
        } else {
            const vd away = v_max(zero, v_max(least, v_sub(zero, most)));
            sum = boxes->metric == MAPUOT_CITYBLOCK ? v_sub(sum, away) : v_fnma(away, away, sum);
        }
    }
    if (boxes->metric == MAPUOT_EUCLIDEAN) sum = v_sub(zero, v_sqrt(v_sub(zero, sum)));
    return v_add(sum, v_add(v_set(boxes->x_log_mass[i]), v_load(boxes->y_log_mass + j)));
}

/* kept[j] = 1 if first and run keep box j of y */
static void mark_runs(const box_args *args, int64_t i, double *kept) {
    memset(kept, 0, (size_t)args->boxes->n * sizeof(double));
    for (int64_t k = args->first[i]; k < args->first[i + 1]; k++)
        for (int64_t j = args->run[2 * k] / args->unit; j * args->unit < args->run[2 * k + 1]; j++) kept[j] = 1.0;
}

/* Count, and with `write` write, the runs of kept boxes. */
static void tell_runs(const box_args *args, int64_t i, const double *kept) {
    const int64_t n = args->boxes->n;
    int64_t count = 0, width = 0;
    for (int64_t j = 0; j < n; j++) {
        if (!(kept[j] > 0.0)) continue;
        const int64_t from = j;
        while (j < n && kept[j] > 0.0) j++;
        if (args->write) {
            int32_t *run = args->run + 2 * (args->first[i] + count);
            run[0] = (int32_t)(from * args->unit);
            run[1] = (int32_t)(j * args->unit);
        }
        count++;
        width += j - from;
    }
    args->count[i] = count;
    args->width[i] = width;
}

void ISA_OP(box_pairs)(const box_args *args, int64_t i0, int64_t i1, double *acc) {
    const mapuot_boxes *boxes = args->boxes;
    const int64_t n = boxes->n;
    const int given = args->first && !args->write;
    const vd zero = v_set(0.0), one = v_set(1.0), half = v_set(0.5);
    double *kept = acc + n;
    for (int64_t i = i0; i < i1; i++) {
        vd total = zero;
        const vd cut = v_set(boxes->x_cut[i]);
        if (given) mark_runs(args, i, kept);
        for (int64_t j = 0; j < n; j += VL) {
            const vd bound = log_bound(boxes, i, j);
            if (!given) v_store(kept + j, v_if_less(v_add(cut, v_load(boxes->y_cut + j)), bound, one, zero));
            const vd mass = v_if_less(half, v_load(kept + j), zero, v_exp(bound));
            total = v_add(total, mass);
            v_store(acc + j, v_add(v_load(acc + j), mass));
        }
        args->row_mass[i] = v_sum(total);
        if (!given) tell_runs(args, i, kept);
    }
}
