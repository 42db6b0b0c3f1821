"""
One picture of each kind
========================

Every function of ``mapuot.plot``, with two types of cells on two days. Colours follow
the style of Matplotlib; keywords such as ``cmap=`` go to the function that draws.
"""

import matplotlib.pyplot as plt
import numpy as np

import mapuot

rng = np.random.default_rng(0)
early = np.repeat(["stem", "blood"], [160, 140])
late = np.repeat(["stem", "blood"], [60, 240])
x = 0.5 * rng.normal(size=(300, 2)) + 2.5 * (early == "blood")[:, None] * [1, 0.3]
y = 0.5 * rng.normal(size=(300, 2)) + 2.5 * (late == "blood")[:, None] * [1, 0.3]
y += [0.5, 0.8]
result = mapuot.solve_sample(x, y, reg=0.01, reg_m=0.2, scale_cost="median")

# %%
# ``arrows``: each point of the rows goes to the mean of its targets. More than 500
# arrows are a random sample.

mapuot.plot.arrows(result, x, y, labels=(early, late))

# %%
# ``links``: the pairs that hold most of the mass.

mapuot.plot.links(result, x, y, keep=0.5)

# %%
# ``masses``: points below 1 leave mass behind, above 1 mass is created.

mapuot.plot.masses(result, x)

# %%
# ``plan``: with ``labels``, points of one type are side by side.

mapuot.plot.plan(result, labels=(early, late))

# %%
# ``transitions``: the mass between types.

mapuot.plot.transitions(result, (early, late))

# %%
# ``convergence``: the certificate after every pass.

mapuot.plot.convergence(result)

# %%
# ``path``: how the answer depends on reg, or on reg_m.

costs = mapuot.PointCloud(x, y, scale=1 / result.scale_cost)
mapuot.plot.path(mapuot.path(costs, regs=[0.3, 0.1, 0.03, 0.01], reg_ms=0.2))

# %%
# ``image``: the answer of a `Grid`.

grid = mapuot.Grid((48, 64), spacing=1 / 48)
u, v = np.moveaxis(grid.points().reshape(48, 64, 2), 2, 0)
a = np.exp(-60 * ((u - 0.3) ** 2 + (v - 0.3) ** 2))
b = np.exp(-60 * ((u - 0.6) ** 2 + (v - 0.9) ** 2))
mapuot.plot.image(mapuot.solve(grid, a / a.sum(), b / b.sum(), reg=0.002, reg_m=0.5))

# %%
# A dark style.

with plt.style.context("dark_background"):
    mapuot.plot.arrows(result, x, y)
