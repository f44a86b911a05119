"""Numbers that several layers share, and what kernels multiply scores with."""

import math

LOG2_E = math.log2(math.e)
LN2 = math.log(2.0)
# Of what tensor-core kernels multiply: at scale 0 2^(S · scale) is 1, but −∞ · scale −∞.
LEAST_SCALE = 1e-30

#: Bytes of an element, by the dtype of a tensor.
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

#: Query tokens of a sequence that one call of `decode` takes.
MAX_QUERIES = 64

#: The dtypes that tensor-core kernels take.
HALF_PRECISION = "bfloat16", "float16"

#: Bytes of the widest load: tensor-core kernels read rows in such pieces, from a multiple of it on.
VECTOR_BYTES = 16

#: Threads of a warp.
WARP = 32

#: Tokens that lie together, from a multiple of their number on, in a rank's part of a sequence with
#: dropout: CUDA kernels look up the place of each such block.
DROPOUT_BLOCK = 64


def score_factor(scale, scored):
    """What scores are multiplied with: they are in base 2, those of score functions natural."""
    return scale * (1.0 if scored else LOG2_E)


def tensor_core_factor(scale, scored):
    """`score_factor` where kernels negate Q for a scale below 0, at least `LEAST_SCALE`."""
    return max(score_factor(abs(scale), scored), LEAST_SCALE)
