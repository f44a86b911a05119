"""CUDA arrays on a machine without a GPU: what is launched, and what is refused."""

import contextlib
import sys
import types

import numpy as np
import pytest
from cuda_arrays import LSE_SHAPE, SHAPE, DeviceArray, Foreign, ForeignByDLPack, device_arrays

import masks
import nbflash
from nbflash.backends.simt.decode_host import SimtPartial
from nbflash.cuda import availability
from nbflash.inputs import arrays
from nbflash.inputs.arrays import (
    alignment,
    in_rows,
    meet,
    native,
    overlaps,
    reach,
    resident,
    signature,
    span,
)
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.decode_problem import Cache, DecodeProblem
from nbflash.inputs.problem import check_forward
from nbflash.inputs.tensors import CudaTensor
from nbflash.planning import plan as planning


@pytest.mark.parametrize("wrap", [lambda x: x, Foreign, ForeignByDLPack], ids=["cupy", "cai", "dl"])
def test_cuda_arrays_run_on_simt_without_a_copy(executor, wrap):
    q, k, v, dout = device_arrays(4)
    out, lse = nbflash.attention(*map(wrap, (q, k, v)), causal=True, return_lse=True)
    assert type(out) is type(lse) is DeviceArray
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (SHAPE, q.dtype, LSE_SHAPE, np.float32)
    assert executor.calls.pop() == (q, k, v, out, lse)
    dlse, options = DeviceArray(LSE_SHAPE), {"causal": True, "deterministic": True}
    for given in ({}, {"dlse": wrap(dlse)}):
        arrays_given = map(wrap, (dout, q, k, v, out, lse))
        gradients = nbflash.attention_backward(*arrays_given, **given, **options)
        *operands, passed = executor.calls[-1][:7]
        assert operands == [dout, q, k, v, out, lse]
        assert executor.calls[-1][7:] == (*gradients, True)
        assert [(x.shape, x.dtype) for x in gradients] == [(SHAPE, q.dtype)] * 3
        assert (passed is dlse) == ("dlse" in given)
        assert (passed.shape, passed.dtype) == (LSE_SHAPE, np.float32)


def test_without_dlse_one_zero_serves_every_call(executor):
    q, k, v, dout = device_arrays(4)
    _, pullback = nbflash.plan(q, k, v).vjp(q, k, v)
    pullback(dout)
    pullback(dout)
    (*_, zero, _, _, _, _), (*_, again, _, _, _, _) = executor.calls[1:]
    assert zero is again
    assert zero.strides == (0, 0, 0)


def test_a_seed_in_cuda_memory_stays_there(executor):
    """It may change under a CUDA graph; two integers are passed as they are."""
    q, k, v = device_arrays(3)
    state = DeviceArray((2,), np.uint64)
    for seed, passed in ((state, state), (Foreign(state), state), (7, (7, 0))):
        out, lse = nbflash.attention(q, k, v, dropout=0.5, seed=seed, return_lse=True)
        assert executor.calls.pop()[5] == passed
        nbflash.attention_backward(out, q, k, v, out, lse, dropout=0.5, seed=seed)
        assert executor.calls.pop()[11] == passed
    with pytest.raises(ValueError, match="seed is on CUDA device 1 but q is in cuda memory, dev"):
        nbflash.attention(q, k, v, dropout=0.5, seed=DeviceArray((2,), np.int64, device_id=1))
    with pytest.raises(ValueError, match="seed is on CUDA device 0 but q is in cpu memory"):
        nbflash.attention(*np.ones((3, *SHAPE), np.float32), dropout=0.5, seed=state)
    assert executor.calls == []


def test_auto_on_cuda_arrays_is_simt_and_the_same_plan(executor):
    q, k, v = device_arrays(3)
    plan = nbflash.plan(q, k, v)
    assert plan.impl == "simt"
    assert nbflash.plan(*device_arrays(3)) is plan
    assert nbflash.plan(q, k, v, impl="simt") is plan
    assert nbflash.why_not("auto", q, k, v) == []


def test_out_is_the_object_that_was_given(executor):
    q, k, v, out = device_arrays(4)
    wrapped = Foreign(out)
    for _ in range(2):
        assert nbflash.attention(q, k, v, out=wrapped) is wrapped
        assert nbflash.plan(q, k, v)(q, k, v, out=wrapped)[0] is wrapped
        assert [call[3] for call in executor.calls] == [out, out]
        executor.calls.clear()


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_host_implementations_refuse_cuda_arrays(executor, impl):
    with pytest.raises(ValueError, match=f"{impl} runs on NumPy arrays, got CUDA arrays"):
        nbflash.attention(*device_arrays(3), impl=impl)
    assert executor.calls == []


