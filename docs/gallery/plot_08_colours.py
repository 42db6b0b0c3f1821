"""
Colour transfer
===============

One photograph in the palette of another. Balanced transport must use the whole palette in its proportions, unbalanced
transport leaves out what fits badly.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_sample_image

import mapuot

photo, palette = (load_sample_image(name)[::4, ::4] / 255 for name in ("china.jpg", "flower.jpg"))
rng = np.random.default_rng(6)
x, y = (image.reshape(-1, 3)[rng.choice(image[..., 0].size, 1000, replace=False)] for image in (photo, palette))
cloud = mapuot.PointCloud(x, y, scale=1 / 3)  # the largest possible cost is 1
pixels = photo.reshape(-1, 3)


def recoloured(result):
    """Every pixel at the mean of the palette, by the potential of the columns; 2000 pixels at a time."""
    moved = np.empty_like(pixels)
    for i in range(0, len(pixels), 2000):
        costs = np.asarray(mapuot.PointCloud(pixels[i : i + 2000], y, scale=1 / 3))
        weight = (result.g - costs) / result.problem.reg
        weight = np.exp(weight - weight.max(1, keepdims=True))
        moved[i : i + 2000] = weight @ y / weight.sum(1, keepdims=True)
    return np.clip(moved.reshape(photo.shape), 0, 1)


# %%
fig, panels = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
shown = {"photograph": photo, "palette": palette}
for reg_m in (np.inf, 0.1):
    shown[f"reg_m = {reg_m}"] = recoloured(mapuot.solve(cloud, reg=0.007, reg_m=reg_m, tol=1e-4))
for ax, (name, image) in zip(panels.flat, shown.items(), strict=True):
    ax.imshow(image)
    ax.set_title(name)
    ax.axis("off")
