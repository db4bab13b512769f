"""Kimi K2: one section of calls, each named `functions.NAME:INDEX`, which is also its id.

Read next: `engines/text/tools/base.py`.
"""

from __future__ import annotations

from engines.text.scanner import MalformedError, Scanner, Wait
from engines.text.tools.base import MAX_NAME_CHARS, Offered, arguments, attempt

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENT, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKS = (SECTION, SECTION_END, CALL, ARGUMENT, CALL_END)


def kimi(scanner: Scanner, offered: Offered) -> Wait:
    """With or without the section's own marks."""
    while (word := (yield from scanner.content_until(SECTION, CALL))) is not None:
        yield from attempt(scanner, section(scanner, word))


def section(scanner: Scanner, word: str) -> Wait:
    """Calls until the section ends."""
    if word == SECTION:
        yield from scanner.space()
        yield from scanner.expect(CALL)
    yield from call(scanner)
    yield from scanner.space()
    while (yield from scanner.skip(CALL)) is not None:
        yield from call(scanner)
        yield from scanner.space()
    yield from scanner.skip(SECTION_END)
    yield from scanner.space()


def call(scanner: Scanner) -> Wait:
    """What follows a call's mark."""
    call_id = (yield from scanner.until(ARGUMENT, limit=MAX_NAME_CHARS)).strip()
    name = call_id.removeprefix("functions.").rpartition(":")[0] or call_id.removeprefix("functions.")
    if not name:
        raise MalformedError("a call without a name")
    yield from arguments(scanner, scanner.open_call(name, call_id))
    yield from scanner.space()
    if (yield from scanner.peek()):
        yield from scanner.expect(CALL_END)
