"""GLM 4.5 and later: `<tool_call>NAME`, then pairs of `<arg_key>` and `<arg_value>` with bare text, `</tool_call>`.

A value's type is the schema's. Read next: `engines/text/tools/base.py`.
"""

from __future__ import annotations

from typing import Any

from engines.text.scanner import MalformedError, Scanner, Wait
from engines.text.tools.base import MAX_NAME_CHARS, Offered, attempt, complete_call, typed
from engines.text.tools.hermes import CLOSE, OPEN, blank_before

KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
MARKS = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)


def glm(scanner: Scanner, offered: Offered) -> Wait:
    """Calls, text around them."""
    while (yield from scanner.content_until(OPEN)) is not None:
        yield from attempt(scanner, call(scanner, offered))


def call(scanner: Scanner, offered: Offered) -> Wait:
    """What follows the opening tag."""
    name = (yield from scanner.until(KEY, CLOSE, limit=MAX_NAME_CHARS, keep=True)).strip()
    if not name or any(char in name for char in "{}<>\n"):
        raise MalformedError("a call without a name")
    values: dict[str, Any] = {}
    while (yield from scanner.skip(KEY)) is not None:
        key = (yield from scanner.until(KEY_END, limit=MAX_NAME_CHARS)).strip()
        yield from scanner.space()
        yield from scanner.expect(VALUE)
        text = yield from scanner.until(VALUE_END)
        values[key] = typed(text, offered.kind(name, key))
        yield from scanner.space()
    yield from scanner.expect(CLOSE)
    complete_call(scanner, name, values)
    yield from blank_before(scanner, OPEN)
