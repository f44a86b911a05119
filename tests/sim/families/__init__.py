"""The families of planted faults, each in a module of its name; see :mod:`mutant_family`."""

import importlib
import pkgutil

from mutant_family import Family

_MODULES = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
FAMILIES = tuple(x for module in _MODULES for x in vars(module).values() if isinstance(x, Family))
