"""
Choosing by what the plan should do
===================================

Patients of two groups are matched by thirty measurements. The right reg and reg_m are
hard to guess. It is easier to say that 70 % of the patients should find partners, and
how sharp the choice of partners should be.
"""

# sphinx_gallery_thumbnail_number = 2
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale

import mapuot

data = load_breast_cancer()
Z, ill = scale(np.log1p(data.data)), data.target == 0
cloud = mapuot.PointCloud(Z[ill], Z[~ill])
tuned = mapuot.tune(cloud, mass=0.7, sharpness=0.6, tol=1e-4)
print(f"reg {tuned.reg:.3g}, reg_m {tuned.reg_m:.3g} after {len(tuned.curve)} solves")

# %%
# The answers on the way, and the one that was asked for (the cross).

mass, sharpness = np.array([(one.mass, one.sharpness) for one in tuned.curve]).T
fig, ax = plt.subplots(figsize=(6, 4), layout="constrained")
regs = np.log10([one.problem.reg for one in tuned.curve])
points = ax.scatter(sharpness, mass, c=regs, s=80)
ax.plot(tuned.result.sharpness, tuned.result.mass, "r+", markersize=18, mew=2)
ax.set(
    title=f"Found after {len(tuned.curve)} solves", xlabel="sharpness", ylabel="mass"
)
fig.colorbar(points, label="log10 reg")

# %%
# The tumours with the largest radius resemble no benign one and stay without a match.

fig, ax = plt.subplots(figsize=(6, 4), layout="constrained")
ax.scatter(data.data[ill, 0], tuned.result.row_marginal * ill.sum(), s=14)
ax.set(title="Large tumours resemble no benign one")
ax.set(xlabel="mean radius of a malignant tumour", ylabel="moved / given mass")
