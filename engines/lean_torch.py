"""Lets `import torch` leave out, until somebody asks, what eager inference does not use.

`torch/__init__.py` imports the shape functions of meta tensors and the exporter for their side effects; they take a
third of its time and 20 MB. `import_torch()` puts stand-ins in their place first: a stand-in imports the real module as
soon as an attribute of it is asked for. Only processes that are ours alone do this (a worker, a
benchmark): in a test process transformers needs the real ones. A version of torch without these modules is unaffected.

Knows nothing of engines. Read next: `engines/start.py`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

POSTPONED = ("torch._meta_registrations", "torch.export")


class Postponed(ModuleType):
    """Stands for a module that has not been imported."""

    def __getattr__(self, name: str) -> Any:
        """Import the real module, once, and ask it; the import system's own questions are not worth that.

        Except for `__path__`, which it asks before it imports a submodule.
        """
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def import_torch() -> None:
    """Import torch without them; if it is imported already, nothing."""
    if "torch" in sys.modules:
        return
    for name in POSTPONED:
        sys.modules[name] = Postponed(name)
    import torch
    from torch._opaque_base import OpaqueBaseMeta

    # One side effect is needed: without its metaclass `torch.Generator()` raises. Setting it twice is fine.
    torch._C._set_generator_metaclass(OpaqueBaseMeta)
