"""Which tokens the next step computes: a token budget, no phases.

Running requests come first, those that need a single token before those that are catching up, so that a long prompt
never holds up a stream. Then waiting ones are admitted while budget, blocks and `max_running` allow; one whose prefix
lies in a tier (`engines/kv/offload.py`) is loaded first, while others go on. When a running
request finds no block, the least urgent one that runs (lowest priority, latest arrival) gives its KV back and waits;
its published blocks stay cached, so most of the recomputation is a prefix hit.

Knows nothing of tensors, sampling or clients.

Read next: `engines/core/queues.py`, `engines/kv/manager.py`, `engines/core/batch.py`.
"""

from __future__ import annotations

from engines.config import SchedulerConfig
from engines.core.queues import QueuePolicy
from engines.core.request import Request, Status
from engines.kv.manager import KVManager
from engines.kv.offload import Offload


class Scheduler:
    """Owns `running` (in order of admission), `waiting` and `loading`. `offload` is None without tiers."""

    def __init__(
        self, config: SchedulerConfig, kv: KVManager, waiting: QueuePolicy, offload: Offload | None = None
    ) -> None:
        self.waiting = waiting
        self.running: list[Request] = []
        self.loading: list[Request] = []
        self._offload = offload
        self.num_preemptions = 0
        self._config = config
        self._kv = kv
        self._budget = 0  # tokens that this step may still take

    def schedule(self, now_s: float) -> list[Request]:
        """Requests of the next step, each with `num_scheduled_tokens` >= 1 and room for them in its block table.

        Empty only if nothing runs or waits, if the one that runs was preempted (the next step admits it again), or if
        all depend on the mover's next result.
        """
        if self._offload is not None:
            ended = {*map(id, self._offload.pump())}
            for request in [request for request in self.loading if id(request) in ended]:
                self.loading.remove(request)
                self.enqueue(request)
        self._budget = self._config.max_batch_tokens
        for request in self.running:
            request.num_scheduled_tokens = 0
        self._schedule_running()
        self._admit(now_s)
        scheduled = [request for request in self.running if request.num_scheduled_tokens]
        for request in scheduled:
            request.num_steps += 1
        return scheduled

    def enqueue(self, request: Request) -> None:
        """A request that may run from now on."""
        request.status = Status.WAITING
        self.waiting.push(request)

    def finish(self, request: Request) -> None:
        """Free its KV; it leaves whichever list holds it."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        elif request.status is Status.LOADING:
            self.loading.remove(request)  # what is on its way goes into the pool, for whoever asks
        self._kv.release(request)
        request.status = Status.FINISHED

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that waiting requests have yet to compute (prefix hits not yet known)."""
        return sum(request.num_tokens for request in (*self.waiting, *self.loading))

    def check_invariants(self) -> None:
        """Lists, statuses and block tables agree with the pool's counts. Raises AssertionError."""
        assert len(self.running) <= self._config.max_running
        assert all(request.status is Status.RUNNING for request in self.running)
        assert all(request.status is Status.WAITING and not request.block_ids for request in self.waiting)
        assert all(request.status is Status.LOADING and not request.block_ids for request in self.loading)
        counts = [0] * self._kv.pool.num_blocks
        if self._offload is not None:
            self._offload.check_invariants()
            for block_id in self._offload.references():
                counts[block_id] += 1
        for request in self.running:
            assert len(request.block_ids) * self._kv.block_size >= request.num_computed_tokens
            assert request.num_tokens_to_compute >= 1, "a request that runs has something to compute"
            for block_id in request.block_ids:
                counts[block_id] += 1
        assert counts == self._kv.pool.ref_counts, "reference counts differ from the block tables of what runs"

    def _schedule_running(self) -> None:
        for request in sorted(self.running, key=lambda r: (r.num_tokens_to_compute > 1, r.order)):
            if request.status is Status.RUNNING:  # not preempted for one before it in this loop
                self._grant(request, self._share(request))

    def _grant(self, request: Request, num_tokens: int) -> None:
        """Room and budget for `num_tokens`; the least urgent make way, which may be the request itself."""
        while not self._kv.allocate(request, num_tokens):
            victim = max(self.running, key=lambda r: r.order)
            self._preempt(victim)
            if victim is request:
                return
        request.num_scheduled_tokens = num_tokens
        self._budget -= num_tokens

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._kv.release(request)
        self._budget += request.num_scheduled_tokens
        request.num_scheduled_tokens = 0
        request.num_preemptions += 1
        request.has_loaded = False
        self.num_preemptions += 1
        self.enqueue(request)

    def _admit(self, now_s: float) -> None:
        while self._budget and len(self.running) < self._config.max_running:
            request = self.waiting.peek()
            if request is None:
                return
            if self._fetch(request):
                self.loading.append(self.waiting.pop())
                request.status = Status.LOADING
                continue
            if not self._place(request):
                return
            self.waiting.pop()
            self.running.append(request)
            request.status = Status.RUNNING
            if request.first_scheduled_s is None:
                request.first_scheduled_s = now_s
                request.num_cached_tokens = request.num_computed_tokens

    def _fetch(self, request: Request) -> bool:
        """Begin to load what the tiers have of its prefix, once; False if there is nothing, or no room now."""
        if self._offload is None or request.has_loaded:
            return False
        request.has_loaded = self._offload.fetch(request, self._num_promised())
        return request.has_loaded

    def _place(self, request: Request) -> bool:
        """Give a waiting request its cached prefix and room for a first chunk, or nothing.

        It is admitted only when all of its tokens fit beside what runs, so that no half-computed prompt is thrown away.
        """
        self._kv.match(request)
        needed = self._kv.num_missing(request, request.num_tokens_to_compute)
        if needed + self._num_promised() > self._kv.pool.num_available:
            self._kv.release(request)
            return False
        self._grant(request, self._share(request))
        return True

    def _num_promised(self) -> int:
        """Blocks that running requests still need to catch up, and one more each, so that none is preempted soon."""
        return sum(self._kv.num_missing(request, request.num_tokens_to_compute) + 1 for request in self.running)

    def _share(self, request: Request) -> int:
        """Tokens of it that this step can take; 0 when the budget is spent."""
        return min(request.num_tokens_to_compute, self._config.chunk_tokens, self._budget)
