"""
From one handwritten digit to another
=====================================

The ink of a handwritten 3 becomes an 8, and a 1 becomes a 0, which takes more ink.
``metric="wfr"`` is a price for both moving and growing; ``Result.interpolate`` gives
points and masses at any time between.
"""

# sphinx_gallery_thumbnail_number = 2
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import mapuot

digits = load_digits()
places = (
    np.stack(np.meshgrid(range(8), range(8), indexing="ij"), -1).reshape(-1, 2) / 5.0
)  # 5 pixels: half a unit

# %%
# The columns are the times 0, 1/3, 2/3 and 1.


def draw(ax, way):
    x, y = way.points[:, 1], -way.points[:, 0]
    ax.scatter(
        x,
        y,
        s=3000 * way.masses,
        color=plt.rcParams["text.color"],
        alpha=0.6,
        linewidth=0,
    )
    ax.set(aspect="equal", xticks=[], yticks=[])
    ax.set_title(f"mass {way.masses.sum():.2f}")


fig, panels = plt.subplots(2, 4, figsize=(8, 4.6), layout="constrained")
for row, pair in zip(panels, ((3, 8), (1, 0)), strict=True):
    a, b = (digits.data[digits.target == digit][8] / 250 for digit in pair)
    cloud = mapuot.PointCloud(places, metric="wfr")
    result = mapuot.solve(cloud, a, b, reg=0.01, reg_m=1.0)
    for ax, t in zip(row, np.linspace(0, 1, 4), strict=True):
        draw(ax, result.interpolate(t))

# %%
# Halfway from the 1 to the 0.

fig, ax = plt.subplots(figsize=(4, 4.4), layout="constrained")
draw(ax, result.interpolate(0.5))
