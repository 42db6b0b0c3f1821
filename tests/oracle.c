/* oracle.c - the independent answer: semismooth Newton on the fixed point of entropic unbalanced transport, dense, in
 * long double, or in __float128 where QUAD is defined.  Nothing of the library is used here.
 *
 * With x = log v, y(x) = prox(log K v) maximises the dual over the rows and G(x) = prox(log K^T e^y) over the columns;
 * F(x) = x - G(x) has the derivative I - Dv A Du B, where A, B are the plan divided by its marginals and Dv, Du in
 * [0, 1] are the slopes of the proxes (at a kink either one: the active set).  A step is taken if the dual value or
 * the residual is better for it, halved up to 12 times, else the plain image G(x).  The optimality gap of the answer is
 * the sum of its Fenchel-Young terms, which are squares: no difference of large numbers.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef QUAD
#include <quadmath.h>
typedef __float128 real;
#define F(name) name##q
#define UNIT 1e-34Q
#define MOST_STEPS 400
#else
#include <math.h>
typedef long double real;
#define F(name) name##l
#define UNIT 1e-19L
#define MOST_STEPS 1500
#endif

#define INF ((real)__builtin_inf())
enum { KL, TV, L2, RANGE, HALVINGS = 12, PATIENCE = 80 };
enum { PRIMAL, DUAL, GAP, STEP, VIOLATION, SCALE, PASSES, MASS, OUT };

typedef struct {
    int count, kind;
    const double *t, *rho; /* range: rho is the slack */
    real *log_t, *x, *log_s, *image, *slope, *sum;
    char *alive;
} side;

typedef struct {
    int m, n;
    real reg, c_mass;
    real *log_k, *P, *A, *B, *J, *step, *trial, *best;
    side rows, cols;
} problem;

static real positive(real x) { return x > 0 ? x : 0; }
static real larger(real x, real y) { return x > y ? x : y; }
static real smaller(real x, real y) { return x < y ? x : y; }
/* the change of a mass if its logarithm changes by x: a mass of next to nothing that grows a lot counts as well */
static real grown(real x) { return larger(F(fabs)(x), F(expm1)(x)); }
static real lower(const side *s, int i) { return (real)(s->rho[i] < 1 ? 1 - s->rho[i] : 0) * s->t[i]; }
static real upper(const side *s, int i) { return (real)(1 + s->rho[i]) * s->t[i]; }

/* w + log w = z */
static real omega(real z) {
    real w = z > 1 ? z - F(log)(z) : F(exp)(z < -1 ? z : 0.56L * z - 0.57L);
    for (int i = 0; i < 60 && w > 0; i++) {
        real next = w - (w + F(log)(w) - z) / (1 + 1 / w);
        next = next > 0 ? next : w / 2;
        if (F(fabs)(next - w) <= UNIT * w) return next;
        w = next;
    }
    return w;
}

/* z with z + k expm1(z) + c = 0: log(r / t) of an L2 point, k = rho t / reg, c = log t - log s */
static real log_ratio(real k, real c) {
    real z = F(log)(omega(F(log)(k) - c + k)) - F(log)(k);
    if (!(z > -1 && z < 1)) z = z > -1 && z < 1e4000L ? z : smaller(z, 0) > -1e9L ? z : -c - k;
    if (F(fabs)(c) < k / 2) z = -c / (1 + k);
    for (int i = 0; i < 100; i++) {
        real step = (z + k * F(expm1)(z) + c) / (1 + k * F(exp)(z));
        if (!(F(fabs)(step) < 1e4500L)) break;
        z -= step;
        if (F(fabs)(step) <= UNIT * F(fabs)(z)) break;
    }
    return z;
}

