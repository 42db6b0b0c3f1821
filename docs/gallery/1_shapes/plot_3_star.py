"""
A barycentre with its couplings
===============================

Three shapes of unequal mass are matched to a fourth marginal of which nothing is known:
a star with a free centre. The plan's marginal at the centre is the barycentre of the
shapes. The same plan couples it with each shape, and the shapes with each other.
"""

import matplotlib.pyplot as plt
import numpy as np

import mapuot

size = 28
grid = np.stack(
    np.meshgrid(*2 * [np.linspace(-1, 1, size)], indexing="ij"), -1
).reshape(-1, 2)
r = np.sqrt((grid**2).sum(1))
ring = (r > 0.5) & (r < 0.75)
cross = (np.abs(grid) < 0.12).any(1) & (r < 0.8)
square = (np.abs(grid).max(1) < 0.7) & (np.abs(grid).max(1) > 0.45)
shapes = [grid[x] for x in (ring, cross, square)]
masses = [
    np.full(len(x), mass / len(x))
    for x, mass in zip(shapes, (1.0, 1.2, 0.8), strict=True)
]

# %%
# Marginal 3 is the centre. It may lie on any point of the grid, and its mass is
# ``None``, that is unknown.

costs = {(k, 3): mapuot.PointCloud(shapes[k], grid) for k in range(3)}
result = mapuot.multimarginal(costs, [*masses, None], reg=0.02, reg_m=1.0)
print(result)

# %%
# The barycentre.

fig, ax = plt.subplots(figsize=(4, 4.2), layout="constrained")
centre = result.marginal(3).reshape(size, size)
ax.imshow(centre, extent=(-1, 1, 1, -1), cmap="gray_r")
ax.set(title=f"barycentre, mass {centre.sum():.2f}", xticks=[], yticks=[])

# %%
# The three shapes. The colour of a point is the angle at which its mass lies in the
# barycentre, as ``conditional`` tells.

fig, panels = plt.subplots(1, 3, figsize=(9, 3.4), layout="constrained")
for k, (ax, shape) in enumerate(zip(panels, shapes, strict=True)):
    to = result.conditional(k, 3) @ grid
    angle = np.arctan2(to[:, 0], to[:, 1])
    ax.scatter(shape[:, 1], shape[:, 0], c=angle, cmap="hsv", s=16)
    ax.set(xlim=(-1, 1), ylim=(1, -1), aspect="equal", xticks=[], yticks=[])
    ax.set_title(f"mass {masses[k].sum():.1f}")
fig.suptitle("Points of one colour meet in the barycentre")

# %%
# The plan also knows where each point of the ring lies in the square, and how far that
# is on average.

print(np.abs(result.conditional(0, 2) @ shapes[2] - shapes[0]).mean().round(3))
