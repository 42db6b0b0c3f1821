"""
A gradient flow of points
=========================

Points roll down the debiased Sinkhorn divergence to a target, by ``Result.gradient``, which has a bound of its error.
"""

import matplotlib.pyplot as plt
import numpy as np

import mapuot

rng = np.random.default_rng(4)
x = rng.random((200, 2)) * 0.3
angle = rng.random(200) * 2 * np.pi
y = np.column_stack([np.cos(angle), np.sin(angle)]) * 0.5 + 0.5


def slope(x, y, reg=0.01, reg_m=1.0):
    """The gradient of the divergence by x; by symmetry that of OT(x, x) / 2 is the one of its rows."""
    across = mapuot.solve(mapuot.PointCloud(x, y), reg=reg, reg_m=reg_m, tol=1e-4).gradient()
    within = mapuot.solve(mapuot.PointCloud(x, x), reg=reg, reg_m=reg_m, tol=1e-4).gradient()
    return across.x - within.x


frames = {0: x.copy()}
for step in range(1, 31):
    x = x - 0.3 * len(x) * slope(x, y)  # each point has mass 1 / n
    if step in (3, 10, 30):
        frames[step] = x.copy()

# %%
fig, panels = plt.subplots(1, 4, figsize=(12, 3.2), layout="constrained", sharex=True, sharey=True)
for ax, (step, points) in zip(panels, frames.items(), strict=True):
    ax.scatter(*y.T, s=6, color="lightgrey")
    ax.scatter(*points.T, s=6)
    ax.set_title(f"step {step}")
    ax.set_aspect("equal")
