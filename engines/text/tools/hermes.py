"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several in a row, text around them.

Read next: `engines/text/tools/base.py`.
"""

from __future__ import annotations

from engines.text.scanner import Scanner, Wait
from engines.text.tools.base import Offered, attempt, json_calls

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKS = (OPEN, CLOSE)


def hermes(scanner: Scanner, offered: Offered) -> Wait:
    """A missing end tag is forgiven at the end of the text."""
    while (yield from scanner.content_until(OPEN)) is not None:
        yield from attempt(scanner, call(scanner, offered))


def call(scanner: Scanner, offered: Offered) -> Wait:
    """What follows the opening tag."""
    yield from json_calls(scanner, offered)
    yield from scanner.space()
    if (yield from scanner.peek()):
        yield from scanner.expect(CLOSE)
    yield from blank_before(scanner, OPEN)


def blank_before(scanner: Scanner, word: str) -> Wait:
    """Drop the blanks between two calls, and at the end of the text."""
    scanner.forget()
    scanner.mark()
    yield from scanner.space()
    if (yield from scanner.peek()) and (yield from scanner.at(word)) is None:
        scanner.give_back()
    scanner.forget()
