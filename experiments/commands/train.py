"""train: tokens a second of GPT-2 with nbflash's attention beside torch's, and the operator's cost.

The model is that of transformers, of random weights; every step is forward, backward and AdamW on
bytes of source files, under autocast on a CUDA device. The logits of nbflash are checked before
anything is timed.
"""

from functools import partial

from experiments.harness import sweeps
from experiments.harness.backends import open_backend
from experiments.harness.console import progress, say
from experiments.harness.errors import BadInput, OutOfBudget
from experiments.harness.passes import NBFLASH
from experiments.harness.provenance import provenance
from experiments.harness.timing import WallClock, host_time, interleave
from experiments.report.tables import show, write_csv, wrote
from nbflash.testing import assert_within_reference

SDPA, SPARSE = "sdpa", "nbflash-sparse"
_CHECKED = 4096  # tokens whose scores all heads hold in float64 at once
COLUMNS = {"model": "", "tokens": "d", "batch": "d", "attention": "", "ms a step": ".2f"}
COLUMNS |= {"p10": ".2f", "p90": ".2f", "tokens/s": ",.0f", "/ sdpa": ".3f", "loss": ".3f"}
KEYS = ("model", "tokens", "batch", "attention", "median_ms", "p10_ms", "p90_ms")
KEYS += ("tokens_per_s", "over_sdpa", "loss")


def run(out, quick, device, seed):
    """Measure what the sweep says, print a table and write ``train.csv`` into ``out``."""
    try:
        import torch
        import transformers  # noqa: F401 - the models are its own
    except ImportError as error:
        raise BadInput(f"train needs torch and transformers: {error}") from None
    backend, sweep = open_backend(device), sweeps.load("train")
    settings = sweep["quick" if quick else "full"]
    torch.manual_seed(seed)
    rows = []
    with progress("training", len(settings["sizes"])) as tick:
        for size in settings["sizes"]:
            rows += _of_size(backend.device, sweep, settings, size, seed)
            tick()
    made = provenance(backend.device)
    path = out / "train.csv"
    write_csv(path, [row | made for row in rows])
    show("GPT-2, random weights", COLUMNS, ([row[key] for key in KEYS] for row in rows))
    if backend.device == "cuda":
        for line in _host_times(sweep["cuda"]):
            say(line)
    wrote(path)


def _of_size(device, sweep, settings, size, seed):
    name, tokens, batch = size
    models = {x: _model(sweep, name, tokens, x, device, seed) for x in (SDPA, NBFLASH, SPARSE)}
    dtype = sweep[device]["dtype"]
    _check(models, next(_batches(tokens, batch, device, seed))[:1, :_CHECKED], dtype)
    steps = {
        x: _step(model, _batches(tokens, batch, device, seed), dtype) for x, model in models.items()
    }
    losses = {}
    timings = interleave(
        steps,
        WallClock(),
        rounds=settings["rounds"],
        seconds=settings["seconds"],
        warmup=2,
        seed=seed,
        keep=losses.__setitem__,
    )
    rates = {x: tokens * batch / timing.median * 1e3 for x, timing in timings.items()}
    return [
        {"model": name, "tokens": tokens, "batch": batch, "attention": x}
        | timings[x].columns
        | {"tokens_per_s": rates[x], "over_sdpa": rates[x] / rates[SDPA], "loss": losses[x]}
        for x in models
    ]


def _model(sweep, name, tokens, attention, device, seed):
    from experiments.papers.language import make_model

    layers, heads, width = sweep["models"][name]
    spec = {"kind": "gpt2", "layers": layers, "heads": heads, "width": width, "vocabulary": 256}
    return make_model(spec, tokens, attention, seed, sweep["block"], device)


def _batches(tokens, batch, device, seed):
    """Endless bytes of source files (batch, tokens)."""
    import torch

    from experiments.papers import texts

    text = torch.frombuffer(bytearray(texts.packages("train")), dtype=torch.uint8)
    draw = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - tokens, (batch,), generator=draw).tolist()
        yield torch.stack([text[start : start + tokens] for start in starts]).long().to(device)


def _cast(device, dtype):
    import torch

    return torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32")


def _check(models, tokens, dtype):
    """OutOfBudget unless nbflash's logits are as close to float64 as those of torch."""
    import copy

    import torch

    found = {}
    with torch.no_grad():
        for name in (SDPA, NBFLASH):
            with _cast(tokens.device.type, dtype):
                found[name] = models[name](tokens).logits
        exact = copy.deepcopy(models[SDPA]).double()(tokens).logits
    got, plain, exact = (x.double().cpu().numpy() for x in (found[NBFLASH], found[SDPA], exact))
    try:
        assert_within_reference(got, exact, plain, "logits")
    except AssertionError as failure:
        raise OutOfBudget(f"no timing is reported, {failure}") from None


def _step(model, text, dtype):
    """A step of training, which returns its loss: it waits for the device."""
    import torch

    device = next(model.parameters()).device.type
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device == "cuda")

    def step():
        tokens = next(text)
        with _cast(device, dtype):
            loss = model(input_ids=tokens, labels=tokens).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        return loss.item()

    return step


def _host_times(sweep):
    """Microseconds of the host for a call of the operator and its backward pass."""
    import torch

    from nbflash.torch import attention

    batch, tokens, heads, head_dim = sweep["host_sizes"]
    made = torch.randn(4, batch, tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    q, k, v, dout = made.unbind()
    given = [x.requires_grad_() for x in (q, k, v)]

    def sdpa(q, k, v):
        swapped = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*swapped).transpose(1, 2)

    for name, call in ((NBFLASH, attention), (SDPA, sdpa)):
        forward = partial(call, *given)
        out = forward()
        backward = partial(torch.autograd.grad, out, given, dout, retain_graph=True)
        backward()
        times = [1e3 * host_time(x, sweep["host_calls"]).median for x in (forward, backward)]
        yield f"{name}: {times[0]:.1f} µs of the host forward, {times[1]:.1f} backward"
