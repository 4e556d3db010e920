"""Packages that an engine imports and does not use on a CPU, as names; for scripts that run in an engine's environment.

GPU kernels, mostly. Importing them gives names; calling one decorates a function or gives another name, never a result.
"""

import importlib.abc
import importlib.machinery
import sys
import types


class Name:
    """A name and everything below it."""

    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if attribute == "get_current_target":  # how triton is asked for its device
            raise RuntimeError("no device")
        return Name(f"{self.__name__}.{attribute}")

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return Name(f"{self.__name__}()")

    def __getitem__(self, key):
        return self


class _Module(types.ModuleType):
    def __getattr__(self, attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if attribute[:1].isupper():
            return type(attribute, (), {"__init__": lambda self, *args, **kwargs: None})
        return Name(f"{self.__name__}.{attribute}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _Module(spec.name)
        module.__version__ = "3.6.0"
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


def install(*packages):
    """Answer every import of ``packages``, and of what is in them, with names."""
    sys.meta_path.insert(0, _Finder(frozenset(packages)))
