"""
Two assays of one branching population
======================================

Cells differentiate along a trunk into three fates. One assay sees them by 20 numbers,
the other by 12, and no cell is in both. A fifth of the second sample is of a kind that
the first one lacks. Distances within each assay are all that can be compared.
"""

# sphinx_gallery_thumbnail_number = 2
import matplotlib.pyplot as plt
import numpy as np

import mapuot

rng = np.random.default_rng(1)
ends = np.array(
    [[4.0, 0.0, 0.0], [-1.0, 3.0, 0.0], [-1.0, -1.5, 2.0]]
)  # of the three fates, after the trunk


def cells(count):
    """Return latent places, the fate of each cell, and how far it has come."""
    time, fate = rng.random(count) * 2, rng.integers(0, 3, count)
    trunk = np.minimum(time, 1)[:, None] * [0.0, 0.0, -3.0]
    return (
        trunk + np.maximum(time - 1, 0)[:, None] * ends[fate],
        np.where(time < 1, 3, fate),
        time,
    )


def assay(latent, dimensions):
    """Return what an assay measures: a turn into more dimensions, and noise."""
    turn = np.linalg.qr(rng.normal(size=(dimensions, 3)))[0]
    return latent @ turn.T + 0.08 * rng.normal(size=(len(latent), dimensions))


(left, fate, time), (right, truth, late) = cells(500), cells(400)
strange = rng.normal(size=(100, 3)) * 0.4 + [3.0, 3.0, 3.0]
X, Y = assay(left, 20), assay(np.vstack([right, strange]), 12)

# %%
# `reg` and `reg_m` are in units of squared distances of distances. Mass that would cost
# more than `reg_m` stays where it is: little of it comes to the cells that the first
# assay lacks. The fates that arrive at each cell of the second assay are those of its
# partners.

unit = X.var(0).sum() ** 2
result = mapuot.gromov(X, Y, reg=0.02 * unit, reg_m=0.3 * unit)
names, share = result.push(fate)
guess, arrived = names[share.argmax(1)], result.col_marginal * len(Y)
guess = np.where(arrived > 0.1, guess, 4)  # 4: nearly no mass arrives
print(result)
print(f"{(guess[:400] == truth).mean():.0%} of the cells are given their own fate")
print(f"mass that comes to a cell: {arrived[:400].mean():.2f}")
print(f"mass that comes to a cell of the other kind: {arrived[400:].mean():.2f}")

# %%
# Each assay in its own plane of largest variance. Colours are fates: in the middle the
# fates that the first assay gives to the cells of the second, on the right the truth.

planes = [np.linalg.svd(z - z.mean(0), full_matrices=False)[2][:2].T for z in (X, Y)]
flat = X @ planes[0], Y @ planes[1]
kinds = {"fate 0": "#0072b2", "fate 1": "#e69f00", "fate 2": "#009e73"}
kinds |= {"trunk": "#cc79a7", "unknown": "#999999"}  # colours that all readers can tell
fig, panels = plt.subplots(1, 3, figsize=(8, 3.6), layout="constrained")
shown = {
    "first assay": (flat[0], fate),
    "second: arriving fates": (flat[1], guess),
    "second: truth": (flat[1], np.append(truth, [4] * 100)),
}
for ax, (title, (points, kind)) in zip(panels, shown.items(), strict=True):
    for k, (name, colour) in enumerate(kinds.items()):
        ax.scatter(*points[kind == k].T, s=8, color=colour, label=name)
    ax.set(title=title, xticks=[], yticks=[])
handles, labels = ax.get_legend_handles_labels()
fig.legend(handles, labels, loc="outside lower center", ncols=5, markerscale=2)

# %%
# The mass that arrives at each cell of the second assay: next to none at the kind that
# the first assay lacks.

fig, ax = plt.subplots(figsize=(6, 4), layout="constrained")
dots = ax.scatter(*flat[1].T, c=arrived, s=10, cmap="viridis", vmin=0)
fig.colorbar(dots, ax=ax, label="received / given mass")
ax.set(title="The unknown kind receives nothing", xticks=[], yticks=[])

# %%
# The problem is not convex: each start ends at a plan that answers its own step, and no
# bound tells how far this is from the best one. By default two starts are tried, and
# `values` has what they came to. Here ten more begin at plans that pair the fates in a
# random order. Those that end lowest are right; others confuse two fates, or the trunk
# with a fate.

starts = [result]
for _ in range(10):
    swap = np.append(rng.permutation(3), 3)
    starts.append(
        np.pad(
            (swap[fate][:, None] == truth) + 0.01,
            ((0, 0), (0, 100)),
            constant_values=0.1,
        )
        / 1e5
    )
found = [
    mapuot.gromov(X, Y, reg=0.02 * unit, reg_m=0.3 * unit, init=start)
    for start in starts
]
found.append(mapuot.gromov(X, Y, reg=0.02 * unit, reg_m=0.3 * unit, init="independent"))
right = [(names[one.push(fate)[1].argmax(1)][:400] == truth).mean() for one in found]
print("default starts:", [round(value / unit, 4) for value in result.values])

fig, (ax, way) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
ax.scatter([one.value / unit for one in found], right)
ax.set(title="A lower objective is right more often")
ax.set(xlabel="objective", ylabel="share of right fates")
for one in found[1:]:
    way.semilogy([step.change for step in one.steps[1:]], color="tab:blue", alpha=0.5)
way.set(title="Each start settles", xlabel="step", ylabel="change of the plan")
