"""Write tiny random models in Hugging Face's layout: for tests and smoke runs without a download.

Real files of a real architecture with random weights: every byte follows from the seed. The decoder's tokenizer is
bytes plus 16 special tokens (every id has a text); the encoder's is WordPiece over ASCII characters. Knows nothing of
engines; what it writes is read back by `engines/models/loader.py` and `engines/text`.

Read next: `engines/models/loader.py`.
"""

from __future__ import annotations

import math
import string
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END, *(f"<|reserved_{i}|>" for i in range(13)))
BYTE_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BERT_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class TinyLlama(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a tiny decoder. `biases` adds them to the query, key and value projections (Qwen2's shape).

    `config`: further fields of config.json, `rope_scaling` or `sliding_window` say.
    """

    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    hidden_size: int = 64
    intermediate_size: int = 128
    max_model_len: int = 512
    rope_theta: float = 10000.0
    tie_embeddings: bool = True
    biases: bool = False
    config: dict[str, Any] = {}


class TinyBert(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a tiny encoder."""

    num_layers: int = 2
    num_heads: int = 4
    hidden_size: int = 64
    intermediate_size: int = 128
    max_model_len: int = 128


def write_tiny_llama(folder: Path, *, seed: int = 0, sizes: TinyLlama | None = None) -> Path:
    """Write config.json, model.safetensors, tokenizer.json and tokenizer_config.json; return the folder."""
    sizes = sizes or TinyLlama()
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _llama_config(sizes))
    _write_json(
        folder / "tokenizer_config.json",
        {"bos_token": IM_START, "eos_token": IM_END, "unk_token": END_OF_TEXT, "chat_template": CHAT_TEMPLATE},
    )
    _byte_tokenizer().save(str(folder / "tokenizer.json"))
    save_file(_llama_weights(sizes, _Random(seed)), str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def write_tiny_bert(folder: Path, *, seed: int = 0, sizes: TinyBert | None = None) -> Path:
    """Write a sentence encoder (mean pooling, normalised) with its tokenizer; return the folder."""
    sizes = sizes or TinyBert()
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    tokenizer = _wordpiece_tokenizer()
    vocab_size = tokenizer.get_vocab_size()
    _write_json(folder / "config.json", _bert_config(sizes, vocab_size))
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": sizes.max_model_len, "do_lower_case": False})
    _write_json(
        folder / "modules.json",
        [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
        ],
    )
    _write_json(
        folder / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": sizes.hidden_size,
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": True,
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = _bert_weights(sizes, vocab_size, _Random(seed))
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


class _Random:
    """Random tensors from one seed, in order of the calls."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        """Rows of about unit length, so that activations keep their size through the layers."""
        return torch.randn(rows, columns, generator=self._generator) / math.sqrt(columns)

    def vector(self, size: int, around: float) -> torch.Tensor:
        return around + 0.1 * torch.randn(size, generator=self._generator)


def _llama_config(sizes: TinyLlama) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM" if sizes.biases else "LlamaForCausalLM"],
        "model_type": "qwen2" if sizes.biases else "llama",
        "vocab_size": BYTE_VOCAB_SIZE,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": sizes.rope_theta,
        "hidden_act": "silu",
        "attention_bias": sizes.biases,
        "mlp_bias": False,
        "tie_word_embeddings": sizes.tie_embeddings,
        "bos_token_id": SPECIAL_TOKENS.index(IM_START),
        "eos_token_id": SPECIAL_TOKENS.index(IM_END),
        "torch_dtype": "float32",
        **sizes.config,
    }


def _llama_weights(sizes: TinyLlama, random: _Random) -> dict[str, torch.Tensor]:
    query, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    # Embedding rows of unit length: with tied weights the logits then spread enough for greedy choices to be clear.
    weights = {"model.embed_tokens.weight": random.matrix(BYTE_VOCAB_SIZE, hidden)}
    for layer in range(sizes.num_layers):
        at = f"model.layers.{layer}"
        projections = {"q_proj": query, "k_proj": kv, "v_proj": kv}
        weights[f"{at}.input_layernorm.weight"] = random.vector(hidden, 1.0)
        for name, rows in projections.items():
            weights[f"{at}.self_attn.{name}.weight"] = random.matrix(rows, hidden)
            if sizes.biases:
                weights[f"{at}.self_attn.{name}.bias"] = random.vector(rows, 0.0)
        weights[f"{at}.self_attn.o_proj.weight"] = random.matrix(hidden, query)
        weights[f"{at}.post_attention_layernorm.weight"] = random.vector(hidden, 1.0)
        weights[f"{at}.mlp.gate_proj.weight"] = random.matrix(inner, hidden)
        weights[f"{at}.mlp.up_proj.weight"] = random.matrix(inner, hidden)
        weights[f"{at}.mlp.down_proj.weight"] = random.matrix(hidden, inner)
    weights["model.norm.weight"] = random.vector(hidden, 1.0)
    if not sizes.tie_embeddings:
        weights["lm_head.weight"] = random.matrix(BYTE_VOCAB_SIZE, hidden)
    return weights


def _bert_config(sizes: TinyBert, vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "max_position_embeddings": sizes.max_model_len,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
    }


def _bert_weights(sizes: TinyBert, vocab_size: int, random: _Random) -> dict[str, torch.Tensor]:
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    weights: dict[str, torch.Tensor] = {
        "embeddings.word_embeddings.weight": random.matrix(vocab_size, hidden),
        "embeddings.position_embeddings.weight": random.matrix(sizes.max_model_len, hidden),
        "embeddings.token_type_embeddings.weight": random.matrix(2, hidden),
    }

    def add_linear(name: str, rows: int, columns: int) -> None:
        weights[f"{name}.weight"] = random.matrix(rows, columns)
        weights[f"{name}.bias"] = random.vector(rows, 0.0)

    def add_norm(name: str) -> None:
        weights[f"{name}.weight"] = random.vector(hidden, 1.0)
        weights[f"{name}.bias"] = random.vector(hidden, 0.0)

    add_norm("embeddings.LayerNorm")
    for layer in range(sizes.num_layers):
        at = f"encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            add_linear(f"{at}.attention.self.{name}", hidden, hidden)
        add_linear(f"{at}.attention.output.dense", hidden, hidden)
        add_norm(f"{at}.attention.output.LayerNorm")
        add_linear(f"{at}.intermediate.dense", inner, hidden)
        add_linear(f"{at}.output.dense", hidden, inner)
        add_norm(f"{at}.output.LayerNorm")
    return weights


def _byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _wordpiece_tokenizer() -> Tokenizer:
    letters = [c for c in string.printable if not c.isspace() and not c.isupper()]
    pieces = [*BERT_SPECIAL_TOKENS, *letters, *(f"##{c}" for c in string.ascii_lowercase + string.digits)]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(name, pieces.index(name)) for name in ("[CLS]", "[SEP]")],
    )
    tokenizer.add_special_tokens(list(BERT_SPECIAL_TOKENS))
    return tokenizer


def _write_json(path: Path, value: Any) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
