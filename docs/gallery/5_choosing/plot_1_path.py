"""
Choosing reg and reg_m by a path
================================

One call solves a list of problems, and starts each from the previous answer.
"""

# sphinx_gallery_thumbnail_number = 4
import matplotlib.pyplot as plt
import numpy as np

import mapuot

rng = np.random.default_rng(1)
x = rng.normal(size=(200, 2))
outliers = rng.normal(size=(50, 2)) * 0.3 + [6, 3]
y = np.vstack([rng.normal(size=(150, 2)) + [1.5, 0], outliers])
M = ((x[:, None] - y) ** 2).sum(-1)
M /= np.median(M)

# %%
# A smaller reg gives a sharper plan and takes more passes. Soon the answer hardly
# changes any more.

regs = [0.3, 0.1, 0.03, 0.01, 0.003]
by_reg = list(mapuot.path(M, regs=regs, reg_ms=1.0))
mapuot.plot.path(by_reg)

# %%
# With a larger reg_m more mass moves, in the end that of the outliers, too. Where the
# curve is flat, little depends on the choice.

reg_ms = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]
by_reg_m = list(mapuot.path(M, regs=[0.03] * len(reg_ms), reg_ms=reg_ms))
mapuot.plot.path(by_reg_m)

# %%
# The links that hold half of the mass, at the largest and at the smallest reg.

fig, panels = plt.subplots(1, 2, figsize=(7.4, 4), layout="constrained")
for result, ax in zip(by_reg[::4], panels, strict=True):
    mapuot.plot.links(result, x, y, ax=ax, keep=0.5)
    ax.set_title(f"reg {result.problem.reg}: {100 * result.mass:.0f} % moves")

# %%
# The mean target of each point at reg_m = 0.1: the outliers are left alone.

fig, ax = plt.subplots(figsize=(6, 4.4), layout="constrained")
mapuot.plot.arrows(by_reg_m[2], x, y, ax=ax)
