"""A user's mistakes, one a line; for mypy --strict a ``type: ignore`` without a mistake is an error, too."""

import numpy as np

import mapuot

M = np.ones((3, 4))
x = np.ones((3, 2))
result = mapuot.solve(M, reg=0.1, reg_m=1.0)

mapuot.solve(M, reg=0.1, reg_m=1.0, penalty="kk")  # type: ignore[arg-type]
mapuot.solve(M, reg=0.1, reg_m=1.0, backend="gpus")  # type: ignore[arg-type]
mapuot.solve(M, reg="a", reg_m=1.0)  # type: ignore[arg-type]
mapuot.solve(M, eps=0.1, reg_m=1.0)  # type: ignore[call-arg]
mapuot.solve_sample(x, reg=0.1, reg_m=1.0)  # type: ignore[call-arg]
mapuot.solve(M, reg=0.1, reg_m=1.0, max_passes="many")  # type: ignore[arg-type]
print(result.plann)  # type: ignore[attr-defined]
mapuot.sinkhorn(M, reg=0.1)  # type: ignore[attr-defined]
mapuot.PointCloud(x, metric="l1")  # type: ignore[arg-type]
