"""Tables 1, 2 and 4: BERT and GPT-2 in training, by form of attention.

Random weights, the real architecture, bytes of the sources of Python's standard library. Rates are
those of whole steps, AdamW among them; the share of attention is what a step takes more than one
whose attention gives the values back. Losses of the same seed are compared with those of eager
attention. For Table 4 a small GPT-NeoX is trained to the end of its schedule, on torch's sources
too.
"""

import gc
from functools import cache

import numpy as np

from experiments.harness.console import left_out, progress, say
from experiments.harness.errors import BadInput, one_line
from experiments.harness.journal import Journal
from experiments.harness.setup import set_up
from experiments.report.tables import show, wrote

KEYS = ("model", "tokens", "batch", "attention", "seed")
FOUND = ("ms_a_step", "tokens_per_s", "losses", "validations", "validation")
EAGER, NONE = "eager", "none"
#: Names of the files of sizes that have their own.
STEMS = {
    "context": "paper-context",
    "graphs": "paper-training-graph",
    "curves": "paper-training-curves",
}
OUT_OF_MEMORY = "out of memory"


def run(out, section="full", device="auto", resume=False, minutes=None):
    """Train what the sweep says; the table goes to ``out``.

    As ``paper-training.csv``, or as what `STEMS` has for the section.
    """
    try:
        import transformers  # noqa: F401 - the models are its own
    except ImportError as error:
        raise BadInput(f"training needs torch and transformers: {error}") from None
    setup = set_up("paper-training", section, device)
    stem = STEMS.get(section, "paper-training")
    columns = ("evaluate", *FOUND, *setup.origin)
    journal = Journal(out / f"{stem}.csv", KEYS, resume, minutes, columns)
    if not resume:
        for path in (out / stem).glob("*.pt"):
            path.unlink()
    train(setup, journal, out / stem)
    if journal.rows:
        from experiments.report.paper_figures import draw_contexts, draw_curves

        tell, draw, files = report, draw_curves, [out / f"{stem}.csv"]
        if section == "context":
            tell, draw = report_contexts, draw_contexts
        tell(journal.rows, setup.settings["paper"])
        if learned := [row for row in journal.rows if row["losses"]]:
            files.append(out / f"{stem}.png")
            draw(learned, files[-1])
        wrote(*files)


def train(setup, journal, folder):
    """Add the rows of the sweep that the journal lacks."""
    settings = setup.settings
    runs = [
        (dict(zip(KEYS, (model, tokens, batch, attention, seed), strict=True)), steps)
        for model, tokens, batch, steps in settings["runs"]
        for seed in settings["seeds"]
        for attention in settings["attention"]
    ]
    with progress("Training", len(runs)) as advance:
        for row, steps in runs:
            if row not in journal:
                found = None
                if not journal.is_late:
                    found = _trained(setup, journal, folder, row, steps)
                    _release(setup)
                if found is None:
                    say("Time is over: --resume continues here.")
                    return
                done = {"steps": steps, "evaluate": settings["evaluate"]}
                journal.add(row | done | found | setup.origin)
            advance()


def _release(setup):
    """Give back the memory of a model that is done with."""
    import torch

    gc.collect()
    if setup.backend.device == "cuda":
        torch.cuda.empty_cache()


@cache
def _text(name):
    """What models are trained on, and what is held out."""
    from experiments.papers import texts

    return [texts.CORPORA[name](part) for part in ("train", "validation")]


