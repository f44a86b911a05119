"""The distribution: what it says of itself, ships and imports, and what README promises."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse

import masks
import nbflash

ROOT = Path(__file__).parents[2]
MAX_LINES = 400
TEXT = {".py", ".md", ".cfg", ".toml", ".csv", ".yml", ".yaml", ".txt", ""}


def tracked_files() -> list[Path]:
    """Return what git would hand out: tracked files, and new ones that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def requirements(extra: str) -> list[str]:
    return setup_cfg()["options.extras_require"][extra].split()


def python_blocks(markdown: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", markdown, flags=re.M | re.S)


def test_changelog_has_this_version():
    headings = re.findall(
        r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M
    )
    assert headings[0] == nbflash.__version__


def test_version_has_one_home():
    assert setup_cfg()["metadata"]["version"] == "attr: nbflash.__version__"
    source = (ROOT / "nbflash" / "__init__.py").read_text(encoding="utf-8")
    assert f'__version__ = "{nbflash.__version__}"' in source


def test_pyproject_is_only_the_build_system():
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 3
    assert lines[0] == "[build-system]"


def test_base_and_test_extras_bring_no_cuda_wheels():
    base = setup_cfg()["options"]["install_requires"].split() + requirements("plot")
    heavy = re.compile(r"cuda|cupy|nvidia|torch|jax")
    assert [name for name in base if heavy.search(name)] == []


@pytest.mark.parametrize(("extra", "other"), [("cuda12", "13"), ("cuda13", "12")])
def test_cuda_extras_name_one_release_of_cuda(extra, other):
    assert [r for r in requirements(extra) if re.search(rf"(cupy-cuda|\[cu){other}", r)] == []
    cupy = [r for r in requirements(extra) if r.startswith("cupy")]
    assert len(cupy) == 1
    assert cupy[0].startswith(f"cupy-cuda{extra[-2:]}x")


# Assembled, so that this file does not hold what it forbids.
FORBIDDEN = {
    "home directory": re.compile("/" + r"(?:home|Users)/(?!me\b)\w|/" + r"root/"),
    "scratch path": re.compile(r"(?<![\w.}$])/" + r"(?:tmp|work|opt)/\w"),
    "package index address": re.compile(r"(?:index|find|trusted)-(?:url|links|host)\b\s*[=:]"),
    "merge conflict": re.compile(r"^(?:<{7} |>{7} )", re.M),
    "unfinished work": re.compile("|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX"])),
}


def forbidden_in(text: str) -> list[str]:
    return [name for name, pattern in FORBIDDEN.items() if pattern.search(text)]


def text_files() -> list[Path]:
    return [path for path in tracked_files() if path.suffix in TEXT]


def test_no_file_holds_a_forbidden_string():
    found = {
        str(path.relative_to(ROOT)): names
        for path in text_files()
        if (names := forbidden_in(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("planted", "name"),
    [
        ("open('" + "/" + "home/ann/q.npy')", "home directory"),
        ("cache = '" + "/" + "tmp/nbflash'", "scratch path"),
        ("pip --index-" + "url=somewhere", "package index address"),
        ("<<<" + "<<<< HEAD", "merge conflict"),
        ("# TO" + "DO: later", "unfinished work"),
    ],
)
def test_planted_string_is_reported(planted, name):
    assert forbidden_in(planted) == [name]


def test_python_files_fit():
    long = {
        str(path.relative_to(ROOT)): count
        for path in text_files()
        if path.suffix == ".py"
        and (count := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert long == {}


def import_without(packages: str, statement: str) -> subprocess.CompletedProcess:
    """Run ``statement`` in a new process in which importing any of ``packages`` fails."""
    script = (
        f"import sys\nfor name in {packages.split()}:\n    sys.modules[name] = None\n{statement}"
    )
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )


OPTIONAL = "cupy cuda ml_dtypes matplotlib rich click greenlet torch transformers jax"


@pytest.mark.parametrize(
    ("packages", "module"),
    [
        (f"{OPTIONAL} numba llvmlite nbflash", "masks"),
        (f"{OPTIONAL} numba.cuda", "nbflash"),
        (OPTIONAL, "nbflash.__main__"),
    ],
)
def test_imports_without(packages, module):
    result = import_without(packages, f"import {module}")
    assert result.returncode == 0, result.stderr


def test_blocked_package_is_really_blocked():
    assert import_without("numpy", "import masks").returncode != 0


def test_package_data_reaches_the_wheel():
    """Every file under experiments/data and experiments/sweeps matches a package_data pattern."""
    patterns = setup_cfg()["options.package_data"]["experiments"].split()
    for folder in ("data", "sweeps"):
        shipped = {path for pattern in patterns for path in (ROOT / "experiments").glob(pattern)}
        present = {p for p in tracked_files() if p.is_relative_to(ROOT / "experiments" / folder)}
        assert present
        assert present <= shipped


def readme_blocks() -> dict[str, str]:
    blocks = python_blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    names = {"import cupy": "cupy", "KVCache": "decode"}
    return {next((names[s] for s in names if s in b), "numpy"): b for b in blocks}


def test_readme_shows_one_example_per_array_library_and_of_decode():
    assert sorted(readme_blocks()) == ["cupy", "decode", "numpy"]


@pytest.mark.parametrize("example", ["numpy", "cupy", "decode"])
def test_readme_example_is_ten_lines(example):
    code = [line for line in readme_blocks()[example].splitlines() if line.strip()]
    assert len(code) <= 10


@pytest.mark.parametrize("example", ["numpy", "decode"])
def test_readme_example_runs(example):
    result = subprocess.run(
        [sys.executable, "-c", readme_blocks()[example]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_readme_cupy_example_differs_in_the_array_library_only():
    blocks = readme_blocks()
    compile(blocks["cupy"], "README.md", "exec")
    as_numpy = (
        blocks["cupy"].replace("import cupy as cp", "import numpy as np").replace("cp.", "np.")
    )
    assert as_numpy == blocks["numpy"]


def mask_expressions() -> list[str]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `(masks\..+?)` \|", readme, flags=re.M)


@pytest.mark.parametrize("expression", mask_expressions())
def test_readme_mask_exists(expression):
    mask = eval(expression, {"masks": masks, "np": np, "scipy": scipy})
    assert mask.shape == (4096, 4096)
    assert all(0 < plane.tiles(128, 128).kinds.nnz <= 32 * 32 for plane in mask.planes)


def test_readme_names_every_generator():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = {name for name in masks.__all__ if re.search(rf"\b{name}\b", readme)}
    generators = {name for name in masks.__all__ if name.islower()}
    assert generators - named == set()


def test_readme_links_exist():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", readme)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
