"""No place where a key decides is forgotten: all are found in the source, and declared here."""

import ast
from pathlib import Path

import pytest
from keyed_places import compares, is_cached, places, remembers, wraps_a_cache
from test_keys_cached import CACHED

HERE = Path(__file__).parent
MASKS, VALUES, CALLS = "test_keys_masks.py", "test_keys_values.py", "test_keys_calls.py"
KERNELS, CONTENTS, BOUND = "test_keys_kernels.py", "test_keys_contents.py", "test_keys_bound.py"
SELECTION, OWN = "test_keys_selection.py", "test_keys_cached.py"

# Where each is tested: a file of this folder.
TESTED = {
    "masks.base.Mask": MASKS,
    "masks.base.Mask._cached": MASKS,
    "nbflash.backends.block_selection.host._bound_best": SELECTION,
    "nbflash.backends.block_selection.host._bound_means": SELECTION,
    "nbflash.backends.block_selection.host._bound_products": SELECTION,
    "nbflash.backends.block_selection.host._bound_weights": SELECTION,
    "nbflash.backends.cpu.dropout._compiled_once": CONTENTS,
    "nbflash.backends.cpu.score._compiled": CONTENTS,
    "nbflash.backends.cpu.score_gradient._compiled": CONTENTS,
    "nbflash.backends.simt.executor.SimtExecutor._passes": BOUND,
    "nbflash.backends.simt.score_gradient_host.SimtScoreBackward._kernel": BOUND,
    "nbflash.backends.sm80.executor.Sm80Executor._bound": BOUND,
    "nbflash.backends.sm90.executor.Sm90Executor._backward_in": BOUND,
    "nbflash.backends.merging.host._bound": SELECTION,
    "nbflash.cuda.bundled._unpacked": OWN,
    "nbflash.cuda.device.cuda_device": OWN,
    "nbflash.cuda.kernel_key._digest_of_sources": KERNELS,
    "nbflash.cuda.kernel_key._toolchain": KERNELS,
    "nbflash.cuda.launch._simulated": KERNELS,
    "nbflash.cuda.launch.load": KERNELS,
    "nbflash.cuda.pause.pause_of": OWN,
    "nbflash.cuda.tensor_map.Maps": KERNELS,
    "nbflash.cuda.tensor_map.Maps.__init__": KERNELS,
    "nbflash.cuda.tile.score._form": OWN,
    "nbflash.distributed.parcels.Index.of": BOUND,
    "nbflash.distributed.parcels.Parcels._tables": BOUND,
    "nbflash.distributed.placed_score._PlacedStage": VALUES,
    "nbflash.distributed.rank_plan.RankPlan.note": CALLS,
    "nbflash.distributed.rank_plan.rank_plan": CALLS,
    "nbflash.distributed.sharding.Sharding": VALUES,
    "nbflash.inputs.block_map.BlockMap": VALUES,
    "nbflash.inputs.positions.Positions": VALUES,
    "nbflash.inputs.tensors.CudaTensor": VALUES,
    "nbflash.planning.decode_plan._Counts.find": BOUND,
    "nbflash.planning.decode_plan.lookup": CALLS,
    "nbflash.planning.plan.AttentionPlan._check_out": CALLS,
    "nbflash.planning.plan.AttentionPlan._check_results": CALLS,
    "nbflash.planning.plan.AttentionPlan._matching": CALLS,
    "nbflash.planning.plan.lookup": CALLS,
    "nbflash.planning.plan.plan_of": CALLS,
    "nbflash.scores.Score": VALUES,
    "nbflash.scores._Stage": VALUES,
}
NO_ARGUMENT = "has no argument: one answer for a process"
MODULES = "by the name of a module, whose file does not change while a process runs"
WITHIN = "of one call or compilation: it is no cache"
TORCH = "needs PyTorch: `BY_HAND` reads its key from the source"
TYPES = "needs PyTorch: its answer follows from a type or a device, its only argument"
OWN_ARGUMENTS = "needs PyTorch: it reads nothing but its arguments, which are its key"
REASONS = {
    "masks.functions._reads": WITHIN,
    "masks.planes.Planes.__init__": WITHIN,
    "masks.tiles._BitPool._add": WITHIN,
    "nbflash.cuda.availability.why_not_cuda": NO_ARGUMENT,
    "nbflash.cuda.bundled.index": NO_ARGUMENT,
    "nbflash.cuda.kernel_key.fresh_content": "tests/compile/test_compile_key.py has it compiled",
    "nbflash.cuda.ptx._asm._defaults": "by a class of Numba's",
    "nbflash.cuda.ptx._asm.asynchrony": NO_ARGUMENT,
    "nbflash.cuda.ptx._asm.hopper": NO_ARGUMENT,
    "nbflash.cuda.ptx._shared.shared": "by the module that is asked for",
    "nbflash.cuda.ptxas.find_ptxas": NO_ARGUMENT,
    "nbflash.cuda.ptxas.ptxas_version": NO_ARGUMENT,
    "nbflash.cuda.side_by_side._workers": NO_ARGUMENT,
    "nbflash.cuda.sources._is_module": MODULES,
    "nbflash.cuda.sources._references": WITHIN,
    "nbflash.cuda.sources._statements": MODULES,
    "nbflash.cuda.sources.definitions_of": WITHIN,
    "nbflash.cuda.sources.file_digest": MODULES,
    "nbflash.cuda.tile.mma.fragment.Fragment.fold": WITHIN,
    "nbflash.cuda.tile.score.ScoreCode": "a frozen dataclass; `signature` is not its key",
    "nbflash.cuda.tile.wgmma.softmax.fold_rows": WITHIN,
    "nbflash.distributed.local.LocalCommunicator._take": "messages, each taken once",
    "nbflash.distributed.local._collected": WITHIN,
    "nbflash.huggingface.mask_functions.remembered": TORCH,
    "nbflash.inputs.tensors._plain_kinds": NO_ARGUMENT,
    "nbflash.inputs.tensors._torch_dtype": TYPES,
    "nbflash.inputs.tensors.numpy_dtype": TYPES,
    "nbflash.torch.handles.Spec.score": TORCH,
    "nbflash.torch.handles._spec": TORCH,
    "nbflash.torch.late_masks.documents": OWN_ARGUMENTS,
    "nbflash.torch.memory._cupy": NO_ARGUMENT,
    "nbflash.torch.memory._stream": TYPES,
}


