"""The gallery of masks: pictures, statistics, and counted cells against closed forms."""

from rich.columns import Columns
from rich.panel import Panel

from experiments.harness.console import console, progress, say
from experiments.harness.errors import BadInput, OutOfBudget
from experiments.harness.patterns import PATTERNS
from experiments.harness.provenance import provenance
from experiments.report.figures import draw_gallery
from experiments.report.tables import show, write_csv, wrote

PICTURE = 16
BLOCKS_AT_LEAST = 8
STATISTICS = ("token_density", "tile_density", "fill", "full", "interval", "bits", "row_max")
STATISTICS += ("row_mean", "components", "layers")


def chosen(only):
    """The patterns of these names, all of them when there are none."""
    names = [pattern.name for pattern in PATTERNS]
    for name in only:
        if name not in names:
            raise BadInput(f"--only {name}: expected one of {', '.join(names)}")
    return [pattern for pattern in PATTERNS if not only or pattern.name in only]


def row_of(pattern, mask, seqlen, block):
    """Statistics of one mask; its cells are counted one by one.

    Raises
    ------
    OutOfBudget
        If the count differs from the closed form.
    """
    counted, expected = int(mask.dense().sum()), pattern.count(seqlen, block)
    stats = mask.stats(block)
    if not counted == stats.tokens == expected:
        raise OutOfBudget(
            f"{pattern.name}: {counted} cells, its tiles hold {stats.tokens}, the closed form "
            f"{pattern.formula} gives {expected}"
        )
    return {
        "pattern": pattern.name,
        "nq": mask.shape[0],
        "nk": mask.shape[1],
        "block": block,
        "cells": counted,
        "closed_form": expected,
        "formula": pattern.formula,
        **{name: getattr(stats, name) for name in STATISTICS},
    }


def run(seqlen, block, only, out):
    """Print pictures and table, write ``masks.csv`` and ``masks.png`` to the directory ``out``."""
    if seqlen % block or seqlen < BLOCKS_AT_LEAST * block:
        raise BadInput(
            f"--seqlen {seqlen}: expected a multiple of --block {block}, "
            f"at least {BLOCKS_AT_LEAST} blocks"
        )
    patterns, built, rows = chosen(only), [], []
    with progress("Masks", len(patterns)) as advance:
        for pattern in patterns:
            mask = pattern.build(seqlen, block)
            built.append(mask)
            rows.append(row_of(pattern, mask, seqlen, block))
            advance()
    pictures = (
        Panel(mask.draw(PICTURE), title=pattern.name, expand=False)
        for pattern, mask in zip(patterns, built, strict=True)
    )
    console.print(Columns(pictures))
    columns = {"pattern": "", "cells": ",d", "= closed form": "", "tokens": ".1%", "tiles": ".1%"}
    columns |= {"fill": ".2f", "full": "d", "interval": "d", "bits": "d", "layers": "d"}
    keys = ("pattern", "cells", "formula", "token_density", "tile_density", "fill")
    keys += ("full", "interval", "bits", "layers")
    cells = [[row[key] for key in keys] for row in rows]
    show(f"{seqlen} tokens, blocks and tiles of {block}", columns, cells)
    say(
        "cells: counted one by one, equal to the closed form; tokens, tiles: share that is "
        "attended, share that is visited; fill: attended share of the visited tiles; full, "
        "interval, bits: tiles by kind; layers: until every token can reach every other it may."
    )
    origin = provenance("cpu")
    write_csv(out / "masks.csv", [row | origin for row in rows])
    draw_gallery(rows, built, out / "masks.png")
    wrote(out / "masks.csv", out / "masks.png")
