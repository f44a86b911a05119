"""`nbflash.warm` and ``nbflash warm``: what is compiled ahead is not compiled again."""

import pytest

import masks
import nbflash
from nbflash import scores
from nbflash.__main__ import run
from nbflash.cuda import launch
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.planning import ahead
from nbflash.planning.kernels import cuda_problem, kernels_of

FORWARD = ("forward",)


@pytest.fixture(autouse=True)
def compiled(tmp_path, monkeypatch):
    """What is handed to processes; they compile nothing, but it counts as kept."""
    monkeypatch.setenv("NBFLASH_CACHE_DIR", str(tmp_path))
    found = []

    def note(jobs, most_workers, *, bar):
        found.append((jobs, most_workers, bar))
        for spec, capability in jobs:
            launch._keep(launch._path(spec, launch.kernel_key.of(spec, capability)), b"kept")
        return jobs

    monkeypatch.setattr(ahead, "compile_all", note)
    return found


def test_all_kernels_of_all_combinations_once(compiled):
    given = {"capability": (9, 0), "score": (None, scores.softcap(20.0)), "dropout": (0.0, 0.1)}
    assert nbflash.warm((64, 128), ("float16",), **given) > 20
    for head_dim, mask in ((64, masks.causal(1000)), (128, masks.dense(4096))):
        spec = AttentionSpec(cuda_problem("float16", head_dim, *mask.shape), mask, None, 0.3)
        assert not any(launch.is_cold(kernel, (9, 0)) for kernel in kernels_of(spec, (9, 0)))
    assert nbflash.warm((64, 128), ("float16",), **given) == 0
    assert nbflash.warm((64,), ("bfloat16",), capability=(9, 0), workers=0, progress=False) > 0
    assert compiled[-1][1:] == (0, False)


def test_decode_is_warmed_by_the_dtypes_of_its_caches(compiled):
    given = {"passes": ("decode",), "cache_dtypes": (None, "int8"), "capability": (8, 0)}
    assert nbflash.warm((64,), ("float16",), **given) > 2
    names = {(spec.name, getattr(spec.config, "quantised", None)) for spec, _ in compiled[0][0]}
    assert names == {
        ("nbflash_decode_sm80", False),
        ("nbflash_decode_sm80", True),
        ("nbflash_combine_simt", None),
    }


def test_a_mask_of_ones_own_has_its_kernels_alone(compiled):
    mask = masks.butterfly(1024, 128)
    assert nbflash.warm((64,), ("bfloat16",), (mask,), passes=FORWARD, capability=(9, 0)) == 1
    ((spec, capability),) = compiled[0][0]
    assert (spec.name, spec.config.full_tiles, capability) == ("nbflash_fwd_sm90", True, (9, 0))


def test_the_command(compiled, capsys):
    what = ["--head-dim", "64", "--dtype", "float16", "--mask", "causal"]
    run(["warm", *what, "--capability", "8.6", "--forward-only"])
    assert "kernels compiled, kept in" in capsys.readouterr().out
    (jobs, _, bar), *_ = compiled
    assert {(spec.name, capability) for spec, capability in jobs} == {("nbflash_fwd_sm80", (8, 6))}
    assert bar


def test_without_a_command_it_is_show_config(capsys):
    run([])
    assert capsys.readouterr().out.startswith(f"nbflash {nbflash.__version__}")


WRONG = {
    "pattern": (
        {"patterns": ("casual",)},
        "patterns has 'casual': must be a mask or one of dense,",
    ),
    "capability": ({"capability": (3, 5)}, r"capability must be one of 7\.5, .* got \(3, 5\)"),
    "head_dim": ({"head_dims": (512,)}, "head_dims has 512: must be 1 to 256"),
    "dtype": ({"dtypes": ("int7",)}, "dtypes has 'int7': must be of float16, bfloat16, "),
    "cache-of-nothing": ({"cache_dtypes": ("int8",)}, "needs 'decode' among passes"),
    "dropout": ({"dropout": (1.5,)}, "dropout"),
    "passes": ({"passes": ("both",)}, "passes has 'both': must be of forward, backward, "),
    "cache": ({"cache_dtypes": ("int4",)}, "cache_dtypes has 'int4': must be of None, int8, fl"),
    "no-device": ({"capability": None}, "capability must be given here"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(case, monkeypatch):
    monkeypatch.setattr("nbflash.cuda.availability.why_not_cuda", lambda: ["no GPU"])
    given, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        nbflash.warm(**{"capability": (8, 0), **given})


@pytest.mark.parametrize("argument", ["dtypes", "passes", "cache_dtypes"])
@pytest.mark.parametrize("given", ["decode", None])
def test_one_name_is_no_sequence(argument, given):
    with pytest.raises(TypeError, match=f"{argument} must be a sequence of .*, got "):
        nbflash.warm(capability=(8, 0), **{argument: given})


def test_the_command_warms_decode_alone(compiled):
    run(["warm", "--decode-only", "--cache", "same", "int8", "--capability", "8.0"])
    ((jobs, *_),) = compiled
    names = {spec.name for spec, _ in jobs}
    assert names == {"nbflash_decode_sm80", "nbflash_combine_simt"}


def test_the_command_says_what_is_wrong(capsys):
    with pytest.raises(SystemExit, match="nbflash: capability must be one of"):
        run(["warm", "--capability", "1.0"])
    for text in ("abc", "9", "9.0.1"):
        with pytest.raises(SystemExit):
            run(["warm", "--capability", text])
        expected = f"argument --capability: expected two integers, as 9.0, got {text!r}"
        assert expected in capsys.readouterr().err


def test_the_simulator_compiles_nothing(monkeypatch):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    with pytest.raises(ValueError, match="the CUDA simulator"):
        nbflash.warm(capability=(9, 0))
