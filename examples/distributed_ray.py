"""The layer of `distributed_torch.py`, trained by the actors of Ray instead of torchrun.

    python examples/distributed_ray.py --ranks 4
    python examples/distributed_ray.py --ranks 2 --device cuda

Each actor is a rank: Ray places it, on any machine of its cluster, and gives it a GPU of its own.
"""

import argparse
import os
import socket

import ray
from distributed_torch import main as train


@ray.remote
class Rank:
    def address(self):
        """Where the ranks may find each other: this machine, and a port that is free."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), str(probe.getsockname()[1])

    def train(self, rank, ranks, address, *given):
        """As torchrun would start it."""
        host, port = address
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port}
        return train(*given)


def main(ranks, tokens, steps, device):
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    ray.init(
        runtime_env={"env_vars": {"PYTHONPATH": path}},
        include_dashboard=False,
        object_store_memory=10**8,  # tensors do not pass through it
    )
    place = {"num_gpus": 1} if device == "cuda" else {"num_cpus": 0}
    actors = [Rank.options(**place).remote() for _ in range(ranks)]
    address = ray.get(actors[0].address.remote())
    given = ranks, address, tokens, steps, device
    losses = ray.get([actor.train.remote(rank, *given) for rank, actor in enumerate(actors)])
    ray.shutdown()
    print(f"{ranks} ranks: loss", *(f"{loss:.3f}" for loss in losses))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    main(**vars(parser.parse_args()))
