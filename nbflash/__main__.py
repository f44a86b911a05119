"""Print versions, devices, what runs here and why the rest does not."""

import argparse

from nbflash import __version__
from nbflash.environment import show_config


def run() -> None:
    """The command line: ``python -m nbflash``, and ``nbflash`` where it is installed."""
    parser = argparse.ArgumentParser(prog="nbflash", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    parser.parse_args()
    show_config()


if __name__ == "__main__":
    run()