/* log u of point i that sees the kernel e^log_s; its slope d log u / d log s is -*slope */
static real prox(const side *s, int i, real log_s, real reg, real *slope) {
    const real rho = s->rho[i], t = s->t[i], k = rho / reg, balanced = s->log_t[i] - log_s;
    *slope = 0;
    switch (s->kind) {
    case KL:
        *slope = rho == INF ? 1 : rho / (rho + reg);
        return *slope * balanced;
    case TV:
        *slope = balanced > -k && balanced < k;
        return smaller(larger(balanced, -k), k);
    case L2: {
        if (!(t > 0)) {
            real w = omega(F(log)(k) + log_s);
            *slope = w / (1 + w);
            return -w;
        }
        real z = log_ratio(k * t, balanced), w = k * t * F(exp)(z);
        *slope = w / (1 + w);
        return F(fabs)(z) < 1 ? balanced + z : -k * t * F(expm1)(z);
    }
    default: {
        real low = balanced + F(log)(lower(s, i) / t), high = balanced + F(log)(upper(s, i) / t);
        *slope = low > 0 || high < 0;
        return smaller(larger(0, low), high);
    }
    }
}

/* the point's term of the dual value */
static real dual_term(const side *s, int i, real x, real reg) {
    const real rho = s->rho[i], t = s->t[i], f = reg * x;
    if (t == 0 && x == -INF) return 0;
    switch (s->kind) {
    case KL:
        return rho == INF ? f * t : -rho * t * F(expm1)(-f / rho);
    case TV:
        return smaller(f, rho) * t;
    case L2:
        return f < rho * t ? f * t - f * f / (2 * rho) : rho * t * t / 2;
    default:
        return smaller(x > 0 && lower(s, i) == 0 ? 0 : f * lower(s, i), f * upper(s, i));
    }
}

/* D(r|t) + D*(-f) + f r, and the error of a hard penalty; log_s: r = e^(x + log_s) */
static real gap_term(const side *s, int i, real x, real log_s, real reg, real *hard) {
    const real rho = s->rho[i], t = s->t[i], f = reg * x, r = F(exp)(x + log_s), k = rho / reg;
    if (t == 0 && x == -INF) return 0;
    switch (s->kind) {
    case KL: {
        if (rho == INF) {
            *hard += F(fabs)(r - t);
            return 0;
        }
        real z = x + log_s - s->log_t[i] + x / k, q = t * F(exp)(-x / k);
        return rho * (F(fabs)(z) < 1e-5L ? q * z * z * (0.5L + z / 3 + z * z / 8) : r * z - r + q);
    }
    case TV:
        return r < t ? reg * (k - x) * (t - r) : reg * (k + x) * (r - t);
    case L2: {
        real e = r - t + f / rho;
        return f < rho * t ? rho * e * e / 2 : r * (f - rho * t) + rho * r * r / 2;
    }
    default: {
        real inside = smaller(larger(r, lower(s, i)), upper(s, i));
        *hard += F(fabs)(r - inside);
        return positive(f * (inside - (f > 0 ? lower(s, i) : upper(s, i))));
    }
    }
}

static real divergence(const side *s, int i, real r) {
    const real rho = s->rho[i], t = s->t[i];
    if (s->kind == KL) {
        const real x = r > 0 && t > 0 ? F(log1p)((r - t) / t) : 1;
        const real near = x * x * (0.5L + x / 3 + x * x * (0.125L + x / 30 + x * x / 144));
        return rho == INF ? 0 : rho * (F(fabs)(x) < 1e-3L ? t * near : (r > 0 ? r * F(log)(r / t) : 0) - r + t);
    }
    return s->kind == TV ? rho * F(fabs)(r - t) : s->kind == L2 ? rho * (r - t) * (r - t) / 2 : 0;
}

static real log_sum(const real *k, int stride, const real *x, int count) {
    real top = -INF, sum = 0;
    for (int j = 0; j < count; j++) top = larger(top, k[(int64_t)j * stride] + x[j]);
    if (top == -INF) return -INF;
    for (int j = 0; j < count; j++) sum += F(exp)(k[(int64_t)j * stride] + x[j] - top);
    return top + F(log)(sum);
}

