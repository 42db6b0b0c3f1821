"""
A map between two images
========================

Two densities on a regular grid. ``mapuot.Grid`` multiplies along one axis after the
other, and needs little more memory than the images.
"""

# sphinx_gallery_thumbnail_number = 2
import numpy as np

import mapuot

grid = mapuot.Grid((96, 128), spacing=1 / 96)
x, y = np.moveaxis(grid.points().reshape(96, 128, 2), 2, 0)


def blobs(*places):
    """Return bumps at (row, column, radius) over a thin haze, of mass 1."""
    image = (
        sum(np.exp(-((x - u) ** 2 + (y - v) ** 2) / (2 * w * w)) for u, v, w in places)
        + 0.01
    )
    return image / image.sum()


a = blobs((0.3, 0.3, 0.08), (0.7, 0.4, 0.12))
b = blobs((0.3, 0.7, 0.1), (0.8, 1.0, 0.08))
result = mapuot.solve(grid, a, b, reg=0.002, reg_m=0.5)
print(result)

# %%
# ``plot.image`` draws the answer. Arrows lead from pixels of the first image to the
# mean of their targets. Where more mass is given than moved, it is left behind.

mapuot.plot.image(result)

# %%
# One of the images alone, with keywords of Matplotlib's ``imshow``.

mapuot.plot.image(result, show="given", cmap="magma")
