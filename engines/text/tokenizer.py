"""Text to token ids and ids to bytes, for one model.

Special tokens are recognised only where the caller says the text is trusted: in a chat, the template's own markers
are, what a user typed is not (`engines/text/template.py` marks which is which). Knows nothing of chats or streams.

Read next: `engines/text/gguf_vocabulary.py`, `engines/text/detokenize.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from engines.gguf_header import is_gguf, read_gguf_header
from engines.text.errors import TokenizerError
from engines.text.gguf_vocabulary import tokenizer_json

SENTENCEPIECE_SPACE = "▁"


class Tokenizer:
    """Thread-safe; immutable after it is made."""

    def __init__(self, definition: str, *, bos_token_id: int | None = None) -> None:
        document = json.loads(definition)
        self._backend = made(definition)
        self._plain = made(json.dumps({**document, "added_tokens": plain_added(document), "post_processor": None}))
        self._bos_token_id = bos_token_id
        added = document.get("added_tokens") or []
        self.special_tokens: dict[str, int] = {t["content"]: t["id"] for t in added if t.get("special")}
        self._added_texts: dict[int, str] = {t["id"]: t["content"] for t in added}
        self._splitter = splitter(added)
        self._byte_level = "ByteLevel" in json.dumps([document.get("decoder"), document.get("pre_tokenizer")])
        # A table for each set of marks that a reader keeps: one or two a model.
        self._shown: dict[frozenset[int], dict[int, bytes]] = {}
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, specials: bool = True) -> list[int]:
        """Ids of `text`. With `specials`, markers in it become special tokens and BOS is added if the model wants it;
        without, every character is plain text."""
        if not specials:
            ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
            return ids
        ids = self._backend.encode(text, add_special_tokens=True).ids
        if self._bos_token_id is not None and ids[:1] != [self._bos_token_id]:
            return [self._bos_token_id, *ids]
        return ids

    def encode_parts(self, parts: Sequence[tuple[str, bool]]) -> list[int]:
        """Ids of the concatenation of `parts` (text, trusted). Special tokens in trusted text count as such, in
        untrusted text they are plain characters. For text without any marker in untrusted parts this equals encoding
        the whole string: special tokens cut the text before anything else looks at it."""
        if all(trusted for _, trusted in parts):
            whole: list[int] = self._backend.encode("".join(text for text, _ in parts), add_special_tokens=False).ids
            return whole
        ids: list[int] = []
        pending: list[str] = []
        for text, trusted in parts:
            if not trusted or self._splitter is None:
                pending.append(text)
                continue
            end = 0
            for found in self._splitter.finditer(text):
                pending.append(text[end : found.start()])
                self._flush(pending, ids)
                ids.append(int(str(found.lastgroup)[1:]))
                end = found.end()
            pending.append(text[end:])
        self._flush(pending, ids)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; special tokens are their own text. Unknown ids raise KeyError."""
        return self._token_bytes[token_id]

    def shown_bytes(self, *, skip_special_tokens: bool, keep: frozenset[int] = frozenset()) -> Mapping[int, bytes]:
        """`token_bytes` as a table. With `skip_special_tokens`, those that are not in `keep` have none."""
        if not skip_special_tokens:
            return self._token_bytes
        table = self._shown.get(keep)
        if table is None:
            hidden = self._special_ids - keep
            table = {token_id: b"" if token_id in hidden else data for token_id, data in self._token_bytes.items()}
            self._shown[keep] = table
        return table

    def is_special(self, token_id: int) -> bool:
        """True for a marker that is not part of the text."""
        return token_id in self._special_ids

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.special_tokens.values())

    @cached_property
    def _token_bytes(self) -> dict[int, bytes]:
        to_byte = {char: byte for byte, char in byte_level_alphabet().items()}
        table: dict[int, bytes] = {}
        for token, token_id in self._backend.get_vocab(with_added_tokens=True).items():
            if token_id in self._added_texts:
                table[token_id] = self._added_texts[token_id].encode("utf-8", "surrogateescape")
            elif self._byte_level:
                table[token_id] = bytes(to_byte[char] for char in token if char in to_byte)
            elif re.fullmatch(r"<0x[0-9A-F]{2}>", token):
                table[token_id] = bytes([int(token[3:5], 16)])
            else:
                table[token_id] = token.replace(SENTENCEPIECE_SPACE, " ").encode()
        return table

    def _flush(self, pending: list[str], ids: list[int]) -> None:
        text = "".join(pending)
        pending.clear()
        if text:
            ids += self._plain.encode(text, add_special_tokens=False).ids


def made(definition: str) -> Backend:
    """A backend without padding or truncation: a prompt is never cut silently."""
    try:
        backend = Backend.from_str(definition)
    except Exception as error:
        raise TokenizerError(f"the tokenizer definition cannot be read: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    return backend


def plain_added(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Added tokens that are ordinary text; special ones are left out, so that their text is only text."""
    return [token for token in document.get("added_tokens") or [] if not token.get("special")]


def splitter(added: Sequence[dict[str, Any]]) -> re.Pattern[str] | None:
    """Finds special tokens in trusted text, longest first, each with the blanks it swallows."""
    specials = sorted((t for t in added if t.get("special")), key=lambda t: -len(t["content"]))
    if not specials:
        return None
    branches = (
        blanks(t, "lstrip") + f"(?P<t{t['id']}>{re.escape(t['content'])})" + blanks(t, "rstrip") for t in specials
    )
    return re.compile("|".join(branches))


def blanks(token: dict[str, Any], side: str) -> str:
    """What a token swallows on one side."""
    return r"\s*" if token.get(side) else ""


def byte_level_alphabet() -> dict[int, str]:
    """GPT-2's map of bytes to printable characters: printable Latin-1 stays, the rest moves to U+0100 and on."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {**{b: chr(b) for b in kept}, **{b: chr(0x100 + n) for n, b in enumerate(moved)}}


def load_tokenizer(path: Path) -> Tokenizer:
    """From a GGUF file, or from tokenizer.json in a folder. Raises TokenizerError naming what is missing."""
    if is_gguf(path):
        metadata = read_gguf_header(path).metadata
        bos = metadata.get("tokenizer.ggml.bos_token_id") if metadata.get("tokenizer.ggml.add_bos_token") else None
        return Tokenizer(tokenizer_json(metadata), bos_token_id=bos)
    file = path / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(f"{path} has no tokenizer.json")
    return Tokenizer(file.read_text(encoding="utf-8"))
