"""How Numba is asked to compile."""

from numba.cuda.core.targetconfig import TargetConfig
from numba.cuda.flags import Flags

from nbflash.cuda.ptx._asm import compiling_for


def test_options_of_a_compilation_are_those_of_numba():
    """With defaults, in the same order; Numba's own function is back when nothing compiles."""
    plain, chosen = Flags(), Flags()
    chosen.forceinline, chosen.enable_ssa = True, False
    expected = [list(flags.values().items()) for flags in (plain, chosen)]
    of_numba = TargetConfig.values
    with compiling_for((9, 0)):
        assert TargetConfig.values is not of_numba
        assert [list(flags.values().items()) for flags in (plain, chosen)] == expected
        assert plain != chosen
        assert plain == Flags()
    assert TargetConfig.values is of_numba
