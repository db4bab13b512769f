"""All replicas, and what is known of each right now. The one place that routing reads the fleet from.

In-flight counts change here synchronously with each request, so that a burst does not see the same idle replica twice;
telemetry corrects what only the engine knows. Knows nothing of how replicas are started.

Read next: `routers/select.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from engines.api import Engine, EngineDeadError, ReplicaStats
from engines.text.model import TextModel


def always() -> bool:
    """A replica without a process of its own is alive as long as we are."""
    return True


class Replica:
    """A running copy of a model. `is_alive` is asked at each choice; counts are the router's own."""

    def __init__(
        self, name: str, model: str, engine: Engine, text: TextModel, *, is_alive: Callable[[], bool] = always
    ) -> None:
        self.name = name
        self.model = model
        self.engine = engine
        self.text = text
        self.stats = ReplicaStats()
        self.running = 0
        self.queued_tokens = 0
        self._is_alive = is_alive

    @property
    def alive(self) -> bool:
        """False while its process is down."""
        return self._is_alive()

    @contextmanager
    def carrying(self, num_tokens: int) -> Iterator[Callable[[], None]]:
        """Count a request of `num_tokens` prompt tokens while it runs; call the yielded function at its first token."""
        self.running += 1
        self.queued_tokens += num_tokens
        waiting = [num_tokens]

        def prefilled() -> None:
            self.queued_tokens -= waiting.pop() if waiting else 0

        try:
            yield prefilled
        finally:
            prefilled()
            self.running -= 1

    async def observe(self) -> ReplicaStats:
        """Ask the engine; the last snapshot stays when it is down."""
        with suppress(EngineDeadError):
            self.stats = await self.engine.stats()
        return self.stats


class Fleet:
    """Replicas by model, in the order added."""

    def __init__(self) -> None:
        self._by_model: dict[str, list[Replica]] = {}

    def add(self, replica: Replica) -> None:
        """One more."""
        self._by_model.setdefault(replica.model, []).append(replica)

    def replicas(self, model: str) -> list[Replica]:
        """Of one model, dead ones included."""
        return list(self._by_model.get(model, ()))

    def __iter__(self) -> Iterator[Replica]:
        for replicas in self._by_model.values():
            yield from replicas

    def missing(self) -> list[str]:
        """Models without a living replica."""
        return [model for model, replicas in self._by_model.items() if not any(r.alive for r in replicas)]
