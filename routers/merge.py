"""Several async generators read at once, as one. A task each, all inside one TaskGroup, all gone when it is closed.

Read next: `routers/execute.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import TypeVar

T = TypeVar("T")


async def merge(sources: Sequence[Callable[[], AsyncGenerator[T, None]]]) -> AsyncGenerator[T, None]:
    """Items in the order they come. The first exception of any source ends all and is raised as it is."""
    queue: asyncio.Queue[T | None] = asyncio.Queue(maxsize=len(sources))

    async def read(source: AsyncGenerator[T, None]) -> None:
        async with aclosing(source):
            async for item in source:
                await queue.put(item)

    async def read_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for source in sources:
                    group.create_task(read(source()))
        finally:
            await queue.put(None)

    reader = asyncio.create_task(read_all())
    try:
        while (item := await queue.get()) is not None:
            yield item
        await reader
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        reader.cancel()
        drain(queue)
        with suppress(asyncio.CancelledError, Exception):
            await reader


def drain(queue: asyncio.Queue[T | None]) -> None:
    """Make room, so that a writer that is being cancelled can leave."""
    while not queue.empty():
        queue.get_nowait()
