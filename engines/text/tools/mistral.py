"""Mistral: `[TOOL_CALLS]` and a list of `{"name": ..., "arguments": ...}`, or, in newer models,
`[TOOL_CALLS]NAME[ARGS]{...}` once a call, with an id between them in some.

Read next: `engines/text/tools/base.py`.
"""

from __future__ import annotations

from engines.text.scanner import MalformedError, Scanner, Wait
from engines.text.tools.base import MAX_NAME_CHARS, Offered, arguments, attempt, json_calls

MARK, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKS = (MARK, CALL_ID, ARGS)


def mistral(scanner: Scanner, offered: Offered) -> Wait:
    """Both forms."""
    while (yield from scanner.content_until(MARK)) is not None:
        yield from attempt(scanner, call(scanner, offered))


def call(scanner: Scanner, offered: Offered) -> Wait:
    """What follows the mark."""
    yield from scanner.space()
    if (yield from scanner.peek()) in "[{":
        yield from json_calls(scanner, offered)
    else:
        name = (yield from scanner.until(CALL_ID, ARGS, "{", limit=2 * MAX_NAME_CHARS, keep=True)).strip()
        call_id = None
        if (yield from scanner.skip(CALL_ID)) is not None:
            call_id = (yield from scanner.until(ARGS, "{", limit=MAX_NAME_CHARS, keep=True)).strip()
        yield from scanner.skip(ARGS)
        if not name:
            raise MalformedError("a call without a name")
        yield from arguments(scanner, scanner.open_call(name, call_id))
    yield from scanner.space()
