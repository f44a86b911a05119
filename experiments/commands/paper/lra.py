"""Tables 3, 5 and 6: a small Transformer that classifies sequences, by form of attention.

``paper-lra`` has the tasks of Long Range Arena, ``paper-long`` one task by length of context, and
``paper-pathx`` Pathfinder with images that grow: a task with ``start`` begins with the weights that
were trained for another one, whose position embeddings are interpolated on the image. ``speed`` is
a few steps of every model, alone on the device: times of processes side by side say nothing.

Every model is kept at each of its checkpoints: with ``--resume`` a run goes on from there and takes
the same batches that it would have taken. Several processes with different ``--task`` or
``--method`` or ``--seed``, each with its own ``--out``, share one GPU.
"""

from itertools import product

import numpy as np

from experiments.harness.console import left_out, progress, say
from experiments.harness.errors import BadInput
from experiments.harness.journal import Journal
from experiments.harness.setup import set_up
from experiments.libraries.torch_base import why_not_torch
from experiments.report.tables import show, wrote

KEYS = ("task", "method", "seed")
STANDARD = "pytorch"
#: What a task may have of its own, beside the size.
OWN = {"train", "validation", "test", "steps", "batch", "rate", "warmup", "evaluate", "pixels"}


def run(
    out,
    sweep="lra",
    section="full",
    device="auto",
    resume=False,
    minutes=None,
    task=(),
    method=(),
    seeds=(),
):
    """Train what a sweep says; the table, ``paper-<sweep>.csv`` and ``.png`` go to ``out``.

    Parameters
    ----------
    sweep : {"lra", "long", "pathx"}
    section : {"full", "quick", "speed"}
        ``speed`` of ``lra`` has files of its own.
    """
    if reason := why_not_torch("cpu"):
        raise BadInput(f"{sweep} needs torch: {reason}")
    setup = set_up(f"paper-{sweep}", section, device)
    stem = f"{sweep}-speed" if section == "speed" else sweep
    journal = Journal(out / f"paper-{stem}.csv", KEYS, resume, minutes, setup.origin)
    if not resume:
        for path in (out / stem).glob("*.pt"):
            path.unlink()
    train(setup, journal, out / stem, task, method, seeds)
    if journal.rows:
        learned, files = section != "speed", [out / f"paper-{stem}.csv"]
        report(journal.rows, setup.settings["paper"], learned)
        if learned:
            from experiments.report.paper_figures import draw_accuracies

            files.append(out / f"paper-{stem}.png")
            draw_accuracies(journal.rows, files[-1])
        wrote(*files)


def train(setup, journal, folder, tasks=(), methods=(), seeds=()):
    """Add the rows of the sweep that the journal lacks."""
    from experiments.papers.tasks import why_not

    settings = setup.settings
    tasks = _chosen("task", tasks, settings["tasks"])
    methods = _chosen("method", methods, settings["methods"])
    seeds = _chosen("seed", seeds, settings["seeds"])
    reasons = {name: why_not(settings["tasks"][name].get("task", name)) for name in tasks}
    for name, reason in reasons.items():
        if reason:
            left_out(name, "task", reason)
    tasks = [name for name in tasks if not reasons[name]]
    runs = list(product(seeds, tasks, methods))  # one seed of everything first
    with progress("Long Range Arena", len(runs)) as advance:
        for seed, task, method in runs:
            row = {"task": task, "method": method, "seed": seed}
            if row not in journal:
                if journal.is_late:
                    say("Time is over: --resume continues here.")
                    return
                found = _trained(setup, journal, folder, row)
                if found is None:
                    say(f"Time is over within {task}, {method}: --resume continues there.")
                    return
                journal.add(row | found | setup.origin)
            advance()


def _chosen(option, names, known):
    for name in names:
        if name not in known:
            raise BadInput(f"--{option} {name}: expected one of {', '.join(map(str, known))}")
    return names or list(known)