/* everything at p->cols.x; returns the dual value of (y(x), x), *residual = |s (G - x)|_1 / mass */
static real evaluate(problem *p, real *residual) {
    const int m = p->m, n = p->n;
    side *rows = &p->rows, *cols = &p->cols;
    real value = p->reg * p->c_mass, mass = 0, left = 0;
    memset(cols->sum, 0, n * sizeof(real));
    for (int i = 0; i < m; i++) {
        rows->sum[i] = rows->slope[i] = 0;
        rows->x[i] = -INF;
        if (!rows->alive[i]) continue;
        rows->log_s[i] = log_sum(p->log_k + (int64_t)i * n, 1, cols->x, n);
        rows->x[i] = prox(rows, i, rows->log_s[i], p->reg, &rows->slope[i]);
        rows->sum[i] = F(exp)(rows->log_s[i] + rows->x[i]);
        mass += rows->sum[i];
        value += dual_term(rows, i, rows->x[i], p->reg);
        for (int j = 0; j < n; j++) {
            p->B[i * n + j] = F(exp)(p->log_k[i * n + j] + cols->x[j] - rows->log_s[i]);
            p->P[i * n + j] = p->B[i * n + j] * rows->sum[i];
            cols->sum[j] += p->P[i * n + j];
        }
    }
    for (int j = 0; j < n; j++) {
        if (!cols->alive[j]) continue;
        cols->log_s[j] = log_sum(p->log_k + j, n, rows->x, m);
        cols->image[j] = prox(cols, j, cols->log_s[j], p->reg, &cols->slope[j]);
        value += dual_term(cols, j, cols->x[j], p->reg);
        left += cols->image[j] == cols->x[j] ? 0 : cols->sum[j] * grown(cols->image[j] - cols->x[j]);
        for (int i = 0; i < m; i++)
            p->A[j * m + i] = rows->alive[i] ? F(exp)(p->log_k[i * n + j] + rows->x[i] - cols->log_s[j]) : 0;
    }
    *residual = left / mass;
    return value - p->reg * mass;
}

/* J d = G - x by Gauss with row pivots; a pivot that is rounding (both sides hard) leaves its unknown 0, and 1 is
 * returned */
static int newton_step(problem *p) {
    int singular = 0;
    const int m = p->m, n = p->n;
    real *J = p->J, *d = p->step;
    for (int j = 0; j < n; j++) {
        for (int k = 0; k < n; k++) J[j * n + k] = j == k;
        d[j] = p->cols.alive[j] ? p->cols.image[j] - p->cols.x[j] : 0;
        if (!p->cols.alive[j] || p->cols.slope[j] == 0) continue;
        for (int i = 0; i < m; i++) {
            const real w = p->cols.slope[j] * p->A[j * m + i] * p->rows.slope[i];
            for (int k = 0; k < n && w > 0; k++) J[j * n + k] -= p->cols.alive[k] ? w * p->B[i * n + k] : 0;
        }
    }
    for (int k = 0; k < n; k++) {
        int top = k;
        for (int i = k + 1; i < n; i++) top = F(fabs)(J[i * n + k]) > F(fabs)(J[top * n + k]) ? i : top;
        for (int j = 0; j < n && top != k; j++) {
            const real held = J[k * n + j];
            J[k * n + j] = J[top * n + j];
            J[top * n + j] = held;
        }
        const real held = d[k];
        d[k] = d[top];
        d[top] = held;
        if (F(fabs)(J[k * n + k]) < 100 * n * UNIT) {
            for (int j = 0; j < n; j++) J[k * n + j] = j == k;
            d[k] = 0;
            singular = 1;
            for (int i = 0; i < k; i++) J[i * n + k] = 0;
        }
        for (int i = k + 1; i < n; i++) {
            const real w = J[i * n + k] / J[k * n + k];
            for (int j = k; j < n && w != 0; j++) J[i * n + j] -= w * J[k * n + j];
            d[i] -= w * d[k];
        }
    }
    for (int k = n - 1; k >= 0; k--) {
        for (int j = k + 1; j < n; j++) d[k] -= J[k * n + j] * d[j];
        d[k] /= J[k * n + k];
    }
    return singular;
}

