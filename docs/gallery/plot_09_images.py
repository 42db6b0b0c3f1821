"""
A map between two images
========================

Densities on a regular grid: `mapuot.Grid` multiplies along the axes, in the memory of the images.
"""

import matplotlib.pyplot as plt
import numpy as np

import mapuot

grid = mapuot.Grid((96, 128), spacing=1 / 96)
x, y = np.moveaxis(grid.points().reshape(96, 128, 2), 2, 0)


def blobs(*places):
    """Bumps at (row, column, radius), over a thin haze; mass 1."""
    image = sum(np.exp(-((x - u) ** 2 + (y - v) ** 2) / (2 * w * w)) for u, v, w in places) + 0.01
    return image / image.sum()


a = blobs((0.3, 0.3, 0.08), (0.7, 0.4, 0.12))
b = blobs((0.3, 0.7, 0.1), (0.8, 1.0, 0.08))
result = mapuot.solve(grid, a, b, reg=0.002, reg_m=0.5)
way = (result.barycentric_map(grid.points()) - grid.points()).reshape(96, 128, 2)
print(result)

# %%
# Where each pixel of the first image goes, and how much leaves it.

fig, panels = plt.subplots(1, 3, figsize=(13, 3.4), layout="constrained")
for ax, image, title in (
    (panels[0], a, "from"),
    (panels[1], b, "to"),
    (panels[2], result.row_marginal.reshape(96, 128) / a, "what leaves, by what is there"),
):
    fig.colorbar(ax.imshow(image, cmap="magma" if ax is panels[2] else "Blues"), ax=ax, shrink=0.8)
    ax.set_title(title)
some = (slice(4, None, 8), slice(4, None, 8))
rows, columns = np.mgrid[:96, :128]
panels[0].quiver(
    columns[some], rows[some], 96 * way[some][..., 1], 96 * way[some][..., 0],
    angles="xy", scale_units="xy", scale=1, width=0.003, color="darkorange",
)  # fmt: skip
