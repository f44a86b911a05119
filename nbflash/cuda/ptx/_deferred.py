"""Stand-ins for Numba, which import it when they are first used: that takes half a second."""

import importlib


class Module:
    """A module that is imported when something of it is first used, by Python or by Numba."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):  # what copies and inspects objects asks for
            raise AttributeError(name)
        found = getattr(importlib.import_module(self._name), name)
        setattr(self, name, found)
        return found

    def __repr__(self):
        return f"Module({self._name!r})"

    @property
    def _numba_type_(self):
        """Asked for where a function that is compiled refers to the module."""
        return _type_of(importlib.import_module(self._name))


class Callee:
    """What device code calls, a device function or an intrinsic, before Numba has made it.

    Parameters
    ----------
    make : callable
        ``make(function)`` gives Numba's own.
    function : callable
    """

    def __init__(self, make, function):
        self._make, self.py_func = make, function
        self._made = None

    @property
    def _numba_type_(self):
        """Asked for where a function that is compiled refers to this one."""
        if self._made is None:
            made = self._make(self.py_func)
            self._made = made, _type_of(made)  # the type does not keep it alive
        return self._made[1]

    def __deepcopy__(self, memo):
        return self

    def __repr__(self):
        return f"Callee({self.py_func!r})"


def _type_of(value):
    from numba.cuda.descriptor import cuda_target

    context = cuda_target.typing_context
    context.refresh()  # registers an intrinsic that has just been made
    return context.resolve_value_type(value)