static real moved_by(problem *p, real by) {
    real residual, value, k = -INF;
    for (int j = 0; j < p->n && p->cols.kind == TV; j++)
        k = p->cols.alive[j] ? larger(k, -p->cols.rho[j] / p->reg - p->trial[j]) : k;
    for (int j = 0; j < p->n; j++) p->cols.x[j] = p->trial[j] + by;
    value = by < k ? -INF : evaluate(p, &residual);
    return value == value ? value : -INF;
}

/* x + constant where the dual is largest: bracketed by doubling, then thirds. Where J is singular Newton does not see
 * it: flat but for the ends of a total variation or range, which may be 1e9 away. */
static void translate(problem *p) {
    real low = 0, high = 0, middle;
    memcpy(p->trial, p->cols.x, p->n * sizeof(real));
    const real here = moved_by(p, 0);
    for (int sign = -1; sign <= 1; sign += 2) {
        real by = sign * 1e-12L, best = here, value;
        while (F(fabs)(by) < 1e13L && (value = moved_by(p, by)) >= best) {
            best = value;
            by *= 4;
        }
        *(sign < 0 ? &low : &high) = by;
    }
    for (int i = 0; i < 250; i++) {
        const real third = (high - low) / 3;
        if (moved_by(p, low + third) < moved_by(p, high - third)) low += third;
        else high -= third;
    }
    middle = (low + high) / 2;
    middle = moved_by(p, middle) > here ? middle : 0;
    for (int j = 0; j < p->n; j++) p->step[j] = middle;
}

/* |change of the plan|_1 / mass by the step */
static real plan_change(const problem *p) {
    const int m = p->m, n = p->n;
    real change = 0, mass = 0;
    for (int i = 0; i < m; i++) {
        real row = 0;
        for (int j = 0; j < n && p->rows.alive[i]; j++) row += p->B[i * n + j] > 0 ? p->B[i * n + j] * p->step[j] : 0;
        for (int j = 0; j < n && p->rows.alive[i]; j++)
            if (p->P[i * n + j] > 0) change += p->P[i * n + j] * grown(p->step[j] - p->rows.slope[i] * row);
        mass += p->rows.sum[i];
    }
    return change / mass;
}

static void move(problem *p, const real *from, real by) {
    for (int j = 0; j < p->n; j++) {
        real x = from[j] + by * p->step[j];
        if (p->cols.kind == TV) {
            const real k = p->cols.rho[j] / p->reg;
            x = smaller(larger(x, -k), k);
        }
        p->cols.x[j] = p->cols.alive[j] ? x : -INF;
    }
}

/* from cols.x to the optimum for p->reg; returns the plan's change by the last Newton step (at the answer) */
static real climb(problem *p, real tol, int *passes) {
    const size_t size = p->n * sizeof(real);
    real residual, value = evaluate(p, &residual), least = INF;
    memcpy(p->best, p->cols.x, size);
    for (int poor = 0, searches = 0; *passes < MOST_STEPS; ++*passes) {
        if (newton_step(p) && searches++ < 6) {
            translate(p);
            move(p, p->trial, 1);
            value = evaluate(p, &residual);
            newton_step(p);
        }
        const real change = plan_change(p) + residual / 100; /* a common translation may not change the plan */
        if (change < least || !(least < INF)) {
            poor = change < least / 2 ? 0 : poor + 1;
            least = change;
            memcpy(p->best, p->cols.x, size);
        } else poor++;
        if (change <= tol || (least < 1e-9L && poor > 6) || poor > PATIENCE) break;
        memcpy(p->trial, p->cols.x, size);
        real by = 1, next = -INF, after = INF;
        int better = 0;
        for (int halved = 0; halved <= HALVINGS && !better; halved++, by /= 2) {
            move(p, p->trial, by);
            next = evaluate(p, &after);
            better = next > value || after < residual / 2 || (after < 1e-6L && after <= residual);
            better = better && next > -INF && next < INF && after < INF;
            ++*passes;
        }
        if (!better) { /* the plain image, which never lowers the dual */
            memcpy(p->cols.x, p->trial, size);
            evaluate(p, &residual);
            for (int j = 0; j < p->n; j++) p->step[j] = p->cols.alive[j] ? p->cols.image[j] - p->cols.x[j] : 0;
            move(p, p->trial, 1);
            next = evaluate(p, &after);
        }
        value = next;
        residual = after;
    }
    memcpy(p->cols.x, p->best, size);
    evaluate(p, &residual);
    newton_step(p);
    return plan_change(p);
}

