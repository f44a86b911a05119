"""The masks of a family of the sparsity sweep."""

import numpy as np

import masks
from experiments.harness import sweeps


def test_cases_are_distinct_and_say_what_they_are():
    family = {
        "name": "both",
        "union": [{"pattern": "local", "width": 1}, {"pattern": "butterfly"}],
        "vary": "stages",
        "values": [0, 1, 3, 4],
    }
    found = sweeps.cases([family], 64, 8)
    # local | butterfly of 0 or 1 stages is local; 8 blocks have room for 3 stages.
    assert [case.expression for case in found][-1] == "local width=1 | butterfly stages=3"
    expected = masks.local(64, 8, 1) | masks.butterfly(64, 8, stages=3)
    np.testing.assert_array_equal(found[-1].mask.dense(), expected.dense())
    assert "stages 4" not in [case.label for case in found]
    assert sweeps.cases([family, family | {"name": "again"}], 64, 8) == found
