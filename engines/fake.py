"""An engine without a model: deterministic, scripted, fast. It carries the gateway's tests and benchmark.

By default it echoes the prompt's ids, cycling, until `max_tokens`. A script may say other tokens, delays and faults.
It obeys the same contract as the real ones (`tests/contract/test_engine.py`) and never computes anything.

Read next: `engines/api.py`, `engines/local.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from engines.api import (
    Capabilities,
    Chunk,
    EmbedRequest,
    EmbedResult,
    EngineDeadError,
    EngineError,
    EngineOverloadedError,
    GenerateRequest,
    InvalidRequestError,
    KVEventBatch,
    ReplicaStats,
    ScoreRequest,
    ScoreResult,
    Timings,
    TokenLogprobs,
    Usage,
)

FAKE_LOGPROB = -0.5
EMBEDDING_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class Script:
    """What the fake does. `tokens` None echoes the prompt. `step_s` passes before each chunk of `chunk_tokens` tokens.

    After `fail_after` chunks `error` is raised (EngineDeadError by default).
    """

    tokens: Sequence[int] | None = None
    chunk_tokens: int = 1
    step_s: float = 0.0
    fail_after: int | None = None
    error: EngineError | None = None


class FakeEngine:
    """`Engine` by script."""

    def __init__(
        self,
        capabilities: Capabilities,
        script: Script | None = None,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._capabilities = capabilities
        self.script = script or Script()
        self._sleep = sleep
        self._running: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._dead: EngineDeadError | None = None
        self._steps = self._requests = self._aborts = self._prompt_tokens = self._generated = 0
        self.seen: list[GenerateRequest] = []

    @property
    def capabilities(self) -> Capabilities:
        """As given."""
        return self._capabilities

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Chunks by script, choice after choice within a step."""
        self._check(request)
        self._running.add(request.request_id)
        self._idle.clear()
        self._requests += 1
        self._prompt_tokens += len(request.prompt_token_ids)
        finished = False
        try:
            async for chunk in self._chunks(request):
                yield chunk
            finished = True
        finally:
            self._aborts += not finished
            self._running.discard(request.request_id)
            if not self._running:
                self._idle.set()

    async def embed(self, request: EmbedRequest) -> EmbedResult:
        """Unit vectors that depend on the ids alone."""
        self._alive()
        for number, ids in enumerate(request.inputs):
            if not 1 <= len(ids) <= self._capabilities.max_model_len:
                raise InvalidRequestError(
                    f"inputs[{number}] has {len(ids)} tokens",
                    field=f"inputs[{number}]",
                    value=str(len(ids)),
                    limit=f"1..{self._capabilities.max_model_len}",
                )
        vectors = [fake_vector(ids) for ids in request.inputs]
        return EmbedResult(
            request_id=request.request_id,
            vectors=vectors,
            dimensions=EMBEDDING_DIMENSIONS,
            prompt_tokens=sum(map(len, request.inputs)),
        )

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Every label is equally likely."""
        self._alive()
        row = [FAKE_LOGPROB] * len(request.label_token_ids)
        usage = Usage(prompt_tokens=sum(map(len, request.prompts)))
        return ScoreResult(request_id=request.request_id, logprobs=[row for _ in request.prompts], usage=usage)

    async def stats(self) -> ReplicaStats:
        """Honest counters; no blocks."""
        self._alive()
        return ReplicaStats(
            running=len(self._running),
            steps_total=self._steps,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generated,
            aborts_total=self._aborts,
            requests_total=self._requests,
        )

    async def kv_events(self, start_seq: int = 0) -> AsyncGenerator[KVEventBatch, None]:
        """There is no KV: waits for ever without a batch."""
        self._alive()
        await asyncio.Event().wait()
        yield KVEventBatch(0.0, [], start_seq)

    async def drain(self) -> None:
        """Refuse new requests; return when none runs."""
        self._draining = True
        await self._idle.wait()

    async def close(self) -> None:
        """What runs meets EngineDeadError at its next chunk."""
        self._dead = self._dead or EngineDeadError("the engine was closed")

    def _alive(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _check(self, request: GenerateRequest) -> None:
        self._alive()
        if self._draining:
            raise EngineOverloadedError("the engine is draining")
        length, limit = len(request.prompt_token_ids), self._capabilities.max_model_len - 1
        if not 1 <= length <= limit:
            raise InvalidRequestError(
                f"prompt_token_ids is {length} tokens; allowed: 1..{limit}",
                field="prompt_token_ids",
                value=str(length),
                limit=f"1..{limit}",
            )
        if request.request_id in self._running:
            raise InvalidRequestError(
                "request_id is in use", field="request_id", value=request.request_id, limit="unique while it runs"
            )
        self.seen.append(request)

    async def _chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        script, limit = self.script, request.sampling.max_tokens
        source = script.tokens if script.tokens is not None else itertools.cycle(request.prompt_token_ids)
        tokens = list(itertools.islice(source, limit))
        stop = next((n for n, token in enumerate(tokens) if token in request.sampling.stop_token_ids), None)
        emitted = tokens if stop is None else tokens[:stop]
        starts = range(0, len(emitted), script.chunk_tokens) or range(1)
        for number, start in enumerate(starts):
            if script.fail_after == number:
                raise script.error or EngineDeadError("scripted death")
            # Without a delay it still lets others run, as a real engine's step would.
            await self._sleep(script.step_s)
            self._alive()
            self._steps += 1
            part = emitted[start : start + script.chunk_tokens]
            last = start + script.chunk_tokens >= len(emitted)
            for choice in range(request.n):
                self._generated += len(part)
                chunk = Chunk(
                    request_id=request.request_id,
                    index=choice,
                    token_ids=part,
                    logprobs=fake_logprobs(part, request.sampling.logprobs),
                )
                yield (
                    self._last(chunk, request, len(emitted), tokens[stop] if stop is not None else None)
                    if last
                    else chunk
                )

    def _last(self, chunk: Chunk, request: GenerateRequest, num_emitted: int, stop_token_id: int | None) -> Chunk:
        cut = stop_token_id is None and num_emitted == request.sampling.max_tokens
        return msgspec.structs.replace(
            chunk,
            finish_reason="length" if cut else "stop",
            stop_token_id=stop_token_id,
            usage=Usage(prompt_tokens=len(request.prompt_token_ids), completion_tokens=num_emitted),
            timings=Timings(num_steps=self._steps),
        )


def fake_logprobs(token_ids: Sequence[int], wanted: int | None) -> list[TokenLogprobs] | None:
    """One entry a token, with itself as the only alternative when any are wanted."""
    if wanted is None:
        return None
    return [
        TokenLogprobs(token_id=t, logprob=FAKE_LOGPROB, top=[(t, FAKE_LOGPROB)] * min(1, wanted)) for t in token_ids
    ]


def fake_vector(ids: Sequence[int]) -> bytes:
    """Eight float32 of length 1 that depend on the ids."""
    raw = [float((sum(ids) * (n + 3) + len(ids)) % 17 + 1) for n in range(EMBEDDING_DIMENSIONS)]
    norm = sum(x * x for x in raw) ** 0.5
    return struct.pack(f"<{EMBEDDING_DIMENSIONS}f", *(x / norm for x in raw))
