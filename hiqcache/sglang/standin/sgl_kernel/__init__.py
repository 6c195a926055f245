"""Takes the place of `sglang-kernel` where no NVIDIA driver exists and the real package cannot be loaded.

SGLang imports names from here while it starts and, on the CPU engine, calls none of them. Every name is therefore
an object that says so when it is called after all.
"""

import importlib.abc
import importlib.machinery
import sys
import types


class _Unavailable:
    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> "_Unavailable":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unavailable(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object):
        raise NotImplementedError(
            f"{self._name} needs an NVIDIA GPU; this process runs hiqcache's CPU stand-in for sglang-kernel"
        )


def _attribute(module: str, name: str) -> _Unavailable:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Unavailable(f"{module}.{name}")


def __getattr__(name: str) -> _Unavailable:
    return _attribute(__name__, name)


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """`import sgl_kernel.anything` gives a module of the same kind."""

    def find_spec(self, fullname: str, path: object, target: object = None):
        if fullname.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _attribute(spec.name, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(_Submodules())
