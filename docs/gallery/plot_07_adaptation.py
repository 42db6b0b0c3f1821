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
centres = np.array([[0.0, 0.0], [3.0, 0.0], [1.5, 7.0]])
ys = rng.integers(0, 3, 300)
xs = centres[ys] + 0.5 * rng.normal(size=(300, 2))
yt = rng.integers(0, 2, 200)  # no third class here
turn = np.array([[np.cos(0.3), np.sin(0.3)], [-np.sin(0.3), np.cos(0.3)]])
xt = centres[yt] @ turn + [1.8, -0.5] + 0.5 * rng.normal(size=(200, 2))
print(f"as it is the classifier is right for {100 * KNeighborsClassifier(7).fit(xs, ys).score(xt, yt):.0f} %")

# %%
fig, panels = plt.subplots(1, 3, figsize=(12, 4), layout="constrained", sharex=True, sharey=True)
panels[0].scatter(*xs.T, c=ys, s=10, cmap="viridis")
panels[0].scatter(*xt.T, color="grey", s=10)
panels[0].set_title("source in colour, target in grey")
for ax, reg_m, name in ((panels[1], 1e3, "balanced, nearly"), (panels[2], 1.0, "unbalanced")):
    transport = UnbalancedSinkhornTransport(reg_e=0.01, reg_m=reg_m, norm="median")
    moved = transport.fit(xs, Xt=xt).transform(xs)
    share = transport.result_.row_marginal * len(xs)
    score = KNeighborsClassifier(7).fit(moved[share > 0.2], ys[share > 0.2]).score(xt, yt)
    ax.scatter(*moved.T, c=ys, s=40 * np.clip(share, 0.02, 1), cmap="viridis")
    ax.set_title(f"{name}: {100 * score:.0f} % right")
