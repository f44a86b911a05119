"""The Hopper implementation: the forward kernel with its arguments bound, and the backward."""

from functools import cached_property

from nbflash.backends.block_plan.host import fitting, schedule_of
from nbflash.backends.sm90.backward import choice
from nbflash.backends.sm90.backward import host as sm90_backward
from nbflash.backends.sm90.forward.choice import choose
from nbflash.backends.sm90.forward.config import forward_configs
from nbflash.backends.sm90.forward.kernel import fwd_sm90_spec
from nbflash.cuda import score_params, tensor_map
from nbflash.cuda.device import cuda_device
from nbflash.cuda.dropout_state import DropoutState
from nbflash.cuda.tile.dropout import dropout_of
from nbflash.cuda.tile.wgmma.dropout import dropping_of
from nbflash.definitions.constants import tensor_core_factor
from nbflash.inputs import arrays
from nbflash.schedule.work_list import row_tables

HOPPER = 9, 0


class Sm90Executor:
    """Forward and backward of one `AttentionSpec` on one Hopper GPU, or in the simulator.

    Parameters
    ----------
    spec : nbflash.inputs.attention_spec.AttentionSpec
    config : Sm90Config, optional
        Instead of the table's row; but `full_tiles` is the schedule's.
    backward : Sm90BackwardConfig, optional
        Instead of that table's row; it says whether there are two passes, too. `full_tiles` and
        `edge` follow from the schedule.
    device : optional
        Instead of the CUDA device of the spec.
    """

    def __init__(self, spec, *, config=None, backward=None, device=None):
        self._spec, self._problem = spec, spec.problem
        self._device = device or cuda_device(spec.problem.device_id, spec.problem.of_torch)
        self._score, params = score_params.prepare(spec.score, spec.problem, HOPPER)
        self._params, self._dropout = self._device.params(params), spec.dropout
        self._state = DropoutState(self._device, spec)
        self._backward_config, self._backwards = backward, {}  # by whether in two passes
        self._map = self._device.maps(spec.problem.dtype)
        configs = [config] if config else fitting(self._table(), spec.mask)
        self._config, self.schedule = choose(configs, spec.mask, self._tiled)

    def _table(self):
        p = self._problem
        more = {"score": self._score, "dropout": dropout_of(self._spec)}
        return forward_configs(p.dtype, p.head_dim, negate=p.scale < 0, **more)

    def _tiled(self, config):
        return schedule_of(self._device, self._spec, config.tile_m, config.tile_n)

    @cached_property
    def _forward(self):
        p, cfg, s = self._problem, self._config, self.schedule
        # Most scores of a place fall with the distance: on the way to the diagonal m would rise at
        # every tile, and O be rescaled.
        if self._score and self._score.by_place:
            s = s.outwards
        most = self._device.multiprocessors * cfg.min_blocks
        items = p.batch * p.heads * s.n_row
        blocks = max(1, min(most, items))
        tables, live = row_tables(s, p, blocks)
        scale = tensor_core_factor(p.scale, self._score is not None)
        strides = *p.strides[0][:3], *p.strides[1][:3]
        sizes = p.nq, p.nk, p.heads, p.group, s.n_row, items, live, scale
        more = self._params, dropping_of(self._dropout)
        return self._device.bind(fwd_sm90_spec(cfg), blocks, (*strides, *sizes), tables, more)

    @cached_property
    def _layouts(self):
        """Of the maps of q, k and v."""
        p, cfg = self._problem, self._config
        heads_kv = p.heads // p.group
        shapes = ((p.batch, p.nq, p.heads), *((p.batch, p.nk, heads_kv),) * 2)
        rows = (cfg.tile_m, cfg.tile_n, cfg.tile_n)
        return [
            self._map.layout((*shape, p.head_dim), three[:3], n)
            for shape, three, n in zip(shapes, p.strides, rows, strict=True)
        ]

    def bind_forward(self):
        """The kernel of `forward`, bound."""
        return self._forward

    def bind_backward(self, deterministic=False):
        """Bind the kernels of `backward`."""
        self._backward_in(deterministic or self.two_passes).bind()

    def forward(self, q, k, v, out, lse, seed=None, lists=()):
        """Write ``out`` and ``lse``."""
        strides, address = arrays.strides(out), self._device.address
        # any() costs a microsecond
        bits = arrays.pointer(out) | 2 * (strides[0] | strides[1] | strides[2])
        if bits % tensor_map.ALIGNMENT or min(strides) < 0:
            target = self._device.empty(out.shape, out.dtype)
            self.forward(q, k, v, target, lse, seed, lists)
            out[...] = target
            return
        addresses, target = [address(x) for x in (q, k, v)], address(out)
        maps = [*zip(addresses, self._layouts, strict=True)]
        maps.append((target, self._map.layout(out.shape, strides, 64)))
        words = [target, address(lse), *strides, *addresses[:2], *self._state(seed)]
        self._forward(words, maps, lists)

    @cached_property
    def two_passes(self):
        """Of `AttentionPlan`."""
        if self._backward_config and not self._dropout:
            return not self._backward_config.with_dq
        return choice.in_two_passes(self._spec, self._score)

    def backward(
        self, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic, seed=None, lists=()
    ):
        """Write ``dq``, ``dk`` and ``dv``."""
        made = self._backward_in(deterministic or self.two_passes)
        made(dout, q, k, v, out, lse, dlse, dq, dk, dv, self._state(seed), lists)

    def _backward_in(self, two_passes):
        """The backward in two passes or in one, made once."""
        made = self._backwards.get(two_passes)
        if made is None:
            config = self._backward_config
            fits = config and config.with_dq != two_passes
            made = sm90_backward.Sm90Backward(
                self._spec,
                self._device,
                (self._score, self._params),
                two_passes=two_passes,
                config=config if fits else None,
            )
            self._backwards[two_passes] = made
        return made
