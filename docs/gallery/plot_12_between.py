"""
From one handwritten digit to another
=====================================

The ink of a handwritten 3 becomes an 8, and a 1 becomes a 0 that has more of it. ``metric="wfr"`` prices a way by its
length and by growth on it; `Result.interpolate` gives points and masses at any time between.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import mapuot

digits = load_digits()
places = np.stack(np.meshgrid(range(8), range(8), indexing="ij"), -1).reshape(-1, 2) / 5.0  # 5 pixels: half a unit
fig, panels = plt.subplots(2, 6, figsize=(12, 4), layout="constrained")
for row, pair in zip(panels, ((3, 8), (1, 0)), strict=True):
    a, b = (digits.data[np.flatnonzero(digits.target == digit)[8]] / 250 for digit in pair)
    cloud = mapuot.PointCloud(places, metric="wfr")
    result = mapuot.solve(cloud, a, b, reg=0.01, reg_m=1.0)
    for ax, t in zip(row, np.linspace(0, 1, 6), strict=True):
        way = result.interpolate(t)
        ax.scatter(way.points[:, 1], -way.points[:, 0], s=3000 * way.masses, color="black", alpha=0.6, linewidth=0)
        ax.set(title=f"t = {t:.1f}, mass {way.masses.sum():.2f}", aspect="equal", xticks=[], yticks=[])
