"""Plain values against the policy's types: every fault of a document at once, each with its exact path.

msgspec stops at the first fault and names the keys of mappings `[...]`; walking the types ourselves gives all of them.
What a value must be, msgspec alone decides. Knows nothing of YAML.

Read next: `policies/schema.py`, `policies/check.py`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from policies.fault import Fault, Path, closest, hint
from policies.schema import Section

WORDS = {
    "`object`": "a mapping",
    "`array`": "a list",
    "`str`": "text",
    "`int`": "a whole number",
    "`float`": "a number",
    "`bool`": "true or false",
    "`null`": "nothing",
}


def type_faults(value: Any, kind: Any, path: Path = (), *, at_key: bool = False) -> Iterator[Fault]:
    """What keeps `value` from being a `kind`, innermost faults alone."""
    kind = kind if value is None else required(kind)
    below = list(inner_faults(value, bare(kind), path))
    yield from below
    if not below:
        try:
            msgspec.convert(value, kind, strict=True)
        except msgspec.ValidationError as error:
            yield Fault(path=path, message=reword(str(error), value, kind) + purpose(kind), at_key=at_key)


def inner_faults(value: Any, kind: Any, path: Path) -> Iterator[Fault]:
    """Of the fields, entries or items alone."""
    if isinstance(kind, type) and issubclass(kind, Section):
        if isinstance(value, dict):
            yield from section_faults(value, kind, path)
    elif get_origin(kind) is dict:
        if isinstance(value, dict):
            of_key, of_item = get_args(kind)
            for key, item in value.items():
                yield from type_faults(key, of_key, (*path, key), at_key=True)
                yield from type_faults(item, of_item, (*path, key))
    elif get_origin(kind) is tuple and isinstance(value, list):
        for number, item in enumerate(value):
            yield from type_faults(item, get_args(kind)[0], (*path, number))


def section_faults(value: dict[str, Any], kind: type[Section], path: Path) -> Iterator[Fault]:
    """Names that are not fields, fields that are missing, fields that are wrong. A misspelt field is one fault."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    misspelt: set[str | None] = set()
    for key in value:
        if key in kind.not_served:
            yield Fault(path=(*path, key), message="is not served by this version of Facet", at_key=True)
        elif key not in fields:
            misspelt.add(closest(key, fields))
            yield Fault(path=(*path, key), message=f"unknown field{hint(key, fields)}", at_key=True)
    for name, field in fields.items():
        if name in value:
            yield from type_faults(value[name], field.type, (*path, name))
        elif field.required and name not in misspelt:
            yield Fault(path=path, message=f"`{name}` is missing{purpose(field.type)}", at_key=True)


def purpose(kind: Any) -> str:
    """`; what the field is for`, as the schema says it, or nothing."""
    metas = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    said = [meta.description for meta in metas if isinstance(meta, msgspec.Meta) and meta.description]
    return f"; {said[0]}" if said else ""


def required(kind: Any) -> Any:
    """Without `| None`."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (arm for arm in get_args(kind) if arm is not types.NoneType)
    return kind


def bare(kind: Any) -> Any:
    """Without `| None` and annotations."""
    kind = required(kind)
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def reword(message: str, value: Any, kind: Any) -> str:
    """msgspec's sentence in the words of the file, with what was found."""
    if get_origin(bare(kind)) is Literal:
        return f"`{value}` is not allowed{hint(str(value), map(str, get_args(bare(kind))))}"
    if "matching regex" in message:
        return f"`{value}` is not allowed"
    message = message.partition(" - at `")[0]
    for word, ours in WORDS.items():
        message = message.replace(word, ours)
    if ", got " not in message:
        message += f", got {len(value)}" if isinstance(value, list | dict) else f", got {value!r}"
    return message[0].lower() + message[1:]
