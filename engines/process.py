"""A worker process and its life: start, watch, restart, behind the `Engine` seam.

While the process is down, every call raises EngineDeadError; the gateway turns that into a 503 or tries another
replica. Restarts back off exponentially. Knows nothing of what the worker computes; imports no torch.

Read next: `engines/nursery.py`, `engines/worker.py`, `engines/remote.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Literal

from engines.api import (
    Capabilities,
    Chunk,
    EmbedRequest,
    EmbedResult,
    EngineDeadError,
    GenerateRequest,
    KVEventBatch,
    ReplicaStats,
    ScoreRequest,
    ScoreResult,
)
from engines.config import EngineConfig
from engines.nursery import SpawnedWorker, WorkerHandle, Zygote, log_tail
from engines.remote import RemoteEngine

State = Literal["starting", "ready", "dead", "closed"]
START_TIMEOUT_S = 300.0
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 30.0
STOP_GRACE_S = 5.0


class EngineProcess:
    """One replica. `run_dir` (0700) holds its socket; its stderr goes to `log_path`. `on_state` hears every change.

    With a `zygote` of the same configuration the worker is forked from it, at a start and at a restart.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        run_dir: Path,
        name: str,
        log_path: Path,
        restart: bool = True,
        on_state: Callable[[State], None] = lambda state: None,
        zygote: Zygote | None = None,
    ) -> None:
        self._config = config
        self._socket_path = run_dir.absolute() / f"{name}.sock"
        self._log_path = log_path.absolute()
        self._restart = restart
        self._on_state = on_state
        self._zygote = zygote
        if zygote is not None:
            zygote.retain()
        self._worker: WorkerHandle | None = None
        self._remote: RemoteEngine | None = None
        self._capabilities: Capabilities | None = None
        self._lost = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self.state: State = "starting"
        self.restarts_total = 0

    async def start(self) -> None:
        """Return when the worker is ready. Raises EngineDeadError with the end of its log if it never is."""
        try:
            await self._launch()
        except BaseException:
            await self._kill()
            self._become("dead")
            raise
        self._watcher = asyncio.create_task(self._watch(), name="facet-engine-watch")

    @property
    def pid(self) -> int | None:
        """Of the running worker."""
        return self._worker.pid if self._worker is not None and self.state == "ready" else None

    @property
    def capabilities(self) -> Capabilities:
        """Of the last worker that was ready."""
        if self._capabilities is None:
            raise EngineDeadError("the engine process is not ready")
        return self._capabilities

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Yield chunks; closing aborts."""
        chunks = self._alive().generate(request)
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            await chunks.aclose()

    async def embed(self, request: EmbedRequest) -> EmbedResult:
        """Vectors of the inputs."""
        return await self._alive().embed(request)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Log-probs of the labels."""
        return await self._alive().score(request)

    async def stats(self) -> ReplicaStats:
        """A fresh snapshot."""
        return await self._alive().stats()

    async def kv_events(self, start_seq: int = 0) -> AsyncGenerator[KVEventBatch, None]:
        """Of the worker that runs now; ends with EngineDeadError when it does."""
        batches = self._alive().kv_events(start_seq)
        try:
            async for batch in batches:
                yield batch
        finally:
            await batches.aclose()

    async def drain(self) -> None:
        """Return when nothing runs; a dead engine has nothing to drain."""
        if self._remote is not None and self.state == "ready":
            with contextlib.suppress(EngineDeadError):
                await self._remote.drain()

    async def close(self) -> None:
        """End the worker: SIGTERM, then SIGKILL after a grace. Idempotent."""
        if self.state == "closed":
            return
        self._become("closed")
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        if self._remote is not None:
            await self._remote.close()
        await self._stop()
        if self._zygote is not None:
            await self._zygote.release()

    def _alive(self) -> RemoteEngine:
        if self._remote is None or self.state != "ready":
            raise EngineDeadError(f"the engine process of {self._config.model.name} is {self.state}")
        return self._remote

    def _become(self, state: State) -> None:
        if self.state != state:
            self.state = state
            self._on_state(state)

    async def _launch(self) -> None:
        self._become("starting")
        self._lost.clear()
        self._socket_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self._worker = await self._new_worker()
                is_ready = await self._worker.ready()
        except TimeoutError:
            raise EngineDeadError(
                f"the engine was not ready after {START_TIMEOUT_S:.0f} s; see {self._log_path}"
            ) from None
        if not is_ready:
            code, tail = await self._worker.wait(), log_tail(self._log_path)
            raise EngineDeadError(f"the engine ended with status {code} while starting:\n{tail}")
        self._remote = await RemoteEngine.connect(str(self._socket_path), on_lost=self._lost.set)
        self._capabilities = self._remote.capabilities
        self._become("ready")

    async def _new_worker(self) -> WorkerHandle:
        if self._zygote is not None:
            return await self._zygote.fork(self._socket_path, self._log_path)
        return await SpawnedWorker.start(self._config, self._socket_path, self._log_path)

    async def _watch(self) -> None:
        """When the worker is lost: reap it, and start another one, later each time it fails at once."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            await self._lost.wait()
            self._become("dead")
            await self._kill()
            if not self._restart:
                return
            while self.state == "dead":
                await asyncio.sleep(backoff_s)
                try:
                    await self._launch()
                    self.restarts_total += 1
                    backoff_s = FIRST_BACKOFF_S
                except (EngineDeadError, OSError):
                    await self._kill()
                    self._become("dead")
                    backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _stop(self) -> None:
        if self._worker is None or self._worker.returncode is not None:
            return
        self._worker.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                await self._worker.wait()
        except TimeoutError:
            await self._kill()

    async def _kill(self) -> None:
        if self._worker is None:
            return
        if self._remote is not None:
            await self._remote.close()
            self._remote = None
        if self._worker.returncode is None:
            self._worker.send_signal(signal.SIGKILL)
        await self._worker.wait()
