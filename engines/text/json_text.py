"""Reads one JSON value from a model's output while it is being written; passes on only what can always be completed.

What has been emitted, plus `JsonSink.closing()`, is valid JSON at any moment: a key waits for its value, a number or
word for its end, an escape for its last digit. Raw line breaks and tabs inside strings, which small models write, are
escaped.

Knows nothing of tools. Read next: `engines/text/scanner.py`, `engines/text/tools/base.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

from engines.text.scanner import SPACE, MalformedError, Scanner, Wait

MAX_DEPTH = 64
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
WORDS = frozenset({"true", "false", "null"})
ESCAPES = frozenset('"\\/bfnrt')
HEX = frozenset("0123456789abcdefABCDEF")
RAW = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class JsonSink:
    """Takes the value's text piece by piece; `write` receives what is safe to show."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._held = ""
        self._closers: list[str] = []

    def hold(self, text: str) -> None:
        """Text that means nothing without what follows."""
        self._held += text

    def show(self, text: str) -> None:
        """What was held, and this."""
        self._write(self._held + text)
        self._held = ""

    def open(self, bracket: str, closer: str) -> None:
        """A container or string begins."""
        self.show(bracket)
        self._closers.append(closer)

    def shut(self) -> None:
        """The innermost one ends as it should."""
        self.show(self._closers.pop())

    def closing(self) -> str:
        """What completes the value from here; what was held is dropped."""
        self._held = ""
        closers, self._closers = self._closers, []
        return "".join(reversed(closers))


def read_value(scanner: Scanner, sink: JsonSink, depth: int = 0) -> Wait:
    """One value. Raises MalformedError; the sink then tells what completes it."""
    if depth > MAX_DEPTH:
        raise MalformedError(f"nested deeper than {MAX_DEPTH}")
    sink.hold((yield from scanner.space()))
    char = yield from scanner.peek()
    if char == "{":
        yield from read_object(scanner, sink, depth)
    elif char == "[":
        yield from read_array(scanner, sink, depth)
    elif char == '"':
        yield from read_string(scanner, sink)
    else:
        sink.show((yield from read_scalar(scanner)))


def read_object(scanner: Scanner, sink: JsonSink, depth: int) -> Wait:
    """From its brace."""
    scanner.take()
    sink.open("{", "}")
    first = True
    while (yield from another(scanner, sink, "}", first)):
        first = False
        if (yield from scanner.peek()) != '"':
            raise MalformedError("a key is missing")
        sink.hold((yield from string_text(scanner)))
        sink.hold((yield from scanner.space()))
        yield from scanner.expect(":")
        sink.hold(":")
        yield from read_value(scanner, sink, depth + 1)


def read_array(scanner: Scanner, sink: JsonSink, depth: int) -> Wait:
    """From its bracket."""
    scanner.take()
    sink.open("[", "]")
    first = True
    while (yield from another(scanner, sink, "]", first)):
        first = False
        yield from read_value(scanner, sink, depth + 1)


def another(scanner: Scanner, sink: JsonSink, closer: str, first: bool) -> Generator[None, None, bool]:
    """Stand before the next member, or consume the closer. A comma before the closer is forgiven and dropped."""
    blanks = yield from scanner.space()
    if (yield from scanner.skip(closer)) is not None:
        sink.hold(blanks)
        sink.shut()
        return False
    if not first:
        yield from scanner.expect(",")
        more = yield from scanner.space()
        if (yield from scanner.skip(closer)) is not None:
            sink.shut()
            return False
        blanks += "," + more
    sink.hold(blanks)
    return True


def read_string(scanner: Scanner, sink: JsonSink) -> Wait:
    """A string value, shown as it grows."""
    scanner.take()
    sink.open('"', '"')
    while (char := (yield from character(scanner))) != '"':
        sink.show(char)
    sink.shut()


def string_text(scanner: Scanner) -> Generator[None, None, str]:
    """A whole string as JSON text."""
    text = scanner.take()
    while (char := (yield from character(scanner))) != '"':
        text += char
    return text + '"'


def character(scanner: Scanner) -> Generator[None, None, str]:
    """One character of a string as JSON text (an escape is one), or the closing quote."""
    if (yield from scanner.peek()) == "":
        raise MalformedError("a string does not end")
    char = scanner.take()
    if char == "\\":
        return char + (yield from escape(scanner))
    if char < " ":
        if char not in RAW:
            raise MalformedError("a control character in a string")
        return RAW[char]
    return char


def escape(scanner: Scanner) -> Generator[None, None, str]:
    """What follows a backslash. A surrogate must come with its other half: alone it is no text."""
    if (yield from scanner.peek()) not in ESCAPES:
        yield from scanner.expect("u")
        code = yield from hex_digits(scanner)
        if 0xD800 <= int(code, 16) < 0xDC00:
            yield from scanner.expect("\\u")
            low = yield from hex_digits(scanner)
            if not 0xDC00 <= int(low, 16) < 0xE000:
                raise MalformedError("half of a character")
            return f"u{code}\\u{low}"
        if 0xDC00 <= int(code, 16) < 0xE000:
            raise MalformedError("half of a character")
        return "u" + code
    return scanner.take()


def hex_digits(scanner: Scanner) -> Generator[None, None, str]:
    """Four of them."""
    code = ""
    while len(code) < 4:
        if (yield from scanner.peek()) not in HEX or (yield from scanner.peek()) == "":
            raise MalformedError("a \\u escape needs four digits")
        code += scanner.take()
    return code


def read_scalar(scanner: Scanner) -> Generator[None, None, str]:
    """A number, true, false or null: known to be whole when something else follows."""
    text = ""
    while (char := (yield from scanner.peek())) and char not in SPACE and char not in ",]}:[{\"'<":
        text += scanner.take()
        if len(text) > 400:
            break
    if text not in WORDS and not NUMBER.fullmatch(text):
        raise MalformedError(f"{text[:20]!r} is no JSON value")
    return text


def read_whole(scanner: Scanner) -> Generator[None, None, str]:
    """One value as text, all at once."""
    parts: list[str] = []
    yield from read_value(scanner, JsonSink(parts.append))
    return "".join(parts)


def read_text(scanner: Scanner) -> Generator[None, None, str]:
    """A string value, decoded. Raises MalformedError for another kind."""
    yield from scanner.space()
    if (yield from scanner.peek()) != '"':
        raise MalformedError("a string is missing")
    return str(json.loads((yield from string_text(scanner))))
