"""In which order waiting requests are admitted: the seam, and the plain policies.

A queue policy knows what a `Request` says of itself; it knows nothing of KV or of what runs. A fair policy (per-tenant
deficits) is one more class and one more line in `QUEUE_POLICIES`.

Read next: `engines/core/scheduler.py`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Protocol

from engines.core.request import Request

Order = tuple[int, ...]


class QueuePolicy(Protocol):
    """Waiting requests in order. `peek` does not mutate; its result is valid until the next mutation."""

    def push(self, request: Request) -> None:
        """A new request, or one that ran and lost its KV: it goes where its arrival says, not to the end."""
        ...

    def peek(self) -> Request | None:
        """The next to admit."""
        ...

    def pop(self) -> Request:
        """Take what `peek` shows."""
        ...

    def remove(self, request: Request) -> None:
        """Take out one that left."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class OrderedQueue:
    """Smallest `order(request)` first; orders are unique. A sorted list: O(log n) to find, a short move to insert."""

    def __init__(self, order: Callable[[Request], Order]) -> None:
        self._order = order
        self._requests: list[Request] = []

    def push(self, request: Request) -> None:
        """See `QueuePolicy.push`."""
        insort(self._requests, request, key=self._order)

    def peek(self) -> Request | None:
        """See `QueuePolicy.peek`."""
        return self._requests[0] if self._requests else None

    def pop(self) -> Request:
        """See `QueuePolicy.pop`."""
        return self._requests.pop(0)

    def remove(self, request: Request) -> None:
        """See `QueuePolicy.remove`."""
        at = bisect_left(self._requests, self._order(request), key=self._order)
        assert self._requests[at] is request
        del self._requests[at]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


def fcfs_queue() -> QueuePolicy:
    """First come, first served, whatever the priority."""
    return OrderedQueue(lambda request: request.order[1:])


def priority_queue() -> QueuePolicy:
    """Strict priority (lower is sooner), first come, first served inside one priority."""
    return OrderedQueue(lambda request: request.order)


QUEUE_POLICIES: Mapping[str, Callable[[], QueuePolicy]] = MappingProxyType(
    {"fcfs": fcfs_queue, "priority": priority_queue}
)
