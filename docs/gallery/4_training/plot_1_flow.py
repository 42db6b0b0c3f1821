"""
A gradient flow of points
=========================

Points follow the gradient of the debiased Sinkhorn divergence to a target.
``Result.gradient`` has it, with a bound on its error.
"""

# sphinx_gallery_thumbnail_number = 2
import matplotlib.pyplot as plt
import numpy as np

import mapuot

rng = np.random.default_rng(4)
x = rng.random((200, 2)) * 0.3
angle = rng.random(200) * 2 * np.pi
y = np.column_stack([np.cos(angle), np.sin(angle)]) * 0.5 + 0.5


def slope(x, y, reg=0.01, reg_m=1.0):
    """Return the gradient of the divergence by x.

    By symmetry, OT(x, x) / 2 has the gradient of OT(x, x) by its rows.
    """
    across = mapuot.solve(
        mapuot.PointCloud(x, y), reg=reg, reg_m=reg_m, tol=1e-4
    ).gradient()
    within = mapuot.solve(
        mapuot.PointCloud(x, x), reg=reg, reg_m=reg_m, tol=1e-4
    ).gradient()
    return across.x - within.x


frames = {0: x.copy()}
for step in range(1, 31):
    x = x - 0.3 * len(x) * slope(x, y)  # each point has mass 1 / n
    if step in (3, 10, 30):
        frames[step] = x.copy()

# %%
# The target is grey, the moving points are blue.

fig, panels = plt.subplots(
    2, 2, figsize=(7, 6.6), layout="constrained", sharex=True, sharey=True
)
for ax, (step, points) in zip(panels.flat, frames.items(), strict=True):
    ax.scatter(*y.T, s=14, color="lightgrey")
    ax.scatter(*points.T, s=14)
    ax.set_title(f"step {step}")
    ax.set_aspect("equal")

# %%
# The way of each point, from the square to the circle.

fig, ax = plt.subplots(figsize=(4.6, 4.4), layout="constrained")
way = np.stack([*frames.values()])  # (steps, points, 2)
ax.plot(way[..., 0], way[..., 1], color="tab:blue", alpha=0.3, linewidth=0.8)
ax.scatter(*y.T, s=14, color="tab:orange", label="target")
ax.scatter(*frames[0].T, s=14, color="tab:blue", label="start")
ax.set_aspect("equal")
fig.legend(loc="outside lower center", ncols=2)
