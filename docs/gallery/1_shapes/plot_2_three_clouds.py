"""
Three clouds at once
====================

Three instruments see the same cells, each with its own noise and with points that the
others lack. One plan of all three clouds matches triples of cells. If the clouds are
matched pair by pair, fewer of the ways from the first to the second, the third and back
end where they began.
"""

import matplotlib.pyplot as plt
import numpy as np

import mapuot

rng = np.random.default_rng(3)
cells = rng.random((40, 2)) * [1.5, 0.6]
clouds = []
for k in range(3):
    seen = cells[rng.random(40) < 0.9]
    strays = rng.random((5, 2)) * [0.15, 0.6] + [(-0.5, 1.8, 2.3)[k], 0]
    clouds.append(np.vstack([seen + rng.normal(0, 0.05, seen.shape), strays]))
masses = [np.full(len(x), 1 / 40) for x in clouds]
costs = {
    (i, j): mapuot.PointCloud(clouds[i], clouds[j]) for i, j in ((0, 1), (1, 2), (0, 2))
}

# %%
# Any two of the three clouds have a cost, which makes a triangle. ``reg_m`` is the
# price of leaving a cell out.

result = mapuot.multimarginal(costs, masses, reg=0.002, reg_m=0.05)
print(result)
kept = [result.marginal(k) / masses[k] for k in range(3)]

# %%
# The same clouds matched pair by pair, and the way around: from cloud 0 to 1, 2, and
# back to 0.


def around(couplings):
    """Count the points of the first cloud that the way around leads back."""
    way = np.arange(len(clouds[0]))
    for P in couplings:
        way = P[way].argmax(1)
    used = kept[0] > 0.4
    return (way == np.arange(len(clouds[0])))[used].sum(), used.sum()


pairs = [(0, 1), (1, 2), (2, 0)]
together = [result.pair(i, j) for i, j in pairs]
alone = []
for i, j in pairs:
    cost = mapuot.PointCloud(clouds[i], clouds[j])
    one = mapuot.solve(cost, masses[i], masses[j], reg=0.002, reg_m=0.05)
    alone.append(one.plan)
for name, couplings in (("all at once", together), ("pair by pair", alone)):
    found, count = around(couplings)
    print(f"{name}: {found} of {count} points come back to themselves")

# %%
# Lines join each cell of the first instrument with its likeliest partners. The clouds
# are drawn above each other. Little mass of the strays, at the sides, is matched.

fig, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
shift = np.array([0, 0.9])
for k, cloud in enumerate(clouds):
    at = cloud + k * shift
    points = ax.scatter(*at.T, c=kept[k], cmap="viridis", vmin=0, vmax=1, zorder=2)
for j in (1, 2):
    partner = result.conditional(0, j)
    for i in np.flatnonzero(kept[0] > 0.4):
        low = (
            clouds[0][i]
            if j == 1
            else clouds[1][result.conditional(0, 1)[i].argmax()] + shift
        )
        high = clouds[j][partner[i].argmax()] + j * shift
        ax.plot(*zip(low, high, strict=True), color="0.8", lw=0.8, zorder=1)
fig.colorbar(points, label="share of a cell's mass that is matched")
names = [f"instrument {k + 1}" for k in range(3)]
ax.set_yticks(0.3 + shift[1] * np.arange(3), names, rotation=90, va="center")
ax.set(xticks=[], title="Little mass of the strays is matched")
