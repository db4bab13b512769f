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
    KVEventBatch,
    ReplicaStats,
    TokenLogprobs,
)
from engines.config import CacheConfig, SchedulerConfig
from engines.core.checks import check_request, refusal
from engines.core.metrics import EngineMetrics
from engines.core.queues import QUEUE_POLICIES
from engines.core.request import Arrival, Request, Status
from engines.core.runner import Runner
from engines.core.sampler import Sampled
from engines.core.scheduler import Scheduler
from engines.kv.manager import KVManager
from engines.kv.offload import Offload

STALL_S = 1.0


class EngineCore:
    """One model, its KV and everybody who wants tokens of it.

    `clock` is monotonic seconds. `on_free_block` is told of every KV block whose content may not be read again.
    `add_tiers` puts tiers below the pool, if there are any.
    """

    def __init__(
        self,
        runner: Runner,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        capabilities: Capabilities,
        *,
        clock: Callable[[], float],
        on_free_block: Callable[[int], None] | None = None,
        add_tiers: Callable[[KVManager], Offload] | None = None,
    ) -> None:
        self.capabilities = capabilities
        self.kv = KVManager(cache, capabilities.num_blocks, on_free=on_free_block)
        self.offload = add_tiers(self.kv) if add_tiers is not None else None
        self.scheduler = Scheduler(scheduler, self.kv, QUEUE_POLICIES[scheduler.queue](), self.offload)
        self._runner = runner
        self._max_waiting = scheduler.max_waiting
        self._clock = clock
        self._choices: dict[str, list[Request]] = {}  # by request id; those that have not finished
        self._outbox: list[Chunk] = []  # of the step that runs
        self._is_stalled = False  # nobody can be computed before a tier has answered
        self._metrics = EngineMetrics(clock)

    def add_request(self, source: GenerateRequest) -> None:
        """Queue a request. Raises InvalidRequestError (its fault) or EngineOverloadedError (ours)."""
        check_request(source, self.capabilities, max_choices=self._max_waiting)
        if source.request_id in self._choices:
            raise refusal("request_id", source.request_id, "an id that no unfinished request has")
        if self._num_pending + source.n > self._max_waiting:
            raise EngineOverloadedError(f"{self._num_pending} of {self._max_waiting} places in the queue are taken")
        number = self._metrics.requests
        root = self.kv.root(source.cache_salt, self.capabilities.digest, number)
        arrival = Arrival(number, self._clock(), root)
        choices = [Request(source, choice, arrival, block_size=self.kv.block_size) for choice in range(source.n)]
        self._metrics.arrived(idle=not self._choices)
        self._choices[source.request_id] = choices
        self._is_stalled = False
        self.scheduler.enqueue(choices[0])  # the others are held until it has computed the prompt

    def abort(self, request_id: str) -> None:
        """Forget all choices of a request and free their KV; no further chunk comes of it. Unknown ids are fine."""
        choices = self._choices.pop(request_id, [])
        for request in choices:
            self.scheduler.finish(request)
        self._metrics.aborts += bool(choices)
        self._is_stalled = False

    def has_work(self) -> bool:
        """True if a request is unfinished, or a tier has something to tell."""
        return bool(self._choices) or self._has_news()

    def can_step(self) -> bool:
        """True if `step()` would do something without waiting for a tier first."""
        return self._has_news() or (bool(self._choices) and not self._is_stalled)

    def step(self) -> list[Chunk]:
        """Compute one batch; the new tokens of every choice that drew one."""
        if self._is_stalled and self.offload is not None:
            self.offload.wait(STALL_S)
        started_s = self._clock()
        scheduled = self.scheduler.schedule(started_s)
        self._is_stalled = not scheduled and self.offload is not None and self.offload.is_busy
        if scheduled:
            computed, drawn = self._run(scheduled)
            self._commit(computed, drawn)
            self._metrics.stepped(started_s)
        chunks, self._outbox = self._outbox, []
        return chunks

    def _run(self, scheduled: list[Request]) -> tuple[list[Request], list[tuple[Request, Sampled]]]:
        """What was computed, and what was drawn from it.

        If the batch fails, its requests run one by one, and those that fail alone end with "error". Running again
        writes the same KV and draws the same tokens, so the others do not notice.
        """
        try:
            return scheduled, self._runner.run(scheduled)
        except Exception as error:
            self._metrics.fault(error, [request.source.request_id for request in scheduled])
        computed: list[Request] = []
        drawn: list[tuple[Request, Sampled]] = []
        for request in scheduled:
            try:
                drawn += self._runner.run([request])
                computed.append(request)
            except Exception as error:
                self._metrics.fault(error, [request.source.request_id])
                self._finish(request, "error")
        return computed, drawn

    def _commit(self, computed: Sequence[Request], drawn: Sequence[tuple[Request, Sampled]]) -> None:
        for request in computed:
            request.num_computed_tokens += request.num_scheduled_tokens
            self.kv.publish(request)
        for request, sampled in drawn:
            self._append(request, sampled)

    def _append(self, request: Request, sampled: Sampled) -> None:
        """Add a drawn token to its choice, and end the choice if it was the last."""
        if request.first_token_s is None:
            request.first_token_s = self._clock()
            self._metrics.prefilled(request)
            self._release_held(request)
        params = request.source.sampling
        if sampled.token_id in params.stop_token_ids:
            self._finish(request, "stop", stop_token_id=sampled.token_id)
            return
        request.append(sampled.token_id)
        self._metrics.generated += 1
        token_ids, logprobs = [sampled.token_id], [sampled.logprobs] if sampled.logprobs is not None else None
        if min(params.max_tokens - request.num_output_tokens, self.capabilities.max_model_len - request.num_tokens) > 0:
            self._emit(request, token_ids, logprobs)
        else:
            self._finish(request, "length", token_ids=token_ids, logprobs=logprobs)

    def _emit(self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        request_id = request.source.request_id
        self._outbox.append(Chunk(request_id=request_id, index=request.choice, token_ids=token_ids, logprobs=logprobs))

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        token_ids: Sequence[int] = (),
        logprobs: list[TokenLogprobs] | None = None,
        stop_token_id: int | None = None,
    ) -> None:
        """Last chunk of a choice; its KV is free when this returns."""
        request_id = request.source.request_id
        self._outbox.append(
            Chunk(
                request_id=request_id,
                index=request.choice,
                token_ids=list(token_ids),
                logprobs=logprobs,
                finish_reason=reason,
                stop_token_id=stop_token_id,
                usage=request.usage(),
                timings=request.timings(self._clock()),
            )
        )
        self._release_held(request)
        self.scheduler.finish(request)
        self._choices[request_id].remove(request)
        if not self._choices[request_id]:
            del self._choices[request_id]

    def _release_held(self, request: Request) -> None:
        """Its prompt is in the prefix index now (or will not be): the other choices may run."""
        for choice in self._choices[request.source.request_id]:
            if choice.status is Status.HELD:
                self.scheduler.enqueue(choice)

    def _has_news(self) -> bool:
        return self.offload is not None and self.offload.has_results()

    @property
    def _num_pending(self) -> int:
        return sum(map(len, self._choices.values())) - len(self.scheduler.running)

    @property
    def kv_bytes(self) -> int:
        """Size of the KV tensors."""
        return self._runner.kv_bytes

    def stats(self) -> ReplicaStats:
        """A snapshot. Choices that wait for the first of their prompt to compute it count as waiting."""
        return self._metrics.snapshot(self.scheduler, self.kv.pool, num_waiting=self._num_pending)

    def take_kv_events(self) -> KVEventBatch | None:
        """Events since the last call, as the next batch in sequence."""
        return self.kv.flush_events(self._clock())

    def kv_events_since(self, seq: int) -> list[KVEventBatch]:
        """Batches still held, from `seq` on."""
        return self.kv.events.since(seq)

    def close(self) -> None:
        """Let the tiers keep what can be found, and end their thread. Nothing may be asked afterwards."""
        if self.offload is not None:
            self.offload.settle(STALL_S)
            self.offload.close()

    def check_invariants(self) -> None:
        """Everything that must hold between steps. Raises AssertionError."""
        self.kv.check_invariants()
        self.scheduler.check_invariants()
        queued = [*self.scheduler.running, *self.scheduler.waiting, *self.scheduler.loading]
        known = [choice for choices in self._choices.values() for choice in choices]
        held = [choice for choice in known if choice.status is Status.HELD]
        assert len(queued) == len(set(queued)), "a request is queued twice"
        assert set(known) - set(held) == set(queued), "a request is lost, or lives on after its end"
        for choice in held:
            lead = self._choices[choice.source.request_id][0]
            assert lead.choice == 0, "a choice waits for one that has ended"
            assert lead.first_token_s is None, "a choice waits for one that has computed the prompt"
