import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[1] / "setup.cfg"
NEEDED = ("click", "rich", "matplotlib")


def run():
    """The command line; one line and exit status 2 where a package that it needs is missing."""
    try:
        from experiments.cli import main

        main()
    except ModuleNotFoundError as error:
        package = error.name.partition(".")[0]
        if package not in NEEDED:
            raise
        source = "." if CHECKOUT.is_file() else "nbflash"
        print(f"error: needs {package}: pip install '{source}[plot]'", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run()
