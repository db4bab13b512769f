"""Harmony (gpt-oss): channels. `analysis` is reasoning, `commentary to=functions.NAME` a call, the rest content.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
    <|message|>{...}<|call|>

Reads reasoning and calls at once, so no other reasoning parser goes before it. A preamble in `commentary` without a
recipient is for the user. Read next: `engines/text/tools/base.py`.
"""

from __future__ import annotations

import re

from engines.text.scanner import Content, Reasoning, Scanner, Wait
from engines.text.tools.base import Offered, arguments, attempt

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
MAX_HEADER_CHARS = 512
MARKS = (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)


def harmony(scanner: Scanner, offered: Offered) -> Wait:
    """Messages until the text ends."""
    while (yield from scanner.content_until(CHANNEL, START)) is not None:
        yield from attempt(scanner, message(scanner))


def message(scanner: Scanner) -> Wait:
    """Header and body."""
    header = yield from scanner.until(MESSAGE, limit=MAX_HEADER_CHARS)
    recipient = RECIPIENT.search(header)
    channel = header.rpartition(CHANNEL)[2].split()
    if recipient is not None:
        yield from arguments(scanner, scanner.open_call(recipient.group(1)))
        yield from scanner.space()
        if (yield from scanner.peek()):
            yield from scanner.expect(*ENDS)
        return
    scanner.forget()
    kind = Reasoning if channel[:1] == ["analysis"] else Content
    yield from scanner.content_until(*ENDS, kind=kind, trim=False)
