"""The Hopper pass over rows for dQ alone: its tables, and its kernel with arguments bound."""

from dataclasses import replace
from functools import cached_property

from nbflash.backends.block_plan.host import schedule_of
from nbflash.backends.sm90.backward.choice import dq_config
from nbflash.backends.sm90.backward.dq_config import ROWS
from nbflash.backends.sm90.backward.dq_kernel import bwd_sm90_dq_spec
from nbflash.cuda.tile.wgmma.dropout import dropping_of
from nbflash.definitions.constants import score_factor
from nbflash.definitions.philox import factor
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
    """

    def __init__(self, spec, device, scoring, stats_m):
        self._problem, self._device = spec.problem, device
        score, self._params = scoring
        self._dropout = spec.dropout
        config = dq_config(spec, score)
        self.schedule = s = schedule_of(device, spec, config.tile_m, config.tile_n)
        self.config = replace(config, stats_m=stats_m, full_tiles=s.full_tiles)
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
        scales = score_factor(p.scale, cfg.score is not None), p.scale * factor(self._dropout)
        constants, more = (*stride, *sizes, *scales), (self._params, dropping_of(self._dropout))
        return self._device.bind(bwd_sm90_dq_spec(cfg), blocks, constants, walked, more)

    def bind(self):
        """Bind its kernel."""
        self._kernel  # noqa: B018 - a cached property

    @cached_property
    def _layouts(self):
        """Of the maps of q, k, v, and of dQ."""
        p, n = self._problem, self.config.tile_n
        shapes = p.q_shape, p.kv_shape, p.kv_shape, p.q_shape
        _, nq, heads, d = p.q_shape
        contiguous = nq * heads * d, heads * d, d
        layouts = (*(three[:3] for three in p.strides), contiguous)
        given = zip(shapes, layouts, (ROWS, n, n, ROWS), strict=True)
        return [self._map.layout(*each) for each in given]

    def __call__(self, operands, of_dout, out, lse, dlse, others, stats, dq, state, lists=()):
        """Write ``dq``, which is contiguous, and the statistics of the queries with tiles.

        Parameters
        ----------
        operands : list
            Addresses of q, k, v and dout.
        of_dout : tuple of int
            Strides of dout.
        out, lse, dlse, stats, dq
            Addresses.
        others : tuple of tuples
            Strides of out and dlse.
        state : tuple
            Dropout's.
        lists : tuple
            What a block map's tables are made of.
        """
        *of_qkv, of_dq = self._layouts
        of_dout = self._map.layout(self._problem.q_shape, of_dout, ROWS)
        maps = [*zip((*operands, dq), (*of_qkv, of_dout, of_dq), strict=True)]
        of_out, of_dlse = others
        self._kernel([dq, out, lse, dlse, stats, *of_out, *of_dlse, *state], maps, lists)
