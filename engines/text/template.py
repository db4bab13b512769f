"""Chat messages to prompt text, through the model's own Jinja template in a sandbox.

The result says which characters the template wrote (trusted: its markers are special tokens) and which a message
brought (untrusted: a user who types `<|im_end|>` gets those characters, not a turn's end). To know it after rendering,
special tokens inside contents are swapped for private-use placeholders that occur in no message, and swapped back.

Knows nothing of token ids. Read next: `engines/text/model.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engines.text.errors import TemplateError

MAX_OUTPUT_CHARS = 8 << 20
MAX_TEMPLATE_CHARS = 256 << 10
PRIVATE_USE = range(0xE000, 0xF8FF)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ChatTemplate:
    """A compiled template. `constants` are the names templates expect (bos_token, eos_token, ...)."""

    def __init__(self, source: str, *, constants: Mapping[str, str], special_tokens: Iterable[str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateError(
                f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are read"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error
        self.source = source
        self._constants = dict(constants)
        tokens = sorted((re.escape(token) for token in special_tokens), key=len, reverse=True)
        self._special = re.compile("|".join(tokens)) if tokens else None

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **variables: Any
    ) -> list[tuple[str, bool]]:
        """Parts (text, trusted) whose concatenation is the prompt. Raises TemplateError.

        `variables` reach the template beside `messages`; they cannot replace it or the constants.
        """
        marks = Placeholders(self._special, [*messages, *tools])
        hidden = [marks.hide(message) for message in messages]
        values = {**variables, **self._constants, "messages": hidden}
        if tools:
            values["tools"] = [marks.hide(tool) for tool in tools]
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(values):
                size += len(piece)
                if size > MAX_OUTPUT_CHARS:
                    raise TemplateError(f"the chat template wrote more than {MAX_OUTPUT_CHARS} characters")
                pieces.append(piece)
        except TemplateError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise TemplateError(f"the chat template cannot render these messages: {error}") from error
        return marks.reveal("".join(pieces))


class Placeholders:
    """Swaps special tokens in message strings for characters that no message holds, and back."""

    def __init__(self, special: re.Pattern[str] | None, messages: Sequence[Mapping[str, Any]]) -> None:
        self._special = special
        self._texts: dict[str, str] = {}
        self._spare = spare_characters(messages)
        self._by_text: dict[str, str] = {}

    def hide(self, value: Any) -> Any:
        """A copy of `value` in which no string (key order and types kept) holds a special token."""
        if isinstance(value, str):
            return value if self._special is None else self._special.sub(lambda m: self._mark(m.group()), value)
        if isinstance(value, Mapping):
            return {key: self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def reveal(self, text: str) -> list[tuple[str, bool]]:
        """Cut the rendered text at the placeholders; what they stand for is untrusted."""
        if not self._texts:
            return [(text, True)]
        parts = re.split("([" + "".join(self._texts) + "])", text)
        return [(self._texts[part], False) if part in self._texts else (part, True) for part in parts if part]

    def _mark(self, token: str) -> str:
        if token not in self._by_text:
            mark = next(self._spare)
            self._by_text[token] = mark
            self._texts[mark] = token
        return self._by_text[token]


def spare_characters(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Private-use characters that no message holds. Nothing is looked at before the first is asked for."""
    used = set(json.dumps(messages, ensure_ascii=False, default=str))
    yield from (chr(code) for code in PRIVATE_USE if chr(code) not in used)


def to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """Templates print tools and arguments as plain JSON, not HTML-escaped as Jinja's own filter does."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def refuse(message: str) -> None:
    """`raise_exception(...)` of a template: these messages are not for this model."""
    raise TemplateError(f"the model's chat template refuses these messages: {message}")


def strftime_now(form: str) -> str:
    """Today, as some templates print it into their system prompt."""
    return datetime.now().strftime(form)
