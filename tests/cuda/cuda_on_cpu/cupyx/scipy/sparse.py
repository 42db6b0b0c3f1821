"""Sparse matrices as in cupyx.scipy.sparse: arrays of the emulated CuPy, and ``get`` converts to SciPy's."""

import cupy
from scipy import sparse


class spmatrix:  # noqa: N801
    def __init__(self, value, shape=None):
        self.host = self.kind(tuple(map(cupy.ndarray.get, value)) if shape else value, shape)
        self.shape, self.dtype, self.nnz, self.ndim = self.host.shape, self.host.dtype, self.host.nnz, 2

    def __getattr__(self, name):
        if name not in ("data", "indices", "indptr", "row", "col"):
            raise AttributeError(name)
        return cupy.asarray(getattr(self.host, name))

    def __add__(self, other):
        return type(self)(self.host + other.host)

    def get(self):
        return self.host.copy()


csr_matrix, csc_matrix, coo_matrix = (
    type(name, (spmatrix,), {"kind": getattr(sparse, name)}) for name in ("csr_matrix", "csc_matrix", "coo_matrix")
)
