"""Two processes of fully_shard (FSDP2): the gradients of two layers, as one process has them."""

import torch
from ddp import Layer, leave, meet
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    """Two layers, the second of them in one graph and checkpointed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.back = nn.Linear(32, 32, dtype=torch.float64)

    def forward(self, x):
        x = self.back(self.layers[0](x).flatten(2))
        return checkpoint(self.layers[1], x, use_reentrant=False)


def main():
    rank, place = meet()
    model = Model().to(place, torch.float64)
    x = torch.randn(4, 17, 32, dtype=torch.float64).to(place)
    alone = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    for layer in model.layers:
        fully_shard(layer)
    model.layers[1].compile(fullgraph=True, backend="aot_eager")
    fully_shard(model)
    for _ in range(2):  # the second time as in every later step of a training
        model.zero_grad()
        model(x[2 * rank : 2 * rank + 2]).square().mean().backward()
    for parameter, want in zip(model.parameters(), alone, strict=True):
        assert isinstance(parameter, DTensor)
        assert parameter.to_local().shape != want.shape
        torch.testing.assert_close(parameter.grad.full_tensor(), want)
    leave()


if __name__ == "__main__":
    main()
