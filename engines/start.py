"""Starts a worker: `python -m engines.start --config JSON --socket PATH`; with `--zygote`, a process to fork from.

The first thing that runs in such a process: it imports torch without what no engine needs.

Read next: `engines/worker.py`, `engines/zygote.py`, `engines/lean_torch.py`.
"""

from __future__ import annotations

import sys

from engines.lean_torch import import_torch


def main() -> int:
    """Entry point of the process; exits with the worker's or the zygote's status."""
    import_torch()
    if "--zygote" in sys.argv[1:]:
        from engines.zygote import main as run
    else:
        from engines.worker import main as run
    return run()


if __name__ == "__main__":
    sys.exit(main())
