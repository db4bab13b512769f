"""Tiny models follow from their seed, and their tokenizers know every id."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engines.models.tiny import BYTE_VOCAB_SIZE, write_tiny_bert, write_tiny_llama


@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_bert])
def test_a_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path, write) -> None:
    first, again, other = (write(tmp_path / name, seed=seed) for name, seed in (("a", 5), ("b", 5), ("c", 6)))
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert Path("model.safetensors") in files
    for name in files:
        assert (first / name).read_bytes() == (again / name).read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_the_byte_tokenizer_keeps_any_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_tiny_llama(tmp_path) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == BYTE_VOCAB_SIZE == 272
    text = "Grüße, 世界!\n\t🙂"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<|im_end|>").ids == [2]


def test_the_wordpiece_tokenizer_frames_an_input(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_tiny_bert(tmp_path) / "tokenizer.json"))
    assert tokenizer.encode("Ab 1").tokens == ["[CLS]", "a", "##b", "1", "[SEP]"]
