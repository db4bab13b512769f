"""YAML text to plain values, with the place of every key and value.

The YAML is 1.2's core schema, which is what editors check against: `no` is text, `010` is ten, and there are no dates.
Anchors and aliases are refused (a few lines of them can mean gigabytes), as are tags, duplicate keys and keys that are
not text; `<<` is a key like any other. Knows nothing of policies.

Read next: `policies/convert.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from policies.fault import Fault, Path

MAX_DEPTH = 32
MAX_NUMBER_CHARS = 64
# Plain scalars that are not text: YAML 1.2.2, section 10.3.2.
NULL = re.compile(r"~|null|Null|NULL|")
BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
INTS = ((re.compile(r"[-+]?[0-9]+"), 10), (re.compile(r"0o[0-7]+"), 8), (re.compile(r"0x[0-9a-fA-F]+"), 16))
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
UNBOUNDED = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class Place(NamedTuple):
    """From 1; columns in characters."""

    line: int
    column: int


class DocumentError(Exception):
    """The text cannot be read as one YAML document; `place` says where that shows."""

    def __init__(self, message: str, place: Place) -> None:
        super().__init__(message)
        self.place = place


class Document:
    """The root value and where everything stands. `faults` are those that did not keep the rest from being read."""

    def __init__(self, text: str) -> None:
        """Raises DocumentError."""
        self.keys: dict[Path, Place] = {}
        self.values: dict[Path, Place] = {}
        self.faults: list[Fault] = []
        try:
            self.value = self._read(yaml.parse(text, Loader=yaml.BaseLoader))
        except yaml.reader.ReaderError as error:
            before = text[: error.position]
            place = Place(before.count("\n") + 1, error.position - before.rfind("\n"))
            raise DocumentError(f"the character U+{error.character:04X} is not allowed in YAML", place) from error
        except yaml.MarkedYAMLError as error:
            place = place_of(error.problem_mark) if error.problem_mark is not None else Place(1, 1)
            raise DocumentError(": ".join(filter(None, (error.context, error.problem))), place) from error

    def place_of(self, fault: Fault) -> Place:
        """Of the key or the value; where there is none, of what is around it."""
        path = fault.path
        place = self.keys.get(path) if fault.at_key else self.values.get(path)
        while place is None and path:
            path = path[:-1]
            place = self.keys.get(path) or self.values.get(path)
        return place or Place(1, 1)

    def _read(self, events: Iterator[yaml.Event]) -> Any:
        """Stream start, one document, stream end."""
        next(events)
        event = next(events)
        if isinstance(event, yaml.StreamEndEvent):
            return None
        value = self._node(next(events), events, ())
        next(events)
        more = next(events)
        if not isinstance(more, yaml.StreamEndEvent):
            raise DocumentError("a second document begins here; a policy is one", place_of(more.start_mark))
        return value

    def _node(self, event: yaml.Event, events: Iterator[yaml.Event], path: Path) -> Any:
        place = self.values[path] = place_of(event.start_mark)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise DocumentError("anchors (&name) and aliases (*name) are not allowed; write the value out", place)
        if getattr(event, "tag", None) is not None:
            raise DocumentError("tags (!name) are not allowed", place)
        if len(path) > MAX_DEPTH:
            raise DocumentError(f"nested deeper than {MAX_DEPTH} levels", place)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(events, path)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(events, path)
        assert isinstance(event, yaml.ScalarEvent), f"an event in the wrong place: {event}"
        return scalar(event)

    def _mapping(self, events: Iterator[yaml.Event], path: Path) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key = self._node(event, events, (*path, "?"))
            place = self.values.pop((*path, "?"))
            if not isinstance(key, str):
                raise DocumentError("a key must be text; write it in quotes", place)
            here = (*path, key)
            if key in mapping:
                raise DocumentError(f"`{key}` stands here a second time; first in line {self.keys[here].line}", place)
            self.keys[here] = place
            mapping[key] = self._node(next(events), events, here)
        return mapping

    def _sequence(self, events: Iterator[yaml.Event], path: Path) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(self._node(event, events, (*path, len(items))))
        return items


def scalar(event: yaml.ScalarEvent) -> Any:
    """Text if it is quoted or a block; else what the core schema says."""
    text: str = event.value
    if event.style is not None:
        return text
    if NULL.fullmatch(text):
        return None
    if text in BOOLS:
        return BOOLS[text]
    if len(text) <= MAX_NUMBER_CHARS:
        for form, base in INTS:
            if form.fullmatch(text):
                return int(text, base)
        if FLOAT.fullmatch(text):
            return float(text)
        if UNBOUNDED.fullmatch(text):
            return float(text.replace(".", ""))
    return text


def place_of(mark: Any) -> Place:
    """PyYAML counts from 0."""
    return Place(mark.line + 1, mark.column + 1)
