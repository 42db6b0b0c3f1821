"""Changes of one rule each that ``make mutants`` tries, by file: with the tests that notice them, the quickest first.

A change is a part of a line or two that stands once in its file: "a {{b~>c}} d" makes "a c d" of "a b d", "a{{ + b}}"
leaves out " + b". Tests are node ids below tests/. EXPLAINED: changes that none can notice, by the reason.
"""

TABLE = {
    "src_c/common/rules.h": ("core/test_rules.py", [
        "+ {{~>0.7 * }}sqrt(2 * d +", "{{d * (1.0 / 3) + }}sqrt", "d{{ + d * d * (1.0 / 9)}}", "return 0.{{7~>6}} * d",
        "{{d == d ? 0 : d~>0}}", "{{+ limits->rho_kl * prox}}", "moved = mass * ({{limits->reg~>0}}",
        "{{limits->hard_sides * limits->reg * log_size * (mass + hard)~>0}}", "){{ + 1e-15 * terms}}",
        "{{SUMS_NOISE * (mass * (limits->reg + limits->rho_kl) + limits->dual_scale)~>0}}",
        "SUMS_NOISE * (mass * (limits->reg{{ + limits->rho_kl}})", "){{ * (1 + 2 * entries)}}",
        "{{storage_error(limits, p->since_absorb) + }}rounding",
        "p->since_absorb) + {{rounding + }}out->lost;\n    out", "since_absorb) + rounding{{ + out->lost}};\n    out",
        "{{hard > allowed * mass ? INF : }}gap_of_rounded", "{{entries + noise~>0}}",
        "|{{ proves_nothing(limits, out, scale) ||}}", "dual {{- p->moved }}:",
        "{{out->error += limits->extra_error;}}", "{{out->gap += limits->extra_gap;}}",
        "log_ratio{{ - limits->rate_cols * shift}}", "{{out->dual -= limits->extra_gap;}}",
        "{{limits->fi_rows - 1~>1 - limits->fi_rows}}", "common = {{~>0.5 * }}limits",
        "{{out->dead > p->dead || }}is_clipped", "){{ || out->lost > MOST_LOST}}",
        "{{|| is_clipped(limits, scale) > (p->clipped > 0)}}", "{{if (out->dead > p->dead) out->dual = -INF;}}",
        "{{p->extrapolated > }}0 &", "{{fmax(p->best_dual, out->dual)~>out->dual}}", ": 1e-{{13~>5}} * fabs",
        "{{coarse = 0;\n        p->}}", "lost = {{p->moved + }}limits", "p->moved{{ + limits->extra_gap}}, least",
        "dual - {{2 * }}lost",
        "= {{~>1.2 * }}limits->tol |", "gap <= {{~>1.2 * }}limits-", "best_error{{ * (1 - 1e-3)}}",
        "{{|| out->dual > p->progress_dual + 1e-9 * fabs(out->dual)}}",
        "{{= (clipped ? NARROW_PATIENCE : STALL_PASSES)~> STALL_PASSES}}",
        "{{isnan(out->mass) || (isnan(out->dual) && out->mass <= LARGEST)~>0}}", "{{out->mass < LEAST_MASS || }}(",
        "{{|| (out->dead > 0 && out->residual < STILL)}}",
        "{{fresh ? MAPUOT_UNDERFLOW : MAPUOT_ABSORB~>MAPUOT_UNDERFLOW}}", "{{left && !((done || floor) && fresh)~>0}}",
        "if ({{out->mass > LARGEST~>0}})", "{{(done || floor) && !(p->narrow > 0)~>done || floor}}",
        "{{!done && limits->finer~>0}}", ", storage){{ / 2}}", "error < {{0.8 * }}p-", "floor_passes{{ + 1}}",
        "{{=}} FLOOR_PASSES", "{{&& out->error <= NEAR_FLOOR * limits->narrow_floor}}",
        "{{out->error <= near * limits->narrow_floor ||}}", "{{limits->symmetric ? NEAR_FLOOR : }}1",
        "dropped >{{=}} MOST_DROPPED", "({{left || }}p->step", "error <= {{2~>4}} * limits",
        "{{p->progress_dual = fmax(p->progress_dual, out->dual);}}",
        "{{p->best_error = fmin(p->best_error, out->error);}}", "best_dual - {{2~>0}} * p->moved",
        "{{scale > NARROW_LIMIT~>0}})", ":{{ out->dead > 0 ? MAPUOT_UNDERFLOW :}}",
        "{{(limits->missed > 1) * SUM_NOISE~>0}}", "scale_v{{ + LEAST_MASS * scale_u}}", "* {{(mass + hard)~>mass}}",
        "{{fabs(p->shift)~>p->shift}}", "? {{1 + }}(double)", "flush_tol{{ || scale > limits->scale_limit}}",
        "{{out->lost > limits->flush_tol || }}scale",
        "{{gap = out->error = INF;\n        out->dual = -INF;\n        out->}}",
        "{{out->mass = isnan(out->mass) ? INF : out->mass;}}", "which recovers */\n        {{out->dual = -INF}}",
        "{{~>0.1 * }}limits->missed *", "return {{3~>0.1}} * entry_error",
        "{{limits->in_place ? 1 + (double)passes : }}1", "{{fabs(p->shift) + fabs(p->lam) + }}size_of_log",
        "({{limits->exponent_error + }}4", "exponent_growth(limits->exponent_error{{ + 4.5e-16 * logs}})",
        "rounding{{ + out->lost}};\n    const", "{{entry_error(limits, p->since_absorb) + }}rounding",
        "error, {{~>0.05 * }}limits-", "over{{ + SUM_NOISE}}", "{{if (!(limits->path > 0)) return error;}}",
        "return {{fmin~>fmax}}(error", "{{gap >= -gap_noise(limits, out->mass)~>1}}",
        "{{(gap < 0 ? gap_noise(limits, mass) : gap)~>fmax(gap, 0)}}", "{{ + GAP_LEAST * (1 + limits->rho_kl)}}",
        "return {{~>0 && }}!(scale", "1 ? x{{ * (1 + x)}}", "x{{ == x ? INF : x}}", "return 0.{{7~>1}} * (",
        "sqrt(gap) + {{d~>0}} * sqrt(", "rho_kl{{ + 0.5 * limits->rho_l2 * mass}}", "{{limits->rho_kl + }}0",
        "linear = {{2~>0}} * limits", "{{* (1 + 3 * d) }}+",
        "rho_tv{{ + limits->hard_sides * limits->reg * log_size}}",
        "{{(limits->flush * scale_u + LEAST_MASS)~>LEAST_MASS}}", "logs{{ + limits->exponent_error * 1.1e15}}",
        "{{p->narrow > 0 ? SUMS_NOISE : }}0",
    ]),
    "src_c/limits.c": ("core/test_rules.py", [
        "0x1p-53, 0x1p-{{24~>28}}}", "-708.0, -{{87~>187}}.3}", "EXACT_ROUNDINGS = {{12~>1}} }",
        "{{k1 > 0.0 ? reg / k1 : }}0", "{{fmax(1e-12, fmin(1e-8, tol / 100.0))~>1e-3}}", "0 / (1.0 + {{k1~>k2}})",
        "0 / ({{fi1 * }}k1 +", "k1 + {{fi2 * }}k2)", "{{limits->rho_kl = terms->rho_kl;}}",
        "{{limits->rho_tv = terms->rho_tv;}}", "{{limits->rho_l2 = terms->rho_l2;}}", ": {{terms->path~>0}};",
        "{{limits->hard_sides = terms->hard_sides;}}",
    ]),
    "src_c/common/penalty.h": (
        "core/test_penalties.py::test_penalty_formulas "
        "core/test_penalties.py::test_misfit_is_the_distance_from_what_has_no_gap "
        "core/test_penalties.py::test_the_gap_of_kl_keeps_its_digits "
        "core/test_penalties.py::test_the_l2_prox_is_that_of_scipy", [
        "(rho + {{~>2 * }}reg) * balanced", "{{penalty <= MAPUOT_BALANCED && isinf(rho) ? fabs(r - t) : }}0",
        "+ f / rho) : {{q~>0}})", "bound, {{~>2 * }}bound);", "{{bound * t < fabs(x) ? bound * t - w : }}log",
        "i < {{3~>1}}; i++", "if (z < -{{36~>6}})", "{{log(rho) + }}balanced",
        "{{(t * expm1(-f / rho)~>t * expm1(-f / rho}}", "{{f < -rho * (1 + 1e-9) ? -INF : }}clip",
        "{{clip(f, -rho, ~>fmax(f, -}}rho", "(f / ({{2~>4}} * rho", "rho * t * t{{ / 2}};",
        "f {{<~>>}} 0 ? f * upper", "{{fmax(rho * t - r, r - upper * t)~>rho * t - r}}", "x * (1.0 / {{3~>4}} +",
        "840{{ + x * late}}", "(x) < {{0.25~>2.5}} ? q", "(x) < {{0.25~>1e-9}} ? q", "rho{{ * (1 - 1e-15)}}",
        "? {{r - t : t - r~>t - r : r - t}}", "{{fmax(0.0, f > 0 ? r - t : t - r)~>0}}", "{{f > 0 ? r : INF~>0}}",
        "return{{ f < 0 ? fabs(r - upper * t) :}}", "rho){{ || t == 0}})", "{{(rho + at) * (r - t)~>0}}",
        "{{(rho - at) * (t - r)~>0}}", "{{f < -rho * (1 + 1e-9) ? INF : }}gap", "gap{{ + fmax(0.0, f - rho) * r}}",
        "{{r * (f - rho * t) + }}0", "{{r = clip(r, rho * t, upper * t);}}", "? 0.{{5~>25}} * rho * e",
        "{{f > 0 ? fabs(r - rho * t) : }}violation",
    ]),
    "src_c/common/column.h": (
        "core/test_rules.py core/test_one_potential.py::test_certificates_are_those_of_the_oracle", [
        "marginal, t) : {{q~>0}});", "{{+ c->k * log_v}}", "fma({{1 -~>0 *}} c->fi,",
        "->weight - {{q~>out.marginal}});", "{{fabs(out.marginal - c->weight)~>out.marginal - c->weight}}",
        "{{dead ? c->x : }}prox_log", "part{{ + shift}}, c", "absorbed{{ + offset}};",
        "{{violation(penalty, out.marginal, c->weight, c->rho, c->upper)~>0}}",
        "gap_term(penalty, g, {{out.marginal~>c->v * sum}}", "(1 + {{0.5 * }}fi)",
    ]),
    "src_c/finish.c": (
        "core/test_one_potential.py::test_certificates_are_those_of_the_oracle "
        "core/test_kernels.py::test_passes_by_penalty[scalar-balanced] "
        "core/test_kernels.py::test_passes_by_penalty[scalar-kl]", [
        "{{finish->sums[SUM_GAP] *= 2.0;}}", "{{finish->sums[SUM_HARD] *= 2.0;}}", "0{{ / (1.0 + k)}})",
        "{{row[ROW_DUAL] = finish->sums[SUM_DUAL];}}", "{{- limits->reg * mass}}",
        "{{rows += limits->reg * finish->lam * limits->row_weight}}",
        "{{rows = limits->rho_rows * (limits->row_weight - mass)}}",
    ]),
    "src_c/finish_tmpl.c": (
        "hostile/test_bounds.py::test_a_bound_is_true_whenever_a_solve_ends[tv-kl-cpu-True] "
        "hostile/test_bounds.py::test_a_bound_is_true_whenever_a_solve_ends[tv-kl-cpu-False] "
        "core/test_penalties.py::test_tol_gap_waits_for_hard_columns[cpu-balanced]", [
        "v_kl_gap(q, {{s~>q}}, t)", "v_sub(b, {{q~>s}})), zero", "{{v_max(v_sub(s, b), v_sub(b, s)~>v_sub(s, b}}",
    ]),
    "src_c/kl.h": ("hostile/test_bounds.py::test_a_bound_is_true_whenever_a_solve_ends[tv-kl-cpu-True]", [
        ",        1.0 / {{3~>4}},",
    ]),
    "src_c/solve.c": ("core/test_plain.py::test_is_the_ordinary_way_pass_by_pass[1.0-0.5-1x1]", [
        "{{->exponent_rounding * (paid + largest) + task}}",
        "{{state->limits.dual_constant = reg * (p->mass_a * p->mass_b);}}",
    ]),
    "mapuot/problem/problem.py": ("core/test_plain.py::test_is_the_ordinary_way_pass_by_pass[1.0-0.5-7x5]", [
        "float({{paid + }}terms",
    ]),
    "src_c/common/mask.h": (
        "api/test_masks.py::test_the_core_does_too[scalar-counter0-key0-answer0] "
        "api/test_masks.py::test_the_core_does_too[scalar-counter1-key1-answer1] "
        "api/test_masks.py::test_every_instruction_set_makes_the_same_entries[scalar-shape0]", [
        "round < {{10~>9}};", "bits <{{=}} (uint64_t", "{{0xCD9E8D57u~>0xCD9E8D59u}}",
        "= {{0x9E3779B9u~>0x9E3779B8u}};", "= {{0xBB67AE85u~>0xBB67AE84u}};", ">> 32) ^ {{d ^ }}q",
        ">> 32) ^ {{b ^ }}p", "{{0xD2511F53u~>0xD2511F55u}}", "uint64_t)b << {{32~>31}};", "{{mask->col + }}j",
        "{{(uint32_t)(high >> 32)~>0}}", "{{(uint32_t)(low >> 32)~>0}}", "{{(uint32_t)(key >> 32)~>0}}",
        "key, {{col, row~>row, col}})",
    ]),
    "src_c/prox_rows.h": (
        "core/test_kernels.py::test_a_row_whose_sum_vanishes_or_overflows_leaves_no_bound[scalar-threads1-kl-0.0] "
        "core/test_kernels.py::test_a_row_whose_sum_vanishes_or_overflows_leaves_no_bound[scalar-threads1-kl-1e+308] "
        "core/test_kernels.py::test_a_row_whose_sum_vanishes_or_overflows_leaves_no_bound[scalar-threads1-tv-1e+308]", [
        "{{v_sub(in, live)~>zero}}", "v_set(DBL_MAX), sum, {{zero~>sum}})", "s[k] <= DBL_MAX ? s[k] : {{0.0~>s[k]}};",
    ]),
    "mapuot/problem/mask.py": (
        "api/test_masks.py::test_philox_gives_the_published_numbers[counter0-key0-answer0] "
        "api/test_masks.py::test_the_limit_is_exact[1.0] "
        "api/test_masks.py::test_blocks_have_the_entries_of_the_whole[cpu]", [
        "range({{10~>9}})", "{{step * }}weyl", ") * 2**64){{ - 1}}", "{{(j, i) if self.turned else (i, j)~>i, j}}",
        "row{{ + i0}}, self", ".{{col, self.row~>row, self.col}}", "= {{self.row + }}np",
    ]),
    "mapuot/answer/slopes.py": (
        "api/test_points.py::test_the_error_of_a_slope_is_reached api/test_masks.py::test_derivatives_by_the_masses "
        "api/test_points.py::test_gradient_against_differences[0.8-cosine]", [
        "return {{~>0.7 * }}bound *", "steep{{ + rounding * sizes}}", "{{2 * }}root * float",
        "scale * root{{ * bounds.slope}}", "steep = {{~>0.5 * }}scale * root / shortest",
        "steep = {{~>0.5 * }}scale * root * bounds.slope",
        "else {{np.sqrt((factor**2).sum())~>factor.max()}}",
        "{{cost + xp.asarray(np.log(np.asarray(p.masked if rows else p.masked.T)))~>cost}}",
        "{{p.shares(result._backend, other.weight, rows~>other.weight.sum(}}",
        "slope{{ - (slope * scaled).sum(1, keepdims=True) * scaled}}",
        "hard, 1.0, {{1 / (1 + reg / rho)~>1.0}}", "mass = {{~>0 * }}other.sum",
        "{{problem.shares(result._backend, other.T, rows).T~>other.sum(1)[:, None]}}",
        "{{cost = cost + xp.asarray(np.log(np.asarray(p.masked if rows else p.masked.T)))~>pass}}",
        "reg * ({{~>0 * }}xp.asarray",
    ]),
    "mapuot/ascend/loop.py": ("core/test_one_potential.py::test_hard_sides_of_a_kernel_that_is_left_by_newtons_step", [
        'rejected{{ and run.outcome.status != "converged"}}',
    ]),
    "mapuot/answer/unregularised.py": (
        "api/test_uses.py::test_points_without_mass_may_take_some_without_entropy[tv]", [
        "{{zeros(len(side.weight)~>log(side.weight}}",
    ]),
    "mapuot/ascend/kept.py": (
        "core/test_kept.py::test_pairs_that_were_missed_are_found "
        "core/test_kept.py::test_the_way_is_left_where_many_pairs_matter "
        "core/test_kept.py::test_it_ends_where_it_is_told_to "
        "core/test_kept.py::test_potentials_that_pairs_led_astray_are_left "
        "core/test_kept.py::test_pairs_that_leave_no_mass_are_found_once", [
        "{{self.conclude(task, exact, found)~>found}}",
        "> {{PAIRS.most_share~>1.0}})",
        '{{"cancelled", }}*', "{{run.trace[-1].error > STAGES.warm_error~>False}}", 'cancelled"{{, *FAILED}})',
    ]),
    "mapuot/ascend/groups.py": ("api/test_truncation.py::test_groups_correct_passes[1]", [
        "{{level.mean.log_weight - log~>log}}", "log_v {{+ shifts[1] }}-", "{{self.factor~>0.0}} * rate",
        "log_weight {{+ log }}-", "weight{{ * np.exp(shift)}}",
    ]),
    "mapuot/answer/draw.py": (
        "core/test_edges.py api/test_result.py::test_pairs_are_drawn_from_the_plan[cpu-210-rows] "
        "api/test_result.py::test_pairs_are_drawn_from_the_plan[cpu-210-systematic]", [
        "{{flatnonzero(r > 0~>arange(len(r)}}", "= np.{{cumsum(r~>arange(1.0, len(r) + 1}})",
        ', side="{{right~>left}}")', "rng.random({{~>size}})) /",
    ]),
    "mapuot/backends/draw.py": (
        "core/test_edges.py api/test_result.py::test_pairs_are_drawn_from_the_plan[cpu-210-independent]", [
        "* ends[{{:~>0}}, -1])", "(RUN * {{~>0 * }}run[:, None", "place {{>~><}} 0, ends", "float64), {{~>0 * }}left)",
        "(ends >{{~>=}} wanted", "{{ends[here] + }}at", 'side="{{left~>right}}") -',
    ]),
    "mapuot/files/read.py": (
        "core/test_edges.py api/test_files.py::test_forged_headers_take_no_memory[npy] "
        "api/test_files.py::test_archives_that_claim_what_they_cannot_hold", [
        "CHECKED_BYTES){{~> and 0}}", "+ 30{{ + lengths}}", "if stop < {{end~>start}}:", "{{size > MOST_HEADER~>0}}",
        "{{min(found[0], default=0) < }}0", "{{info.file_size > MOST_INFLATED * path.stat().st_size~>0}}",
    ]),
    "mapuot/files/checkpoint.py": (
        "api/test_files.py::test_damaged_checkpoints api/test_files.py::test_checkpoint[kl]", [
        '{{kinds == "f" and not np.isfinite(whole).all()~>0}}', "potential{{ / reg}}",
        "{{potential.shape != start[side].shape~>0}}",
    ]),
    "mapuot/answer/load.py": (
        "api/test_result.py::test_what_needs_m_says_so api/test_result.py::test_what_is_no_answer", [
        "check_same{{~> if 0 else }}(cost, shape", "near{{ or saved[2] != given[2]}}", "SAME = 1e-{{6~>5}}",
        "{{np.isnan(vector).any()~>0}}", "{{name in values and np.any(np.asarray(values[name]) < 0)~>0}}",
    ]),
    "mapuot/backends/boxes.py": (
        "core/test_edges.py api/test_truncation.py::test_groups_correct_passes[1] "
        "api/test_truncation.py::test_almost_no_mass_makes_no_bound_small", [
        "rounding = {{2.0**-48~>0.0}} *", "{{rounding - ~>-}}math", "tau = {{~>0.5 * }}float(self",
        "tau{{ * self.mass}}", "{{(problem.reg * self.mass)~>self.mass}}",
        "error{{ * (1 + part) + part * (1 + found)}}", "{{self.problem.reg * share.mass~>0.0}}",
        "{{not enough~>False}}):", "self.hidden = {{share.mass~>0.0}}", ">= {{LEAST_MASS~>0}}:",
        "{{not side.ranks.max(any_of(side.hard))~>True}}", "value = {{inner + }}t *", "log(r{{ + t}}) - log_q",
        "t > 0, {{~>0.1 * }}rho",
    ]),
    "src_c/boxes_tmpl.c": (
        "core/test_edges.py api/test_truncation.py::test_the_bound_is_true[scalar-1-1] "
        "api/test_truncation.py::test_bounds_between_boxes_are_above_the_sums[scalar-3000.0-sqeuclidean] "
        "api/test_truncation.py::test_bounds_between_boxes_are_above_the_sums[scalar-0.0-euclidean] "
        "api/test_truncation.py::test_every_penalty_and_metric[cityblock-kl] "
        "api/test_truncation.py::test_bounds_between_boxes_are_above_the_sums[scalar-0.0-sqeuclidean]", [
        "{{v_add(v_set(half[k]), v_load(boxes->y_half + at)~>v_load(boxes->y_half + at}}",
        "{{v_fma(r, v_sub(s, D), v_fnma(s, s, sum)~>v_fnma(s, s, sum}}",
        "{{v_min(v_max(v_mul(by_2, r), least), most~>v_max(v_mul(by_2, r), least}}",
        "{{v_add(v_load(acc + j), mass)~>mass}}", "D = {{v_sub~>v_add}}(v_set",
        "{{v_add(v_set(boxes->x_log_mass[i]), v_load(boxes->y_log_mass + j)~>v_load(boxes->y_log_mass + j}}",
        "{{v_add(v_set(boxes->x_log_mass[i]), v_load(boxes->y_log_mass + j)~>v_set(boxes->x_log_mass[i]}}",
        "row_mass[i] = {{~>0.5 * }}v_sum(", "{{v_fnma(s, s, sum)~>sum}}",
        "{{sum = v_fma(v_mul(by_2, v_max(both, v_sub(zero, both))), H, sum);}}",
        "{{zero, v_max(least, v_sub(zero, most)~>least, v_sub(zero, most}}",
        "{{v_sub(zero, v_sqrt(v_sub(zero, sum)))~>sum}}", "{{v_sub(sum, away~>v_fnma(away, away, sum}}",
        "unit <{{~>=}} args->run", "{{v_add(cut, v_load(boxes->y_cut + j))~>cut}}", "args->unit{{~> + 1}}; j *",
        "int32_t)({{from~>(from + 1)}} *", "int32_t)({{j~>(j - 1)}} * args", "width += {{j - from~>1}};",
        "by_2, {{v_sub~>v_add}}(p,", "both = {{v_add~>v_sub}}(p", "= {{v_sub(D, H)~>D}},", "most = {{v_add(D, H)~>D}}",
    ]),
    "mapuot/marginals/certificate.py": ("core/test_edges.py", [
        "d{{ + stored) + missed / mass~>)}}",
        "{{root * root * (1 + 6 * delta) / (1 - delta) / mass / reg~>0.1 * root * root / mass / reg}}",
        "{{(2 * delta + slip) * math.sqrt(kl)~>0.0}}", "{{reg * mass * delta + }}slipped",
        "{{state.is_complete and 0 <= }}gap", "{{math.inf if missed > allowed * mass else }}all_terms",
        "slipped = {{~>0 * }}sum(rho", "moved{{ - eta * reg * mass}}", "+ {{missed / mass~>0.0}}", "delta < {{0~>1}}.1",
        "+ {{moved + }}2 * eta",
    ]),
    "src_c/newton.c": (
        "core/test_newton.py::test_the_step_solves_the_dense_equations "
        "core/test_newton.py::test_a_bound_has_all_its_terms "
        "core/test_newton.py::test_a_bound_of_many_marginals_has_all_its_terms "
        "core/test_newton.py::test_what_cannot_be_met_is_not_certified", [
        "= {{w->d[j] = }}0.", "- {{sides * }}hard", "{{2.0 * }}fmax(high", "{{, at.energy *= 2.0}}",
        "{{left *= 2.0, at.}}", "0{{ + noise / fmax(w->missed, noise / 16.0)}}", "{{(at->left + noise)~>at->left}}",
        "{{fabs(have[k] - ask[k])~>0}}", "{{have[part ? part[j] : 0] / ask[part ? part[j] : 0]~>1.0}}",
        "{{is_hard ? fabs(weight[j] - w->marginal[j]) : 0.}}", "{{fmax(w->found - sides * hard / mass, 0.0)~>0.0}}",
        "{{+ w->rate[j] * (q / mass) }}:", "{{1.0 + asked / mass~>0.5}}", "mass : {{INFINITY~>1.0 + asked / mass}}",
        "{{w->missed += sides * fabs(w->left[j]);}}", "return {{apart + }}bound", "bound{{ * (1 + 2 * apart)}}",
        ": {{high - low~>0.5 * (high - low)}};", ", {{w->rate[j]~>0}} *", "{{at.left += fabs(w->left[j]);}}",
        "{{~>0.1 * }}w->y[j] * (w->", "INFINITY : {{0.0~>INFINITY}},",
        "{{sums_rounding((double)w->m)~>0.0}}", "{{~>0.05 * }}w->paths * (at", "){{ + sqrt(0.5 * more)}}",
        "most * gap / {{4~>40}}.0;", "after {{* over~>/ w->mass}}) +", "gap * over{{~> / 4}}) + rest",
        "gap {{* over~>/ w->mass}}) + rest", "{{most <= MOST_W && }}at", "here{{ * hidden}})", "step{{ * hidden}};",
        "after = {{step~>rest}} *", "error <= {{~>1.2 * }}w->tol) return MAPUOT_HOLDS;",
        "{{(k ? c / pivot : 0.0)~>0.0}}", "{{+ (k ? w->ratios[k] / w->steps_made[k - 1] : 0.0)}}",
        "{{is_below(w, low)~>0}}", "){{ / w->curvature}}", "{{sides * w->size + }}noise",
        "w->size{{ + noise * noise}})", "return {{SAFETY * }}sqrt",
        "{{fmax(highest, -lowest)~>highest}}", "{{mass /= w->marginals ? (double)w->marginals : 1.0;}}",
        "products > {{1~>0}} &", "{{unreached == 0.0 || }}(lost", "w->apart += {{reached ? lost : 0.0~>0.0}};",
    ]),
    "src_cuda/dense/finish_column.cuh": ("cuda/test_cuda.py::test_every_penalty_equals_the_oracle", [
        "SUM_GAP] = {{~>0.5 * }}found.gap", "] = {{found.hard~>0}};", "] = {{found.dual~>0}};",
        ": {{found.misfit~>0}}", "{{-}}S.limits.rate_cols", "{{(F.p.shift + t.lam)~>F.p.shift}}",
    ]),
    "src_cuda/dense/finish_scalars.cuh": (
        "cuda/test_cuda.py::test_every_penalty_equals_the_oracle "
        "core/test_one_potential.py::test_certificates_are_those_of_the_oracle[cuda-kl] "
        "core/test_one_potential.py::test_certificates_are_those_of_the_oracle[cuda-range]", [
        "= {{move.kappa * }}row", "{{S.hard_weight~>0}} *", "{{F.p.dual_constant + }}move", "{{t[SUM_MISFIT]~>0}},",
        "+ {{both(S) * }}t[", "out, {{both(S) * }}t", "], {{both(S) * }}t",
    ]),
    "src_cuda/batch/batch_finish.cuh": (
        "cuda/test_batch_cuda.py::test_every_problem_is_certified "
        "cuda/test_batch_cuda.py::test_float64_passes_are_those_of_the_oracle", [
        "{{(p.mass_a - mass)~>p.mass_a}}", "{{+ shift * p.mass_a}}", ".{{kappa * move.}}", "weight{{ * move.grow}}",
    ]),
    "src_cuda/points/points.cuh": ("cuda/test_points_cuda.py::test_half_of_the_pairs_stand_for_all_by_one_potential", [
        "{{(int)(i / (8 * OWN))~>0}}", "{{if (HALVED) both[half + e] += mine[q] * entry;}}",
    ]),
    "src_cuda/dense/plain.cu": ("cuda/test_points_cuda.py::test_rounding_that_stays_on_the_device_counts", [
        "T.cost_rest{{ + formed}}",
    ]),
    "src_cuda/points/point_tables.cu": (
        "cuda/test_points_cuda.py::test_points_on_a_gpu_that_are_not_finite_are_named "
        "cuda/test_points_cuda.py::test_a_matrix_of_products_errs_by_what_is_told", [
        "{{if (!finite) odd[1] = 1;}}", "{{if (!finite) odd[0] = 1;}}",
    ]),
    "src_cuda/points/point_products.cuh": (
        "cuda/test_points_cuda.py::test_rows_and_columns_have_the_same_bits[narrow-70] "
        "cuda/test_points_cuda.py::test_products_on_tensor_cores_are_those_of_float64[sqeuclidean-40]", [
        "place_of(8 * g + lane % 8, {{4 + }}lane / 8)",
    ]),
    "src_cuda/points/point_wide_products.cuh": (
        "cuda/test_points_cuda.py::test_float64_products_on_tensor_cores_have_quick_powers[20]", [
        "[threadIdx.x] = {{j < others ? __ldg(weight + j) : 0~>__ldg(weight + j)}}",
        "[{{PIECE * c + }}q * 4 + part]",
    ]),
    "src_cuda/points/boxes.cu": ("cuda/test_points_cuda.py::test_boxes_keep_what_those_of_the_cpu_keep", [
        "]{{ + B.y_half[k * B.n + j]}}", "fma(0.{{5~>25}} * fabs", "{{r, s - D, fma(-s, s, sum)~>-s, s, sum}}",
        "{{(B.x_log_mass[i] + B.y_log_mass[j])~>B.x_log_mass[i]}}", "{{kept ? 0 : exp(bound)~>0}}",
        "{{+ B.y_cut[j] }}<", "1{{ | (lane > 0 ? left : last) >> 31}}", "known{{ + log(total)}}",
    ]),
    "src_cuda/plan/stream.cu": ("cuda/test_cuda.py::test_pairs_are_drawn_where_the_cost_is", [
        "{{left = fmax(left - __shfl_sync(FULL, end - sum, chosen), 0);}}", "{{share * }}__shfl_sync",
        "{{end += lane >= bit ? before : 0;}}",
    ]),
    "mapuot/spaces/steps.py": (
        "api/test_gromov.py::test_a_start_between_some_points_leads_to_the_plan_of_all[inf-sqeuclidean] "
        "api/test_gromov.py::test_reg_m_far_above_reg_is_nearly_balanced", [
        "{{(measures_first or steps) and not path.is_ahead~>True}}",
        "{{0.5 * task.log_ratio(before, after)~>0.5 * math.log(before.mass / after.mass)}}",
    ]),
    "mapuot/spaces/task.py": (
        "api/test_gromov.py::test_the_objective_is_its_definition_and_the_change_bounds_the_plans "
        "api/test_gromov.py::test_the_change_bounds_plans_whose_entries_all_err_alike "
        "api/test_gromov.py::test_the_change_counts_what_the_inner_solve_leaves_open "
        "api/test_gromov.py::test_reg_m_far_above_reg_is_nearly_balanced", [
        "* z{{ + apart * apart}})", "{{4 * }}mass) / 3", "{{ + result.error_bound * mass}}",
        "firm = {{FIRM * reg < rho < math.inf~>False}}",
    ]),
    "mapuot/backends/cuda/arrays.py": ("cuda/test_points_cuda.py::test_a_matrix_of_products_errs_by_what_is_told", [
        "2.0**-{{53~>60}} * (3 *",
    ]),
    "mapuot/backends/cuda/points.py": (
        "cuda/test_points_cuda.py::test_points_whose_matrix_has_no_room_are_stored_as_k[inner]", [
        '"{{ or options.tol < KEPT_TOL}}', "{{size <= float(cloud.form or 0)~>True}}",
    ]),
    "mapuot/backends/newton.py": (
        "core/test_newton.py::test_the_least_curvature_is_that_of_the_stiffest_row "
        "core/test_newton.py::test_error_bound_is_true_of_every_method[cpu-0.001-cols-map-uot]", [
        "rho_range[{{1~>0}}] /", "{{0] == math.inf~>1] == 0}}", "weight{{ * np.exp(-problem.reg * log_u / rows.rho)}}",
    ]),
}  # fmt: skip
EXPLAINED = {
    ("src_c/common/rules.h", "{{dual) && isfinite(out->}}"):
        "a dual value that is no number makes p->moved inf or NaN, which certifies nothing either",
    ("src_c/limits.c", "ld{{ * entry_bytes % 4096 == 0 ? ld + PAD : ld}}"):
        "pages that meet in a cache cost time alone",
    ("mapuot/ascend/groups.py", "]{{ - shifts[0], nexts[1] - shifts~>, nexts}}"):
        "where the problem between groups starts from changes how many of its passes it takes",
    ("mapuot/backends/operator.py", "i0, at[{{order[some]~>some}}])"):
        "the shares are independent of the rows that they are drawn for",
    ("mapuot/backends/boxes.py", "){{ * (1 + 2.0**-50)}}"): "the rounding that is added to the masses covers it",
    ("src_c/boxes_tmpl.c", "), {{zero~>v_exp(bound)}}, v_exp"):
        "pairs that are kept count as skipped, too: a larger bound, and more passes",
    ("src_c/newton.c", "{{(w->asked[j] - w->left[j])~>w->asked[j]}}"):
        "what is left is orthogonal to all directions of conjugate gradients, hence to y",
}  # fmt: skip
