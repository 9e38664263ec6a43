"""What SGLang imports and a machine without a GPU has not: its kernels for CUDA and AMX (`sgl_kernel`), and `torchvision`.

SGLang 0.5.23 imports both at start and calls neither for a text model on a processor without AMX. `install` answers for them with
modules of placeholders. It has to run before anything else in every process that SGLang spawns, ahead of its plug-ins: scripts/install-sglang
writes a `.pth` file that calls it, in the environment that it makes. Imports nothing that takes time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

STOOD_IN_FOR: Final = ("sgl_kernel", "torchvision")


class _Names(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Placeholder(metaclass=_Names):
    """Stands for every function, class and constant of a module that is not there; its attributes are itself."""

    def __init__(self, *given: object, **named: object) -> None:
        raise NotImplementedError(
            "sgl_kernel and torchvision are not installed, and something of them was called: this model needs a machine "
            "that has SGLang's kernels"
        )

    def __class_getitem__(cls, item: object) -> type[Placeholder]:
        return cls


class _Absent(ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder


class Finder(MetaPathFinder, Loader):
    """Answers for `STOOD_IN_FOR` and what is in them. Last in line: what is installed is found first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to make a module of placeholders; None for what this does not stand in for."""
        del path, target
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in STOOD_IN_FOR else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module, a package of no files."""
        made = _Absent(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run."""


def install() -> None:
    """Stand in for what is missing, in this process. Done again, it changes nothing."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
