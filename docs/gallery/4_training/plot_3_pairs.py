"""
Pairs to train on, with labels
==============================

Two sets of handwritten digits are paired image by image. A generative model with a
condition, here the digit, needs pairs of the same digit: ``labels`` with a price for
unequal ones see to that. No pair is drawn twice.
"""

# sphinx_gallery_thumbnail_number = 2
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import mapuot

digits = load_digits()
names = "without labels", "with labels"
x, y = digits.data[:400] / 16, digits.data[400:800] / 16
labels = digits.target[:400], digits.target[400:800]
ways = ({}, {"labels": labels, "across": 20.0})
fig, panels = plt.subplots(2, 1, figsize=(8, 5.4), layout="constrained")
for ax, name, how in zip(panels, names, ways, strict=True):
    result = mapuot.solve_sample(x, y, reg=0.02, reg_m=0.5, scale_cost="median", **how)
    i, j = result.sample(300, seed=0, replace=False)
    wrong = labels[0][i] != labels[1][j]
    order = np.argsort(~wrong, kind="stable")[:10]  # pairs that differ come first
    pictures = [np.hstack(z[k[order]].reshape(-1, 8, 8)) for z, k in ((x, i), (y, j))]
    ax.imshow(np.insert(np.vstack(pictures), 8, 0.3, 0), cmap="gray_r")
    ax.set_title(f"{name}: {wrong.sum()} of 300 pairs change the digit")
    ax.axis("off")

# %%
# Some of the pairs with labels: in each column an image and its partner.

fig, ax = plt.subplots(figsize=(5, 3), layout="constrained")
pictures = [np.hstack(z[k[:6]].reshape(-1, 8, 8)) for z, k in ((x, i), (y, j))]
ax.imshow(np.insert(np.vstack(pictures), 8, 0.3, 0), cmap="gray_r")
ax.set_title("Above an image, below its partner")
ax.axis("off")
