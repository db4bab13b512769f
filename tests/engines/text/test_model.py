"""The text facade, against `transformers` on the same files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.text.errors import TextError, TokenizerError
from engines.text.model import TextModel, load_text

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What's 17 × 4?\n\nShow  your work."},
    {"role": "assistant", "content": "68"},
    {"role": "user", "content": "Sure? 日本"},
]


@pytest.fixture(scope="module")
def tiny(tiny_llama_path: Path) -> TextModel:
    return load_text(tiny_llama_path)


def test_chat_ids_equal_transformers(tiny: TextModel, tiny_llama_path: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tiny_llama_path)
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=True)[
        "input_ids"
    ]
    assert tiny.encode_chat(CHAT) == list(expected)


@pytest.mark.model
def test_demo_model_chat(demo_model_path: Path) -> None:
    text = load_text(demo_model_path)
    assert text.eos_token_ids == (2, 0)
    assert text.vocab_size == 49152
    ids = text.encode_chat([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    shown = text.detokenizer(skip_special_tokens=False)
    expected = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert shown.feed(ids) + shown.flush() == expected


@pytest.mark.model
def test_embedding_frame(embed_model_path: Path) -> None:
    """[CLS] text [SEP]; the words [SEP] in a text are no frame."""
    text = load_text(embed_model_path)
    assert text.encode_for_embedding("hello world") == [101, 7592, 2088, 102]
    ids = text.encode_for_embedding("hello [SEP] world")
    assert ids.count(102) == 1
    assert len(text.encode_for_embedding("word " * 400)) == 402


def test_end_of_turn_markers_count_only_if_the_vocabulary_has_them(tiny: TextModel) -> None:
    names = {tiny.tokenizer.token_bytes(token_id).decode() for token_id in tiny.eos_token_ids}
    assert names == {"<|im_end|>", "<|endoftext|>"}


def test_an_id_without_a_token_has_no_bytes(tiny: TextModel) -> None:
    assert tiny.token_bytes(10**6) == b""


def test_a_missing_path_and_a_broken_file_are_named(tmp_path: Path, tiny_llama_path: Path) -> None:
    with pytest.raises(TokenizerError, match="does not exist"):
        load_text(tmp_path / "nothing")
    (tmp_path / "tokenizer.json").write_bytes((tiny_llama_path / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(TextError, match=r"config.json is not valid JSON"):
        load_text(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(TextError, match=r"config.json does not hold a JSON object"):
        load_text(tmp_path)
