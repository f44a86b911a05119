"""torch's scaled_dot_product_attention."""

from experiments.harness.grid import CAUSAL, DENSE
from experiments.libraries.torch_base import TorchLibrary


class Sdpa(TorchLibrary):
    """``torch.nn.functional.scaled_dot_product_attention`` held to one of its backends."""

    def __init__(self, q, k, v, backend):
        super().__init__(q, k, v)
        self._backend = backend

    @staticmethod
    def why_not(case):
        return "" if case.kind in (DENSE, CAUSAL) else "dense and causal alone"

    def label(self, case):
        return f"sdpa-{self._backend.split('_')[0].lower()}"

    def _attention(self, case):
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, self._backend)
        options = {"is_causal": case.kind == CAUSAL, "enable_gqa": case.heads_kv is not None}

        def attention(q, k, v):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

        return attention
