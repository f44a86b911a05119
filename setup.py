"""What setup.cfg cannot say: README as an index page shows it, and where the project is published.

``NBFLASH_URL``, the address of the repository, becomes the project's links. A checkout does not
know it; the workflow on GitHub sets it.
"""

import os
import re
from pathlib import Path

from setuptools import setup

LINK = re.compile(r"!?\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def index_page(markdown, home):
    """Links to files of the repository lead there; without ``home`` they become text."""
    to = rf"[\1]({home}/blob/main/\2)" if home else r"\1 (`\2`)"
    return LINK.sub(to, markdown)


def project_urls(home):
    """The links of the project, by name."""
    if not home:
        return {}
    return {
        "Source": home,
        "Documentation": f"{home}/tree/main/docs",
        "Changelog": f"{home}/blob/main/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }


if __name__ == "__main__":
    url = os.environ.get("NBFLASH_URL", "").rstrip("/")
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=index_page(readme, url), project_urls=project_urls(url))
