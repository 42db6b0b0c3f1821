"""
A barycentre with its couplings
===============================

Three shapes of unequal mass around a marginal of which nothing is known: a star with a free centre. The plan's marginal
there is their barycentre, and the same plan couples it with each shape, and the shapes with each other.
"""

import matplotlib.pyplot as plt
import numpy as np

import mapuot

size = 28
grid = np.stack(np.meshgrid(*2 * [np.linspace(-1, 1, size)], indexing="ij"), -1).reshape(-1, 2)
r = np.sqrt((grid**2).sum(1))
ring = (r > 0.5) & (r < 0.75)
cross = (np.abs(grid) < 0.12).any(1) & (r < 0.8)
square = (np.abs(grid).max(1) < 0.7) & (np.abs(grid).max(1) > 0.45)
shapes = [grid[x] for x in (ring, cross, square)]
masses = [np.full(len(x), mass / len(x)) for x, mass in zip(shapes, (1.0, 1.2, 0.8), strict=True)]

# %%
# Marginal 3 is the centre: any point of the grid, with mass ``None``.

costs = {(k, 3): mapuot.PointCloud(shapes[k], grid) for k in range(3)}
result = mapuot.multimarginal(costs, [*masses, None], reg=0.02, reg_m=1.0)
print(result)

# %%
# On the left the barycentre; then each shape, in the colours of the angle at which its mass lies in the barycentre,
# as ``conditional`` tells.

fig, panels = plt.subplots(1, 4, figsize=(10, 2.8), layout="constrained")
centre = result.marginal(3).reshape(size, size)
panels[0].imshow(centre, extent=(-1, 1, 1, -1), cmap="gray_r")
panels[0].set_title(f"barycentre, mass {centre.sum():.2f}")
for k, (ax, shape) in enumerate(zip(panels[1:], shapes, strict=True)):
    to = result.conditional(k, 3) @ grid
    ax.scatter(shape[:, 1], shape[:, 0], c=np.arctan2(to[:, 0], to[:, 1]), cmap="hsv", s=8)
    ax.set(xlim=(-1, 1), ylim=(1, -1), aspect="equal", title=f"mass {masses[k].sum():.1f}")
for ax in panels:
    ax.set(xticks=[], yticks=[])

# %%
# What the centre hides and the plan knows: where the ring lies in the square.

print(np.abs(result.conditional(0, 2) @ shapes[2] - shapes[0]).mean().round(3))
