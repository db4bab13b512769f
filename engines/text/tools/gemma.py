"""Gemma: `call:NAME{key:<quote>text<quote>,n:1}` between marks, with a token of its own as quote.

Gemma 4 has `<|tool_call>`, `<tool_call|>` and the quote `<|"|>`; FunctionGemma has `<start_function_call>`,
`<end_function_call>` and `<escape>`. Keys are bare, values are quoted text, numbers, words, lists and mappings.

Read next: `engines/text/tools/base.py`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from engines.text.json_text import MAX_DEPTH, read_scalar
from engines.text.scanner import MalformedError, Scanner, Wait
from engines.text.tools.base import MAX_NAME_CHARS, Offered, attempt, complete_call, typed

FORMS = {"<|tool_call>": ("<tool_call|>", '<|"|>'), "<start_function_call>": ("<end_function_call>", "<escape>")}
MARKS = tuple(mark for start, rest in FORMS.items() for mark in (start, *rest))


def gemma(scanner: Scanner, offered: Offered) -> Wait:
    """Calls of both forms, text around them."""
    while (word := (yield from scanner.content_until(*FORMS))) is not None:
        yield from attempt(scanner, call(scanner, *FORMS[word]))


def call(scanner: Scanner, end: str, quote: str) -> Wait:
    """What follows the opening mark."""
    yield from scanner.expect("call:")
    name = (yield from scanner.until("{", limit=MAX_NAME_CHARS, keep=True)).strip()
    if not name:
        raise MalformedError("a call without a name")
    values = yield from mapping(scanner, quote, 0)
    yield from scanner.space()
    if (yield from scanner.peek()):
        yield from scanner.expect(end)
    complete_call(scanner, name, values)
    yield from scanner.space()


def mapping(scanner: Scanner, quote: str, depth: int) -> Generator[None, None, dict[str, Any]]:
    """`{key:value,...}`."""
    yield from scanner.expect("{")
    values: dict[str, Any] = {}
    yield from scanner.space()
    while (yield from scanner.skip("}")) is None:
        if values:
            yield from scanner.expect(",")
            yield from scanner.space()
        key = (yield from scanner.until(":", limit=MAX_NAME_CHARS)).strip().removeprefix(quote).removesuffix(quote)
        values[key] = yield from value(scanner, quote, depth + 1)
        yield from scanner.space()
    return values


def value(scanner: Scanner, quote: str, depth: int) -> Generator[None, None, Any]:
    """Any value."""
    if depth > MAX_DEPTH:
        raise MalformedError(f"nested deeper than {MAX_DEPTH}")
    yield from scanner.space()
    if (yield from scanner.skip(quote)) is not None:
        return (yield from scanner.until(quote))
    char = yield from scanner.peek()
    if char == "{":
        return (yield from mapping(scanner, quote, depth))
    if char != "[":
        return typed((yield from read_scalar(scanner)), None)
    scanner.take()
    items: list[Any] = []
    yield from scanner.space()
    while (yield from scanner.skip("]")) is None:
        if items:
            yield from scanner.expect(",")
        items.append((yield from value(scanner, quote, depth + 1)))
        yield from scanner.space()
    return items
