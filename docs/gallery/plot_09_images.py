"""
A map between two images
========================

Two densities on a regular grid. ``mapuot.Grid`` multiplies along one axis after the other, and needs little more memory
than the images.
"""

import matplotlib.pyplot as plt
import numpy as np

import mapuot

grid = mapuot.Grid((96, 128), spacing=1 / 96)
x, y = np.moveaxis(grid.points().reshape(96, 128, 2), 2, 0)


def blobs(*places):
    """Return bumps at (row, column, radius) over a thin haze, of mass 1."""
    image = sum(np.exp(-((x - u) ** 2 + (y - v) ** 2) / (2 * w * w)) for u, v, w in places) + 0.01
    return image / image.sum()


a = blobs((0.3, 0.3, 0.08), (0.7, 0.4, 0.12))
b = blobs((0.3, 0.7, 0.1), (0.8, 1.0, 0.08))
result = mapuot.solve(grid, a, b, reg=0.002, reg_m=0.5)
way = (result.barycentric_map(grid.points()) - grid.points()).reshape(96, 128, 2)
print(result)

# %%
# Arrows show where pixels of the first image go. The lower pictures are the mass that leaves each pixel and the mass
# that arrives, as shares of what is there.

fig, panels = plt.subplots(2, 2, figsize=(8, 5.6), layout="constrained")
both = result.row_marginal.reshape(96, 128) / a, result.col_marginal.reshape(96, 128) / b
titles = "from", "to", "share that leaves", "share that arrives"
for ax, image, title in zip(panels.flat, (a, b, *both), titles, strict=True):
    fig.colorbar(ax.imshow(image, cmap="magma" if ax in panels[1] else "Blues"), ax=ax)
    ax.set(title=title, xticks=[], yticks=[])
some = (slice(4, None, 8), slice(4, None, 8))
rows, columns = np.mgrid[:96, :128]
panels[0, 0].quiver(
    columns[some], rows[some], 96 * way[some][..., 1], 96 * way[some][..., 0],
    angles="xy", scale_units="xy", scale=1, width=0.003, color="darkorange",
)  # fmt: skip
