"""Dropout's state as kernels take it: see :mod:`nbflash.cuda.tile.dropout`."""

from nbflash.cuda.tile.dropout import PLACED, dropout_of


class DropoutState:
    """``state(seed)``: the words of the kernels' argument of that name, none without dropout.

    Parameters
    ----------
    device
        `nbflash.cuda.device`.
    spec : nbflash.inputs.attention_spec.AttentionSpec
    """

    def __init__(self, device, spec):
        self._device, self._on = device, bool(spec.dropout)
        placed = dropout_of(spec) == PLACED
        self._shifts = device.resident(spec.positions.shifts()) if placed else ()
        self._addresses = [device.address(x) for x in self._shifts]

    def __call__(self, seed):
        return (*self._device.state(seed), *self._addresses) if self._on else ()
