"""In which order waiting requests are admitted: one seam, two policies.

A queue policy knows arrival and priority of requests; it knows nothing of KV or of what runs.

Read next: `engines/core/scheduler.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from engines.core.request import Request


class QueuePolicy(Protocol):
    """Waiting requests in order. `peek` does not mutate; its result is valid until the next mutation."""

    def push(self, request: Request) -> None:
        """A new request."""
        ...

    def push_back_preempted(self, request: Request) -> None:
        """A request that ran and lost its KV: before all others of its priority."""
        ...

    def peek(self) -> Request | None:
        """The next to admit."""
        ...

    def pop(self) -> Request:
        """Take what `peek` shows."""
        ...

    def remove(self, request: Request) -> None:
        """Take out one that was aborted."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class PriorityQueue:
    """Strict priority bands (lower is sooner), first come first served inside a band."""

    def __init__(self) -> None:
        self._bands: dict[int, deque[Request]] = {}

    def push(self, request: Request) -> None:
        """To the end of its band."""
        self._bands.setdefault(request.source.priority, deque()).append(request)

    def push_back_preempted(self, request: Request) -> None:
        """To the front of its band."""
        self._bands.setdefault(request.source.priority, deque()).appendleft(request)

    def peek(self) -> Request | None:
        """First of the lowest band."""
        return self._bands[min(self._bands)][0] if self._bands else None

    def pop(self) -> Request:
        """Take the first of the lowest band."""
        priority = min(self._bands)
        request = self._bands[priority].popleft()
        self._drop_if_empty(priority)
        return request

    def remove(self, request: Request) -> None:
        """O(waiting of its band)."""
        self._bands[request.source.priority].remove(request)
        self._drop_if_empty(request.source.priority)

    def __len__(self) -> int:
        return sum(map(len, self._bands.values()))

    def __iter__(self) -> Iterator[Request]:
        for priority in sorted(self._bands):
            yield from self._bands[priority]

    def _drop_if_empty(self, priority: int) -> None:
        if not self._bands[priority]:
            del self._bands[priority]
