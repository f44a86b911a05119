"""Print versions, devices, what runs here and why the rest does not."""

import argparse

from nbflash.environment import show_config

argparse.ArgumentParser(prog="python -m nbflash", description=__doc__).parse_args()
show_config()
