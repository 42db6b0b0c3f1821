"""
Colour transfer
===============

One photograph in the palette of another. Balanced transport has to use the whole
palette in its proportions; unbalanced transport leaves out colours that fit badly.
"""

# sphinx_gallery_thumbnail_number = 2
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_sample_image

import mapuot

photo, palette = (
    load_sample_image(name)[::4, ::4] / 255 for name in ("china.jpg", "flower.jpg")
)
rng = np.random.default_rng(6)
x, y = (
    image.reshape(-1, 3)[rng.choice(image[..., 0].size, 1000, replace=False)]
    for image in (photo, palette)
)
cloud = mapuot.PointCloud(x, y, scale=1 / 3)  # the largest possible cost is 1
pixels = photo.reshape(-1, 3)

# %%
# ``Result.map`` is defined for every colour, not only for the thousand colours of the
# sample.

shown = {"photograph": photo, "palette": palette}
for reg_m, name in ((np.inf, "balanced"), (0.1, "unbalanced, reg_m = 0.1")):
    moved = mapuot.solve(cloud, reg=0.007, reg_m=reg_m, tol=1e-4).map(pixels)
    shown[name] = np.clip(moved.reshape(photo.shape), 0, 1)
fig, panels = plt.subplots(2, 2, figsize=(8, 5.6), layout="constrained")
for ax, (name, image) in zip(panels.flat, shown.items(), strict=True):
    ax.imshow(image)
    ax.set_title(name)
    ax.axis("off")

# %%
# The unbalanced answer, larger.

fig, ax = plt.subplots(figsize=(6, 4.2), layout="constrained")
ax.imshow(image)
ax.set_title("Unbalanced: no dark green in the sky")
ax.axis("off")
