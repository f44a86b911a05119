"""PTX instructions that order, copy or sum memory, by their names."""

import re

ORDERS = re.compile(
    r"\b(mbarrier\.\w+|fence|atom|red|bar\.\w+|wgmma\.(fence|commit|wait)\w*"
    r"|cp\.(reduce\.)?async|createpolicy|membar|barrier|griddepcontrol"
    r"|ld\.acquire|st\.release)[. ;]"
)
