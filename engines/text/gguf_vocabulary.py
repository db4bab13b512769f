"""A tokenizer out of GGUF metadata: vocabulary, merges and pre-tokenizer become the `tokenizers` library's JSON form.

Byte-level BPE ("gpt2" in GGUF's words) is supported, with the pre-tokenizers named below; a SentencePiece vocabulary
("llama") is not, and says so: take the same model with its tokenizer.json. Knows nothing of chat templates.

Read next: `engines/text/tokenizer.py`.
"""

from __future__ import annotations

import json
from typing import Any

from engines.text.errors import TokenizerError

# GGUF token types (llama.cpp): 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.
CONTROL = 3
USER_DEFINED = 4

CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
GPT2_SPLIT = rf"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
MODERN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split_on(pattern: str) -> dict[str, Any]:
    """A pre-tokenizer step that isolates every match of a regular expression."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


DIGITS = {"type": "Digits", "individual_digits": True}

# llama.cpp's name of a pre-tokenizer -> steps before the byte mapping.
PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [split_on(GPT2_SPLIT)],
    "default": [split_on(GPT2_SPLIT)],
    "smollm": [DIGITS, split_on(GPT2_SPLIT)],
    "starcoder": [DIGITS, split_on(GPT2_SPLIT)],
    "llama-bpe": [split_on(MODERN_SPLIT % "1,3")],
    "llama3": [split_on(MODERN_SPLIT % "1,3")],
    "qwen2": [split_on(MODERN_SPLIT % "1")],
}


def tokenizer_json(metadata: dict[str, Any]) -> str:
    """The JSON of a `tokenizers.Tokenizer`. Raises TokenizerError naming the key that is missing or unsupported."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise TokenizerError(
            f"tokenizer.ggml.model is {kind!r}; only byte-level BPE ('gpt2') can be read from GGUF. "
            "Use the model's folder with tokenizer.json instead."
        )
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise TokenizerError(
            f"tokenizer.ggml.pre is {pre!r}; known: {known}. Use a folder with tokenizer.json instead."
        )
    tokens = required(metadata, "tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    merges = [merge.split(" ", 1) for merge in required(metadata, "tokenizer.ggml.merges")]
    added = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*PRE_TOKENIZERS[pre], BYTE_LEVEL]},
            "post_processor": None,
            "decoder": BYTE_LEVEL,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "fuse_unk": False,
                "byte_fallback": False,
                # llama.cpp's reading of these vocabularies: a whole word that is a token needs no merges.
                "ignore_merges": pre in ("llama-bpe", "llama3"),
                "vocab": {token: number for number, token in enumerate(tokens)},
                "merges": merges,
            },
        }
    )


def required(metadata: dict[str, Any], key: str) -> list[Any]:
    """A list that must be there."""
    value = metadata.get(key)
    if not isinstance(value, list) or not value:
        raise TokenizerError(f"{key} is missing from the GGUF metadata")
    return value
