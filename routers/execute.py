"""Runs a plan: tokenizes, chooses replicas, reads their streams, and is the only router file that starts tasks.

Closing the event stream closes every engine stream at once. A replica that dies before its first token is replaced
once; afterwards the client gets an error, for nothing can take over yet. Knows nothing of wire formats or money.

Read next: `routers/prompt.py`, `routers/choice.py`, `routers/select.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import TypeVar, cast

from engines.api import Chunk, EngineDeadError, EngineFaultError, EngineOverloadedError, GenerateRequest
from policies.schema import Policy
from routers.choice import Choice, choices_of
from routers.embed import CanonicalEmbedding, Embedded, embed
from routers.fleet import Fleet, Replica
from routers.prompt import check_prompts, check_token_ids, effective_params, encode_prompts, sampling
from routers.select import ReplicaSelector
from routers.types import (
    AspectUsage,
    CanonicalRequest,
    DeadlineExceededError,
    Decision,
    Event,
    Finished,
    Plan,
    RequestUsage,
    Started,
    Step,
    UnavailableError,
)

MAX_ATTEMPTS = 2
T = TypeVar("T")


class Executor:
    """Shared by all requests. `draw_seed` gives a seed to requests without one; `clock` is monotonic seconds."""

    def __init__(
        self,
        fleet: Fleet,
        selector: ReplicaSelector,
        *,
        draw_seed: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self.fleet = fleet
        self.selector = selector
        self.draw_seed = draw_seed
        self.clock = clock

    def start(self, plan: Plan, request: CanonicalRequest) -> Execution:
        """An execution that begins when its events are read."""
        return Execution(self, plan, request)

    async def embed(self, request: CanonicalEmbedding, policy: Policy) -> Embedded:
        """Vectors of one request; no plan, for one model answers it."""
        return await embed(request, policy, self.fleet, self.selector)


class Execution:
    """One plan on its way. `usage()` is true at any moment, also after the client has left."""

    def __init__(self, executor: Executor, plan: Plan, request: CanonicalRequest) -> None:
        self.plan = plan
        self.request = request
        self.decisions: list[Decision] = []
        self._executor = executor
        self._prompts: list[list[int]] = []
        self._choices: list[Choice] = []
        self._params = request.params
        self._replicas: dict[int, Replica] = {}
        self._failed: set[str] = set()

    async def events(self) -> AsyncGenerator[Event, None]:
        """Started with the first token, deltas and ends of choices, usage last. Raises RouteError."""
        step = self.plan.steps[0]
        await self._prepare(step)
        started, running = False, len(self._choices)
        async with aclosing(self._chunks(step)) as chunks:
            async for index, chunk in chunks:
                if not started:
                    started = True
                    yield Started(plan=self.plan, decisions=tuple(self.decisions), params=self._params)
                choice = self._choices[index]
                if choice.finished is not None:
                    continue  # what the engine computed before it heard of the stop string
                for event in choice.feed(chunk):
                    yield event
                    running -= isinstance(event, Finished)
                if not running:
                    break
        yield self.usage()

    def usage(self) -> RequestUsage:
        """Tokens so far. A prompt shared by n choices counts once."""
        n = max(1, self._params.n)
        leads = [self._choices[number] for number in range(0, len(self._choices), n)] if self._choices else []
        begun = [number for number in range(len(self._prompts)) if number in self._replicas]
        prompt_tokens = sum(len(self._prompts[number]) for number in begun)
        cached_tokens = sum(lead.usage.cached_tokens for lead in leads if lead.usage is not None)
        completion_tokens = sum(choice.num_tokens for choice in self._choices)
        step = self.plan.steps[0]
        timings = next((lead.timings for lead in leads if lead.timings is not None), None)
        aspect = AspectUsage(
            aspect=step.aspect.name,
            step=step.id,
            model=step.candidates[0].model,
            replica=self._replicas[begun[0]].name if begun else "",
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=completion_tokens,
            queue_ms=timings.queue_s * 1e3 if timings else 0.0,
            prefill_ms=timings.prefill_s * 1e3 if timings else 0.0,
            decode_ms=timings.decode_s * 1e3 if timings else 0.0,
        )
        return RequestUsage(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=completion_tokens,
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self._choices),
            aspects=(aspect,),
        )

    async def _prepare(self, step: Step) -> None:
        """Token ids, limits and effective parameters, before any engine is asked."""
        model, overrides = step.candidates[0].model, step.candidates[0].overrides
        replicas = self._executor.fleet.replicas(model)
        living = next((replica for replica in replicas if replica.alive), None)
        if living is None:
            raise UnavailableError(f"No replica of {model!r} is ready; it is being restarted. Try again in a moment.")
        capabilities, text = living.engine.capabilities, living.text
        check_token_ids(self.request.params, capabilities)
        self._prompts = await encode_prompts(self.request, text)
        check_prompts(self._prompts, self.request, capabilities)
        seed = self.request.params.seed
        room = capabilities.max_model_len - max(map(len, self._prompts))
        self._params = effective_params(
            self.request.params, overrides, seed=self._executor.draw_seed() if seed is None else seed, room=room
        )
        self._choices = choices_of(self.request, self._prompts, text, self._params)

    def _chunks(self, step: Step) -> AsyncGenerator[tuple[int, Chunk], None]:
        """(global choice index, chunk) of all prompts, under the step's deadline."""
        streams = [partial(self._prompt_chunks, step, number) for number in range(len(self._prompts))]
        source = streams[0]() if len(streams) == 1 else merge(streams)
        if step.deadline_ms is None:
            return source
        return self._until(source, self._executor.clock() + step.deadline_ms / 1e3, step.deadline_ms)

    async def _until(
        self, source: AsyncGenerator[tuple[int, Chunk], None], end_s: float, deadline_ms: int
    ) -> AsyncGenerator[tuple[int, Chunk], None]:
        async with aclosing(source):
            while True:
                try:
                    async with asyncio.timeout(end_s - self._executor.clock()):
                        item = await anext(source)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise DeadlineExceededError(f"The policy's deadline of {deadline_ms} ms has passed.") from None
                yield item

    async def _prompt_chunks(self, step: Step, number: int) -> AsyncGenerator[tuple[int, Chunk], None]:
        """One prompt's chunks, from another replica if the first one dies before it has said anything."""
        spoken = False
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                replica, request = self._addressed(step, number, attempt)
                with replica.carrying(len(request.prompt_token_ids)) as prefilled:
                    async with aclosing(as_generator(replica.engine.generate(request))) as chunks:
                        async for chunk in chunks:
                            if not spoken:
                                spoken = True
                                prefilled()
                            yield number * self._params.n + chunk.index, chunk
                return
            except EngineDeadError as error:
                self._failed.add(self._replicas[number].name)
                if spoken or attempt == MAX_ATTEMPTS:
                    raise UnavailableError(f"The engine ended while it served this request: {error}") from error
            except EngineOverloadedError as error:
                raise UnavailableError(
                    str(error), code="engine_overloaded", retry_after_s=error.retry_after_s
                ) from error
            except EngineFaultError as error:
                raise UnavailableError(str(error), code="engine_fault") from error

    def _addressed(self, step: Step, number: int, attempt: int) -> tuple[Replica, GenerateRequest]:
        """The replica chosen for this prompt, and what it is asked. Raises UnavailableError."""
        prompt, n = self._prompts[number], self._params.n
        model = step.candidates[0].model
        replicas = [r for r in self._executor.fleet.replicas(model) if r.name not in self._failed]
        replica, decision = self._executor.selector.choose(step.id, model, replicas, len(prompt))
        self.decisions.append(decision)
        self._replicas[number] = replica
        request = GenerateRequest(
            request_id=f"{self.request.request_id}/{step.id}/{number}/{attempt}",
            prompt_token_ids=prompt,
            sampling=sampling(self._params, replica.text),
            n=n,
            tenant=self.request.tenant,
            cache_salt=self.request.cache_salt,
            priority=self.request.priority,
            deterministic=self._params.deterministic,
            trace_parent=self.request.trace_parent,
        )
        return replica, request


def as_generator(chunks: AsyncIterator[Chunk]) -> AsyncGenerator[Chunk, None]:
    """The Engine seam promises an iterator whose closing aborts; every implementation is a generator."""
    return cast(AsyncGenerator[Chunk, None], chunks)


async def merge(sources: Sequence[Callable[[], AsyncGenerator[T, None]]]) -> AsyncGenerator[T, None]:
    """Items in the order they come. The first exception of any source ends all and is raised as it is."""
    queue: asyncio.Queue[T | None] = asyncio.Queue()
    # Bounds what waits. A bounded queue would not do: its end mark could wait for room that no reader makes any more.
    room = asyncio.Semaphore(len(sources))

    async def read(source: AsyncGenerator[T, None]) -> None:
        async with aclosing(source):
            async for item in source:
                await room.acquire()
                queue.put_nowait(item)

    async def read_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for source in sources:
                    group.create_task(read(source()))
        finally:
            queue.put_nowait(None)

    reader = asyncio.create_task(read_all())
    try:
        while (item := await queue.get()) is not None:
            room.release()
            yield item
        await reader
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        reader.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await reader
