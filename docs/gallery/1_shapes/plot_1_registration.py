"""
Registration of a shape that lost a part
========================================

A shape is turned, and a part of it is cut off. Unbalanced transport finds which points
belong together, and which have no partner.
"""

# sphinx_gallery_thumbnail_number = 1
import matplotlib.pyplot as plt
import numpy as np

import mapuot

rng = np.random.default_rng(0)
t = np.sort(rng.random(250)) * 2 * np.pi
shape = np.column_stack([np.cos(t), np.sin(t)]) * (1 + 0.3 * np.cos(3 * t))[:, None]
angle = 0.35
turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
other = (shape @ turn.T)[t < 5.0] + 0.01 * rng.normal(size=((t < 5.0).sum(), 2))

a, b = (
    np.full(len(shape), 1 / 250),
    np.full(len(other), 1 / 250),
)  # the cut part is missing, not thinned


def rotation(x, y, w):
    """The rotation that brings x nearest to y, with weights w (Kabsch's formula)."""
    x, y = x - np.average(x, 0, w), y - np.average(y, 0, w)
    u, _, vt = np.linalg.svd((x * w[:, None]).T @ y)
    return (u @ vt).T


# %%
# Match the points, turn the shape by the match, and repeat. Each point counts by the
# mass that it moves, so that the part without a partner has no influence.

turned = shape
for _ in range(20):
    result = mapuot.solve(
        mapuot.PointCloud(turned, other), a, b, reg=0.005, reg_m=0.05, tol=1e-4
    )
    turned = (
        turned @ rotation(turned, result.barycentric_map(other), result.row_marginal).T
    )
whole = rotation(shape, turned, np.ones(len(shape)))
print(f"turned by {np.arctan2(whole[1, 0], whole[0, 0]):.2f}, in truth by {angle}")

# %%
# The lines join pairs that hold 90 % of the mass: the lost part has no partner.

fig, ax = plt.subplots(figsize=(6, 5), layout="constrained")
mapuot.plot.links(result, shape, other, ax=ax, keep=0.9)

# %%
# The turned shape. Colours are the share of each point's mass that moves.

fig, ax = plt.subplots(figsize=(6, 5), layout="constrained")
mapuot.plot.masses(result, turned, ax=ax)
