"""Where worker processes come from: started by themselves, or forked by a zygote that has everything loaded.

Both give a handle with the same few verbs. Imports no torch; knows nothing of what a worker computes.

Read next: `engines/process.py` (a worker's life), `engines/zygote.py` (the other side of the pipe).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Protocol

import msgspec

from engines.api import EngineDeadError
from engines.config import EngineConfig

READY, ZYGOTE, FORK, EXIT = "ready", "zygote", "fork", "exit"
LOST_STATUS = -signal.SIGKILL  # of a worker whose zygote has gone: it went with it
LOG_TAIL_CHARS = 2000
# Where our packages lie: a worker started there runs this installation, not a folder `engines` that the user stands in.
PACKAGES_FOLDER = Path(__file__).resolve().parents[1]


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line to the zygote: where the worker listens, and where its stderr goes."""

    socket: str
    log: str


class WorkerHandle(Protocol):
    """A worker process."""

    @property
    def pid(self) -> int:
        """Of the process."""
        ...

    @property
    def returncode(self) -> int | None:
        """None while it lives."""
        ...

    async def ready(self) -> bool:
        """True once it listens; False if it ended before."""
        ...

    async def wait(self) -> int:
        """Its exit status, when it has ended."""
        ...

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing if it has ended."""
        ...


class SpawnedWorker:
    """Our own child."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """`process` writes READY to its stdout."""
        self._process = process

    @classmethod
    async def start(cls, config: EngineConfig, socket_path: Path, log_path: Path) -> SpawnedWorker:
        """A process of its own, which imports and loads everything itself."""
        arguments = ["--config", msgspec.json.encode(config).decode(), "--socket", str(socket_path)]
        return cls(await start_python(arguments, log_path, stdin=asyncio.subprocess.DEVNULL))

    @property
    def pid(self) -> int:
        """See `WorkerHandle`."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """See `WorkerHandle`."""
        return self._process.returncode

    async def ready(self) -> bool:
        """See `WorkerHandle`."""
        assert self._process.stdout is not None
        return await self._process.stdout.readline() == f"{READY}\n".encode()

    async def wait(self) -> int:
        """See `WorkerHandle`."""
        return await self._process.wait()

    def send_signal(self, number: int) -> None:
        """See `WorkerHandle`."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


class ForkedWorker:
    """A child of the zygote, which tells what becomes of it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._listens = asyncio.Event()
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        """See `WorkerHandle`."""
        return self._pid

    @property
    def returncode(self) -> int | None:
        """See `WorkerHandle`."""
        return self._ended.result() if self._ended.done() else None

    async def ready(self) -> bool:
        """See `WorkerHandle`."""
        await self._listens.wait()
        return not self._ended.done()

    async def wait(self) -> int:
        """See `WorkerHandle`."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        """See `WorkerHandle`."""
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def listens(self) -> None:
        """The zygote's reader: it said that it is ready."""
        self._listens.set()

    def ended(self, status: int) -> None:
        """The zygote's reader: it has ended."""
        if not self._ended.done():
            self._ended.set_result(status)
        self._listens.set()


class Zygote:
    """The process that workers of one configuration are forked from; started when first needed, and again if it dies.

    Several `EngineProcess`es may share it; it ends when the last of them has released it. Its own stderr goes to
    `log_path`. Only for engines on the CPU: a device's context does not survive a fork.
    """

    def __init__(self, config: EngineConfig, log_path: Path) -> None:
        self._config, self._log_path = config, log_path
        self._num_users = 0
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._workers: dict[int, ForkedWorker] = {}
        self._forked: asyncio.Future[ForkedWorker] | None = None
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Of the running zygote."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def fork(self, socket_path: Path, log_path: Path) -> ForkedWorker:
        """A new worker, not ready yet. Paths are absolute. Raises EngineDeadError if the zygote cannot start."""
        async with self._turn:
            process = await self._alive()
            assert process.stdin is not None
            self._forked = asyncio.get_running_loop().create_future()
            request = ForkRequest(socket=str(socket_path), log=str(log_path))
            process.stdin.write(msgspec.json.encode(request) + b"\n")
            try:
                return await self._forked
            finally:
                self._forked = None

    def retain(self) -> None:
        """One more user, who calls `release` once."""
        self._num_users += 1

    async def release(self) -> None:
        """One user less; without any it ends, and workers that still live end with it."""
        self._num_users -= 1
        if not self._num_users:
            await self._close()

    async def _close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._reader is not None:
            await self._reader

    async def _alive(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        if self._reader is not None:
            await self._reader
        arguments = ["--zygote", "--config", msgspec.json.encode(self._config).decode()]
        self._process = await start_python(arguments, self._log_path, stdin=asyncio.subprocess.PIPE)
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if line != f"{ZYGOTE}\n".encode():
            code = await self._process.wait()
            tail = log_tail(self._log_path)
            raise EngineDeadError(f"the engine ended with status {code} while starting:\n{tail}")
        self._reader = asyncio.create_task(self._read(self._process.stdout), name="facet-zygote")
        return self._process

    async def _read(self, lines: asyncio.StreamReader) -> None:
        while line := await lines.readline():
            word, pid, *rest = line.decode().split()
            worker = self._workers.setdefault(int(pid), ForkedWorker(int(pid)))
            if word == READY:
                worker.listens()
            elif word == FORK and self._forked is not None and not self._forked.done():
                self._forked.set_result(worker)
            elif word == EXIT:
                worker.ended(int(rest[0]))
                del self._workers[worker.pid]
        for worker in self._workers.values():
            worker.ended(LOST_STATUS)
        self._workers.clear()
        if self._forked is not None and not self._forked.done():
            self._forked.set_exception(EngineDeadError(f"the zygote ended:\n{log_tail(self._log_path)}"))


async def start_python(arguments: list[str], log_path: Path, *, stdin: int) -> asyncio.subprocess.Process:
    """`python -m engines.start`, which ends with this process; stderr is appended to `log_path`."""
    with log_path.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "engines.start",
            *arguments,
            "--parent",
            str(os.getpid()),
            cwd=PACKAGES_FOLDER,
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )


def log_tail(path: Path) -> str:
    """The end of a worker's log."""
    try:
        return path.read_text(errors="replace")[-LOG_TAIL_CHARS:]
    except OSError:
        return f"(no log at {path})"
