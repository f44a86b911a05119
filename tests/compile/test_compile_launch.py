"""How Numba is asked to compile, and what its PTX becomes."""

import re

from compiled import compile_ptx
from numba.cuda.core.targetconfig import TargetConfig
from numba.cuda.flags import Flags

from nbflash.backends.sm90.decode.config import decode_config
from nbflash.backends.sm90.decode.kernel import decode_sm90_spec
from nbflash.cuda.ptx._asm import compiling_for


def test_tensor_maps_are_parameters_by_value():
    """128 bytes each, aligned; their addresses become generic before they are used."""
    spec = decode_sm90_spec(decode_config("float16", 64, None))
    ptx = compile_ptx(spec, (9, 0))
    for name in (f"{spec.name}_param_{i}" for i in range(spec.maps)):
        assert f".param .align 64 .b8 {name}[128]" in ptx
        assert f"[{name}]" not in ptx
        first, *others = re.findall(rf"(.*), {name};\n\t(.*)", ptx)
        assert re.fullmatch(r"\s*mov\.b64 %rd\d+", first[0])
        register = first[0].split()[-1]
        assert first[1] == f"cvta.param.u64 {register}, {register};"
        assert not others


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
