"""
Domain adaptation
=================

A classifier is trained on a source with labels and used on a target without. The target
lacks one class. Balanced transport has to move that class somewhere; unbalanced
transport leaves it behind.
"""

# sphinx_gallery_thumbnail_number = 3
import matplotlib.pyplot as plt
import numpy as np
from sklearn.neighbors import KNeighborsClassifier

import mapuot
from mapuot.da import UnbalancedSinkhornTransport

rng = np.random.default_rng(5)
centres = np.array([[0.0, 0.0], [3.0, 0.0], [1.5, 7.0]])
ys = rng.integers(0, 3, 300)
xs = centres[ys] + 0.5 * rng.normal(size=(300, 2))
yt = rng.integers(0, 2, 200)  # no third class here
turn = np.array([[np.cos(0.3), np.sin(0.3)], [-np.sin(0.3), np.cos(0.3)]])
xt = centres[yt] @ turn + [1.8, -0.5] + 0.5 * rng.normal(size=(200, 2))
score = KNeighborsClassifier(7).fit(xs, ys).score(xt, yt)
print(f"without a move the classifier is right for {100 * score:.0f} %")

# %%
fig, ax = plt.subplots(figsize=(5, 4), layout="constrained")
ax.scatter(*xs.T, c=ys, s=10, cmap="viridis")
ax.scatter(*xt.T, color="grey", s=10)
ax.set_title("source in colour, target in grey")

# %%
# The source after its move; the size of a point is the share of its mass that moves.

fig, panels = plt.subplots(
    1, 2, figsize=(8, 4), layout="constrained", sharex=True, sharey=True
)
for ax, reg_m, name in (
    (panels[0], 1e3, "nearly balanced"),
    (panels[1], 1.0, "unbalanced"),
):
    transport = UnbalancedSinkhornTransport(reg_e=0.01, reg_m=reg_m, norm="median")
    moved = transport.fit(xs, Xt=xt).transform(xs)
    share = transport.result_.row_marginal * len(xs)
    score = (
        KNeighborsClassifier(7).fit(moved[share > 0.2], ys[share > 0.2]).score(xt, yt)
    )
    ax.scatter(*moved.T, c=ys, s=40 * np.clip(share, 0.02, 1), cmap="viridis")
    ax.set_title(f"{name}: {100 * score:.0f} % right")

# %%
# The share of the mass of each sample of the source that moves: the class that the
# target lacks stays behind.

fig, ax = plt.subplots(figsize=(6, 4), layout="constrained")
mapuot.plot.masses(transport.result_, xs, ax=ax)
