"""What the engines find on this machine: `python -m engines.probe`, one JSON document on stdout.

`facet doctor` starts it in a process of its own, so that the gateway's process never loads torch. Loads no model.

Read next: `engines/models/registry.py` (who chooses the number format).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from typing import Any

import torch

NATIVE_MODULE = "engines.ops.native"


def facts() -> dict[str, Any]:
    """Versions, the widest vector instructions in use, torch's int8 library, and whether our own kernels run.

    `native` is None when this version has none; `why_not` says what keeps them from running.
    """
    native: bool | None = None
    why_not = ""
    if importlib.util.find_spec(NATIVE_MODULE) is not None:
        module = importlib.import_module(NATIVE_MODULE)
        native = bool(module.available())
        why_not = "" if native else str(module.why_not())
    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "int8": torch.backends.quantized.engine,
        "threads": torch.get_num_threads(),
        "native": native,
        "why_not": why_not,
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
    sys.exit(0)