static void *zeros(size_t count, size_t size) { return calloc(count ? count : 1, size); }

static void open_side(side *s, int count, int kind, const double *t, const double *rho) {
    real *space = zeros(6 * (size_t)count, sizeof(real));
    *s = (side){.count = count,
                .kind = kind,
                .t = t,
                .rho = rho,
                .log_t = space,
                .x = space + count,
                .log_s = space + 2 * count,
                .image = space + 3 * count,
                .slope = space + 4 * count,
                .sum = space + 5 * count,
                .alive = zeros(count, 1)};
    for (int i = 0; i < count; i++) s->log_t[i] = F(log)((real)t[i]);
}

static void set_kernel(problem *p, const double *M, const double *c, int reference) {
    p->c_mass = 0;
    for (int i = 0; i < p->m; i++)
        for (int j = 0; j < p->n; j++) {
            const int k = i * p->n + j;
            const real log_c = reference == 0   ? p->rows.log_t[i] + p->cols.log_t[j]
                               : reference == 1 ? 0
                                                : F(log)((real)c[k]);
            p->c_mass += reference == 0 ? (real)p->rows.t[i] * p->cols.t[j] : reference == 1 ? 1 : (real)c[k];
            p->log_k[k] = M[k] == __builtin_inf() || log_c == -INF ? -INF : log_c - M[k] / p->reg;
        }
}

/* points that can carry mass; a point that wants mass and has no partner left pays for it: returned (inf: infeasible) */
static real find_alive(problem *p) {
    side *sides[2] = {&p->rows, &p->cols};
    real paid = 0;
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < sides[k]->count; i++)
            sides[k]->alive[i] = sides[k]->t[i] > 0 || sides[k]->kind == TV || sides[k]->kind == L2;
    char *wants = zeros(p->m + p->n, 1);
    memcpy(wants, p->rows.alive, p->m);
    memcpy(wants + p->m, p->cols.alive, p->n);
    for (int again = 1; again;) {
        again = 0;
        for (int k = 0; k < 2; k++)
            for (int i = 0; i < sides[k]->count; i++) {
                int partners = 0;
                for (int j = 0; j < sides[1 - k]->count; j++)
                    partners += sides[1 - k]->alive[j] && p->log_k[k ? j * p->n + i : i * p->n + j] > -INF;
                if (sides[k]->alive[i] && !partners) {
                    sides[k]->alive[i] = 0;
                    again = 1;
                }
            }
    }
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < sides[k]->count; i++)
            if (!sides[k]->alive[i] && wants[k * p->m + i]) {
                const side *s = sides[k];
                const int hard = s->kind == KL ? s->rho[i] == __builtin_inf() : s->kind == RANGE && lower(s, i) > 0;
                paid += hard ? INF : divergence(s, i, 0);
            }
    free(wants);
    for (int i = 0; i < p->m; i++)
        for (int j = 0; j < p->n; j++)
            if (!p->rows.alive[i] || !p->cols.alive[j]) p->log_k[i * p->n + j] = -INF;
    return paid;
}

