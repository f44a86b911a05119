"""The Hopper pass over rows for dQ alone: its tables, and its kernel with arguments bound."""

from dataclasses import replace
from functools import cached_property

from nbflash.backends.block_plan.host import schedule_of
from nbflash.backends.sm90.backward.dq_config import ROWS, completed, dq_config
from nbflash.backends.sm90.backward.dq_kernel import bwd_sm90_dq_spec
from nbflash.cuda.tile.wgmma.dropout import dropping_of
from nbflash.definitions.constants import LOG2_E
from nbflash.definitions.philox import factor
from nbflash.inputs import arrays
from nbflash.schedule.work_list import row_tables


class DqPass:
    """dQ of one `AttentionSpec`, the same bits every time.

    Parameters
    ----------
    spec : nbflash.inputs.attention_spec.AttentionSpec
    device
        Of `nbflash.cuda.device.cuda_device`.
    scoring : (ScoreCode or None, tuple)
        Functions of the scores and their parameters on the device.
    stats_m : int
        Query tile by which the statistics are laid out.
    config : Sm90DqConfig, optional
        Instead of the table's row.
    """

    def __init__(self, spec, device, scoring, stats_m, *, config=None):
        self._problem, self._device = spec.problem, device
        score, self._params = scoring
        config = config or dq_config(spec.problem.dtype, spec.problem.head_dim, stats_m)
        self._dropout = spec.dropout
        config = completed(config, score, bool(spec.dropout))
        self.schedule = s = schedule_of(device, spec, config.tile_m, config.tile_n)
        self.config = replace(config, full_tiles=s.full_tiles)
        self._map = device.maps(spec.problem.dtype)

    @cached_property
    def _kernel(self):
        """The launch with sizes and tables bound."""
        p, cfg, s = self._problem, self.config, self.schedule
        items = p.batch * p.heads * s.n_row
        blocks = min(self._device.multiprocessors * cfg.min_blocks, items)
        walked, live = row_tables(s, p, blocks)
        stride = p.nq * p.heads * p.head_dim, p.heads * p.head_dim, p.head_dim
        sizes = p.nq, p.heads, p.group, s.n_row, items, live
        scales = p.scale * (1.0 if cfg.score else LOG2_E), p.scale * factor(self._dropout)
        constants, more = (*stride, *sizes, *scales), (self._params, dropping_of(self._dropout))
        return self._device.bind(bwd_sm90_dq_spec(cfg), blocks, constants, walked, more)

    def bind(self):
        """Bind its kernel."""
        self._kernel  # noqa: B018 - a cached property

    def __call__(self, dout, q, k, v, out, lse, dlse, stats, dq, state, lists=()):
        """Write ``dq``, which is contiguous, and the statistics of the queries with tiles."""
        n = self.config.tile_n
        boxes = zip((q, k, v, dout, dq), (ROWS, n, n, ROWS, ROWS), strict=True)
        maps = [self._map(x, rows) for x, rows in boxes]
        words = self._device.words
        strides = *arrays.strides(out), *arrays.strides(dlse)
        self._kernel(words((dq, out, lse, dlse, stats), strides, state), maps, lists)
