"""Detokenizing in pieces equals detokenizing the whole, and no piece holds half a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.text.detokenize import Detokenizer
from engines.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_path: Path) -> Tokenizer:
    return load_tokenizer(tiny_llama_path)


@given(text=st.text(max_size=30), size=st.integers(1, 5))
def test_pieces_join_to_the_text(tokenizer: Tokenizer, text: str, size: int) -> None:
    ids = tokenizer.encode(text, specials=False)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.feed(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join(pieces) + detokenizer.flush() == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(data=st.binary(max_size=20), size=st.integers(1, 4))
def test_bytes_that_are_no_text_are_replaced_as_in_the_whole(tokenizer: Tokenizer, data: bytes, size: int) -> None:
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    ids = [by_byte[bytes([byte])] for byte in data]
    detokenizer = Detokenizer(tokenizer)
    shown = "".join(detokenizer.feed(ids[at : at + size]) for at in range(0, len(ids), size)) + detokenizer.flush()
    assert shown == data.decode("utf-8", errors="replace")


def test_a_character_waits_for_its_last_byte(tokenizer: Tokenizer) -> None:
    first, second, third = tokenizer.encode("日", specials=False)
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.feed([token]) for token in (first, second, third)] == ["", "", "日"]


def test_special_tokens_are_skipped_unless_asked_for(tokenizer: Tokenizer) -> None:
    end = tokenizer.special_tokens["<|im_end|>"]
    assert Detokenizer(tokenizer).feed([end]) == ""
    assert Detokenizer(tokenizer, skip_special_tokens=False).feed([end]) == "<|im_end|>"
