"""``python -m nbflash``: versions, devices, what runs here and why the rest does not."""

from nbflash.environment import show_config

show_config()
