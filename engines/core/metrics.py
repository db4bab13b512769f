"""Counters and step times of one engine, and the snapshot made of them.

Knows nothing of how they are shown.

Read next: `engines/core/engine.py` (who counts), `engines/api.py` (`ReplicaStats`).
"""

from __future__ import annotations

import logging
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from engines.api import ReplicaStats
from engines.core.request import Request
from engines.core.scheduler import Scheduler
from engines.kv.pool import BlockPool

logger = logging.getLogger("facet.engine")

STEP_TIMES_KEPT = 512


class EngineMetrics:
    """Written by the engine thread only. Tokens that are computed again after a preemption are not counted again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step_times_s: deque[float] = deque(maxlen=STEP_TIMES_KEPT)
        self._progress_s = 0.0  # when the last step ended, or when work came to an idle engine
        self.steps = 0
        self.requests = 0
        self.aborts = 0
        self.faults = 0
        self.generated = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def arrived(self, *, idle: bool) -> None:
        """A client request was accepted; `idle`: there was no other."""
        self.requests += 1
        if idle:
            self._progress_s = self._clock()

    def stepped(self, started_s: float) -> None:
        """A step has run and is committed."""
        self._progress_s = self._clock()
        self._step_times_s.append(self._progress_s - started_s)
        self.steps += 1

    def prefilled(self, request: Request) -> None:
        """A choice drew its first token: count its prompt, once."""
        self.prompt_tokens += request.num_prompt_tokens
        self.cached_tokens += request.num_cached_tokens

    def fault(self, error: Exception, request_ids: Sequence[str]) -> None:
        """A forward pass raised; the engine goes on."""
        self.faults += 1
        logger.error("a step of %d requests failed: %s", len(request_ids), ", ".join(request_ids), exc_info=error)

    def snapshot(self, scheduler: Scheduler, pool: BlockPool, *, num_waiting: int) -> ReplicaStats:
        """Everything at this moment."""
        busy = bool(scheduler.running or num_waiting)
        return ReplicaStats(
            running=len(scheduler.running),
            waiting=num_waiting,
            waiting_tokens=scheduler.num_waiting_tokens,
            total_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            used_blocks=pool.num_used,
            steps_total=self.steps,
            step_age_s=self._clock() - self._progress_s if busy else 0.0,
            step_p50_s=percentile(self._step_times_s, 50),
            step_p99_s=percentile(self._step_times_s, 99),
            prompt_tokens_total=self.prompt_tokens,
            cached_tokens_total=self.cached_tokens,
            generation_tokens_total=self.generated,
            preemptions_total=scheduler.num_preemptions,
            aborts_total=self.aborts,
            requests_total=self.requests,
            rss_bytes=resident_bytes(),
        )


def percentile(values: Iterable[float], percent: int) -> float:
    """The value that `percent` of 100 do not exceed, nearest rank; 0 if there are none."""
    ordered = sorted(values) or [0.0]
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def resident_bytes() -> int:
    """Resident memory of this process; 0 where /proc is not mounted."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * mmap.PAGESIZE
