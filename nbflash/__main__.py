"""Print versions, devices, what runs here and why the rest does not; or compile kernels ahead."""

import argparse
import sys

from nbflash import __version__, warming
from nbflash.environment import show_config


def run(arguments=None) -> None:
    """``nbflash`` and ``python -m nbflash``: `nbflash.show_config` without a command."""
    parser = argparse.ArgumentParser(prog="nbflash", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    warming.add_command(parser.add_subparsers())
    options = parser.parse_args(arguments)
    try:
        getattr(options, "run", lambda _: show_config())(options)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"nbflash: {error}")


if __name__ == "__main__":
    run()
