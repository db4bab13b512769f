"""DeepSeek V3 and V3.1, R1: one section of calls.

    <｜tool▁calls▁begin｜>
    <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{...}\\n```<｜tool▁call▁end｜>       V3, R1
    <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>                              V3.1
    <｜tool▁calls▁end｜>

Read next: `engines/text/tools/base.py`.
"""

from __future__ import annotations

from engines.text.scanner import MalformedError, Scanner, Wait
from engines.text.tools.base import MAX_NAME_CHARS, Offered, arguments, attempt

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"
MARKS = (SECTION, SECTION_END, CALL, SEPARATOR, CALL_END)


def deepseek(scanner: Scanner, offered: Offered) -> Wait:
    """Both forms, with or without the section's own marks."""
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
    name = (yield from scanner.until(SEPARATOR, limit=MAX_NAME_CHARS)).strip()
    yield from scanner.space()
    fenced = (yield from scanner.peek()) != "{"
    if fenced:
        name = (yield from scanner.until("\n", limit=MAX_NAME_CHARS)).strip()
        yield from scanner.expect(FENCE)
        yield from scanner.skip("json")
        yield from scanner.space()
    if not name:
        raise MalformedError("a call without a name")
    yield from arguments(scanner, scanner.open_call(name))
    yield from scanner.space()
    if fenced:
        yield from scanner.skip(FENCE)
        yield from scanner.space()
    if (yield from scanner.peek()):
        yield from scanner.expect(CALL_END)
