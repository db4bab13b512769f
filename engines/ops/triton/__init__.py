"""Triton kernels for CUDA: one file a kernel family, each beside the contract of its op in `engines/ops`.

Importing this package imports neither triton nor a driver; the files in it do. Triton is the optional extra `gpu`.
`available()` says whether a table of these kernels may be dispatched to.

What lies here knows nothing of models, requests or blocks' owners. It never tunes itself at run time: tile sizes come
from the tables in `tiles.py`, so that a row's bits depend neither on its neighbours nor on what ran before.
Read next: `docs/kernels.md`, `engines/ops/triton/kernel.py`.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch


def available() -> bool:
    """True if this process sees a CUDA device and triton can be imported (it is not imported here)."""
    return torch.cuda.is_available() and find_spec("triton") is not None
