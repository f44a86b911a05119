"""The pages on the frameworks: their examples run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = {
    f"{path.stem}-{i}": block
    for path in sorted((ROOT / "docs").glob("*.md"))
    for i, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    )
}


def test_every_page_has_an_example():
    assert {name.partition("-")[0] for name in BLOCKS} == {"huggingface", "jax", "torch"}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_example_runs(block):
    given = {"cwd": ROOT, "capture_output": True, "text": True, "check": False}
    result = subprocess.run([sys.executable, "-c", block], **given)
    assert result.returncode == 0, result.stderr
    assert result.stdout