def test_the_simulator_refuses_cuda_arrays(executor, monkeypatch):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    with pytest.raises(ValueError, match="runs on NumPy arrays, got CUDA arrays"):
        nbflash.attention(*device_arrays(3), impl="simt")


def test_cuda_arrays_and_host_arrays_do_not_mix(executor):
    q, k, v = device_arrays(3)
    for host in ("q", "k", "v", "out"):
        given = {"q": q, "k": k, "v": v, "out": DeviceArray(SHAPE), host: np.zeros(SHAPE, "f4")}
        with pytest.raises(TypeError, match="move them to one device"):
            nbflash.attention(**given)
    assert executor.calls == []


@pytest.mark.parametrize("name", ["k", "v", "out"])
def test_cuda_arrays_of_two_devices_do_not_mix(executor, name):
    given = dict(zip(("q", "k", "v", "out"), device_arrays(4), strict=True))
    nbflash.attention(**given)
    given[name] = DeviceArray(SHAPE, device_id=1)
    match = f"{name} is on CUDA device 1 but q is on device 0"
    with pytest.raises(ValueError, match=match):
        nbflash.attention(**given)
    assert len(executor.calls) == 1


@pytest.mark.parametrize("name", ["dout", "out", "lse", "dlse"])
def test_gradients_of_two_devices_do_not_mix(executor, name):
    given = dict(zip(("dout", "q", "k", "v", "out"), device_arrays(5), strict=True))
    given["lse"], given["dlse"] = DeviceArray(LSE_SHAPE), DeviceArray(LSE_SHAPE)
    nbflash.attention_backward(**given)
    given[name] = DeviceArray(given[name].shape, device_id=1)
    with pytest.raises(ValueError, match=f"{name} is on CUDA device 1 but q is on device 0"):
        nbflash.attention_backward(**given)
    assert len(executor.calls) == 1


@pytest.mark.parametrize("name", ["lse_a", "out_b", "lse_b"])
def test_parts_of_two_devices_do_not_merge(cupy, name):
    shapes = {"out_a": SHAPE, "lse_a": LSE_SHAPE, "out_b": SHAPE, "lse_b": LSE_SHAPE}
    given = {x: DeviceArray(shape, device_id=int(x == name)) for x, shape in shapes.items()}
    with pytest.raises(ValueError, match=f"{name} is on CUDA device 1 but out_a is on device 0"):
        nbflash.merge(**given)


def test_out_must_not_overlap_cuda_inputs(executor):
    q, k, v = device_arrays(3)
    size = q.size * 4
    for _ in range(2):  # the second time as one of a layout that is known
        for shift in (0, 128, -128, size - 4, 4 - size):
            out = DeviceArray(SHAPE, address=k.data.ptr + shift)
            with pytest.raises(ValueError, match="out must not overlap k"):
                nbflash.attention(q, k, v, out=out)
        for shift in (size, -size):
            nbflash.attention(q, k, v, out=DeviceArray(SHAPE, address=k.data.ptr + shift))


def test_arrays_among_the_parameters_of_a_score_become_resident(monkeypatch):
    """Numbers stay, and what is in CUDA memory already."""
    monkeypatch.setattr(arrays, "resident", lambda tables: [x.tolist() for x in tables])
    device = DeviceArray((4,))
    given = (np.arange(2), 3, 0.5), (), (device,)
    assert arrays.resident_params(given) == (([0, 1], 3, 0.5), (), (device,))


@pytest.mark.parametrize(
    ("at", "expected"), [(-32, False), (-28, True), (0, True), (60, True), (64, False)]
)
def test_addresses_that_meet(at, expected, cupy):
    """Of arrays of 64 and 32 bytes; where the third lies does not matter."""
    far = DeviceArray((16,), address=1 << 20)
    arrays = DeviceArray((16,), address=4096), far, DeviceArray((8,), address=4096 + at)
    assert meet(list(map(reach, arrays)), arrays) is expected


