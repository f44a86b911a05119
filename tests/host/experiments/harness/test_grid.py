"""The cases of a sweep, and how their work is counted."""

import numpy as np
import pytest

from experiments.harness import sweeps
from experiments.harness.errors import BadInput
from experiments.harness.grid import BLOCKS, random_rows, read_cases
from experiments.harness.passes import BACKWARD, BOTH, FORWARD, flops

SHAPE = (2, 128, 2, 16)


def test_quick_runs_the_cases_of_the_figure_alone():
    found = read_cases(sweeps.load("peers"), "quick")
    common = ["dense", "causal", "butterfly", "local-4", "local-1"]
    assert {shape: [case.name for case in of] for shape, of in found.items()} == {
        (2, 8192, 16, 128): [*common, "random-64"],
        (2, 8192, 32, 64): common,
    }


def test_full_sweep_has_every_mask_that_has_room():
    found = read_cases(sweeps.load("peers"), "full")
    assert {shape[1] for shape in found} == {2**k for k in range(9, 16)}
    assert {shape[3] for shape in found} == {64, 128, 256}
    assert (1, 32768, 8, 256) in found
    names = [spec["name"] for spec in sweeps.load("peers")["mask"]]
    for shape, of in found.items():
        # Four blocks either side of four are dense.
        left_out = {"local-4"} if shape[1] == 512 else set()
        assert [case.name for case in of] == [name for name in names if name not in left_out]
        density = {case.name: case.density for case in of}
        assert density["dense"] == 1
        assert density["causal"] == 0.5
        blocks = shape[1] // 128
        assert density["butterfly"] == pytest.approx((1 + np.log2(blocks)) / blocks)
        assert density["local-1"] == pytest.approx((3 * blocks - 2) / blocks**2)
        assert density["random-64"] == 0.125
        assert all(case.mask.shape == (shape[1], shape[1]) for case in of)
    assert found[1, 32768, 8, 256][5].density == pytest.approx(0.1, rel=1e-4)


def test_options_choose_cases():
    sweep = sweeps.load("peers")
    found = read_cases(sweep, "quick", names=("random",), head_dims=(32,), seqlens=(384,))
    assert list(found) == [(42, 384, 64, 32)]
    assert [(case.name, case.kind, case.tile) for case in found[42, 384, 64, 32]] == [
        ("random", BLOCKS, 128)
    ]
    with pytest.raises(BadInput, match="--mask local: expected one of dense, causal, butterfly"):
        read_cases(sweep, "full", names=("local",))
    with pytest.raises(
        BadInput, match="no mask has room in 200: dense takes multiples of 128 from 128 on"
    ):
        read_cases(sweep, "full", seqlens=(200,))
    with pytest.raises(BadInput, match=r"room in 512: local-4 takes .* 128 from 640 on$"):
        read_cases(sweep, "full", names=("local-4",), seqlens=(512,))
    with pytest.raises(BadInput, match="the quick sweep has no mask at head_dim 96: name one with"):
        read_cases(sweep, "quick", head_dims=(96,))


def test_cases_of_real_work_have_sizes_of_their_own():
    sweep = sweeps.load("peers")
    found = read_cases(sweep, "cases")
    sizes = {name: [] for name in (spec["name"] for spec in sweep["cases"]["case"])}
    for key, cases in found.items():
        for case in cases:
            assert key == (*case.shape, case.heads_kv or case.shape[2])
            assert case.mask.shape == (case.shape[1],) * 2
            sizes[case.name].append(key)
            if case.kind not in ("causal", "blocks"):
                assert case.density == case.mask.nnz / case.shape[1] ** 2
    assert sizes == {
        "ragged": [(4, 3001, 16, 128, 16), (4, 3001, 32, 64, 32)],
        "whole": [(4, 3072, 16, 128, 16), (4, 3072, 32, 64, 32)],
        "gqa": [(2, 8192, 16, 128, 2)],
        "equal-heads": [(2, 8192, 16, 128, 16)],
        "window": [(1, 16384, 16, 128, 16), (1, 16384, 32, 64, 32)],
        "documents": [(1, 16384, 16, 128, 16)],
        "prefix": [(1, 16384, 16, 128, 16)],
        "bigbird": [(1, 16384, 16, 128, 16)],
        "narrow": [(2, 8192, 16, 80, 16), (2, 8192, 16, 96, 16)],
        "rows-64-16": [(1, 8192, 16, 128, 16)],
        "rows-64-26": [(1, 16384, 16, 128, 16), (1, 16384, 16, 64, 16)],
        "rows-64-51": [(1, 32768, 16, 128, 16)],
        "rows-128-8": [(1, 8192, 16, 128, 16)],
        "rows-128-13": [(1, 16384, 16, 128, 16), (1, 16384, 16, 64, 16)],
    }
    for case in (case for cases in found.values() for case in cases):
        if case.name.startswith("rows-"):
            _, tile, per_row = case.name.split("-")
            blocks = case.mask.tiles(int(tile)).kinds
            assert set(np.diff(blocks.indptr)) == {int(per_row)}
            assert (case.tile, case.libraries) == (int(tile), ("nbflash", "cudnn-frontend"))
    chosen = read_cases(sweep, "cases", names=("ragged", "window"), head_dims=(64,))
    assert [case.name for cases in chosen.values() for case in cases] == ["ragged", "window"]
    assert list(read_cases(sweep, "cases", seqlens=(3072,))) == sizes["whole"]
    with pytest.raises(BadInput, match="--mask dense: expected one of ragged, whole, gqa"):
        read_cases(sweep, "cases", names=("dense",))
    with pytest.raises(BadInput, match="no case is of these masks, lengths and head dimensions"):
        read_cases(sweep, "cases", names=("gqa",), head_dims=(64,))


def test_random_rows_are_those_of_their_seed():
    blocks = random_rows(96, 16, 2, seed=1).tiles(16).kinds
    assert set(np.diff(blocks.indptr)) == {2}
    again, other = (random_rows(96, 16, 2, seed).tiles(16).kinds for seed in (1, 2))
    np.testing.assert_array_equal(again.indices, blocks.indices)
    assert (other.indices != blocks.indices).any()


def test_work_is_counted_by_density():
    quick = read_cases(sweeps.load("peers"), "quick")[2, 8192, 16, 128]
    work = {case.name: flops(case.shape, case.density, FORWARD) for case in quick}
    assert work["dense"] == 4 * 8192**2 * 128 * 16 * 2
    assert work["causal"] == work["dense"] / 2
    assert work["random-64"] == work["dense"] / 8
    assert flops(SHAPE, 1.0, BACKWARD) == 2.5 * flops(SHAPE, 1.0, FORWARD)
    assert flops(SHAPE, 1.0, BOTH) == flops(SHAPE, 1.0, FORWARD) + flops(SHAPE, 1.0, BACKWARD)


def test_flops_are_counted_as_the_papers_do():
    assert flops((2, 1024, 16, 64), 1.0, "forward") == 4 * 1024**2 * 64 * 16 * 2
    assert flops((2, 1024, 16, 64), 0.5, "backward") == 2.5 * 2 * 1024**2 * 64 * 16 * 2
