"""What `make dist` tries in an environment of the wheel alone: python tests/installed.py dist

The archives hold what they should, the installed package is the one that is imported, its commands
run, and the example of README does.
"""

import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
IN_SOURCES = (
    *("CHANGELOG.md", "CITATION.cff", "Makefile", "MANIFEST.in", ".ci/run", "notes/README.md"),
    *("docs/start.md", "examples/gpt.py", "tests/conftest.py", "tests/sim/suite.json"),
    "experiments/data/sample.npz",
)
IN_WHEEL = "nbflash/py.typed", "masks/py.typed", "experiments/sweeps/io.toml"
NOT_IN_WHEEL = "experiments/data/sample.npz", "tests/conftest.py", "docs/conf.py"


def check_archives(folder: Path) -> None:
    (sources,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    with tarfile.open(sources) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = set(IN_SOURCES) - names
    if missing:
        raise SystemExit(f"{sources} lacks {sorted(missing)}")
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        text = archive.read(metadata).decode()
    if not set(IN_WHEEL) <= names or set(NOT_IN_WHEEL) & names:
        raise SystemExit(f"{wheel} holds {sorted(names)}")
    if "](docs/" in text or "# nbflash" not in text:
        raise SystemExit(f"{metadata} has README with links to files")


def main() -> None:
    check_archives(Path(sys.argv[1]))
    import nbflash

    if Path(nbflash.__file__).is_relative_to(ROOT / "nbflash"):
        raise SystemExit(f"{nbflash.__file__} is not the installed package")
    scripts = Path(sys.executable).parent
    shown = subprocess.run([scripts / "nbflash"], capture_output=True, text=True, check=True)
    if not shown.stdout.startswith(f"nbflash {nbflash.__version__}\n"):
        raise SystemExit(shown.stdout)
    bare = subprocess.run([scripts / "nbflash-experiments"], capture_output=True, text=True)
    if bare.returncode != 2 or "pip install 'nbflash[plot]'" not in bare.stderr:
        raise SystemExit(bare.stderr)
    example = (ROOT / "README.md").read_text(encoding="utf-8").partition("```python\n")[2]
    exec(example.partition("```")[0], {})


if __name__ == "__main__":
    main()
