"""The streams of a plan's steps to one client stream, in an order clients can rely on.

    Started, then per choice its deltas in order and one Finished, RequestUsage last

This version has one step a plan, so it checks the order rather than makes it. Knows nothing of wire formats.

Read next: `gateway/sse.py`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from routers.types import Event, Finished, ReasoningDelta, RequestUsage, Started, TextDelta, ToolCallDelta


async def assemble(events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """Pass events on, asserting the order above; closing closes the source."""
    started = False
    finished: set[int] = set()
    try:
        async for event in events:
            if isinstance(event, Started):
                assert not started, "two Started events"
                started = True
            elif isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta):
                assert started, "a delta before Started"
                assert event.index not in finished, f"choice {event.index} went on after its end"
            elif isinstance(event, Finished):
                assert started, "an end before Started"
                assert event.index not in finished, f"choice {event.index} ended twice"
                finished.add(event.index)
            else:
                assert isinstance(event, RequestUsage), f"unknown event {event}"
                assert finished, "usage before any choice ended"
            yield event
    finally:
        await events.aclose()
