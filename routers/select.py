"""Which replica serves a candidate: the cheapest by estimated milliseconds, every term kept.

    cost_ms = rtt + (queued_tokens * ms_per_token + prompt_tokens * ms_per_token) * (1 + beta * batch)

(DESIGN section 11 with what is known today: no prefix residency, equal network distance.) Knows nothing of plans or
tenants. Read next: `routers/fleet.py`, `routers/explain.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from routers.fleet import Replica
from routers.types import CostTerm, Decision, ReplicaCost, UnavailableError

MS_PER_PROMPT_TOKEN = 1.0
BATCH_WEIGHT = 0.02


class ReplicaSelector(Protocol):
    """Chooses among living replicas. Must not mutate them; the caller counts what it sends."""

    def choose(self, step: str, model: str, replicas: Sequence[Replica], num_tokens: int) -> tuple[Replica, Decision]:
        """The replica and why. Raises UnavailableError when none is alive."""
        ...


class LeastLoaded:
    """The cost above; ties go to the replica added first."""

    def choose(self, step: str, model: str, replicas: Sequence[Replica], num_tokens: int) -> tuple[Replica, Decision]:
        """See the module's formula."""
        living = [replica for replica in replicas if replica.alive]
        if not living:
            raise UnavailableError(f"No replica of {model!r} is ready; it is being restarted. Try again in a moment.")
        costs = [replica_cost(replica, num_tokens) for replica in living]
        best = min(range(len(living)), key=lambda number: costs[number].total_ms)
        decision = Decision(
            step=step, model=model, replica=living[best].name, policy="least_loaded", costs=tuple(costs)
        )
        return living[best], decision


def replica_cost(replica: Replica, num_tokens: int) -> ReplicaCost:
    """All terms of one replica, ms but for `batch`, which is a factor."""
    rtt_ms = 0.0
    queue_ms = replica.queued_tokens * MS_PER_PROMPT_TOKEN
    prefill_ms = num_tokens * MS_PER_PROMPT_TOKEN
    batch = 1 + BATCH_WEIGHT * replica.running
    terms = (
        CostTerm(name="rtt_ms", value=rtt_ms),
        CostTerm(name="queue_ms", value=queue_ms),
        CostTerm(name="prefill_ms", value=prefill_ms),
        CostTerm(name="batch_factor", value=batch),
    )
    return ReplicaCost(replica=replica.name, total_ms=rtt_ms + (queue_ms + prefill_ms) * batch, terms=terms)
