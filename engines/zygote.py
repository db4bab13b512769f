"""A process with torch imported and weights mapped, which forks ready workers: `python -m engines.start --zygote`.

    in   one line a worker: {"socket": path, "log": path}
    out  "zygote" when it can fork; "fork PID" for each line; "ready PID" from the worker; "exit PID STATUS" at its end

Workers share its pages. It computes nothing, so that no thread of a pool exists when it forks: threads, sockets, KV and
the engine are made in the child. It ends when its input does, or with its parent; its workers end with it.

Knows nothing of what is asked. Read next: `engines/worker.py`, `engines/nursery.py` (the other side).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import torch

from engines.api import EngineError
from engines.config import EngineConfig
from engines.core.build import build_around, default_threads, set_threads
from engines.models.base import DecoderModel, EncoderModel
from engines.models.registry import load_model
from engines.nursery import EXIT, FORK, READY, ZYGOTE, ForkRequest
from engines.worker import die_with_parent, run

Model = DecoderModel | EncoderModel


def main() -> int:
    """Entry point of the process; an error that the user can mend goes to stderr as one line."""
    parser = argparse.ArgumentParser(prog="engines.zygote", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--zygote", action="store_true")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--parent", type=int, required=True, help="end when this process id is no longer the parent")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    die_with_parent()
    if os.getppid() != arguments.parent:
        return 1
    try:
        config = msgspec.json.decode(arguments.config, type=EngineConfig)
        threads = default_threads(config.model.num_threads)
        torch.set_num_threads(1)
        model = load_model(msgspec.structs.replace(config.model, num_threads=threads))
    except (EngineError, msgspec.MsgspecError, OSError) as error:
        print(f"facet zygote: {error}", file=sys.stderr)
        return 1
    # What lives now lives as long as every worker: the collector need not touch, hence copy, its pages.
    gc.collect()
    gc.freeze()
    say(ZYGOTE)
    for request in requests():
        pid = os.fork()
        if not pid:
            os._exit(be_worker(request, config, model, threads))
        say(f"{FORK} {pid}")
    return 0


def requests() -> Iterator[ForkRequest]:
    """Lines of the input; between them, children that have ended are reaped and told of."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pending = b""
    while True:
        readable, _, _ = select.select([0, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            reap()
        if 0 in readable:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                yield msgspec.json.decode(line, type=ForkRequest)


def reap() -> None:
    """Tell of every child that has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        say(f"{EXIT} {pid} {os.waitstatus_to_exitcode(status)}")


def be_worker(request: ForkRequest, config: EngineConfig, model: Model, threads: int) -> int:
    """The child: its own log, signals, threads and engine. Returns its exit status; raises nothing."""
    socket_path = Path(request.socket)
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        zygote = os.getppid()
        die_with_parent()
        if os.getppid() != zygote:
            return 1
        log = os.open(request.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        set_threads(threads)
        make = partial(build_around, model, config, clock=time.monotonic)
        asyncio.run(run(make, socket_path, lambda: say(f"{READY} {os.getpid()}")))
    except (EngineError, OSError) as error:
        print(f"facet worker: {error}", file=sys.stderr)
        return 1
    except BaseException:
        logging.getLogger("facet.worker").exception("the worker failed")
        return 1
    finally:
        socket_path.unlink(missing_ok=True)
        sys.stderr.flush()
    return 0


def say(line: str) -> None:
    """One line in one write: lines of several processes never mix."""
    os.write(1, f"{line}\n".encode())
