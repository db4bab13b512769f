"""The seam of tool-call parsers, and the steps that families share.

A family is a generator over a `Scanner` (engines/text/scanner.py). Rules of all of them:

- Any chunking of the text gives the same calls, and the same content.
- Fragments of a call's arguments join to one valid JSON object, also when the text is cut off or broken.
- What is not a call is content, to the letter. Nothing is raised.

Knows nothing of HTTP or of what tools do. Read next: `engines/text/tools/hermes.py`, `engines/text/tools/registry.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from typing import Any

import msgspec

from engines.text.json_text import JsonSink, another, read_text, read_value, read_whole
from engines.text.scanner import MalformedError, Piece, Scanner, Wait

NAME_KEYS = ("name", "tool_name", "function")
ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
MAX_NAME_CHARS = 256


class Offered(msgspec.Struct, frozen=True):
    """The tools of a request: name -> JSON schema of its parameters. Empty: not known."""

    schemas: Mapping[str, Mapping[str, Any]] = {}

    def has(self, name: str) -> bool:
        """False only for a name that is known not to be offered."""
        return not self.schemas or name in self.schemas

    def kind(self, name: str, parameter: str) -> str | None:
        """The JSON type that the schema wants for a parameter, if it says one."""
        properties = self.schemas.get(name, {}).get("properties", {})
        wanted = properties.get(parameter, {}) if isinstance(properties, Mapping) else {}
        kind = wanted.get("type") if isinstance(wanted, Mapping) else None
        return kind if isinstance(kind, str) else None


Family = Callable[[Scanner, Offered], Wait]


class PieceParser:
    """Runs a generator over pushed text. `feed` and `close` return the pieces found meanwhile."""

    def __init__(self, make: Callable[[Scanner], Wait]) -> None:
        self._scanner = Scanner()
        self._run = make(self._scanner)
        self._over = False
        self._resume()

    def feed(self, text: str) -> list[Piece]:
        """More text."""
        self._scanner.push(text)
        return self._resume()

    def close(self) -> list[Piece]:
        """The text is over."""
        self._scanner.close()
        return self._resume()

    def _resume(self) -> list[Piece]:
        if not self._over:
            self._over = next(self._run, self) is self
        return self._scanner.pieces()


def tool_parser(family: Family, offered: Offered | None = None) -> PieceParser:
    """A parser of one stream."""
    return PieceParser(lambda scanner: whole_text(scanner, family, offered or Offered()))


def whole_text(scanner: Scanner, family: Family, offered: Offered) -> Wait:
    """The family's own reading, and what it leaves unread as content."""
    yield from family(scanner, offered)
    yield from scanner.content_until()


def attempt(scanner: Scanner, reading: Wait) -> Generator[None, None, bool]:
    """Read a call; if it is none, everything since the mark is content.

    Once a call has begun it stays one: its arguments are completed, and only what follows is content.
    """
    scanner.mark()
    calls = scanner.num_calls
    try:
        yield from reading
    except MalformedError:
        if scanner.num_calls == calls:
            scanner.give_back()
        else:
            scanner.end_call()
            scanner.forget()
        return False
    scanner.forget()
    return True


def arguments(scanner: Scanner, index: int) -> Wait:
    """The JSON object that comes next, streamed as the arguments of call `index`. Raises MalformedError, completed."""

    def write(text: str) -> None:
        scanner.emit(index, text)

    sink = JsonSink(write)
    yield from scanner.space()
    if (yield from scanner.peek()) != "{":
        # Some models write the object as a string that holds JSON; anything else is no set of arguments.
        try:
            write(object_text((yield from read_text(scanner))))
        except MalformedError:
            write("{}")
            raise
        return
    try:
        yield from read_value(scanner, sink)
    except MalformedError:
        write(sink.closing())
        raise


def object_text(text: str) -> str:
    """`text` if it is a JSON object, else MalformedError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedError("arguments are no JSON") from error
    if not isinstance(value, dict):
        raise MalformedError("arguments are no object")
    return json.dumps(value, ensure_ascii=False)


def json_call(scanner: Scanner, offered: Offered, *, known: bool = False) -> Wait:
    """`{"name": ..., "arguments": {...}}` in any order of keys; other keys are passed over. With `known`, a name that
    is not offered is malformed: the object may be an answer."""
    yield from scanner.expect("{")
    silent = JsonSink(lambda text: None)
    silent.open("{", "}")
    index: int | None = None
    early: str | None = None
    call_id: str | None = None
    first, written = True, False
    while (yield from another(scanner, silent, "}", first)):
        first = False
        key = yield from read_text(scanner)
        yield from scanner.space()
        yield from scanner.expect(":")
        yield from scanner.space()
        if key in NAME_KEYS and index is None:
            name = yield from read_text(scanner)
            if not 1 <= len(name) <= MAX_NAME_CHARS or (known and not offered.has(name)):
                raise MalformedError(f"{name[:20]!r} is no tool")
            index = scanner.open_call(name, call_id)
            if early is not None:
                scanner.emit(index, early)
                written = True
        elif key in ARGUMENT_KEYS and not written and early is None:
            if index is not None:
                written = True
                yield from arguments(scanner, index)
            else:
                early = yield from whole_arguments(scanner)
        elif key == "id" and index is None and (yield from scanner.peek()) == '"':
            call_id = yield from read_text(scanner)
        else:
            yield from read_whole(scanner)
    if index is None:
        raise MalformedError("a call without a name")
    scanner.end_call()


def whole_arguments(scanner: Scanner) -> Generator[None, None, str]:
    """Arguments that come before the name."""
    if (yield from scanner.peek()) == '"':
        return object_text((yield from read_text(scanner)))
    return object_text((yield from read_whole(scanner)))


def json_calls(scanner: Scanner, offered: Offered, *, known: bool = False) -> Wait:
    """One call, or a list of them."""
    yield from scanner.space()
    if (yield from scanner.skip("[")) is None:
        yield from json_call(scanner, offered, known=known)
        return
    first = True
    silent = JsonSink(lambda text: None)
    silent.open("[", "]")
    while (yield from another(scanner, silent, "]", first)):
        first = False
        yield from json_call(scanner, offered, known=known)


def complete_call(scanner: Scanner, name: str, values: Mapping[str, Any], call_id: str | None = None) -> None:
    """A call whose arguments are all there."""
    index = scanner.open_call(name, call_id)
    scanner.emit(index, json.dumps(dict(values), ensure_ascii=False))


def typed(text: str, kind: str | None) -> Any:
    """A parameter written as bare text, as the type that the schema wants: text stays text, else JSON if it is some."""
    if kind == "string":
        return text
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text) if kind != "string" else text


def refuse_constant(word: str) -> Any:
    """NaN and Infinity are no JSON."""
    raise ValueError(word)
