"""Qwen3-Coder: parameters as tags, values as bare text.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value's type is the schema's. Read next: `engines/text/tools/base.py`.
"""

from __future__ import annotations

from typing import Any

from engines.text.scanner import MalformedError, Scanner, Wait
from engines.text.tools.base import Offered, attempt, complete_call, typed
from engines.text.tools.hermes import blank_before

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MARKS = (OPEN, CLOSE, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)


def qwen_xml(scanner: Scanner, offered: Offered) -> Wait:
    """Calls with or without the outer tag."""
    while (word := (yield from scanner.content_until(OPEN, FUNCTION))) is not None:
        yield from attempt(scanner, call(scanner, offered, word))


def call(scanner: Scanner, offered: Offered, word: str) -> Wait:
    """What follows the opening tag."""
    if word == OPEN:
        yield from scanner.space()
        yield from scanner.expect(FUNCTION)
    name = (yield from scanner.until(">", limit=256)).strip()
    if not name:
        raise MalformedError("a function without a name")
    values: dict[str, Any] = {}
    yield from scanner.space()
    while (yield from scanner.skip(PARAMETER)) is not None:
        key = (yield from scanner.until(">", limit=256)).strip()
        text = yield from scanner.until(PARAMETER_END)
        values[key] = typed(text.removeprefix("\n").removesuffix("\n"), offered.kind(name, key))
        yield from scanner.space()
    yield from scanner.expect(FUNCTION_END)
    complete_call(scanner, name, values)
    yield from scanner.space()
    if word == OPEN and (yield from scanner.peek()):
        yield from scanner.expect(CLOSE)
    yield from blank_before(scanner, OPEN)