static void report(problem *p, real step, real paid, int passes, double *out) {
    real gap = 0, hard = 0, scale = p->reg * p->c_mass + paid, primal = p->reg * p->c_mass + paid, mass = 0,
         dual = paid;
    side *sides[2] = {&p->rows, &p->cols};
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < sides[k]->count; i++) {
            const side *s = sides[k];
            if (!s->alive[i]) continue;
            gap += gap_term(s, i, s->x[i], s->log_s[i], p->reg, &hard);
            const real f = s->x[i] > -INF ? p->reg * s->x[i] : 0, d = divergence(s, i, s->sum[i]);
            const real value = dual_term(s, i, s->x[i], p->reg);
            dual += value;
            primal += f * s->sum[i] + d;
            scale += F(fabs)(f) * (s->sum[i] + s->t[i]) + F(fabs)(value) + d;
            mass += k == 0 ? s->sum[i] : 0;
        }
    out[PRIMAL] = (double)(primal - p->reg * mass);
    out[DUAL] = (double)(dual + p->reg * (p->c_mass - mass));
    out[GAP] = (double)gap;
    out[STEP] = (double)step;
    out[VIOLATION] = (double)(hard / mass);
    out[SCALE] = (double)(scale + p->reg * mass);
    out[PASSES] = passes;
    out[MASS] = (double)mass;
}

/* reference: 0 a b^T, 1 ones, 2 c. start: log v to begin with, or NULL: then reg is lowered to the one asked for in
 * steps of 4, from reg_from. Returns 0, or 1 if no plan with mass is feasible: nothing is reported then. */
int oracle(int m, int n, const double *M, const double *c, int reference, double reg, int row_kind, int col_kind,
           const double *a, const double *b, const double *rho_a, const double *rho_b, const double *start,
           double reg_from, long double *log_u, long double *log_v, long double *plan, double *out) {
    const size_t mn = (size_t)m * n;
    problem p = {.m = m, .n = n, .reg = reg};
    open_side(&p.rows, m, row_kind, a, rho_a);
    open_side(&p.cols, n, col_kind, b, rho_b);
    p.log_k = zeros(4 * mn + (size_t)n * n + 3 * n, sizeof(real));
    p.P = p.log_k + mn;
    p.A = p.P + mn;
    p.B = p.A + mn;
    p.J = p.B + mn;
    p.step = p.J + (size_t)n * n;
    p.trial = p.step + n;
    p.best = p.trial + n;
    int passes = 0, levels = 0, empty = 1;
    set_kernel(&p, M, c, reference);
    const real paid = find_alive(&p);
    for (int i = 0; i < m; i++) empty &= !p.rows.alive[i];
    real step = INF;
    if (!empty && paid < INF) {
        while (reg * F(pow)(4, levels) * 4 <= reg_from && !start) levels++;
        for (int j = 0; j < n; j++)
            p.cols.x[j] = p.cols.alive[j] ? start && start[j] > -1e300 && start[j] < 1e300 ? start[j] : 0 : -INF;
        for (; levels >= 0; levels--) {
            p.reg = reg * F(pow)(4, levels);
            set_kernel(&p, M, c, reference);
            find_alive(&p);
            for (int j = 0; j < n; j++) p.cols.x[j] = p.cols.alive[j] ? p.cols.x[j] : -INF;
            int spent = 0;
            step = climb(&p, levels ? 1e-3L : 8 * UNIT, &spent);
            passes += spent;
            for (int j = 0; j < n && levels; j++) p.cols.x[j] *= 4;
        }
        report(&p, step, paid, passes, out);
    }
    for (int i = 0; i < m; i++) log_u[i] = (long double)p.rows.x[i];
    for (int j = 0; j < n; j++) log_v[j] = (long double)p.cols.x[j];
    for (size_t k = 0; k < mn; k++) plan[k] = (long double)p.P[k];
    free(p.log_k);
    free(p.rows.log_t);
    free(p.cols.log_t);
    free(p.rows.alive);
    free(p.cols.alive);
    return empty || !(paid < INF);
}
