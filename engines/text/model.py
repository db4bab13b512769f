"""All the text knowledge of one model behind one object: encode, chat template, detokenize, end-of-sequence ids.

Made from the same path as the weights, without reading them; loads in tens of milliseconds and imports no torch.
Knows nothing of engines, requests or policies.

Read next: `engines/text/tokenizer.py`, `engines/text/template.py`, `engines/text/detokenize.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.gguf_header import is_gguf, read_gguf_header
from engines.text.detokenize import Detokenizer
from engines.text.errors import TextError, TokenizerError
from engines.text.output import OutputForm, OutputReader
from engines.text.template import CHATML, ChatTemplate
from engines.text.tokenizer import Tokenizer, load_tokenizer
from engines.text.tools.base import Offered
from engines.text.tools.prompt import in_words

# Enough to hold a mark that opens the model's thoughts.
PROMPT_END_TOKENS = 16

# Markers that end a turn in the common families; each counts only if the vocabulary has it as a special token.
TURN_ENDS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
    "<|eom_id|>",
)


class TextModel:
    """Immutable and thread-safe."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, *, eos_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.form = OutputForm(template.source)
        self._template = template
        self._takes_tools = "tools" in template.source
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = tokenizer.vocab_size

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt; special tokens written out in it count as such, as completion clients expect."""
        return self.tokenizer.encode(text)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Ids of a rendered chat. A template that knows no tools gets them in words. Raises TemplateError when it
        refuses the messages."""
        if not self._takes_tools:
            messages, tools = in_words(messages, tools), ()
        parts = self._template.render(messages, tools, add_generation_prompt=add_generation_prompt, **variables)
        return self.tokenizer.encode_parts(parts)

    def output_reader(self, offered: Offered | None, prompt_ids: Sequence[int]) -> OutputReader | None:
        """For one choice of a chat: tells thoughts and calls from the answer; None if this model has neither.
        `offered` None: the request has no tools."""
        if self.form.is_plain(with_tools=offered is not None):
            return None
        end = b"".join(self.token_bytes(token_id) for token_id in prompt_ids[-PROMPT_END_TOKENS:])
        return self.form.reader(offered, end.decode("utf-8", "replace"))

    def output_marks(self, *, with_tools: bool) -> frozenset[int]:
        """Special tokens that `output_reader` looks for; the detokenizer must keep them."""
        known = self.tokenizer.special_tokens
        return frozenset(known[mark] for mark in self.form.marks(with_tools=with_tools) if mark in known)

    def encode_for_embedding(self, text: str) -> list[int]:
        """Ids with the model's own frame ([CLS] ... [SEP]); the text itself holds no special tokens."""
        frame = self.tokenizer.encode("")
        if not frame:
            return self.tokenizer.encode(text, specials=False)
        return [*frame[:1], *self.tokenizer.encode(text, specials=False), *frame[1:]]

    def detokenizer(self, *, skip_special_tokens: bool = True, keep: frozenset[int] = frozenset()) -> Detokenizer:
        """A fresh stream; special tokens in `keep` are text."""
        return Detokenizer(self.tokenizer, skip_special_tokens=skip_special_tokens, keep=keep)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; an id without a token (padding of the vocabulary) has none."""
        try:
            return self.tokenizer.token_bytes(token_id)
        except KeyError:
            return b""


def load_text(path: Path) -> TextModel:
    """From a GGUF file or a folder with tokenizer.json. Raises TextError naming the file and what is wrong with it."""
    if not path.exists():
        raise TokenizerError(f"{path} does not exist")
    tokenizer = load_tokenizer(path)
    described = gguf_description(path, tokenizer) if is_gguf(path) else folder_description(path)
    known = tokenizer.special_tokens
    eos = list(dict.fromkeys([*described.eos_token_ids, *(known[mark] for mark in TURN_ENDS if mark in known)]))
    template = ChatTemplate(described.template or CHATML, constants=described.constants, special_tokens=known)
    return TextModel(tokenizer, template, eos_token_ids=eos)


class Description:
    """What the model's metadata says about its text."""

    def __init__(self, template: str, eos_token_ids: Sequence[int], constants: Mapping[str, str]) -> None:
        self.template = template
        self.eos_token_ids = [token_id for token_id in eos_token_ids if token_id >= 0]
        self.constants = dict(constants)


def gguf_description(path: Path, tokenizer: Tokenizer) -> Description:
    """From GGUF metadata."""
    metadata = read_gguf_header(path).metadata
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    constants = {
        f"{name}_token": tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        for name, token_id in ids.items()
        if isinstance(token_id, int) and name in ("bos", "eos")
    }
    ends = [ids[name] for name in ("eos", "eot", "eom")]
    template = metadata.get("tokenizer.chat_template", "")
    return Description(template, [token_id for token_id in ends if isinstance(token_id, int)], constants)


def folder_description(path: Path) -> Description:
    """From tokenizer_config.json, chat_template.jinja, generation_config.json and config.json, where they exist."""
    tokenizer_config, generation, config = (
        read_json(path / name) for name in ("tokenizer_config.json", "generation_config.json", "config.json")
    )
    template_file = path / "chat_template.jinja"
    template = (
        template_file.read_text(encoding="utf-8") if template_file.is_file() else default_template(tokenizer_config)
    )
    ends: list[int] = []
    for document in (generation, config):
        value = document.get("eos_token_id")
        ends += [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]
    constants = {
        name: token_text(tokenizer_config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
    }
    return Description(template, ends, {name: text for name, text in constants.items() if text is not None})


def default_template(tokenizer_config: Mapping[str, Any]) -> str:
    """`chat_template` is a string, or a list of named ones of which "default" is meant."""
    template = tokenizer_config.get("chat_template") or ""
    if isinstance(template, list):
        named = {item.get("name"): item.get("template", "") for item in template}
        template = named.get("default", "")
    return str(template)


def token_text(value: Any) -> str | None:
    """A token is written as a string or as an object with its content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """An object, or an empty one if there is no such file. Raises TextError naming the file when it is broken."""
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TextError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise TextError(f"{path} does not hold a JSON object")
    return document