def test_interleaved_cuda_memory_does_not_overlap(cupy):
    """Rows of 32 bytes, 64 bytes apart: even rows against odd rows, and against themselves."""
    even, odd = (DeviceArray((4, 8), strides=(64, 4), address=4096 + 32 * i) for i in (0, 1))
    assert not overlaps(even, odd)
    assert overlaps(even, DeviceArray((4, 8), strides=(64, 4), address=4096 + 28))
    assert overlaps(even, DeviceArray((1,), address=4096 + 64))
    assert not overlaps(even, DeviceArray((1,), address=4096 + 32))


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((2, 3), (12, 4), (100, 124)),
        ((2, 3), (-12, 4), (88, 112)),
        ((2, 3), (0, 4), (100, 112)),
        ((2, 0), (12, 4), (100, 100)),
        ((), (), (100, 104)),
    ],
)
def test_span_is_the_range_of_addresses(shape, strides, expected):
    assert span(DeviceArray(shape, strides=strides, address=100)) == expected


def test_alignment_divides_addresses_and_strides(cupy):
    whole = DeviceArray(SHAPE, address=4096)
    assert alignment(whole, whole) == 16
    assert alignment(whole, DeviceArray(SHAPE, address=4104)) == 8
    assert alignment(DeviceArray(SHAPE, address=4100), whole) == 4
    assert alignment(DeviceArray(SHAPE, strides=(3000, 500, 36, 4), address=4096)) == 4
    # The stride of an axis of length 1 is never used.
    assert alignment(DeviceArray((1, 6, 4, 8), strides=(4, 128, 32, 4), address=4096)) == 16
    assert alignment(np.zeros(SHAPE, np.float16)) == 2
    assert check_forward(*[whole] * 3).alignment == 16
    for which in range(3):
        given = [DeviceArray(SHAPE, address=4096 + 8 * (i == which)) for i in range(3)]
        assert check_forward(*given).alignment == 8


def test_plans_of_less_aligned_memory_are_different(executor):
    plans = {
        shift: nbflash.plan(
            *(DeviceArray(SHAPE, address=2**41 + i + shift) for i in (0, 2**20, 2**21))
        )
        for shift in (0, 4, 8, 16)
    }
    assert plans[0] is plans[16]
    assert [plans[shift].problem.alignment for shift in (0, 4, 8)] == [16, 4, 8]


def test_a_plan_called_with_another_layout_runs_the_plan_of_that_layout(executor, monkeypatch):
    prepared = []
    monkeypatch.setattr(planning, "prepare", lambda *what: prepared.append(what) or executor)
    q, k, v = device_arrays(3)
    plan = nbflash.plan(q, k, v, causal=True)
    other = [DeviceArray(SHAPE, strides=(3072, 512, 64, 4), address=2**42 + 8) for _ in range(3)]
    for _ in range(2):
        plan(*other)
        plan(q, k, v)
    assert len(executor.calls) == 4
    (_, spec), (_, other_spec) = prepared
    assert spec.problem is plan.problem
    assert spec.mask is other_spec.mask is plan.mask
    assert other_spec.problem == check_forward(*other)


def test_signature_holds_what_a_plan_depends_on(cupy):
    x = DeviceArray(SHAPE, address=4096)
    assert signature(x) == signature(DeviceArray(SHAPE, address=8192))
    for other in (
        DeviceArray((2, 6, 8, 4), address=4096),
        DeviceArray(SHAPE, np.int32, address=4096),
        DeviceArray(SHAPE, device_id=1, address=4096),
        DeviceArray(SHAPE, strides=(0, 128, 32, 4), address=4096),
        DeviceArray(SHAPE, address=4097),
    ):
        assert signature(x) != signature(other)


def test_empty_cuda_problems_write_without_a_kernel(cupy, monkeypatch):
    monkeypatch.setattr(availability, "why_not_cuda", lambda: [])
    q, k = DeviceArray(SHAPE), DeviceArray((2, 0, 4, 8))
    out, lse = nbflash.attention(q, k, k, return_lse=True, impl="simt")
    assert (out.filled, lse.filled) == (0, -np.inf)


def test_cuda_arrays_without_cupy_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    x = Foreign(DeviceArray(SHAPE))
    with pytest.raises(
        ImportError, match=r"CUDA arrays need CuPy: pip install 'nbflash\[cuda12\]'"
    ):
        nbflash.attention(x, x, x)


def test_cuda_memory_that_cannot_be_shared_names_the_argument(cupy):
    def refuse(x):
        raise BufferError("no such layout")

    cupy.from_dlpack = refuse
    q = DeviceArray(SHAPE)
    with pytest.raises(
        TypeError, match=r"k \(.*ForeignByDLPack\) cannot be shared: no such layout"
    ):
        native(q=q, k=ForeignByDLPack(q))


