"""The benchmark of mapuot: ``python -m bench NAME`` measures one part and writes JSON and PNG to build/bench."""

import os

# the peers run on the kernels that OpenBLAS chooses for this machine, whatever the caller's environment says
for _name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(_name, None)
