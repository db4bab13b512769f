"""Counters and step times of one engine, and the snapshot made of them.

Read next: `engines/core/engine.py` (who counts), `gateway/telemetry.py` (who shows).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path

from engines.api import ReplicaStats
from engines.core.request import Request
from engines.core.scheduler import Scheduler
from engines.kv.pool import BlockPool

logger = logging.getLogger("facet.engine")

STEP_TIMES_KEPT = 512


class EngineMetrics:
    """Written by the engine thread only. Recomputed tokens count as work of the engine, not as prompt tokens."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step_times_s: deque[float] = deque(maxlen=STEP_TIMES_KEPT)
        self._step_started_s = 0.0
        self._last_step_s = 0.0
        self.steps = 0
        self.requests = 0
        self.aborts = 0
        self.faults = 0
        self.generated = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def begin_step(self) -> None:
        """A batch is about to run."""
        self._step_started_s = self._clock()

    def end_step(self) -> None:
        """It has run and is committed."""
        now_s = self._clock()
        self._step_times_s.append(now_s - self._step_started_s)
        self._last_step_s = now_s
        self.steps += 1

    def computed(self, request: Request) -> None:
        """Count a prompt once, when its last token has been computed for the first time."""
        if request.first_token_s is None and request.num_computed_tokens == request.num_tokens:
            self.prompt_tokens += request.num_prompt_tokens
            self.cached_tokens += request.num_cached_tokens

    def fault(self, error: Exception) -> None:
        """A forward pass raised; the engine goes on."""
        self.faults += 1
        logger.error("a step failed", exc_info=error)

    def snapshot(self, scheduler: Scheduler, pool: BlockPool) -> ReplicaStats:
        """Everything at this moment."""
        times = sorted(self._step_times_s) or [0.0]
        busy = bool(scheduler.running)
        return ReplicaStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            waiting_tokens=scheduler.num_waiting_tokens,
            total_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            used_blocks=pool.num_used,
            steps_total=self.steps,
            step_age_s=self._clock() - max(self._last_step_s, self._step_started_s) if busy else 0.0,
            step_p50_s=times[len(times) // 2],
            step_p99_s=times[min(len(times) - 1, len(times) * 99 // 100)],
            prompt_tokens_total=self.prompt_tokens,
            cached_tokens_total=self.cached_tokens,
            generation_tokens_total=self.generated,
            preemptions_total=scheduler.num_preemptions,
            aborts_total=self.aborts,
            requests_total=self.requests,
            rss_bytes=resident_bytes(),
        )


def resident_bytes() -> int:
    """Resident memory of this process; 0 where /proc is not mounted."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * 4096
