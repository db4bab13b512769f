"""The dense decoder: against transformers, against its own reference ops, and bitwise the same in any company."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.config import ModelConfig
from engines.layers.forward_batch import ForwardBatch
from engines.models.base import Checkpoint, DecoderModel, ModelSpec
from engines.models.evaluate import all_logits
from engines.models.llama import LlamaModel
from engines.models.loader import open_checkpoint
from engines.models.packing import pack_llama
from engines.models.registry import load_model
from engines.models.tiny import TinyLlama, write_tiny_llama
from engines.ops.dispatch import REFERENCE
from engines.ops.kv_cache import KVCache, allocate_kv_cache
from engines.text.model import load_text

BLOCK_SIZE = 16
SIZES = {
    "grouped heads": TinyLlama(),
    "biases, untied head": TinyLlama(biases=True, tie_embeddings=False, num_layers=3),
    "wide heads, one key/value head": TinyLlama(num_heads=3, num_kv_heads=1, head_dim=32, hidden_size=96),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cache_for(spec: ModelSpec, num_tokens: int) -> KVCache:
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    kv = allocate_kv_cache(spec.num_layers, num_blocks, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
    kv.k.fill_(float("nan"))
    kv.v.fill_(float("nan"))
    return kv


def built(checkpoint: Checkpoint, dtype: str, **options: Any) -> LlamaModel:
    return LlamaModel(checkpoint.spec, pack_llama(checkpoint, dtype), **options)


def transformers_model(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def reference_logprobs(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(model(token_ids[None]).logits[0].float(), dim=-1)


def our_logprobs(model: DecoderModel, token_ids: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(all_logits(model, token_ids, cache_for(model.spec, len(token_ids))), dim=-1)


def tokens(count: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_float32_agrees_with_transformers(tmp_path: Path, sizes: TinyLlama) -> None:
    folder = write_tiny_llama(tmp_path / "m", seed=2, sizes=sizes)
    model = built(open_checkpoint(folder), "float32")
    ids = tokens(200, model.spec.vocab_size)
    expected = reference_logprobs(transformers_model(folder), ids)
    torch.testing.assert_close(our_logprobs(model, ids), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_the_kernels_agree_with_the_reference_ops(tmp_path: Path, sizes: TinyLlama) -> None:
    checkpoint = open_checkpoint(write_tiny_llama(tmp_path / "m", seed=2, sizes=sizes))
    ids = tokens(70, checkpoint.spec.vocab_size)
    reference = our_logprobs(built(checkpoint, "float32", ops=REFERENCE), ids)
    torch.testing.assert_close(our_logprobs(built(checkpoint, "float32"), ids), reference, rtol=0, atol=1e-4)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_int8_is_near_float32(tmp_path: Path, sizes: TinyLlama) -> None:
    """Rotation, folded norms and biases change the arithmetic, not the function."""
    checkpoint = open_checkpoint(write_tiny_llama(tmp_path / "m", seed=2, sizes=sizes))
    ids = tokens(200, checkpoint.spec.vocab_size)
    exact, rough = (our_logprobs(built(checkpoint, dtype), ids).double() for dtype in ("float32", "int8"))
    assert float((exact.exp() * (exact - rough)).sum(dim=-1).mean()) < 2e-3


class Stream:
    """One sequence that a test feeds in pieces, with its blocks in its own order."""

    def __init__(self, ids: torch.Tensor, blocks: list[int]) -> None:
        self.ids, self.blocks, self.done = ids, blocks, 0
        self.rows: list[torch.Tensor] = []

    @property
    def left(self) -> int:
        return len(self.ids) - self.done


def forward(model: DecoderModel, kv: KVCache, step: list[tuple[Stream, int]]) -> None:
    """All rows' logits, so that every token's result is compared."""
    width = max(len(stream.blocks) for stream, _ in step)
    positions = [range(stream.done, stream.done + n) for stream, n in step]
    starts = [0]
    for _, n in step:
        starts.append(starts[-1] + n)
    logits = model.forward(
        ForwardBatch(
            token_ids=torch.cat([stream.ids[stream.done : stream.done + n] for stream, n in step]),
            positions=torch.tensor([p for span in positions for p in span], dtype=torch.int32),
            slot_mapping=torch.tensor(
                [
                    stream.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
                    for (stream, _), span in zip(step, positions, strict=True)
                    for p in span
                ],
                dtype=torch.int32,
            ),
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor([stream.done + n for stream, n in step], dtype=torch.int32),
            block_tables=torch.tensor([s.blocks + [0] * (width - len(s.blocks)) for s, _ in step], dtype=torch.int32),
            logits_rows=torch.arange(starts[-1]),
        ),
        kv,
    )
    for (stream, n), rows in zip(step, torch.split(logits, [n for _, n in step]), strict=True):
        stream.rows.append(rows)
        stream.done += n


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_sequence_is_bitwise_itself_in_any_company_and_cut(tmp_path: Path, dtype: str) -> None:
    model = built(open_checkpoint(write_tiny_llama(tmp_path / "m", seed=2)), dtype)
    lengths = (300, 140, 47, 16, 1)
    prompts = [tokens(n, model.spec.vocab_size, seed) for seed, n in enumerate(lengths)]
    alone = [all_logits(model, ids, cache_for(model.spec, len(ids))) for ids in prompts]
    for seed, num_threads in enumerate((1, 2, 3)):
        torch.set_num_threads(num_threads)
        rng = random.Random(seed)
        needed = [-(-n // BLOCK_SIZE) for n in lengths]
        free = list(range(sum(needed)))
        rng.shuffle(free)
        streams = [Stream(ids, [free.pop() for _ in range(n)]) for ids, n in zip(prompts, needed, strict=True)]
        kv = cache_for(model.spec, BLOCK_SIZE * sum(needed))
        while any(stream.left for stream in streams):
            step = [
                (stream, min(stream.left, rng.choice((1, 2, 3, 16, 40, 130))))
                for stream in rng.sample(streams, len(streams))
                if stream.left and rng.random() < 0.8
            ]
            if step:
                forward(model, kv, step)
        for stream, expected in zip(streams, alone, strict=True):
            assert torch.equal(torch.cat(stream.rows), expected), (seed, len(expected))


def test_only_the_rows_asked_for_are_returned_in_order(tmp_path: Path) -> None:
    model = built(open_checkpoint(write_tiny_llama(tmp_path / "m")), "float32")
    ids = tokens(20, model.spec.vocab_size)
    everything = all_logits(model, ids, cache_for(model.spec, 20))
    batch = ForwardBatch(
        token_ids=ids,
        positions=torch.arange(20, dtype=torch.int32),
        slot_mapping=torch.arange(20, dtype=torch.int32),
        query_start=torch.tensor([0, 20], dtype=torch.int32),
        context_lens=torch.tensor([20], dtype=torch.int32),
        block_tables=torch.tensor([[0, 1]], dtype=torch.int32),
        logits_rows=torch.tensor([4, 19]),
    )
    logits = model.forward(batch, cache_for(model.spec, 20))
    assert logits.shape == (2, model.spec.vocab_size)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, everything[[4, 19]])
    empty = ForwardBatch(**{field: getattr(batch, field) for field in batch.__slots__} | {"logits_rows": ids[:0]})
    assert model.forward(empty, cache_for(model.spec, 20)).shape == (0, model.spec.vocab_size)


PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "Water boils at",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 3, 5, 8, 13,",
    "In 1969, Neil Armstrong",
    "SELECT name FROM users WHERE",
    "Die Hauptstadt von Deutschland ist",
    "The mitochondria is the powerhouse of",
    "To be, or not to be, that is",
    "A recipe for pancakes: first,",
    "import numpy as np\n\nx = np.",
    "The quick brown fox",
    "Q: What is the largest planet?\nA:",
    "Photosynthesis is the process by which",
    "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "She opened the door and saw",
    "Roses are red,",
)


@pytest.fixture(scope="module")
def demo(demo_model_path: Path) -> tuple[DecoderModel, Any, Any]:
    """(our exact model, transformers' model with the same dequantized weights, tokenizer)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig, LlamaForCausalLM
    checkpoint = open_checkpoint(demo_model_path)
    spec = checkpoint.spec
    with torch.device("meta"):
        reference = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=spec.vocab_size,
                hidden_size=spec.hidden_size,
                intermediate_size=spec.intermediate_size,
                num_hidden_layers=spec.num_layers,
                num_attention_heads=spec.num_heads,
                num_key_value_heads=spec.num_kv_heads,
                max_position_embeddings=spec.max_model_len,
                rms_norm_eps=spec.rms_norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
                tie_word_embeddings=True,
            )
        )
    reference.load_state_dict(
        {name: checkpoint.float32(name) for name in checkpoint.names()}, strict=False, assign=True
    )
    reference.tie_weights()
    reference.model.rotary_emb = type(reference.model.rotary_emb)(reference.config)  # its buffers were on "meta"
    model = load_model(ModelConfig(name="demo", path=str(demo_model_path), dtype="float32"))
    assert isinstance(model, DecoderModel)
    return model, reference.eval(), load_text(demo_model_path).tokenizer


