"""Pythonic calls (Llama 3.2, Llama 4, Olmo): the whole message is `[f(a=1, b="x"), g()]`.

Values are Python literals and become JSON. Arguments by position get the names that the schema lists. Without a schema
for the name, or when something is no literal, it is content.

Read next: `engines/text/tools/base.py`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Generator
from typing import Any

from engines.text.json_text import MAX_DEPTH
from engines.text.scanner import MalformedError, Scanner, Wait
from engines.text.tools.base import MAX_NAME_CHARS, Offered, attempt, complete_call

TAGS = ("<|python_start|>", "<|python_end|>", "<|python_tag|>")
MAX_CALL_CHARS = 1 << 16


def pythonic(scanner: Scanner, offered: Offered) -> Wait:
    """A message that is one list of calls; a tag before or after it is dropped."""
    scanner.mark()
    yield from scanner.space()
    yield from scanner.skip(*TAGS)
    if (yield from scanner.peek()) == "[":
        yield from attempt(scanner, call_list(scanner, offered))
    else:
        scanner.give_back()


def call_list(scanner: Scanner, offered: Offered) -> Wait:
    """From the bracket."""
    scanner.take()
    calls = [(yield from one_call(scanner, offered))]
    while (yield from scanner.skip(",")) is not None:
        calls.append((yield from one_call(scanner, offered)))
    yield from scanner.expect("]")
    for name, values in calls:
        complete_call(scanner, name, values)
    yield from scanner.space()
    yield from scanner.skip(*TAGS)
    yield from scanner.space()


def one_call(scanner: Scanner, offered: Offered) -> Generator[None, None, tuple[str, dict[str, Any]]]:
    """Name and arguments. The list is emitted only when all of it has been understood: a list of code is an answer."""
    yield from scanner.space()
    name = yield from scanner.until("(", limit=MAX_NAME_CHARS)
    if not all(part.isidentifier() for part in name.split(".")) or not offered.has(name):
        raise MalformedError(f"{name[:20]!r} is no tool")
    text = yield from balanced(scanner)
    yield from scanner.space()
    return name, literal_arguments(name, text, offered)


def balanced(scanner: Scanner) -> Generator[None, None, str]:
    """Text up to the bracket that closes the call."""
    text, quote, depth = "", "", 0
    while (char := (yield from scanner.peek())) != "":
        scanner.take()
        if quote:
            if char == "\\" and (yield from scanner.peek()):
                char += scanner.take()
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char == ")" and depth == 0:
            return text
        elif char in ")]}":
            depth -= 1
        text += char
        if depth > MAX_DEPTH or depth < 0 or len(text) > MAX_CALL_CHARS:
            break
    raise MalformedError("a call does not end")


def literal_arguments(name: str, text: str, offered: Offered) -> dict[str, Any]:
    """`a=1, b="x"` as a mapping of JSON values."""
    try:
        tree = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(tree, ast.Call) or any(keyword.arg is None for keyword in tree.keywords):
            raise MalformedError("no call")
        names = list(offered.schemas.get(name, {}).get("properties", {}))
        if len(tree.args) > len(names):
            raise MalformedError("arguments without names")
        values = {key: ast.literal_eval(node) for key, node in zip(names, tree.args, strict=False)}
        values |= {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in tree.keywords}
        json.dumps(values, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise MalformedError("arguments are no literals") from error
    return values
