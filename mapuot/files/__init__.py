"""Problems and answers in files: .npy, .npz, HDF5 and Zarr, rows at a time.

``file.h5:group/M`` names an array inside a file. ``read`` makes a cost from a file, so this package imports the package
of the costs, which does not know files.
"""

from .checkpoint import Checkpoint, load_checkpoint
from .formats import FORMATS, LIBRARIES, library, split_answer, split_name
from .read import find_vector, names_along, open_cost, open_matrix, opened, read_values, read_vector
from .remote import is_url
from .write import Blocks, complete, refuse_folder, write

__all__ = ["load_checkpoint", "open_matrix", "read_vector"]