@pytest.mark.model
def test_the_demo_model_agrees_with_transformers_on_twenty_prompts(demo: tuple[DecoderModel, Any, Any]) -> None:
    model, reference, tokenizer = demo
    assert len(set(PROMPTS)) == 20
    for prompt in PROMPTS:
        ids = torch.tensor(tokenizer.encode(prompt))
        difference = (our_logprobs(model, ids) - reference_logprobs(reference, ids)).abs().amax()
        assert float(difference) < 1e-3, prompt


@pytest.mark.model
def test_the_demo_models_256_greedy_tokens_are_those_of_transformers(demo: tuple[DecoderModel, Any, Any]) -> None:
    """Ours are generated one by one through the KV cache; transformers then reads them all at once: at every position
    its likeliest token must be the one that ours took, which is what its own greedy decoding would have done."""
    model, reference, tokenizer = demo
    prompt = tokenizer.encode(
        "<|im_start|>user\nWrite a long story about a lighthouse.<|im_end|>\n<|im_start|>assistant\n"
    )
    kv = cache_for(model.spec, len(prompt) + 256)
    stream = Stream(torch.tensor(prompt), list(range(int(kv.k.shape[1]))))
    forward(model, kv, [(stream, len(prompt))])
    for _ in range(256):
        stream.ids = torch.cat((stream.ids, stream.rows[-1][-1:].argmax(dim=-1)))
        forward(model, kv, [(stream, 1)])
    ours = stream.ids[len(prompt) :]
    theirs = reference_logprobs(reference, stream.ids).argmax(dim=-1)[len(prompt) - 1 : -1]
    assert ours.tolist() == theirs.tolist()
    assert len(ours) == 256
