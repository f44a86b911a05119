"""nbflash.torch on the device: nbflash's bits; torch's streams, memory, graphs, random numbers."""

import importlib.util
import threading

import cupy
import pytest
from device_runs import bits, gallery, make_qkv, run

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

from nbflash import torch as nt

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
by_dtype = pytest.mark.parametrize("dtype", DTYPES)


def kernels(**parameters):
    """Compiled when they are needed."""
    return []


def as_tensors(arrays, dtype):
    raw = [torch.from_dlpack(x.view("uint8")).view(DTYPES[dtype]) for x in arrays]
    return [*(x.requires_grad_() for x in raw[:3]), raw[3]]


def as_arrays(tensors):
    return [cupy.from_dlpack(x.detach().contiguous().view(torch.uint8)) for x in tensors]


@pytest.fixture(scope="module")
def mask():
    return gallery(150, 150)["butterfly-causal"]


def inputs(dtype):
    return make_qkv(2, 150, 150, 4, 2, 64, dtype)


def forward_and_backward(tensors, mask=None, **options):
    *given, dout = tensors
    out, lse = nt.attention(*given, mask, return_lse=True, deterministic=True, **options)
    return [out, lse, *torch.autograd.grad(out, given, dout)]


@by_dtype
def test_same_bits_as_cupy(dtype, mask):
    arrays = inputs(dtype)
    got = forward_and_backward(as_tensors(arrays, dtype), mask)
    assert bits(as_arrays(got)) == bits(run(arrays, mask, deterministic=True, impl="auto"))


@by_dtype
def test_any_strides(dtype, mask):
    tensors = as_tensors(inputs(dtype), dtype)
    whole = bits(as_arrays(forward_and_backward(tensors, mask)))
    layouts = [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    ]
    if dtype == "bfloat16":  # rows that are not aligned are copied
        layouts.append(lambda x: torch.cat([x[..., :1], x], dim=-1)[..., 1:])
    for layout in layouts:
        views = [layout(x.detach()).requires_grad_(x.requires_grad) for x in tensors]
        assert bits(as_arrays(forward_and_backward(views, mask))) == whole


