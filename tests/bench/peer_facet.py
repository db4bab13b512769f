"""Facet as its own peer: `python peer_facet.py CONFIG_JSON`, the figures of `engines/bench.py`, one when asked.

Read next: `tests/bench/peer_protocol.py`, `engines/bench.py`.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import msgspec
from peer_protocol import own_stdout, serve

from engines.bench import FIGURES, Workload, with_room
from engines.config import EngineConfig
from engines.core.build import build_core, set_threads
from engines.core.engine import EngineCore


def installed_version() -> str:
    try:
        return version("facet-gateway")
    except PackageNotFoundError:
        return "source tree"


def main() -> None:
    began_s = time.perf_counter()
    config = with_room(msgspec.json.decode(sys.argv[1], type=EngineConfig))
    answers = own_stdout()
    set_threads(config.model.num_threads)
    engine = build_core(config, clock=time.monotonic)
    assert isinstance(engine, EngineCore)
    work = Workload(engine)
    figures = {name: partial(figure, engine, work, time.monotonic) for name, figure in FIGURES.items()}
    start_s = time.perf_counter() - began_s
    serve(answers, figures, version=installed_version(), detail=engine.capabilities.dtype, start_s=start_s)


if __name__ == "__main__":
    main()
