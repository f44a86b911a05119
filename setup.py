"""What setup.cfg cannot say: README as an index page shows it, where no other file exists."""

import re
from pathlib import Path

from setuptools import setup

LINK = re.compile(r"!?\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def index_page(markdown):
    """Links to files of the repository become text: their names, for who has a checkout."""
    return LINK.sub(r"\1 (`\2`)", markdown)


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md")
    setup(long_description=index_page(readme.read_text(encoding="utf-8")))