def test_on_a_stream_behind_work_of_torch(mask):
    tensors = as_tensors(inputs("bfloat16"), "bfloat16")
    whole = bits(as_arrays(forward_and_backward(tensors, mask)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = [torch.zeros_like(x) for x in tensors]
        torch.cuda._sleep(100_000_000)
        for x, y in zip(late, tensors, strict=True):
            x.copy_(y.detach())
        late = [*(x.requires_grad_() for x in late[:3]), late[3]]
        got = forward_and_backward(late, mask)
        assert not stream.query()  # nothing has waited
    stream.synchronize()
    assert bits(as_arrays(got)) == whole


@by_dtype
def test_in_a_thread_of_its_own(dtype, mask):
    """Nothing of CUDA's runtime has run there: memory that torch has kept is given again."""
    tensors, found = as_tensors(inputs(dtype), dtype), []
    whole = bits(as_arrays(forward_and_backward(tensors, mask)))
    for work in (
        lambda: nt.attention(*tensors[:3], mask, return_lse=True),
        lambda: forward_and_backward(tensors, mask),
    ):
        thread = threading.Thread(target=lambda work=work: found.append(work()))
        thread.start()
        thread.join()
    alone, both = found
    assert bits(as_arrays(alone)) == whole[:2]
    assert bits(as_arrays(both)) == whole


def test_memory_is_that_of_torch(mask):
    tensors = as_tensors(inputs("bfloat16"), "bfloat16")
    forward_and_backward(tensors, mask)
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes(), torch.cuda.memory_allocated()
    results = forward_and_backward(tensors, mask)
    assert pool.total_bytes() == before[0]
    held = sum(-(-x.untyped_storage().nbytes() // 512) * 512 for x in results)
    assert torch.cuda.memory_allocated() - before[1] <= held  # scratch has been given back


def captured(step):
    """A CUDA graph of ``step``, warmed up, and what it writes."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step()
    return graph, results


@by_dtype
def test_graph_reads_its_inputs_anew(dtype, mask):
    tensors = as_tensors(inputs(dtype), dtype)
    graph, results = captured(lambda: forward_and_backward(tensors, mask))
    with torch.no_grad():
        for x in tensors:
            x.mul_(0.5)
    graph.replay()
    noise = torch.full((1 << 22,), torch.nan, device="cuda")  # not in memory of the graph
    graph.replay()
    want = forward_and_backward(tensors, mask)
    assert bits(as_arrays(results)) == bits(as_arrays(want))
    assert noise.isnan().all()


def test_graph_draws_anew_at_every_replay(mask):
    tensors = as_tensors(inputs("bfloat16"), "bfloat16")
    graph, (out, *_) = captured(lambda: forward_and_backward(tensors, mask, dropout=0.25))
    seen = []
    for seed in (1, None, 1):
        if seed is not None:
            torch.cuda.manual_seed(seed)
        graph.replay()
        seen.append(bits(as_arrays([out])))
    assert seen[0] == seen[2] != seen[1]


def test_compiled():
    tensors = as_tensors(inputs("bfloat16"), "bfloat16")

    def layer(q, k, v):
        return 2 * nt.attention(q, k, v, causal=True, deterministic=True)  # exact, fused or not

    compiled = torch.compile(layer, fullgraph=True)
    got, want = (
        torch.autograd.grad(f(*tensors[:3]), tensors[:3], tensors[3]) for f in (compiled, layer)
    )
    assert bits(as_arrays(got)) == bits(as_arrays(want))


def test_computed_bias_makes_no_plan(mask):
    from nbflash.planning import cache

    *given, dout = as_tensors(inputs("bfloat16"), "bfloat16")
    weight = torch.randn(4, 150, device="cuda", requires_grad=True)

    def step():
        bias = (weight[:, :, None] * weight[:, None]).unsqueeze(0).bfloat16()
        out = nt.attention(*given, mask, score=nt.scores.bias(bias))
        return torch.autograd.grad(out, [weight, *given], dout)

    first = step()
    plans = len(cache.plans)
    kept = [torch.empty(1 << 20, device="cuda") for _ in range(3)]  # other addresses
    for a, b in zip(first, step(), strict=True):
        torch.testing.assert_close(a, b)
    assert len(cache.plans) == plans
    del kept


def test_decode_is_that_of_cupy():
    import nbflash

    q, k, v, _ = (x.detach() for x in as_tensors(inputs("bfloat16"), "bfloat16"))
    lengths = torch.tensor([150, 70], dtype=torch.int32, device="cuda")
    got = nt.decode(q[:, -3:], k, v, lengths, return_lse=True)
    arrays = make_qkv(2, 150, 150, 4, 2, 64, "bfloat16")
    given = arrays[0][:, -3:], *arrays[1:3], cupy.from_dlpack(lengths)
    assert bits(as_arrays(got)) == bits(nbflash.decode(*given, return_lse=True))


def small_gpt2():
    transformers = pytest.importorskip("transformers")

    import nbflash.huggingface  # noqa: F401

    sizes = {"n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 97}
    config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="nbflash")
    return model.cuda().bfloat16()


def test_transformers_model_generates_and_trains():
    model = small_gpt2()
    ids = torch.randint(3, 97, (2, 16), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    for cache in (None, "static"):
        options = {} if cache is None else {"cache_implementation": cache, "disable_compile": True}
        tokens = model.eval().generate(ids, max_new_tokens=6, pad_token_id=0, **options)
        assert tokens.shape[1] <= 22


@torch.no_grad()
def test_transformers_model_in_a_graph():
    model = small_gpt2().eval()
    from nbflash.huggingface import mask_of

    first, later = torch.randint(3, 97, (2, 2, 16), device="cuda")
    mask = mask_of(2, 16, 16)
    expected = [model(ids, attention_mask=mask).logits for ids in (first, later)]
    graph, ids = torch.cuda.CUDAGraph(), first.clone()
    with torch.cuda.graph(graph):
        got = model(ids, attention_mask=mask).logits
    for given, logits in zip((first, later), expected, strict=True):
        ids.copy_(given)
        graph.replay()
        assert torch.equal(got, logits)
    refusal = pytest.raises(RuntimeError, match="mask_of")
    with refusal, torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(ids, use_cache=False)
