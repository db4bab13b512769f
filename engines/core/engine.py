"""The engine: requests in, chunks out, one `step()` at a time.

    step:  schedule -> run -> commit

Synchronous and single-threaded; `engines/local.py` gives it a thread, `engines/worker.py` a process. Knows nothing of
text, tenants' money, sockets or which model it runs.

Read next: `engines/core/scheduler.py`, `engines/kv/manager.py`, `engines/core/runner.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engines.api import (
    Capabilities,
    Chunk,
    EngineOverloadedError,
    FinishReason,
    GenerateRequest,
    InvalidRequestError,
    KVEventBatch,
    ReplicaStats,
    TokenLogprobs,
)
from engines.config import CacheConfig, SchedulerConfig
from engines.core.checks import check_request
from engines.core.metrics import EngineMetrics
from engines.core.queues import PriorityQueue
from engines.core.request import Request, Status
from engines.core.runner import Runner
from engines.core.sampler import Sampled
from engines.core.scheduler import Scheduler
from engines.kv.manager import KVManager
from engines.text.block_hash import root_hash


class EngineCore:
    """One model, its KV and everybody who wants tokens of it."""

    def __init__(
        self,
        runner: Runner,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        capabilities: Capabilities,
        *,
        clock: Callable[[], float],
        on_free_block: Callable[[int], None] | None = None,
    ) -> None:
        self.capabilities = capabilities
        self.kv = KVManager(cache, capabilities.num_blocks, on_free=on_free_block)
        self.scheduler = Scheduler(scheduler, self.kv, PriorityQueue())
        self._runner = runner
        self._max_waiting = scheduler.max_waiting
        self._clock = clock
        self._requests: dict[tuple[str, int], Request] = {}
        self._outbox: list[Chunk] = []
        self._metrics = EngineMetrics(clock)

    def add_request(self, source: GenerateRequest) -> None:
        """Queue a request. Raises InvalidRequestError (its fault) or EngineOverloadedError (ours)."""
        check_request(source, self.capabilities)
        if (source.request_id, 0) in self._requests:
            raise InvalidRequestError(
                "request_id is in use", field="request_id", value=source.request_id, limit="unique"
            )
        if len(self.scheduler.waiting) + source.n > self._max_waiting:
            raise EngineOverloadedError(f"the queue is full: its limit is {self._max_waiting} requests")
        root = root_hash(source.cache_salt, self.capabilities.digest)
        now_s = self._clock()
        choices = [
            Request(source, choice, arrival_s=now_s, root=root, block_size=self.kv.block_size)
            for choice in range(source.n)
        ]
        lead = choices[0]
        # The others find the prompt in the prefix index once the first has computed it.
        lead.followers = choices[1:] if self.kv.prefix_cache else []
        for request in choices:
            self._requests[request.key] = request
            if request not in lead.followers:
                self._enqueue(request)
        self._metrics.requests += 1

    def abort(self, request_id: str) -> None:
        """Forget all choices of a request and free their KV; no further chunk comes of it. Unknown ids are fine."""
        choices = [request for key, request in self._requests.items() if key[0] == request_id]
        for request in choices:
            request.followers = []
            self._drop(request)
        self._outbox = [chunk for chunk in self._outbox if chunk.request_id != request_id]
        self._metrics.aborts += bool(choices)

    def has_work(self) -> bool:
        """True if `step()` would do something."""
        return bool(self._requests or self._outbox)

    def step(self) -> list[Chunk]:
        """Compute one batch; new tokens of every request that drew one."""
        scheduled = self.scheduler.schedule(self._clock())
        if scheduled:
            self._metrics.begin_step()
            self._commit(scheduled, self._run(scheduled))
            self._metrics.end_step()
        chunks, self._outbox = self._outbox, []
        return chunks

    def _run(self, scheduled: list[Request]) -> list[tuple[Request, Sampled]]:
        """Run the batch; if it fails, run its requests one by one and give up only those that fail alone."""
        try:
            return self._runner.run(scheduled)
        except Exception as error:
            self._metrics.fault(error)
        drawn: list[tuple[Request, Sampled]] = []
        for request in list(scheduled):
            try:
                drawn += self._runner.run([request])
            except Exception as error:
                self._metrics.fault(error)
                scheduled.remove(request)
                self._finish(request, "error")
        return drawn

    def _commit(self, scheduled: Sequence[Request], drawn: Sequence[tuple[Request, Sampled]]) -> None:
        for request in scheduled:
            request.num_computed_tokens += request.num_scheduled_tokens
            self._metrics.computed(request)
            self.kv.publish(request)
        for request, sampled in drawn:
            self._emit(request, sampled)

    def _emit(self, request: Request, sampled: Sampled) -> None:
        """Append a drawn token and say whether it was the last."""
        if request.first_token_s is None:
            request.first_token_s = self._clock()
            self._release_followers(request)
        params = request.source.sampling
        if sampled.token_id in params.stop_token_ids:
            self._finish(request, "stop", stop_token_id=sampled.token_id)
            return
        request.append(sampled.token_id)
        self._metrics.generated += 1
        logprobs = [sampled.logprobs] if sampled.logprobs is not None else None
        full = request.num_tokens >= self.capabilities.max_model_len
        if full or request.num_output_tokens >= params.max_tokens:
            self._finish(request, "length", token_ids=[sampled.token_id], logprobs=logprobs)
        else:
            self._outbox.append(
                Chunk(
                    request_id=request.source.request_id,
                    index=request.choice,
                    token_ids=[sampled.token_id],
                    logprobs=logprobs,
                )
            )

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        token_ids: Sequence[int] = (),
        logprobs: list[TokenLogprobs] | None = None,
        stop_token_id: int | None = None,
    ) -> None:
        self._outbox.append(
            Chunk(
                request_id=request.source.request_id,
                index=request.choice,
                token_ids=list(token_ids),
                logprobs=logprobs,
                finish_reason=reason,
                stop_token_id=stop_token_id,
                usage=request.usage(),
                timings=request.timings(self._clock()),
            )
        )
        self._release_followers(request)
        self._drop(request)

    def _release_followers(self, request: Request) -> None:
        for follower in request.followers:
            self._enqueue(follower)
        request.followers = []

    def _enqueue(self, request: Request) -> None:
        request.status = Status.WAITING
        self.scheduler.waiting.push(request)

    def _drop(self, request: Request) -> None:
        if request.status is not Status.HELD:
            self.scheduler.finish(request)
        request.status = Status.FINISHED
        del self._requests[request.key]

    def stats(self) -> ReplicaStats:
        """A snapshot of queues, blocks and counters."""
        return self._metrics.snapshot(self.scheduler, self.kv.pool)

    def take_kv_events(self) -> KVEventBatch | None:
        """Events since the last call, as the next batch in sequence."""
        return self.kv.flush_events(self._clock())

    def kv_events_since(self, seq: int) -> list[KVEventBatch]:
        """Batches still held, from `seq` on."""
        return self.kv.events.since(seq)

    def check_invariants(self) -> None:
        """Everything that must hold between steps. Raises AssertionError."""
        self.kv.check_invariants()
        self.scheduler.check_invariants()
        known = set(self._requests.values())
        followers = {follower for request in known for follower in request.followers}
        assert known == {*self.scheduler.running, *self.scheduler.waiting, *followers}
