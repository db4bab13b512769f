"""The life of a request, top to bottom. Every API surface comes through here, so none escapes a check.

    authenticate -> admit -> decompose -> plan -> execute -> assemble -> settle

Handlers know the wire, this file knows the order, the rooms it calls know the work. Settlement runs whatever ends the
request: an answer, an error, a client that leaves.

Read next: docs/life-of-a-request.md, `routers/execute.py`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from gateway.admission import Admission
from gateway.ledger import Ledger
from gateway.metrics import Metrics
from gateway.telemetry import RequestSpan, Telemetry
from gateway.tenants import Caller, Tenants
from policies.schema import Policy
from routers.assemble import assemble
from routers.decompose import decompose
from routers.embed import CanonicalEmbedding, Embedded
from routers.execute import Execution, Executor
from routers.plan import make_plan
from routers.types import (
    CanonicalRequest,
    Event,
    Finished,
    ReasoningDelta,
    RequestUsage,
    Started,
    TextDelta,
    ToolCallDelta,
)

CLIENT_GONE = 499


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Shared by all requests. `policy` returns the revision in force; a request keeps the one it began with."""

    tenants: Tenants
    admission: Admission
    ledger: Ledger
    executor: Executor
    policy: Callable[[], Policy]
    metrics: Metrics
    telemetry: Telemetry
    clock: Callable[[], float]

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Before the body is decoded: nobody unknown gets work out of us. Raises ApiError 401."""
        return await self.tenants.authenticate(headers)

    async def run(
        self, caller: Caller, request: CanonicalRequest, headers: Mapping[str, str]
    ) -> AsyncGenerator[Event, None]:
        """Events of one request. Raises ApiError, RouteError or EngineError before or between them."""
        policy = self.policy()
        with self.admission.admitted(caller):
            span = self.telemetry.start_request(request, headers)
            request = msgspec.structs.replace(
                request, tenant=caller.tenant, cache_salt=caller.cache_salt, trace_parent=span.trace_parent
            )
            observer = Observer(self.metrics, self.clock)
            execution: Execution | None = None
            failure: BaseException | None = None
            try:
                aspects = decompose(request)
                plan = make_plan(aspects, request, policy)
                span.planned(plan)
                execution = self.executor.start(plan, request)
                async with aclosing(assemble(execution.events())) as events:
                    async for event in events:
                        observer.see(event)
                        yield event
            except BaseException as error:
                failure = error
                raise
            finally:
                self._settle(caller, policy, request, execution, span, observer, failure)

    async def embed(self, caller: Caller, request: CanonicalEmbedding) -> Embedded:
        """Vectors, settled like any other work."""
        policy = self.policy()
        with self.admission.admitted(caller):
            embedded = await self.executor.embed(request, policy)
            self.ledger.settle(request.request_id, caller, policy, embedded.usage, member=0, status=200)
            return embedded

    def _settle(
        self,
        caller: Caller,
        policy: Policy,
        request: CanonicalRequest,
        execution: Execution | None,
        span: RequestSpan,
        observer: Observer,
        failure: BaseException | None,
    ) -> None:
        usage = (
            execution.usage()
            if execution is not None
            else RequestUsage(prompt_tokens=0, cached_tokens=0, completion_tokens=0)
        )
        status = 200 if failure is None else CLIENT_GONE if isinstance(failure, GeneratorExit) else 500
        for member, aspect in enumerate(usage.aspects):
            if aspect.prompt_tokens:
                self.ledger.settle(request.request_id, caller, policy, aspect, member=member, status=status)
        observer.finish(usage)
        span.finish(usage, failure)


class Observer:
    """Latencies of one request, as its client sees them."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._start_s = self._last_s = clock()
        self._first_s: float | None = None
        self._model = ""

    def see(self, event: Event) -> None:
        """Time a token, count an end."""
        if isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta):
            now_s = self._clock()
            if self._first_s is None:
                self._first_s = now_s
                self._metrics.ttft.observe(self._model, now_s - self._start_s)
            else:
                self._metrics.itl.observe(self._model, now_s - self._last_s)
            self._last_s = now_s
        elif isinstance(event, Started):
            self._model = event.decisions[-1].model
        elif isinstance(event, Finished):
            self._metrics.success.labels(self._model, event.finish_reason).inc()

    def finish(self, usage: RequestUsage) -> None:
        """The request is over."""
        if not self._model:
            return
        now_s = self._clock()
        self._metrics.e2e.observe(self._model, now_s - self._start_s)
        for aspect in usage.aspects:
            self._metrics.queue.observe(self._model, aspect.queue_ms / 1e3)
        if self._first_s is not None and usage.completion_tokens > 1:
            self._metrics.tpot.observe(self._model, (now_s - self._first_s) / (usage.completion_tokens - 1))
