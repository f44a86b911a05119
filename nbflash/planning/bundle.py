"""The cubins that a wheel carries: ``python -m nbflash.planning.bundle``, or ``make cubins``.

Needs the compilers and no GPU. What is compiled is kept as always, so that a second run compiles
what has changed.
"""

from __future__ import annotations

from nbflash.backends.block_selection.host import kernels_of_means, kernels_of_selection
from nbflash.backends.merging.host import kernels_of_merging
from nbflash.cuda import bundled, kernel_key, launch, sources, workers
from nbflash.cuda.pause import pause_spec
from nbflash.definitions.constants import HALF_PRECISION, VECTOR_BYTES
from nbflash.planning.ahead import compile_all
from nbflash.planning.kernels import common_decode_kernels, common_kernels

#: The cubins of 8.6 serve 8.9, too.
CAPABILITIES = (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)
HEAD_DIMS = 64, 96, 128, 192, 256
#: Of caches, where there are such kernels of tensor cores; None: of the queries' dtype.
CACHE_DTYPES = {None: (8, 0), "int8": (8, 0), "float8_e4m3fn": (9, 0)}
MOST_BYTES = 8_000_000  # of a wheel


def packs() -> dict:
    """Name of a pack to its kernels and their compute capability."""
    found = {}
    for capability in CAPABILITIES:
        arch = launch.arch_of(capability)
        caches = [cache for cache, least in CACHE_DTYPES.items() if capability >= least]
        for dtype in HALF_PRECISION:
            for head_dim in HEAD_DIMS:
                specs = common_kernels(dtype, head_dim, capability)
                specs += common_decode_kernels(dtype, head_dim, capability, caches)
                specs += kernels_of_merging(dtype, head_dim)
                specs += kernels_of_means(dtype, head_dim, VECTOR_BYTES)
                found[f"{arch}-{dtype}-{head_dim}"] = specs, capability
        found[f"{arch}-selection"] = [*kernels_of_selection(), pause_spec()], capability
    return found


def build(most_workers: int) -> None:
    """Compile all packs, write them and say how large they are.

    Raises
    ------
    RuntimeError
        If a kernel cannot be compiled, or if they take more than a wheel may have.
    """
    bundled.remove()  # nothing is taken from a bundle of older compilers
    wanted = packs()
    jobs = [(spec, capability) for specs, capability in wanted.values() for spec in specs]
    found = compile_all(jobs, most_workers)
    cubins = {
        name: {kernel_key.of(spec, capability): found[spec, capability] for spec in specs}
        for name, (specs, capability) in wanted.items()
    }
    every = [spec for specs, _ in wanted.values() for spec in specs]
    roots = dict.fromkeys(map(kernel_key.roots_of, every))
    digests = {kernel_key.name_of_sources(each): sources.digest_of(*each) for each in roots}
    bundled.write(cubins, digests)
    report(cubins)


def report(cubins) -> None:
    """Print sizes by architecture."""
    total = 0
    for capability in CAPABILITIES:
        arch = launch.arch_of(capability)
        mine = [
            cubin
            for name in cubins
            if name.startswith(f"{arch}-")
            for cubin in cubins[name].values()
        ]
        packed = sum(file.stat().st_size for file in bundled.FOLDER.glob(f"{arch}-*"))
        total += packed
        raw = sum(map(len, mine))
        print(f"{arch:<8} {len(mine):>4} cubins {raw / 1e6:7.2f} MB, packed {packed / 1e6:6.2f} MB")
    total += (bundled.FOLDER / bundled.INDEX).stat().st_size
    print(f"together {total / 1e6:.2f} MB")
    if total > MOST_BYTES:
        raise RuntimeError(f"a wheel may have {MOST_BYTES} bytes, the cubins take {total}")


if __name__ == "__main__":
    build(workers.cores())
