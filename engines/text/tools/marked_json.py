"""Families that differ only in the mark before a list of `{"name": ..., "arguments": ...}`: Granite, Phi-4, xLAM.

Read next: `engines/text/tools/base.py`.
"""

from __future__ import annotations

from engines.text.scanner import Scanner, Wait
from engines.text.tools.base import Family, Offered, attempt, json_calls


def marked_json(marks: tuple[str, ...], ends: tuple[str, ...] = (), *, bare: bool = False) -> Family:
    """A family whose calls follow one of `marks` and may be followed by one of `ends`. With `bare`, a message that
    begins with JSON naming an offered tool is calls too."""

    def family(scanner: Scanner, offered: Offered) -> Wait:
        scanner.mark()
        yield from scanner.space()
        char = yield from scanner.peek()
        if bare and char and char in "[{":
            yield from attempt(scanner, calls(scanner, offered, ends, known=True))
        else:
            scanner.give_back()
        while (word := (yield from scanner.content_until(*marks))) is not None:
            yield from attempt(scanner, calls(scanner, offered, ends, known=word.startswith("```")))

    return family


def calls(scanner: Scanner, offered: Offered, ends: tuple[str, ...], *, known: bool) -> Wait:
    """What follows a mark."""
    yield from json_calls(scanner, offered, known=known)
    yield from scanner.space()
    if ends:
        yield from scanner.skip(*ends)
        yield from scanner.space()
