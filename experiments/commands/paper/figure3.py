"""Figure 3: runtime and memory of exact, sparse and approximate attention by sequence length.

Exact and sparse methods are checked before they are timed, without dropout. What runs out of
memory, or has no kernel for a case, is a row that says so. Rows are written as they are measured:
``--resume`` goes on where a run ended, and ``--minutes`` ends one in time.
"""

from itertools import product

import numpy as np

from experiments.harness.console import left_out, progress, say
from experiments.harness.errors import BadInput, OutOfBudget, one_line
from experiments.harness.journal import Journal
from experiments.harness.oracle import Oracle, Relative, sample_rows
from experiments.harness.passes import BACKWARD, BOTH, FORWARD, PASSES
from experiments.harness.runner import Runner, Task
from experiments.harness.setup import set_up
from experiments.libraries.torch_base import why_not_torch
from experiments.report.tables import show, wrote
from nbflash.inputs.arrays import native

KEYS = ("variant", "pass", "method", "seqlen")
OUT_OF_MEMORY = "out of memory"


def run(out, quick=False, device="auto", seed=0, resume=False, minutes=None, method=()):
    """Measure what the sweep says; the table, ``paper-figure3.csv`` and ``.png`` go to ``out``."""
    if reason := why_not_torch("cpu"):
        raise BadInput(f"figure3 needs torch: {reason}")
    from experiments.report.paper_figures import draw_figure3

    setup = set_up("paper-figure3", "quick" if quick else "full", device, seed=seed)
    journal = Journal(out / "paper-figure3.csv", KEYS, resume, minutes, setup.origin)
    measure(setup, journal, method)
    paper = setup.settings["paper"]
    if journal.rows:
        report(journal.rows, paper)
        draw_figure3(journal.rows, paper, out / "paper-figure3.png")
        wrote(out / "paper-figure3.csv", out / "paper-figure3.png")


def measure(setup, journal, chosen=()):
    """Add the rows of the sweep that the journal lacks, of each variant short sequences first."""
    from experiments.papers.methods import METHODS

    settings = setup.settings
    names = chosen or settings["methods"] or METHODS
    if unknown := [name for name in names if name not in METHODS]:
        raise BadInput(f"--method {unknown[0]}: expected one of {', '.join(METHODS)}")
    cases = list(product(settings["variants"], settings["seqlen"], names))
    with progress("Figure 3", len(cases)) as advance:
        for variant, n, name in cases:
            if journal.is_late:
                say("Time is over: --resume continues here.")
                return
            for row in _of_method(setup, journal, n, variant, name, METHODS[name]):
                journal.add(row | {"seed": settings["seed"]} | setup.origin)
            advance()


def _of_method(setup, journal, n, variant, name, method):
    """Rows of the passes that are missing for one method, length and variant."""
    settings = setup.settings
    todo = [
        {"variant": variant, "pass": which, "method": name, "seqlen": n}
        for which in settings["passes"]
    ]
    todo = [row for row in todo if row not in journal]
    if not todo:
        return
    lanes = settings["batch"] * settings["heads"]
    sizes = {key: settings[key] for key in ("batch", "heads", "head_dim")}
    common = {"kind": method.kind, "dtype": settings["dtype"].name} | sizes
    most = settings.get("most_score_bytes")
    scores = lanes * n * n * settings["dtype"].itemsize
    if method.is_quadratic and most is not None and scores > most:
        yield from (
            row | common | _result(f"left out: {scores / 1e9:.1f} GB of scores") for row in todo
        )
        return
    case = _Case(setup, n, variant, method)
    for row in todo:
        yield row | common | case.measure(row["pass"])


