"""The distribution: what it says of itself, ships and imports, and what README promises."""

import configparser
import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import nbflash

ROOT = Path(__file__).parents[3]
MAX_LINES = 400
TEXT = {".py", ".md", ".cfg", ".toml", ".csv", ".yml", ".yaml", ".txt", ""}


def tracked_files() -> list[Path]:
    """Return what git would hand out: tracked files, and new ones that it does not ignore.

    In an unpacked source distribution: its files.
    """
    if not (ROOT / ".git").exists():
        sources = ROOT / "nbflash.egg-info" / "SOURCES.txt"
        return [ROOT / name for name in sources.read_text(encoding="utf-8").splitlines()]
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
    """All files but the sample, and what made it, match a pattern; none is large."""
    shipped = {
        path
        for package, patterns in setup_cfg()["options.package_data"].items()
        for pattern in patterns.split()
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    } & set(tracked_files())
    folders = ROOT / "experiments" / "data", ROOT / "experiments" / "sweeps"
    data = {path for path in tracked_files() if path.is_relative_to(folders[0])}
    data |= {path for path in tracked_files() if path.is_relative_to(folders[1])}
    data |= {ROOT / "masks" / "py.typed", ROOT / "nbflash" / "py.typed"}
    assert {path.name for path in data - shipped} == {"sample.npz", "make_sample.py"}
    assert sum(path.stat().st_size for path in shipped) < 200_000


README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = r"\]\((?!https?:|#)([^)#]+)"


def test_readme_is_short():
    assert len(README.split()) <= 1000


def test_readme_has_one_example_of_ten_lines():
    (example,) = python_blocks(README)
    assert len([line for line in example.splitlines() if line.strip()]) <= 10


def test_readme_links_exist():
    targets = re.findall(LINK, README)
    assert len(targets) >= 20
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_readme_leads_to_every_page():
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    led_to = {
        "docs/index.md",
        "docs/changelog.md",
        "docs/contributing.md",
        "docs/simulator.md",
        *re.findall(LINK, README),
    }
    assert pages - led_to == set()


def test_an_index_page_has_no_links_to_files():
    page = runpy.run_path(str(ROOT / "setup.py"))["index_page"](README, "")
    assert re.findall(LINK, page) == []
    assert "[arXiv:2205.14135](https://arxiv.org/abs/2205.14135)" in page
    assert "Start here (`docs/start.md`)" in page


def test_links_lead_to_where_the_project_is_published():
    home = "https://example.org/team/nbflash"
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "--long-description"],
        cwd=ROOT,
        env=os.environ | {"NBFLASH_URL": home + "/"},
        capture_output=True,
        text=True,
    )
    page = done.stdout
    assert f"[Start here]({home}/blob/main/docs/start.md)" in page
    assert re.findall(LINK, page) == []
    links = runpy.run_path(str(ROOT / "setup.py"))["project_urls"]
    assert links("") == {}
    assert links(home)["Issues"] == f"{home}/issues"
    assert links(home)["Changelog"] == f"{home}/blob/main/CHANGELOG.md"


def test_citation_has_this_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {nbflash.__version__}\n" in citation


@pytest.mark.parametrize("name", ["nbflash", "nbflash-experiments"])
def test_console_script_names_a_function(name):
    scripts = setup_cfg()["options.entry_points"]["console_scripts"].split("\n")
    targets = dict(line.split(" = ") for line in scripts if line)
    module, _, function = targets[name].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("name", ["masks.py", "masks/__init__.py"])
def test_a_module_that_shadows_masks_is_named(tmp_path, name):
    """And is not run."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("raise SystemExit('it was run')")
    (tmp_path / "script.py").write_text("import nbflash")
    environment = os.environ | {"PYTHONPATH": str(Path(nbflash.__file__).parents[1])}
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert f"nbflash brings a package 'masks', but {path} has the same name" in done.stderr
