"""Where one reader waits for what a writer puts, in batches: one wake-up for all that has come.

Single event loop, single reader. Knows nothing of what it carries.

Read next: `engines/local.py`, `engines/remote.py`.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """`put` and `close` never block; `get` returns everything that is there, at least one item."""

    __slots__ = ("_error", "_items", "_waiter")

    def __init__(self) -> None:
        self._items: list[T] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        """Add an item and wake the reader."""
        self._items.append(item)
        self._wake()

    def close(self, error: Exception) -> None:
        """No more items: once what is there has been read, `get` raises `error`."""
        if self._error is None:
            self._error = error
            self._wake()

    async def get(self) -> list[T]:
        """All items since the last call. Raises the error given to `close` when there are none."""
        while not self._items:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
