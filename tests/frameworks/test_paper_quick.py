"""`--quick` of every command of the paper that needs torch, as users run it.

Two minutes on two cores is what its help promises: it takes less than that of one core.
"""

import time

import pytest
from paper_runs import read_csv, run

pytestmark = pytest.mark.usefixtures("one_thread")
COMMANDS = ("figure3", "lra", "long", "pathx", "training")


@pytest.mark.parametrize("command", COMMANDS)
def test_quick(command, tmp_path):
    begin = time.process_time()
    assert run(command, "--quick", "--device", "cpu", "--out", tmp_path) == 0
    assert time.process_time() - begin < 120
    rows = read_csv(tmp_path / f"paper-{command}.csv")
    names = {row.get("method") or row["attention"] for row in rows}
    assert names & {"nbflash-butterfly", "nbflash-sparse"}
