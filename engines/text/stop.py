"""Stop strings in a stream of text: what may be the start of one is held back until it is clear.

The first stop string to be completed wins, as if characters came one by one, so the text emitted is the same however
the stream is cut. Knows nothing of tokens.

Read next: `routers/execute.py` (who feeds it).
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """One stream. Of two stops completed by the same character the one that began first (the longer) wins."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that can be shown now. Once `matched` is set, everything after is dropped."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        completed = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if completed:
            end, start, self.matched = min(completed)
            self._held = ""
            return text[: end if self._include else start]
        shown = len(text) - self._possible_start(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The stream has ended: what was held back was text after all."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that is a beginning of a stop string."""
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
