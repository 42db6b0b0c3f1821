"""A user's program for `make lint`: mypy --strict checks the public types, and nobody runs it."""

import numpy as np

import mapuot
from mapuot.da import TransportOnto
from mapuot.wot import OTModel

M = np.ones((3, 4))
result: mapuot.Result = mapuot.solve(M, reg=0.1, reg_m=(1.0, np.inf))
bound: float = result.error_bound
again: mapuot.Result = mapuot.load("x.npz", M)
for one in mapuot.path(M, regs=[0.1], reg_ms=1.0):
    print(one.cost + bound)
batch: mapuot.BatchResult = mapuot.solve_batch(M, reg=0.1, reg_m=1.0)
first: mapuot.Result = batch[0]
i, j = result.sample(3)
classes, shares = result.push(["a", "b", "a"])
print(result.sparse(keep=0.9).nnz, mapuot.PointCloud(M, M).shape)
growth = OTModel(M, days=[0, 1, 2]).coupling(0, 1).growth
print(growth.sum(), TransportOnto(M).fit_transform(M))
