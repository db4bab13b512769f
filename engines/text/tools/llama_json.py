"""Llama 3.x: the whole message is `{"name": ..., "parameters": {...}}`, several joined by `;`, perhaps after
`<|python_tag|>`. Without the tag, an object counts as a call only if it names a tool that is offered.

Read next: `engines/text/tools/base.py`.
"""

from __future__ import annotations

from engines.text.scanner import Scanner, Wait
from engines.text.tools.base import Offered, attempt, json_calls

TAG = "<|python_tag|>"


def llama_json(scanner: Scanner, offered: Offered) -> Wait:
    """Calls at the start of the message, or after the tag; anything else is content."""
    scanner.mark()
    yield from scanner.space()
    if (yield from scanner.peek()) == "{":
        yield from attempt(scanner, chain(scanner, offered, known=True))
    else:
        scanner.give_back()
    while (yield from scanner.content_until(TAG)) is not None:
        yield from attempt(scanner, chain(scanner, offered, known=False))


def chain(scanner: Scanner, offered: Offered, *, known: bool) -> Wait:
    """One call, and those joined to it."""
    yield from json_calls(scanner, offered, known=known)
    yield from scanner.space()
    while (yield from scanner.skip(";")) is not None:
        yield from json_calls(scanner, offered, known=known)
        yield from scanner.space()
