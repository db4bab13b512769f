"""What is left out of `import torch` comes when it is asked for."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from engines.lean_torch import POSTPONED, Postponed, import_torch
import_torch()
import sys, torch
assert all(isinstance(sys.modules[name], Postponed) for name in POSTPONED)
assert torch.add(torch.ones(2), 1).tolist() == [2.0, 2.0]
assert torch.Generator().manual_seed(1).initial_seed() == 1
assert all(isinstance(sys.modules[name], Postponed) for name in POSTPONED), "adding two numbers imported them"
%s
assert not isinstance(sys.modules[{name!r}], Postponed)
import_torch()
assert not isinstance(sys.modules[{name!r}], Postponed)
print("fine")
"""


def ran(use: str, name: str) -> subprocess.CompletedProcess[str]:
    script = (SCRIPT % use).format(name=name)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_an_attribute_brings_the_module() -> None:
    done = ran("assert callable(torch.export.export)", "torch.export")
    assert done.stdout == "fine\n", done.stderr


def test_a_submodule_brings_the_module() -> None:
    done = ran("import torch.export.dynamic_shapes", "torch.export")
    assert done.stdout == "fine\n", done.stderr


def test_a_name_brings_the_module() -> None:
    done = ran("from torch._meta_registrations import activate_meta", "torch._meta_registrations")
    assert done.stdout == "fine\n", done.stderr
