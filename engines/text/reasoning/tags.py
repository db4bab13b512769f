"""Thoughts between two marks, before the answer.

A template that ends in the opening mark has the model begin inside its thoughts (`inside`). Text that never closes its
thoughts is all thoughts. Marks after the first close are text: a model may write about them.

Read next: `engines/text/scanner.py`, `engines/text/reasoning/registry.py`.
"""

from __future__ import annotations

import msgspec

from engines.text.scanner import Content, Reasoning, Scanner, Wait
from engines.text.tools.base import PieceParser


class Tags(msgspec.Struct, frozen=True):
    """`opens` and `closes` are alternatives, the longer ones first; `after` are marks that wrap the answer and go."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    after: tuple[str, ...] = ()


def reasoning_parser(tags: Tags, *, inside: bool = False) -> PieceParser:
    """A parser of one stream: Reasoning pieces, then Content."""
    return PieceParser(lambda scanner: thoughts(scanner, tags, inside))


def thoughts(scanner: Scanner, tags: Tags, inside: bool) -> Wait:
    """Blanks before the thoughts, and between them and the answer, are dropped."""
    scanner.mark()
    yield from scanner.space()
    if (yield from scanner.skip(*tags.opens)) is None and not inside:
        scanner.give_back()
        yield from scanner.content_until()
        return
    scanner.forget()
    yield from scanner.space()
    if (yield from scanner.content_until(*tags.closes, kind=Reasoning)) is None:
        return
    scanner.forget()
    yield from scanner.space()
    while (yield from scanner.content_until(*tags.after, kind=Content)) is not None:
        scanner.forget()
