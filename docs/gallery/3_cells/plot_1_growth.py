"""
A population over time, with growth
===================================

Cells of three fates are sampled at three times. One fate divides, one dies. Growth
iterations learn these rates from the counts alone; then descendants and ancestors are
followed through both steps.
"""

# sphinx_gallery_thumbnail_number = 2
import matplotlib.pyplot as plt
import numpy as np

import mapuot
from mapuot.wot import OTModel

rng = np.random.default_rng(3)
centres, rates = (
    np.array([[0.0, 0.0], [4.0, 0.0], [2.0, 4.0]]),
    np.array([2.0, 1.0, 0.5]),
)
X, days, fate = [], [], []
for day in range(3):
    share = rates**day / (rates**day).sum()
    kinds = rng.choice(
        3, 300, p=share
    )  # a sample: 300 cells a day, whatever the population
    X.append(centres[kinds] + [0.4 * day, 0.3 * day] + 0.4 * rng.normal(size=(300, 2)))
    days += [day] * 300
    fate += list(kinds)
X, days, fate = np.vstack(X), np.array(days), np.array(fate)

# %%
# The rates come out as multiples of their mean. They were 2 : 1 : 1/2.

model = OTModel(X, days=days, epsilon=0.05, lambda1=1.0, lambda2=50.0, growth_iters=8)
growth = model.coupling(0, 1).growth
for kind in range(3):
    print(
        f"fate {kind}: growth {growth[fate[days == 0] == kind].mean():.2f} of the mean"
    )

# %%
# Where are the descendants of the first fate after one and after two days? The colour
# of a cell is its share of their mass.

first = fate[days == 0] == 0
fig, panels = plt.subplots(1, 3, figsize=(9, 3.4), layout="constrained", sharey=True)
for day, ax in enumerate(panels):
    share = first if day == 0 else model.descendants(first, 0, day)
    dots = ax.scatter(*X[days == day].T, c=share / share.max(), s=8, cmap="viridis")
    ax.set_title(f"day {day}: {'descendants' if day else 'the first fate'}")
fig.colorbar(dots, ax=panels, label="mass of a cell / the largest")

# %%
# The table of transitions says the same in numbers.

step = model.coupling(0, 1).result
names = np.array(["dividing", "steady", "dying"])[fate]
mapuot.plot.transitions(step, (names[days == 0], names[days == 1]))

# %%
# All days can also be one problem, a chain of three marginals. On the left the fate of
# each cell of day 0: the share of its descendants on day 2 that are of the first kind.
# On the right the mass by which it is their ancestor.

clouds = [X[days == day] for day in range(3)]
costs = {
    (day, day + 1): mapuot.PointCloud(clouds[day], clouds[day + 1]) for day in range(2)
}
chain = mapuot.multimarginal(
    costs, [np.full(300, 1 / 300)] * 3, reg=0.02, reg_m=0.05, scale_cost="mean"
)
pairs = chain.pair(0, 2)
mass = pairs[:, fate[days == 2] == 0].sum(1)
shown = {
    "fate": (mass / pairs.sum(1), "share of a cell's descendants"),
    "ancestors": (mass / mass.max(), "mass of a cell / the largest"),
}
fig, panels = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained", sharey=True)
for ax, (title, (values, label)) in zip(panels, shown.items(), strict=True):
    dots = ax.scatter(*clouds[0].T, c=values, s=8, cmap="viridis", vmin=0)
    fig.colorbar(dots, ax=ax, label=label)
    ax.set_title(f"day 0: {title} of the first kind")