def _is_place(node):
    return any(is_one(node) for is_one in (is_cached, wraps_a_cache, compares, remembers))


def test_every_place_with_a_key_is_declared():
    """A new one belongs to `CACHED`, or to `TESTED` with its test, or to `REASONS`."""
    found = {name for name in places(_is_place) if ".simulator." not in name}
    declared = {*CACHED, *TESTED, *REASONS}
    assert found - declared == set(), "say where it is tested, or why no key can leave anything out"
    assert declared - found == set(), "declared, and not there any more"


@pytest.mark.parametrize("name", TESTED)
def test_the_test_that_is_named_knows_the_place(name):
    """Its name, or that of the module or function which asks it."""
    text = (HERE / TESTED[name]).read_text()
    known = [part for part in name.split(".") if part not in ("nbflash", "masks", "cuda", "find")]
    assert any(part in text for part in known), TESTED[name]


def test_what_has_no_argument_has_none():
    found = places(is_cached)
    for name, reason in REASONS.items():
        if reason == NO_ARGUMENT:
            assert not found[name].args.args, name


OF_PLAN = "its layout is the plan's"
# Keys that are written by hand: the variable, and arguments that it need not name, with the reason.
BY_HAND = {
    "nbflash.backends.simt.executor.SimtExecutor._passes": ("key", {}),
    "nbflash.distributed.rank_plan.rank_plan": ("key", {}),
    "nbflash.planning.decode_plan.key_of": ("return", {}),
    "nbflash.planning.decode_plan.lookup": ("call", {}),
    "nbflash.planning.plan.AttentionPlan._matching": ("call", {}),
    "nbflash.planning.plan.lookup": ("call", {}),
    "nbflash.planning.plan.AttentionPlan._check_results": (
        "call",
        {"q": "its layout is the plan's"},
    ),
    "nbflash.planning.plan.AttentionPlan._check_out": (
        "call",
        dict.fromkeys("qkv", "its layout is the plan's"),
    ),
    "nbflash.torch.handles.Spec.score": ("key", {}),
    "nbflash.torch.handles._spec": ("key", {}),
}


def _values(function, variable):
    """What is assigned to a variable, or returned."""
    for node in ast.walk(function):
        returned = variable == "return" and isinstance(node, ast.Return)
        if returned or (isinstance(node, ast.Assign) and variable in _bound(node.targets)):
            yield node.value


def _bound(targets):
    """Names that an assignment binds."""
    nodes = (x for target in targets for x in ast.walk(target) if isinstance(x, ast.Name))
    return {x.id for x in nodes if isinstance(x.ctx, ast.Store)}


def _names(nodes):
    return {x.id for node in nodes for x in ast.walk(node) if isinstance(x, ast.Name)}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_key_by_hand_names_every_argument(name):
    """Itself, or by what is made of them."""
    variable, left_out = BY_HAND[name]
    function = places(lambda node: isinstance(node, ast.FunctionDef))[name]
    arguments = {x.arg for x in ast.walk(function.args) if isinstance(x, ast.arg)} - {"self"}
    known, pending = set(), _names(list(_values(function, variable))[:1])
    while pending:
        at = pending.pop()
        if at not in known:
            known.add(at)
            pending |= _names(_values(function, at)) if at not in arguments else set()
    assert arguments - known == set(left_out)


def test_keys_that_other_libraries_need():
    """Types beside numbers that may be equal, and of every tensor shape, dtype and device."""
    functions = places(lambda node: isinstance(node, ast.FunctionDef))
    (key,) = _values(functions["nbflash.torch.handles.Spec.score"], "key")
    assert ast.unparse(key) == "(stream, dtype, *((x.shape, x.dtype, x.device) for x in tensors))"
    (types,) = _values(functions["nbflash.torch.handles._spec"], "types")
    assert ast.unparse(types) == "(type(causal), type(scale), type(dropout))"
    (key,) = _values(functions["nbflash.torch.handles._spec"], "key")
    assert "types" in _names([key])
    assert {
        name.removeprefix("nbflash.huggingface."): ast.unparse(call.args[0])
        for name, function in functions.items()
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "remembered"
    } == {
        "layer_masks.LayerMask._first": "(self.kind, nq, nk)",
        "layer_masks._cut": "('cut', mask, nq, nk, q_offset, kv_offset)",
        "layer_masks.last_rows": "('last rows', mask)",
        "mask_functions.mask_of": "(batch_size, mask, first)",
        "mask_functions.shared": "mask",
    }
