"""
Domain adaptation
=================

A classifier is trained where labels are known, moved to where they are not. The target lacks a class: balanced
transport must fill its place, unbalanced transport leaves it behind.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.neighbors import KNeighborsClassifier

from mapuot.da import UnbalancedSinkhornTransport

rng = np.random.default_rng(5)
centres = np.array([[0.0, 0.0], [3.0, 0.0], [1.5, 2.5]])
ys = rng.integers(0, 3, 300)
xs = centres[ys] + 0.5 * rng.normal(size=(300, 2))
yt = rng.integers(0, 2, 200)  # no third class here
xt = centres[yt] @ [[0.9, 0.45], [-0.45, 0.9]] + [1.2, 1.0] + 0.5 * rng.normal(size=(200, 2))

# %%
fig, panels = plt.subplots(1, 3, figsize=(12, 4), layout="constrained", sharex=True, sharey=True)
panels[0].scatter(*xs.T, c=ys, s=10, cmap="viridis")
panels[0].scatter(*xt.T, color="grey", s=10)
panels[0].set_title("source in colour, target in grey")
for ax, reg_m, name in ((panels[1], 1e3, "balanced, nearly"), (panels[2], 0.3, "unbalanced")):
    transport = UnbalancedSinkhornTransport(reg_e=0.02, reg_m=reg_m, norm="median")
    moved = transport.fit(xs, Xt=xt).transform(xs)
    share = transport.result_.row_marginal * len(xs)
    score = KNeighborsClassifier(7).fit(moved[share > 0.2], ys[share > 0.2]).score(xt, yt)
    ax.scatter(*moved.T, c=ys, s=40 * np.clip(share, 0.02, 1), cmap="viridis")
    ax.set_title(f"{name}: {100 * score:.0f} % right")
