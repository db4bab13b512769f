"""A policy file to a `Policy`: parse, type, check; every error with its place and a hint.

YAML is read by PyYAML's safe constructor without anchors or aliases (an alias bomb is a few lines) and with duplicate
keys refused. Knows nothing of requests. Read next: `policies/check.py`.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import msgspec
import yaml

from policies.check import check_policy
from policies.schema import Policy

MAX_POLICY_BYTES = 1 << 20
Place = tuple[int, int]
PATH_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]|\[\.\.\.\]")


class PolicyError(Exception):
    """The file cannot be used; `problems` are complete sentences with file, line and column."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class PlacedLoader(yaml.SafeLoader):
    """Safe YAML without aliases, remembering where each value stands."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.places: dict[str, Place] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse aliases before they multiply."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(None, None, "aliases (*name) are not allowed", self.get_mark())
        return super().compose_node(parent, index)

    def remember(self, node: yaml.Node, path: str) -> None:
        """Record the place of `node` and everything below it; refuse duplicate keys."""
        self.places.setdefault(path, place(node.start_mark))
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
                seen.add(key.value)
                self.places[f"{path}.{key.value}"] = place(key.start_mark)
                self.remember(value, f"{path}.{key.value}")
        elif isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                self.remember(item, f"{path}[{number}]")


def place(mark: Any) -> Place:
    """Line and column, from 1."""
    return (mark.line + 1, mark.column + 1)


def load_policy(path: Path) -> Policy:
    """Read, parse, type and check. Raises PolicyError."""
    try:
        size = path.stat().st_size
        if size > MAX_POLICY_BYTES:
            raise PolicyError([f"{path}: {size} bytes; a policy has at most {MAX_POLICY_BYTES}"])
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError([f"{path}: cannot be read: {error}"]) from error
    return parse_policy(text, str(path))


def parse_policy(text: str, name: str = "<policy>") -> Policy:
    """As `load_policy`, from a string; `name` stands for the file in messages."""
    document, places = parse_yaml(text, name)
    try:
        policy = msgspec.convert(document, Policy, strict=True)
    except msgspec.ValidationError as error:
        raise PolicyError([explain(str(error), document, places, name)]) from error
    problems = [located(f"{message} - at `{path}`", path, places, name) for path, message in check_policy(policy)]
    if problems:
        raise PolicyError(problems)
    return policy


def parse_yaml(text: str, name: str) -> tuple[Any, dict[str, Place]]:
    """The document and the place of every value, by path (`$.models.small`)."""
    loader = PlacedLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise PolicyError([f"{name}:1:1: the file is empty; start with `version: facet/v1`"])
        loader.remember(node, "$")
        return loader.construct_document(node), loader.places
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise PolicyError([f"{where}: {error.problem}"]) from error
    except RecursionError as error:
        raise PolicyError([f"{name}: nested too deeply"]) from error
    finally:
        loader.dispose()


def explain(message: str, document: Any, places: dict[str, Place], name: str) -> str:
    """A msgspec message, placed in the file, with a suggestion for a name that is nearly right."""
    found = re.search(r" - at `(.*)`$", message)
    written = found.group(1) if found else "$"
    path = resolve_path(written, document, message)
    message = message.replace(f"`{written}`", f"`{path}`")
    unknown = re.search(r"unknown field `([^`]+)`", message)
    if unknown:
        hint = closest(unknown.group(1), fields_at(path))
        return located(message + hint, f"{path}.{unknown.group(1)}", places, name)
    return located(message, path, places, name)


def resolve_path(path: str, document: Any, message: str) -> str:
    """msgspec writes `[...]` for any key of a mapping; find the entry that has the fault by converting each alone."""
    if "[...]" not in path:
        return path
    head, _, tail = path.partition("[...]")
    section = value_at(document, head)
    if not isinstance(section, dict):
        return head
    for key, value in section.items():
        trial = {**document, head.removeprefix("$."): {key: value}}
        try:
            msgspec.convert(trial, Policy, strict=True)
        except msgspec.ValidationError as error:
            if str(error) == message:
                return f"{head}.{key}{tail}"
    return head


def value_at(document: Any, path: str) -> Any:
    """The value at `$.a.b[0]`, or None."""
    for key, number in re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", path):
        try:
            document = document[key] if key else document[int(number)]
        except (KeyError, IndexError, TypeError):
            return None
    return document


def fields_at(path: str) -> list[str]:
    """Field names that are allowed at a path, for suggestions."""
    kind: Any = msgspec.inspect.type_info(Policy)
    for key, number in re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", path):
        kind = inner_type(kind, key, bool(number))
        if kind is None:
            return []
    return [field.encode_name for field in kind.fields] if isinstance(kind, msgspec.inspect.StructType) else []


def inner_type(kind: Any, key: str, is_index: bool) -> Any:
    """The type one step below."""
    inspect = msgspec.inspect
    if isinstance(kind, inspect.UnionType):
        kind = next((t for t in kind.types if not isinstance(t, inspect.NoneType)), None)
    if isinstance(kind, inspect.StructType):
        return next((field.type for field in kind.fields if field.encode_name == key), None)
    if isinstance(kind, inspect.DictType):
        return kind.value_type
    if is_index and isinstance(kind, inspect.VarTupleType | inspect.ListType):
        return kind.item_type
    return None


def closest(word: str, known: list[str]) -> str:
    """` (did you mean ...?)`, or the list of what is allowed, or nothing."""
    near = difflib.get_close_matches(word, known, n=1)
    if near:
        return f" (did you mean `{near[0]}`?)"
    return f" (allowed: {', '.join(sorted(known))})" if known else ""


def located(message: str, path: str, places: dict[str, Place], name: str) -> str:
    """Prefix file, line and column of the nearest place known."""
    while path not in places and path != "$":
        path = re.sub(r"(\.[^.\[\]]+|\[\d+\])$", "", path) or "$"
    line, column = places.get(path, (1, 1))
    return f"{name}:{line}:{column}: {message}"
