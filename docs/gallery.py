"""The directive ``{mask} name``: picture, density and closed form of a pattern of `masks`.

Pictures are drawn when the site is built; the cells of each mask are counted and compared with its
closed form, as ``python -m experiments masks`` does.
"""

from pathlib import Path

from docutils import nodes
from matplotlib.figure import Figure
from sphinx.util.docutils import SphinxDirective

from experiments.commands.gallery import chosen, row_of
from experiments.report.figures import save

SEQLEN, BLOCK = 512, 32
PICTURES = "_build/gallery"


class MaskDirective(SphinxDirective):
    """A figure, and a line of figures that belong to it."""

    required_arguments = 1

    def run(self):
        (pattern,) = chosen(self.arguments)
        mask = pattern.build(SEQLEN, BLOCK)
        row = row_of(pattern, mask, SEQLEN, BLOCK)
        name = f"{pattern.name}.png"
        draw(mask, Path(self.env.srcdir, PICTURES, name))
        caption = (
            f"{mask.shape[0]} queries, {mask.shape[1]} keys, blocks of {BLOCK}: "
            f"{row['token_density']:.1%} of the pairs, {row['tile_density']:.1%} of the tiles of "
            f"{BLOCK} × {BLOCK}. Number of pairs: {pattern.formula} = {row['cells']:,}."
        )
        alt = f"Mask {pattern.name}: queries run down, keys to the right"
        image = nodes.image(uri=f"/{PICTURES}/{name}", alt=alt, width="220px")
        return [nodes.figure("", image, nodes.caption(caption, caption))]


def draw(mask, path):
    """Write the picture of one mask."""
    figure = Figure(figsize=(2.2, 2.2), layout="constrained", dpi=100)
    ax = figure.subplots()
    mask.plot(ax)
    ax.set(xticks=[], yticks=[])
    save(figure, path)


def setup(app):
    app.add_directive("mask", MaskDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
