"""
Barycentres of shapes
=====================

The mean of two pictures as mass that moves from one to the other: balanced, debiased,
and unbalanced.
"""

# sphinx_gallery_thumbnail_number = 2
import matplotlib.pyplot as plt
import numpy as np

import mapuot

size = 32
grid = np.stack(
    np.meshgrid(*2 * [np.linspace(-1, 1, size)], indexing="ij"), -1
).reshape(-1, 2)
r = np.sqrt((grid**2).sum(1))
ring = ((r > 0.45) & (r < 0.75)).astype(float)
cross = ((np.abs(grid) < 0.15).any(1) & (r < 0.8)).astype(float)
A = np.stack([ring / ring.sum(), cross / cross.sum()])
M = ((grid[:, None] - grid) ** 2).sum(2)
t = np.linspace(0, 1, 5)[:, None]

# %%
# Five weightings are solved in one call. The blur of the first line comes from the
# entropy; ``debiased`` takes it away.

kinds = {
    "balanced": {},
    "debiased": {"debiased": True},
    "unbalanced": {"reg_m": 0.3, "debiased": True},
}
fig, panels = plt.subplots(3, 5, figsize=(8, 5), layout="constrained")
for line, (name, kind) in zip(panels, kinds.items(), strict=True):
    found = mapuot.barycenter(
        M, A, reg=0.01, weights=np.hstack([1 - t, t]), tol_change=1e-3, **kind
    )
    for ax, q in zip(line, found.q, strict=True):
        ax.imshow(q.reshape(size, size), cmap="gray_r")
        ax.set(xticks=[], yticks=[])
    line[0].set_ylabel(name)

# %%
# Halfway between ring and cross, unbalanced.

fig, ax = plt.subplots(figsize=(4, 4), layout="constrained")
ax.imshow(found.q[2].reshape(size, size), cmap="gray_r")
ax.set(title=f"halfway, mass {found.q[2].sum():.2f} of 1", xticks=[], yticks=[])