def test_memory_of_a_plan_is_not_of_a_pool(cupy, executor, monkeypatch):
    """A pool would hand it on while another stream writes to it, and JAX takes its buffer back."""
    allocators, made = ["pool"], []

    @contextlib.contextmanager
    def using_allocator(allocator):
        allocators.append(allocator)
        yield
        allocators.pop()

    monkeypatch.setattr(cupy.cuda, "using_allocator", using_allocator)
    monkeypatch.setattr(cupy, "ndarray", lambda *what: made.append(allocators[-1]))
    planning.AttentionPlan(AttentionSpec(check_forward(*device_arrays(3)), masks.dense(6)), "simt")
    assert made == [None]


def test_gradients_without_a_kernel_do_not_stop_attention(executor, monkeypatch):
    """Kernels to be compiled are bound together, those of gradients where there are any."""

    def refuse():
        raise ValueError("no backward kernel within the shared memory of this device")

    monkeypatch.setattr(
        executor, "bind_forward", lambda: types.SimpleNamespace(is_cold=lambda: True)
    )
    monkeypatch.setattr(executor, "bind_backward", refuse, raising=False)
    nbflash.attention(*device_arrays(3), return_lse=True)
    assert len(executor.calls) == 1


def test_tables_are_there_before_another_stream_reads_them(cupy):
    """Outside the pool, and the host waits for the copies: kernels of any stream may follow."""
    found, tables = [], [np.arange(6).reshape(2, 3).T, np.ones(4)]

    @contextlib.contextmanager
    def using_allocator(allocator):
        found.append(allocator)
        yield
        found.append("again")

    stream = types.SimpleNamespace(synchronize=lambda: found.append("waited"))
    cupy.cuda.using_allocator = using_allocator
    cupy.cuda.get_current_stream = lambda: stream
    cupy.asarray = lambda x: found.append(x.flags.c_contiguous) or x
    copied = resident(tables)
    assert found == [None, True, True, "again", "waited"]
    for x, y in zip(copied, tables, strict=True):
        np.testing.assert_array_equal(x, y)


def test_masks_of_cuda_problems_stay_on_the_host(executor):
    q, k, v = device_arrays(3)
    mask = masks.causal(6) & masks.local(6, block=2)
    assert nbflash.plan(q, k, v, mask).mask is mask


def test_tensors_of_other_alignment_are_planned_anew():
    """An address counts modulo 16, no more."""
    one, other, again = (
        CudaTensor(
            types.SimpleNamespace(
                shape=(1, 2, 3, 8),
                dtype="torch.float16",
                data_ptr=lambda at=at: at,
                get_device=lambda: 0,
                stride=lambda: (48, 24, 8, 1),
            )
        ).signature
        for at in (4096, 4098, 8192)
    )
    assert one == again != other


@pytest.mark.parametrize("odd", [None, "q", "k_cache", "v_cache"])
def test_decode_takes_vectors_where_all_three_allow_them(odd):
    """The host's arrays say nothing of addresses: these are as on a device."""
    shapes = {"q": (2, 1, 2, 16), "k_cache": (2, 32, 2, 16), "v_cache": (2, 32, 2, 16)}
    given = {
        name: DeviceArray(shape, address=(1 << 40) + 4 * (name == odd))
        for name, shape in shapes.items()
    }
    problem = DecodeProblem(2, 1, 2, 2, 16, 32, None, "float32", "float32", 0.25, "cuda", 0)
    q, *caches = given.values()
    config = SimtPartial.config_for(problem, None, q, Cache(*caches, None))
    assert config.vectors == (odd is None)


def test_rows_that_are_not_contiguous_are_copied():
    """A last axis of one has no distance, and arrays without axes have none."""
    x = np.arange(24.0).reshape(2, 3, 4)
    for same in (
        x,
        x[:1],
        x[:, ::2],
        x[::-1],
        x[..., :1],
        x[..., 1::4],
        x[0, 0, 0:1],
        np.float64(1),
    ):
        assert in_rows(np.asarray(same)).strides == np.asarray(same).strides
    for other in (
        x[..., ::2],
        x[..., ::-1],
        x[:1, :, ::2],
        x.T,
        np.broadcast_to(x[..., :1], x.shape),
    ):
        copied = in_rows(other)
        assert copied.flags.c_contiguous
        np.testing.assert_array_equal(copied, other)
