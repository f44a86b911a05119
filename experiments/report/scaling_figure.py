"""The figure of `experiments distributed`: the share of the ideal against the length."""

from experiments.harness.passes import BACKWARD, FORWARD, NBFLASH
from experiments.report.figures import COLOURS, GREY, MARKERS, axes_of, plain_ticks, save


def draw_scaling(rows, path):
    """Nbflash: a panel for each pass, a line for each mask; dashed what the model predicts."""
    figure, axes = axes_of(2)
    masks = list(dict.fromkeys(row["mask"] for row in rows))
    for ax, which in zip(axes, (FORWARD, BACKWARD), strict=True):
        for mask, colour, marker in zip(masks, COLOURS, MARKERS, strict=False):
            of_mask = [
                row
                for row in rows
                if (row["pass"], row["mask"], row["library"]) == (which, mask, NBFLASH)
            ]
            of_mask.sort(key=lambda row: row["tokens"])
            tokens = [row["tokens"] for row in of_mask]
            shares = [row["of_ideal"] for row in of_mask]
            ax.plot(tokens, shares, color=colour, marker=marker, label=mask)
            if all(row["predicted_of_ideal"] is not None for row in of_mask):
                predicted = [row["predicted_of_ideal"] for row in of_mask]
                ax.plot(tokens, predicted, color=colour, linestyle="--", linewidth=0.9)
        ax.axhline(1, color=GREY, linewidth=0.8)
        ax.set(xscale="log", ylim=(0, None), xlabel="tokens", title=which)
        plain_ticks(ax.xaxis)
    axes[0].set_ylabel("share of the ideal")
    axes[0].legend(fontsize=7.5, frameon=False)
    first = rows[0]
    figure.suptitle(
        f"Attention over {first['ranks']} ranks, {first['device']}, {first['dtype']}, "
        f"commit {first['commit']}; dashed: predicted",
        fontsize=9,
    )
    save(figure, path)
