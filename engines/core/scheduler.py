"""Which tokens the next step computes: a token budget, no phases.

Running requests come first, those that need a single token before those that are catching up, so that a long prompt
never holds up a stream. Then waiting ones are admitted while budget, blocks and `max_running` allow. When a running
request finds no block, the one that is least urgent (lowest priority, latest arrival) gives its KV back and waits; its
published blocks stay cached, so most of the recomputation is a prefix hit.

Knows nothing of tensors, sampling or clients.

Read next: `engines/kv/manager.py`, `engines/core/batch.py`.
"""

from __future__ import annotations

from engines.config import SchedulerConfig
from engines.core.queues import QueuePolicy
from engines.core.request import Request, Status
from engines.kv.manager import KVManager


class Scheduler:
    """Owns `running` (in order of admission) and `waiting`."""

    def __init__(self, config: SchedulerConfig, kv: KVManager, waiting: QueuePolicy) -> None:
        self._config = config
        self._kv = kv
        self.waiting = waiting
        self.running: list[Request] = []
        self.num_preemptions = 0

    def schedule(self, now_s: float) -> list[Request]:
        """Requests of the next step, each with `num_scheduled_tokens` >= 1 and room for them in its block table."""
        for request in self.running:
            request.num_scheduled_tokens = 0
        preempted_before = self.num_preemptions
        budget = self._schedule_running()
        if self.num_preemptions == preempted_before:  # what was just evicted must not come back in the same step
            self._admit(budget, now_s)
        scheduled = [request for request in self.running if request.num_scheduled_tokens]
        for request in scheduled:
            request.num_steps += 1
        return scheduled

    def finish(self, request: Request) -> None:
        """Free its KV; it leaves whichever list holds it."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        self._kv.release(request)
        request.status = Status.FINISHED

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that waiting requests have yet to compute (prefix hits not yet known)."""
        return sum(request.num_tokens for request in self.waiting)

    def check_invariants(self) -> None:
        """Lists, statuses and block tables agree with the pool's counts. Raises AssertionError."""
        assert all(request.status is Status.RUNNING for request in self.running)
        assert all(request.status is Status.WAITING and not request.block_ids for request in self.waiting)
        counts = [0] * self._kv.pool.num_blocks
        for request in self.running:
            assert len(request.block_ids) * request.block_size >= request.num_computed_tokens
            for block_id in request.block_ids:
                counts[block_id] += 1
        assert counts == self._kv.pool.ref_counts, "reference counts differ from the block tables of what runs"

    def _schedule_running(self) -> int:
        budget = self._config.max_batch_tokens
        for request in sorted(self.running, key=lambda r: r.num_tokens_to_compute > 1):
            if request.status is not Status.RUNNING:
                continue  # preempted for a request before it in this loop
            wanted = min(request.num_tokens_to_compute, self._config.chunk_tokens, budget)
            if wanted and self._make_room(request, wanted):
                request.num_scheduled_tokens = wanted
                budget -= wanted
        return budget

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Allocate, preempting others until it fits; False if the request itself was the least urgent."""
        while not self._kv.allocate(request, num_tokens):
            victim = self._victim()
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _victim(self) -> Request:
        # A request that has its tokens in this step already is spared: its slots are promised.
        open_to_preemption = [request for request in self.running if not request.num_scheduled_tokens]
        return max(open_to_preemption, key=lambda r: (r.source.priority, r.arrival_s, r.choice))

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._kv.release(request)
        request.status = Status.WAITING
        request.num_scheduled_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push_back_preempted(request)

    def _admit(self, budget: int, now_s: float) -> None:
        while budget and len(self.running) < self._config.max_running:
            request = self.waiting.peek()
            if request is None or not self._place(request, budget):
                return
            self.waiting.pop()
            request.status = Status.RUNNING
            if request.first_scheduled_s is None:
                request.first_scheduled_s = now_s
                request.num_cached_tokens = request.num_computed_tokens
            self.running.append(request)
            budget -= request.num_scheduled_tokens

    def _place(self, request: Request, budget: int) -> bool:
        """Give a waiting request its cached prefix and room for a first chunk, or nothing."""
        self._kv.match(request)
        wanted = min(request.num_tokens_to_compute, self._config.chunk_tokens, budget)
        if not self._kv.allocate(request, wanted):
            self._kv.release(request)
            return False
        request.num_scheduled_tokens = wanted
        return True
