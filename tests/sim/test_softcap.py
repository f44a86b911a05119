"""tanh by a polynomial near 0, by the hardware beyond: which is taken, and what of it is right."""

from dataclasses import replace

import numpy as np
import pytest
from mutants import Mutant, mutated_modules
from sm90_runs import ALONE, HALVES, check, inputs, run

import masks
from nbflash import scores, sim
from nbflash.kernels.fwd_sm90 import fwd_sm90_spec
from nbflash.tile import softcap

T = 64
FWD, SOFTCAP = "nbflash.kernels.fwd_sm90", "nbflash.tile.softcap"
CHAIN = (
    "nbflash.tile.score",
    *(f"nbflash.kernels.sm90_{x}" for x in ("score", "whole", "compute")),
    FWD,
)


def off(x, inverse):
    """The polynomial's distance from tanh, relative."""
    found = softcap.near_tanh(x, softcap.coefficients(np.float32(inverse)))
    exact = np.tanh(x.astype(np.float64) * inverse)
    return np.max(abs(found - exact) / abs(exact))


@pytest.mark.parametrize("inverse", [softcap.LEAST, 1 / 50, 1.0, softcap.MOST])
def test_the_polynomial_is_as_good_as_the_instruction_and_no_further(inverse):
    x = np.linspace(1e-3, softcap.NEAR, 4001, dtype=np.float32) / np.float32(inverse)
    assert off(np.concatenate([x, -x]), inverse) <= 2**-11.5
    assert off(x * np.float32(1.5), inverse) > 2**-8


def problem(far=(), size=1.0):
    """Products of q and k below ``size``², but for the keys ``far`` up to 8 times as large."""
    q, k, v, _ = inputs(T + 9, 2 * T, dtype="bfloat16")
    q, k = abs(q), abs(k)
    longest = max(np.linalg.norm(x.astype(np.float32), axis=-1).max() for x in (q, k))
    for x in (q, k):
        x *= np.array(size / longest, x.dtype)
    k[:, list(far)] *= np.array(8, k.dtype)
    return q, k, v


CASES = {  # cap, scale, size, keys beyond; whether any warp goes the far way, and whether all do
    "all near": (2.0, 2.2, 1.0, (), False, False),
    "one key far": (2.0, 2.2, 1.0, (T + 2,), True, False),
    "all but absent rows far": (1.0, 2.2, 1.0, (), True, False),
    "tiny products": (2.0, 2.2 * 2.0**26, 2.0**-13, (), True, True),
    "huge products": (2.0, 2.2 * 2.0**-50, 2.0**25, (), True, True),
}


@pytest.fixture
def ways(monkeypatch):
    """For every fragment whether it went the far way."""
    taken, near = [], softcap.all_near

    def counted(s, inverse):
        taken.append(not near(s, inverse))
        return not taken[-1]

    monkeypatch.setattr(softcap, "all_near", counted)
    return taken


@pytest.mark.parametrize("config", [ALONE, HALVES], ids=["whole", "halves"])
@pytest.mark.parametrize("case", CASES)
def test_forward(case, config, ways):
    cap, scale, size, far, some, every = CASES[case]
    q, k, v = problem(far, size)
    config = replace(config, k_stages=config.k_stages + 1)  # a kernel that counts
    check(config, masks.causal(T + 9, 2 * T), q, k, v, scale=scale, score=scores.softcap(cap))
    assert (any(ways), all(ways)) == (some, every)


def test_nan_in_a_hidden_key_does_not_hide_a_far_one_beside_it():
    q, k, v = problem(far=(2,))
    mask = masks.from_function(lambda q, kv: kv != 3, T + 9, 2 * T)
    how = {"scale": 1.1, "score": scores.softcap(1.0)}
    clean = run(ALONE, mask, q, k, v, **how)
    k[:, 3] = np.nan
    for found, expected in zip(run(ALONE, mask, q, k, v, **how), clean, strict=True):
        np.testing.assert_array_equal(found, expected)


FAULTS = (
    Mutant("nothing is far", "all_lanes(functools", "all_lanes(True or functools"),
    Mutant("of four the first", "in others:", "in others[:0]:"),
    Mutant("large products", "inverse >= LEAST", "inverse >= 0.0"),
    Mutant("small products", "inverse <= MOST", "inverse >= 0.0"),
    Mutant("tanh twice", "map(types.float32, (1, 0,", "map(types.float32, (1, -0.3,"),
)


def check_all(spec_of):
    """In whole tiles; a far score is in every place of four."""
    mask = masks.dense(T + 9, 2 * T)
    for cap, scale, size, far, *_ in CASES.values():
        for shift in range(2 if far else 1):
            q, k, v = problem([x + shift for x in far], size)
            how = {"scale": scale, "score": scores.softcap(cap), "spec_of": spec_of}
            check(ALONE, mask, q, k, v, **how)


def test_the_cases_of_the_faults_pass():
    check_all(fwd_sm90_spec)


@pytest.mark.parametrize("mutant", FAULTS, ids=str)
def test_mutant_is_caught(mutant):
    faulty = mutated_modules(SOFTCAP, mutant, CHAIN)[FWD]
    with pytest.raises((sim.SimError, AssertionError)):
        check_all(faulty.fwd_sm90_spec)
