"""A pull reader over text that is pushed: parsers of model output are written as straight-line generators.

A parser reads what it needs (`yield from scanner.peek()`), and is suspended while that text has not come yet. It
decides only on text that it has seen, never on where a piece ended, so any chunking gives the same result.

    def parse(scanner):                                  pieces come out of `scanner.pieces()`
        while (yield from scanner.content_until(MARK)):
            ...

Knows nothing of tools or tokens. Read next: `engines/text/tools/base.py`, `engines/text/json_text.py`.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable

import msgspec

Wait = Generator[None, None, None]
SPACE = " \t\r\n"


class Content(msgspec.Struct, frozen=True):
    """Text of the answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text of the model's thoughts."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """A tool call begins. `id` only if the model's own format has one."""

    index: int
    name: str
    id: str | None = None


class CallArguments(msgspec.Struct, frozen=True):
    """A fragment of the arguments of call `index`; all fragments of a call join to one valid JSON object."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments
Kind = type[Content] | type[Reasoning] | int  # an int: arguments of that call


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with neighbours of one kind as one piece."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(piece, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + piece.text)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments) and piece.index == last.index:
            result[-1] = CallArguments(piece.index, last.text + piece.text)
        else:
            result.append(piece)
    return result


class MalformedError(Exception):
    """The text is not what the format says. Raised and caught inside parsers; clients never see it."""


class Scanner:
    """Text not yet read (and, while a place is marked, the text since then), and the pieces found."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._out: list[Piece] = []
        self._kind: Kind | None = None
        self._parts: list[str] = []
        self._has_arguments = True
        self._buffer = ""
        self._at = 0
        self._closed = False
        self._mark: int | None = None

    def push(self, text: str) -> None:
        """More text."""
        kept = self._at if self._mark is None else self._mark
        self._buffer = self._buffer[kept:] + text
        self._at -= kept
        if self._mark is not None:
            self._mark = 0

    def close(self) -> None:
        """There will be no more."""
        self._closed = True

    # Reading

    def fill(self, count: int) -> Generator[None, None, bool]:
        """Wait for `count` characters; False if the text ends before."""
        while len(self._buffer) - self._at < count and not self._closed:
            yield
        return len(self._buffer) - self._at >= count

    def peek(self) -> Generator[None, None, str]:
        """The next character, not consumed; empty at the end."""
        if self._at == len(self._buffer):
            yield from self.fill(1)
        return self._buffer[self._at : self._at + 1]

    def take(self) -> str:
        """Consume the character that `peek` gave."""
        self._at += 1
        return self._buffer[self._at - 1]

    def space(self) -> Generator[None, None, str]:
        """Consume blanks."""
        found = ""
        while (char := (yield from self.peek())) and char in SPACE:
            found += self.take()
        return found

    def at(self, *words: str) -> Generator[None, None, str | None]:
        """The longest of `words` that comes next, not consumed; waits no longer than needed to tell."""
        left = sorted(words, key=len, reverse=True)
        for word in left:
            size = 0
            while size < len(word):
                size += 1
                if not (yield from self.fill(size)) or not word.startswith(self._buffer[self._at : self._at + size]):
                    break
            else:
                return word
        return None

    def skip(self, *words: str) -> Generator[None, None, str | None]:
        """Consume one of `words` if it comes next."""
        found = yield from self.at(*words)
        if found is not None:
            self._at += len(found)
        return found

    def expect(self, *words: str) -> Wait:
        """Consume one of `words`. Raises MalformedError."""
        if (yield from self.skip(*words)) is None:
            raise MalformedError(f"expected {' or '.join(words)}")

    def until(self, *words: str, limit: int = 1 << 20, keep: bool = False) -> Generator[None, None, str]:
        """Consume text up to one of `words`, and the word unless `keep`; the text. Raises MalformedError at the end of
        the text, or after `limit` characters."""
        text = ""
        while True:
            if not (yield from self.peek()):
                raise MalformedError(f"{words[0]} is missing")
            if self._may_start(words) and (yield from (self.at if keep else self.skip)(*words)) is not None:
                return text
            text += self.take()
            if len(text) > limit:
                raise MalformedError(f"no {words[0]} within {limit} characters")

    # Finding

    def content_until(
        self, *words: str, kind: type[Content] | type[Reasoning] = Content, trim: bool = True
    ) -> Generator[None, None, str | None]:
        """Emit text up to one of `words` and consume the word; None at the end of the text. With `trim`, blanks before
        the word are not emitted, and blanks and word are marked, so that `give_back` makes them content again."""
        plain = re.compile(f"[^{SPACE}{''.join(re.escape(word[0]) for word in words)}]+")
        held = ""
        while (char := (yield from self.peek())) != "":
            if self._may_start(words):
                self.mark()
                if (word := (yield from self.skip(*words))) is not None:
                    if not trim:
                        self.forget()
                        self.emit(kind, held)
                    return word
            if char in SPACE:
                self.mark()
                held += self.take()
                continue
            self.forget()
            run = plain.match(self._buffer, self._at)
            text = run.group() if run else char
            self._at += len(text)
            self.emit(kind, held + text)
            held = ""
        self.forget()
        self.emit(kind, held)
        return None

    def emit(self, kind: Kind, text: str) -> None:
        """Text of a kind; what follows of the same kind joins it in one piece."""
        if not text:
            return
        if kind != self._kind:
            self._flush()
            self._kind = kind
        self._parts.append(text)
        self._has_arguments = self._has_arguments or isinstance(kind, int)

    def end_call(self) -> None:
        """The call is over; without arguments it has an empty object of them."""
        if not self._has_arguments:
            self.emit(self.num_calls - 1, "{}")

    def pieces(self) -> list[Piece]:
        """What was found since the last call."""
        self._flush()
        found, self._out = self._out, []
        return found

    def _flush(self) -> None:
        if self._parts:
            assert self._kind is not None, "text of no kind"
            text = "".join(self._parts)
            self._out.append(CallArguments(self._kind, text) if isinstance(self._kind, int) else self._kind(text))
            self._parts.clear()

    # Going back

    def mark(self) -> None:
        """Remember this place until `forget` or `give_back`; an older mark stays."""
        if self._mark is None:
            self._mark = self._at

    def forget(self) -> None:
        """The text since the mark has become pieces."""
        self._mark = None

    def give_back(self) -> None:
        """What was read since the mark is content after all."""
        assert self._mark is not None, "nothing is marked"
        text = self._buffer[self._mark : self._at]
        self._mark = None
        self.emit(Content, text)

    def open_call(self, name: str, call_id: str | None = None) -> int:
        """A call begins; its index."""
        index = self.num_calls
        self.num_calls += 1
        self._flush()
        self._out.append(CallStart(index, name, call_id))
        self._has_arguments = False
        self.forget()
        return index

    def _may_start(self, words: tuple[str, ...]) -> bool:
        char = self._buffer[self._at]
        return any(word[0] == char for word in words)
