"""An engine in this process: a core on a thread of its own, behind the `Engine` seam.

The thread owns the core; nothing else touches it. Commands go in through a queue, chunks come out once a step. Without
work the thread blocks on the queue and uses no CPU. The worker process is a socket around this class.

Knows nothing of sockets, models or text. Read next: `engines/core/engine.py`, `engines/worker.py`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

import msgspec

from engines.api import (
    Capabilities,
    Chunk,
    EmbedRequest,
    EmbedResult,
    EngineDeadError,
    EngineFaultError,
    EngineOverloadedError,
    GenerateRequest,
    InvalidRequestError,
    KVEventBatch,
    ReplicaStats,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    Usage,
)
from engines.config import EngineConfig
from engines.core.build import build_core
from engines.core.encoder import EncoderCore
from engines.core.engine import EngineCore
from engines.mailbox import Mailbox

logger = logging.getLogger("facet.engine")
Core = EngineCore | EncoderCore
T = TypeVar("T")


class Sink(Protocol):
    """Where the chunks of one request go; called on the event loop."""

    def put(self, item: Chunk) -> None:
        """A chunk of the request."""
        ...

    def close(self, error: Exception) -> None:
        """No more will come: the engine failed."""
        ...


class LocalEngine:
    """`Engine` over a core on a thread. Make it with `await LocalEngine.start(factory)`."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._sinks: dict[str, Sink] = {}
        self._followers: set[Mailbox[KVEventBatch]] = set()
        self._after_step: list[Callable[[], None]] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._dead: EngineDeadError | None = None
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Core] = self._loop.create_future()
        self._thread: threading.Thread | None = None
        self._core: Core | None = None

    @classmethod
    async def start(cls, make_core: Callable[[], Core]) -> LocalEngine:
        """Run `make_core` on the engine's thread (loading takes seconds) and return when it is ready."""
        engine = cls()
        thread = threading.Thread(target=engine._run, args=(make_core,), name="facet-engine", daemon=True)
        engine._thread = thread
        thread.start()
        try:
            engine._core = await engine._ready
        except BaseException:
            thread.join()
            raise
        return engine

    @property
    def capabilities(self) -> Capabilities:
        """As the core says."""
        if self._core is None:
            raise EngineDeadError("the engine has not started")
        return self._core.capabilities

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Yield chunks; leaving the iterator early aborts the request."""
        mailbox: Mailbox[Chunk] = Mailbox()
        unfinished = request.n
        await self.open_stream(request, mailbox)
        try:
            while unfinished:
                for chunk in await mailbox.get():
                    if chunk.finish_reason == "error":
                        raise EngineFaultError(f"request {request.request_id} met a fault in the engine")
                    unfinished -= chunk.finish_reason is not None
                    yield chunk
        finally:
            self.close_stream(request.request_id, abort=unfinished > 0)

    async def open_stream(self, request: GenerateRequest, sink: Sink) -> None:
        """Queue a request whose chunks go to `sink`; the caller ends with `close_stream`. Raises EngineError."""
        core = self._decoder()
        if self._draining:
            raise EngineOverloadedError("the engine is draining")
        if request.request_id in self._sinks:
            raise InvalidRequestError(
                "request_id is in use", field="request_id", value=request.request_id, limit="unique while it runs"
            )
        self._sinks[request.request_id] = sink
        self._idle.clear()
        try:
            await self._call(partial(core.add_request, request))
        except BaseException:
            # Cancelled or refused: the core may have it all the same when the answer was on its way.
            self.close_stream(request.request_id, abort=True)
            raise

    def close_stream(self, request_id: str, *, abort: bool) -> None:
        """Stop delivering; with `abort` the core frees its KV before its next step. Idempotent."""
        if self._sinks.pop(request_id, None) is None:
            return
        if abort and isinstance(self._core, EngineCore):
            self._inbox.put(partial(self._core.abort, request_id))
        if not self._sinks:
            self._idle.set()

    def call_after_step(self, callback: Callable[[], None]) -> None:
        """Call on the event loop after each step's chunks have reached their sinks."""
        self._after_step.append(callback)

    async def embed(self, request: EmbedRequest) -> EmbedResult:
        """Vectors of the inputs; requests are computed one after another."""
        core = self._core
        if not isinstance(core, EncoderCore):
            raise InvalidRequestError("this model generates; it does not embed", field="model", limit="an embed model")
        return await self._call(partial(core.embed, request))

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """One prefill a prompt; the labels' log-probs are read from the first distribution."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=request.label_token_ids)
        rows: list[list[float]] = []
        prompt_tokens = cached_tokens = 0
        for number, prompt in enumerate(request.prompts):
            generate = GenerateRequest(
                request_id=f"{request.request_id}/score-{number}",
                prompt_token_ids=prompt,
                sampling=sampling,
                tenant=request.tenant,
                cache_salt=request.cache_salt,
                trace_parent=request.trace_parent,
            )
            async for chunk in self.generate(generate):
                for entry in chunk.logprobs or []:
                    found = dict(entry.top)
                    rows.append([found[label] for label in request.label_token_ids])
                if chunk.usage is not None:
                    prompt_tokens += chunk.usage.prompt_tokens
                    cached_tokens += chunk.usage.cached_tokens
        usage = Usage(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
        return ScoreResult(request_id=request.request_id, logprobs=rows, usage=usage)

    async def stats(self) -> ReplicaStats:
        """A snapshot, taken between two steps."""
        if self._core is None:
            raise EngineDeadError("the engine has not started")
        return await self._call(self._core.stats)

    async def kv_events(self, start_seq: int = 0) -> AsyncGenerator[KVEventBatch, None]:
        """Replay from `start_seq`, then follow."""
        core = self._decoder()
        mailbox: Mailbox[KVEventBatch] = Mailbox()
        self._followers.add(mailbox)
        try:
            next_seq = start_seq
            for batch in await self._call(partial(core.kv_events_since, start_seq)):
                yield batch
                next_seq = batch.seq + 1
            while True:
                for batch in await mailbox.get():
                    if batch.seq >= next_seq:
                        yield batch
                        next_seq = batch.seq + 1
        finally:
            self._followers.discard(mailbox)

    async def drain(self) -> None:
        """Refuse new requests; return when none runs."""
        self._draining = True
        await self._idle.wait()

    async def close(self) -> None:
        """End the thread; what runs ends with EngineDeadError."""
        self._inbox.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._fail(EngineDeadError("the engine was closed"))

    def _decoder(self) -> EngineCore:
        if self._dead is not None:
            raise self._dead
        if not isinstance(self._core, EngineCore):
            raise InvalidRequestError("this model embeds; it does not generate", field="model", limit="a decoder")
        return self._core

    async def _call(self, function: Callable[[], T]) -> T:
        """Run on the engine thread, between steps."""
        if self._dead is not None:
            raise self._dead
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                result = function()
            except Exception as error:
                self._loop.call_soon_threadsafe(fail_if_waiting, future, error)
            else:
                self._loop.call_soon_threadsafe(resolve_if_waiting, future, result)

        self._inbox.put(run)
        return await future

    def _fail(self, error: EngineDeadError) -> None:
        if self._dead is None:
            self._dead = error
        for sink in list(self._sinks.values()):
            sink.close(error)
        for follower in list(self._followers):
            follower.close(error)
        self._sinks.clear()
        self._idle.set()

    # -- below: the engine thread ------------------------------------------------------------------------------------

    def _run(self, make_core: Callable[[], Core]) -> None:
        try:
            core = make_core()
        except BaseException as error:
            self._loop.call_soon_threadsafe(fail_if_waiting, self._ready, error)
            return
        if isinstance(core, EngineCore) and core.offload is not None:
            core.offload.on_result(lambda: self._inbox.put(noop))
        self._loop.call_soon_threadsafe(resolve_if_waiting, self._ready, core)
        try:
            while self._take_commands(core):
                if isinstance(core, EngineCore) and core.can_step():
                    chunks, batch = core.step(), core.take_kv_events()
                    if chunks or batch:
                        self._loop.call_soon_threadsafe(self._deliver, chunks, batch)
        except Exception as error:
            logger.exception("the engine thread failed")
            self._loop.call_soon_threadsafe(self._fail, EngineDeadError(f"the engine failed: {error}"))
            self._refuse_commands()
        else:
            if isinstance(core, EngineCore):
                core.close()

    def _take_commands(self, core: Core) -> bool:
        """Run every queued command; wait for one if there is nothing to compute. False when told to end."""
        wait = not (isinstance(core, EngineCore) and core.can_step())
        while True:
            try:
                command = self._inbox.get(block=wait)
            except Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _refuse_commands(self) -> None:
        """Nothing may wait for ever on a thread that is gone: callers see `_dead` set, late ones are let run."""
        while (command := self._inbox.get()) is not None:
            command()

    def _deliver(self, chunks: list[Chunk], batch: KVEventBatch | None) -> None:
        sinks = self._sinks
        for chunk in chunks:
            sink = sinks.get(chunk.request_id)
            if sink is not None:
                sink.put(chunk)
        if batch is not None:
            for follower in self._followers:
                follower.put(batch)
        for callback in self._after_step:
            callback()


async def load_engine(config: EngineConfig, *, clock: Callable[[], float]) -> LocalEngine:
    """Load the model on the engine's thread. Raises EngineError with what to mend."""
    return await LocalEngine.start(partial(build_core, config, clock=clock))


def noop() -> None:
    """A command that only wakes the engine's thread."""


def resolve_if_waiting(future: asyncio.Future[T], result: T) -> None:
    """Set a result unless the waiter has left."""
    if not future.done():
        future.set_result(result)


def fail_if_waiting(future: asyncio.Future[T], error: BaseException) -> None:
    """Set an error unless the waiter has left."""
    if not future.done():
        future.set_exception(error)


def with_request_id(chunk: Chunk, request_id: str) -> Chunk:
    """The same chunk under another id."""
    return msgspec.structs.replace(chunk, request_id=request_id)
