"""Device functions of the same content are one; what is compiled does not depend on what was."""

import compiled
import pytest

from nbflash.backends.simt.configs import forward_config as simt_forward
from nbflash.backends.simt.forward import fwd_simt_spec
from nbflash.backends.sm80.config import forward_configs
from nbflash.backends.sm80.forward import fwd_sm80_spec
from nbflash.cuda import launch
from nbflash.cuda.ptx import _shared


class Layout:
    """Known by its attributes."""

    def __init__(self, width):
        self.width = width


class Another(Layout):
    pass


def make_function(value):
    def fn(x):
        return x + value

    return fn


def make_around(value):
    fn = make_function(value)
    return lambda x: fn(x)


def make_recursive(value):
    def fn(x):
        return fn(x) + value

    return fn


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """The functions that are remembered: none yet, and those of this file are ours."""
    found = {}
    monkeypatch.setattr(_shared, "_known", found)
    monkeypatch.setattr(_shared, "_OURS", __name__)
    return found


def is_shared(first, second):
    return _shared.shared(first, lambda fn: [fn]) is _shared.shared(second, lambda fn: [fn])


VALUES = {
    "number": (64, 64, 65),
    "kind": (1, 1, True),
    "zeros": (0.0, 0.0, -0.0),
    "NaN": (float("nan"), float("nan"), 0.0),
    "tuple": ((1, (2, "a")), (1, (2, "a")), (1, (2, "b"))),
    "list": ([1, 2], [1, 2], (1, 2)),
    "layout": (Layout(1), Layout(1), Layout(2)),
    "class": (Layout(1), Layout(1), Another(1)),
    "function": (make_function(1), make_function(1), make_function(2)),
    "object": (make_function, make_function, object()),
}


@pytest.mark.parametrize("make", [make_function, make_around, make_recursive])
@pytest.mark.parametrize("values", VALUES)
def test_the_same_code_and_values(values, make):
    value, same, other = VALUES[values]
    assert is_shared(make(value), make(same))
    assert not is_shared(make(value), make(other))


def test_the_code_counts():
    assert not is_shared(make_function(1), make_recursive(1))


def test_a_default_counts():
    def make(value):
        return lambda x, y=value, *, z=value: x + y + z

    assert is_shared(make(1), make(1))
    assert not is_shared(make(1), make(2))


def test_what_may_change_is_not_shared(monkeypatch):
    def make(value):
        def fn(x):
            return later(x)

        made = _shared.shared(fn, lambda fn: [fn])
        later = make_function(value)
        return made, later

    assert make(1)[0] is not make(1)[0]
    monkeypatch.setattr(_shared, "_OURS", "nbflash")  # those of this file are a user's
    assert not is_shared(make_function(1), make_function(1))
    assert not is_shared(make_around(1), make_around(1))


def test_a_process_shares_from_a_moment_on(monkeypatch):
    monkeypatch.setattr(_shared, "_known", None)
    assert not is_shared(make_function(1), make_function(1))
    _shared.begin()
    assert is_shared(make_function(1), make_function(1))


def test_the_oldest_are_forgotten(known, monkeypatch):
    monkeypatch.setattr(_shared, "MOST", 2)
    one, *_ = (_shared.shared(make_function(n), lambda fn: [fn]) for n in (1, 2, 1, 3))
    assert len(known) == 2
    assert _shared.shared(make_function(1), lambda fn: [fn]) is one


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)])
def test_a_kernel_after_others_is_the_kernel_alone(capability, known, monkeypatch):
    """Of another architecture, and of another type."""
    monkeypatch.setattr(_shared, "_OURS", "nbflash")

    def code(dtype, capability=capability):
        spec = fwd_sm80_spec(forward_configs(dtype, 64, smem_limit=99 << 10)[0])
        return compiled.code_of(launch.compile_ptx(spec, capability))

    code("float16", (8, 6))
    before = len(known)
    after_others = [code("float16"), code("bfloat16")]
    assert before < len(known) < 2 * before
    alone = []
    for dtype in ("float16", "bfloat16"):
        known.clear()
        alone.append(code(dtype))
    assert after_others == alone


@pytest.mark.parametrize("make", [fwd_sm80_spec, fwd_simt_spec])
def test_numba_lowers_a_kernel_alike_for_every_architecture(make, monkeypatch):
    """Which is what `compiled.lowering_kept` rests on."""
    monkeypatch.setattr(compiled, "_lowered", {})
    configs = {fwd_sm80_spec: forward_configs("float16", 64, smem_limit=99 << 10)}
    configs[fwd_simt_spec] = [simt_forward("float32", 64, vectors=True, smem_limit=99 << 10)]
    spec = make(configs[make][0])
    found = []
    for capability in ((8, 0), (9, 0)):
        with compiled.lowering_kept("kernel"):
            found.append(compiled.code_of(launch.compile_ptx(spec, capability)))
    assert list(compiled._lowered) == ["kernel"]
    assert found[1] == compiled.code_of(launch.compile_ptx(spec, (9, 0))) != found[0]