class _Case:
    """One method at one length: its inputs, its check and its calls."""

    def __init__(self, setup, n, variant, method):
        import torch

        from experiments.papers.methods import Problem

        settings = setup.settings
        self._setup, self._method = setup, method
        batch, seed = settings["batch"], settings["seed"]
        lengths = None
        if "mask" in variant:
            drawn = np.random.default_rng(seed).integers(n // 2, n + 1, batch)
            lengths = tuple(int(x) for x in drawn)
        p = settings["dropout"] if "dropout" in variant else 0.0
        sizes = n, settings["head_dim"], batch, lengths
        self._problem = Problem(*sizes, p, setup.backend.device, seed)
        self._unchecked = Problem(*sizes, 0.0, setup.backend.device, seed)
        generator = torch.Generator(setup.backend.device).manual_seed(seed)
        shape = batch, settings["heads"], n, settings["head_dim"]
        how = {"generator": generator, "device": setup.backend.device}
        dtype = getattr(torch, settings["dtype"].name)
        *inputs, self._dout = (torch.randn(shape, **how).to(dtype) for _ in range(4))
        self._inputs = [x.requires_grad_() for x in inputs]
        self._oracle = None

    def measure(self, which):
        """Columns of a pass: times and memory, or the reason why there are none."""
        import torch

        try:
            call = self._call(which, self._method.make(self._problem))
            if self._method.mask is not None:
                self._check(which)
            memory = self._memory(which)
            runner = Runner(self._setup.clock, self._setup.settings)
            timing = runner.measure({which: lambda: Task(call)})[which].timing
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return _result(OUT_OF_MEMORY)
        except OutOfBudget:
            raise
        except (RuntimeError, NotImplementedError, ValueError) as error:
            if self._setup.backend.device != "cpu":
                torch.cuda.synchronize()  # raises where the context is lost
            return _result(one_line(error)[:200])
        return _result("", timing.columns | {"memory_mb": memory})

    def _call(self, which, attention):
        """What is timed: torch's graph of the forward pass is made before a backward pass."""
        import torch

        gradients = lambda out: torch.autograd.grad(
            out, self._inputs, self._dout, retain_graph=which == BACKWARD, allow_unused=True
        )
        if which == BACKWARD:
            out = attention(*self._inputs)
            return lambda: gradients(out)
        if which == BOTH:
            return lambda: gradients(attention(*self._inputs))

        inputs = [x.detach() for x in self._inputs]
        return lambda: attention(*inputs)

    def _check(self, which):
        """Hold the method without dropout to its budget, on one head of the first batch entry."""
        setup, problem = self._setup, self._unchecked
        public = [_array(x) for x in (*self._inputs, self._dout)]
        rows = sample_rows(problem.n, setup.settings["check_rows"], setup.settings["seed"])
        if self._oracle is None:
            mask = self._method.expected(problem)
            given = {"planes": [(0, 0)], "measure": Relative}
            self._oracle = Oracle(setup.backend, public, mask, rows, **given)
        result = self._call(which, self._method.make(problem))()
        name, result = ("out", result) if which == FORWARD else ("dq", result[0])
        self._oracle.check(**{name: _array(result)})

    def _memory(self, which):
        """Megabytes at most while a call runs, inputs among them; None on a CPU."""
        import torch

        if self._setup.backend.device == "cpu":
            return None
        torch.cuda.reset_peak_memory_stats()
        self._call(which, self._method.make(self._problem))()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 2**20


def _array(x):
    """(batch, seqlen, heads, head_dim) of a tensor with heads first, in the same memory."""
    (array,) = native(x=x.detach().transpose(1, 2))
    return array


def _result(status, measured=None):
    empty = dict.fromkeys(("median_ms", "p10_ms", "p90_ms", "rounds", "memory_mb"))
    return empty | (measured or {}) | {"status": status}


def paper_ms(paper, row):
    """What the paper printed for a row; None where it has nothing."""
    found = paper.get(row["variant"], {}).get(row["pass"], {}).get(row["method"], [])
    return _at(paper, found, row)


def paper_mb(paper, row):
    """The paper's memory, which is that of forward and backward together."""
    return _at(paper, paper["memory"].get(row["method"], []), row)


def _at(paper, values, row):
    by_length = dict(zip(paper["seqlen"], values, strict=False))
    return by_length.get(int(row["seqlen"]))


def report(rows, paper):
    """A table for each variant and pass: methods by length, ours and the paper's."""
    lengths = sorted({int(row["seqlen"]) for row in rows})
    for variant, which in product(dict.fromkeys(x["variant"] for x in rows), PASSES):
        of = [x for x in rows if (x["variant"], x["pass"]) == (variant, which)]
        if not of:
            continue
        title = (
            f"{which}, {variant or 'neither dropout nor mask'}: ms ({paper['device']}: the paper's)"
        )
        _show(title, of, lengths, "median_ms", lambda row: paper_ms(paper, row), ".2f")
        if which == BOTH and any(row["memory_mb"] for row in of):
            title = f"{which}, {variant or 'neither dropout nor mask'}: MB at most (the paper's)"
            _show(title, of, lengths, "memory_mb", lambda row: paper_mb(paper, row), ".0f")
    reasons = {(x["method"], x["variant"], x["status"]) for x in rows if x["status"]}
    for name, variant, status in sorted(reasons):
        if status != OUT_OF_MEMORY:
            left_out(name, variant or "plain", status)


def _show(title, rows, lengths, column, paper, spec):
    cells = {(x["method"], int(x["seqlen"])): _cell(x, column, paper(x), spec) for x in rows}
    names = dict.fromkeys(row["method"] for row in rows)
    columns = {"method": ""} | {str(n): "" for n in lengths}
    show(title, columns, [[name, *(cells.get((name, n), "") for n in lengths)] for name in names])


def _cell(row, column, paper, spec):
    """Ours, or what happened, and the paper's in brackets."""
    own = {OUT_OF_MEMORY: "OOM"}.get(row["status"], "–") if row["status"] else ""
    if not own and row[column]:
        own = format(float(row[column]), spec)
    return f"{own} ({paper:g})" if paper else own
