"""Whether ``import masks`` finds the package of that name that comes with nbflash.

Imported before all modules that import ``masks``, so that a user's file of that name is reported
before it runs.
"""

import sys
from importlib.util import find_spec
from pathlib import Path


def check_masks() -> None:
    """Raise ImportError if another module of that name comes first on ``sys.path``."""
    own = Path(__file__).resolve().parents[2] / "masks" / "__init__.py"
    module = sys.modules.get("masks") or find_spec("masks")
    origin = getattr(module, "__file__", None) or getattr(module, "origin", None)
    if origin is not None and Path(origin).resolve() != own:
        raise ImportError(
            f"nbflash brings a package 'masks', but {origin} has the same name and comes first: "
            f"rename that file, or move it off sys.path"
        )


check_masks()
