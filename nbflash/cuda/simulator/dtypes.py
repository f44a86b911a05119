"""NumPy dtypes of what device code calls a type."""

import numpy as np
from numba.cuda import types
from numba.cuda.np.numpy_support import as_dtype

from nbflash.cuda.simulator.errors import SimError


def numpy_dtype(dtype):
    """The NumPy dtype of a Numba type or of anything NumPy takes."""
    if isinstance(dtype, types.Type):
        if "bfloat16" in str(dtype):
            raise SimError("the simulator carries bfloat16 as uint16 bits")
        return as_dtype(dtype)
    return np.dtype(dtype)
