"""
Sparse matching with forbidden pairs
====================================

Workers are matched to jobs, and a worker can only take a job that is near. Who finds
none stays without, and the pairs that matter are found without a threshold.
"""

import matplotlib.pyplot as plt
import numpy as np

import mapuot

rng = np.random.default_rng(2)
workers, jobs = rng.random((150, 2)), rng.random((120, 2)) * [1.4, 1.0]
distance = np.sqrt(((workers[:, None] - jobs) ** 2).sum(-1))
M = np.where(distance < 0.15, distance, np.inf)
a, b = np.full(150, 1.0), np.full(120, 1.0)
result = mapuot.solve(M, a, b, reg=0.01, reg_m=0.2, penalty="tv")
print(result)

# %%
# The lines are the fewest pairs that hold 95 % of the matched mass; the rings are
# workers without a job.

pairs = result.sparse(keep=0.95)
print(f"{pairs.nnz} of {np.isfinite(M).sum()} allowed pairs hold 95 % of the mass")
fig, ax = plt.subplots(figsize=(7, 5), layout="constrained")
mapuot.plot.links(result, workers, jobs, ax=ax, keep=0.95)
alone = result.row_marginal < 0.05
ax.scatter(*workers[alone].T, s=60, facecolors="none", edgecolors="0.5")
