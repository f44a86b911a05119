"""Numbers that several layers share."""

import math

LOG2_E = math.log2(math.e)
LN2 = math.log(2.0)