def _trained(setup, journal, folder, row, steps):
    """The columns of one run; None where it is not done yet."""
    import torch

    from experiments.papers.language import Language, make_model
    from experiments.papers.training import Trainer

    settings, (name, tokens, batch, attention, seed) = setup.settings, row.values()
    how, device = settings | {"steps": steps}, setup.backend.device
    path = folder / ("-".join(map(str, row.values())) + ".pt") if settings["checkpoints"] else None
    try:
        spec, block = settings["models"][name], settings["block"]
        recorded = settings.get("graph", False)
        model = make_model(spec, tokens, attention, seed, block, device, recorded)
        given = {"attention": attention, "dtype": settings["dtype"].name, "seed": seed}
        given |= {"evaluated": settings["evaluated"]}
        task = Language(model, *_text(settings["text"]), tokens, batch, **given)
        trainer = Trainer(model, task, how, path)
        trainer.run(lambda: journal.is_late)
    except torch.OutOfMemoryError:
        return _result(OUT_OF_MEMORY)
    except RuntimeError as error:
        if "No available kernel" not in str(error) and "backend" not in str(error):
            raise
        return _result(one_line(error)[:200])  # SDPA has none for this case
    if not trainer.is_done:
        return None
    _, losses, validations = zip(*trainer.progress.curve, strict=True)
    return _result(
        "",
        ms_a_step=trainer.ms_a_step,
        tokens_per_s=1e3 * batch * tokens / trainer.ms_a_step if trainer.ms_a_step else None,
        losses=" ".join(map(repr, losses)),
        validations=" ".join(map(repr, validations)),
        validation=validations[-1],
    )


def _result(status, **found):
    return dict.fromkeys(FOUND) | found | {"status": status}


def compared(rows):
    """For each row: its rate over eager's, the share of attention, how far its losses are off.

    Yields
    ------
    (dict, float or None, float or None, float or None)
    """

    def key(row, **other):
        return tuple(str((row | other)[name]) for name in KEYS)

    of = {key(row): row for row in rows}
    for row in rows:
        eager, none = (of.get(key(row, attention=name)) for name in (EAGER, NONE))
        own, of_eager, of_none = (_number(x, "ms_a_step") for x in (row, eager, none))
        share = 1 - of_none / own if own and of_none else None
        off = None
        if eager and row["losses"] and eager["losses"]:
            one, other = (np.array(x["losses"].split(), float) for x in (row, eager))
            off = float(abs(one - other).max())
        yield row, of_eager / own if own and of_eager else None, share, off


def _number(row, column):
    return float(row[column]) if row and row[column] else None


def report(rows, paper):
    """A line for each run, and what the paper printed."""
    columns = {"model": "", "tokens": "d", "batch": "d", "attention": ""}
    columns |= {"ms a step": ".1f", "tokens/s": ",.0f", "× eager": ".2f"}
    columns |= {"attention's share": ".0%", "Δ loss": ".1e", "validation": ".3f"}
    table = []
    for row, speedup, share, off in compared(rows):
        cells = [row["model"], int(row["tokens"]), int(row["batch"]), row["attention"]]
        cells += [_number(row, "ms_a_step"), _number(row, "tokens_per_s"), speedup]
        table.append([*cells, share, off, _number(row, "validation")])
        if row["status"]:
            left_out(f"{row['attention']}", f"{row['model']}, {row['tokens']}", row["status"])
    show("Training: Δ loss is the largest difference from eager attention", columns, table)
    printed = ", ".join(f"{name} {x}" for name, x in paper["speedup"].items())
    say(f"{paper['source']}: × HuggingFace, for BERT × MLPerf 1.1: {printed} (8 A100, other data).")


def report_contexts(rows, paper):
    """Validation by context, dense and block-sparse, and what the paper printed."""
    contexts = sorted({int(row["tokens"]) for row in rows})
    columns = {"attention": "", "seed": ""} | {str(n): ".3f" for n in contexts}
    of = {(row["attention"], row["seed"], int(row["tokens"])): row for row in rows}
    table = [
        [*form, *(_number(of.get((*form, n)), "validation") for n in contexts)]
        for form in dict.fromkeys((row["attention"], row["seed"]) for row in rows)
    ]
    show("Validation by context, nats a byte", columns, table)
    printed = ", ".join(f"{tokens} {x}" for tokens, x in paper["perplexity"].items())
    say(f"{paper['source']}: perplexity of GPT-2 small by context: {printed} (other data).")