def _trained(setup, journal, folder, row):
    """The columns of one model; None where it is not done yet."""
    from experiments.papers import tasks
    from experiments.papers.classifier import Classification, Classifier
    from experiments.papers.training import Trainer

    task, method, seed = row.values()
    own = dict(setup.settings["tasks"][task])  # with settings of its own for this task
    settings = setup.settings | {key: own.pop(key) for key in OWN & own.keys()}
    start, source = own.pop("start", None), own.pop("task", task)
    data = {x: tasks.load(folder, source, x, settings[x], own) for x in tasks.PARTS}
    first, pixels = data["train"], settings.get("pixels", False)
    _, parts, n = first.tokens.shape
    model = Classifier(
        first.vocabulary,
        first.classes,
        parts,
        n,
        method,
        **settings["model"],
        pixels=pixels,
        device=setup.backend.device,
        seed=seed,
    )
    if start is not None:
        begin = folder / f"{start}-{method}-{seed}.pt"
        if not begin.exists():
            raise BadInput(f"{task} starts from the weights of {start}: run that task first")
        model.start_from(begin)
    how = {"batch": settings["batch"], "dtype": settings["dtype"].name, "seed": seed}
    work = Classification(model, first, data["validation"], **how, symmetries=pixels)
    trainer = Trainer(model, work, settings, folder / f"{task}-{method}-{seed}.pt")
    trainer.run(lambda: journal.is_late)
    if not trainer.is_done:
        return None
    done = trainer.progress
    return {
        "n": n,
        "classes": first.classes,
        "dtype": how["dtype"],
        "examples": len(first),
        "steps": done.step,
        "batch": settings["batch"],
        "loss": done.curve[-1][1],
        "validation": done.curve[-1][2],
        "accuracy": work.accuracy(data["test"]),
        "ms_a_step": trainer.ms_a_step,
        "parameters": sum(x.numel() for x in model.parameters()),
    }


def report(rows, paper, learned=True):
    """Accuracy over seeds, of models that have ``learned``, and times beside plain attention's."""
    names = list(dict.fromkeys(row["task"] for row in rows))
    if learned:
        _show_accuracies(rows, names, paper)
    if any(row["ms_a_step"] for row in rows):
        _show_times(rows, names)
    say("Data are of our own making: experiments/papers says what differs.")


def _show_accuracies(rows, tasks, paper):
    """What a method reached beside what the paper printed, and its speed-up over all tasks."""
    table, speedups = [], {}
    for method in dict.fromkeys(row["method"] for row in rows):
        of = [row for row in rows if row["method"] == method]
        table.append(
            [method, *(_accuracy([x for x in of if x["task"] == y], paper) for y in tasks)]
        )
        if speed := [x for task in tasks if (x := speedup(rows, task, method))]:
            printed = paper["speedup"].get(method)
            cell = f"{np.exp(np.log(speed).mean()):.2f}" + (f" ({printed})" if printed else "")
            speedups[method] = cell
    for corpus, printed in paper.get("also", {}).items():
        of = dict(zip(paper["tasks"], printed, strict=True))
        table.append([f"the paper, {corpus}", *(str(of.get(task, "")) for task in tasks)])
    columns = {"method": ""} | dict.fromkeys(tasks, "")
    if speedups:
        columns |= {"speed-up": ""}
        table = [[*row, speedups.get(row[0], "")] for row in table]
    show("Accuracy in percent, mean ± spread over seeds (the paper's, other data)", columns, table)
    chance = {row["task"]: 100 / int(row["classes"]) for row in rows}
    say("By chance: " + ", ".join(f"{task} {x:.1f} %" for task, x in chance.items()))
    if speedups:
        say(
            "Speed-up: plain attention's time of a step over that of the method, the geometric "
            "mean over tasks."
        )


def _show_times(rows, tasks):
    """Milliseconds of a step by method and task, and how many times faster it is than plain."""
    table = []
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for task in tasks:
            ms, times = _time(rows, task, method), speedup(rows, task, method)
            cell = "" if ms is None else f"{ms:.1f}"
            cells.append(cell + (f" ({times:.2f} ×)" if times else ""))
        table.append([method, *cells])
    show("Milliseconds of a step", {"method": ""} | dict.fromkeys(tasks, ""), table)


def speedup(rows, task, method):
    """The median time of a step of `STANDARD` over that of a method; None where one lacks."""
    standard, own = (_time(rows, task, name) for name in (STANDARD, method))
    return standard / own if standard and own else None


def _time(rows, task, method):
    """Median milliseconds of a step; None where nothing was timed."""
    of = [x for x in rows if (x["task"], x["method"]) == (task, method)]
    times = [float(x["ms_a_step"]) for x in of if x["ms_a_step"]]
    return float(np.median(times)) if times else None


def _accuracy(rows, paper):
    if not rows:
        return ""
    values = 100 * np.array([float(row["accuracy"]) for row in rows])
    found = f"{values.mean():.1f}" + (f" ± {np.ptp(values) / 2:.1f}" if len(values) > 1 else "")
    task, printed = rows[0]["task"], paper.get(rows[0]["method"])
    if printed and task in paper["tasks"]:
        found += f" ({printed[paper['tasks'].index(task)]})"
    return found
