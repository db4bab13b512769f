"""How far a number format is from the exact model: Kullback-Leibler divergence on given tokens, teacher-forced.

Both models read the same windows of text; at every position KL(reference || format) of the next-token distribution, in
nats, and whether the likeliest token is the same. Windows are independent (no context crosses a border), as in the
perplexity tools of llama.cpp. Knows nothing of tokenizers or of where the text is from.

Read next: `engines/evaluate.py` (the command), `engines/models/registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from engines.api import EngineError
from engines.config import DType, ModelConfig
from engines.layers.forward_batch import ForwardBatch
from engines.models.base import DecoderModel
from engines.models.registry import load_model
from engines.ops.kv_cache import KVCache, allocate_kv_cache

WINDOW_TOKENS = 512
BLOCK_SIZE = 16
# Neighbouring positions are not independent; resampling runs of them keeps the interval honest.
BOOTSTRAP_RUN_TOKENS = 32
BOOTSTRAP_ROUNDS = 1000
BOOTSTRAP_SEED = 20261201

Figures = npt.NDArray[np.float64]


class KLDReport(msgspec.Struct, frozen=True, kw_only=True):
    """Divergences in nats a token, shares within 0..1; `*_low` and `*_high` bound the 95 % bootstrap interval.

    `perplexity_ratio` is the format's perplexity over the reference's.
    """

    model: str
    digest: str
    dtype: str
    reference_dtype: str
    tokens: int
    mean_kld: float
    mean_kld_low: float
    mean_kld_high: float
    median_kld: float
    p99_kld: float
    p999_kld: float
    same_top1: float
    same_top1_low: float
    same_top1_high: float
    perplexity: float
    reference_perplexity: float
    perplexity_ratio: float


def evaluate_kld(
    config: ModelConfig,
    token_ids: Sequence[int],
    *,
    reference_dtype: DType = "float32",
    progress: Callable[[int, int], None] | None = None,
) -> KLDReport:
    """Compare `config` with the same weights in `reference_dtype` on `token_ids` (at least two).

    `progress(tokens done, tokens in all)` is called after each window. Raises EngineError if the model is no decoder.
    """
    if len(token_ids) < 2:
        raise EngineError(f"{len(token_ids)} tokens are too few to compare distributions on; give at least 2")
    reference = _decoder(msgspec.structs.replace(config, dtype=reference_dtype))
    model = _decoder(config)
    window = min(WINDOW_TOKENS, model.spec.max_model_len)
    caches = [_cache(one, window) for one in (reference, model)]
    klds, same, losses = [], [], []
    for start in range(0, len(token_ids) - 1, window):
        ids = torch.tensor(token_ids[start : start + window + 1])
        inputs, targets = ids[:-1], ids[1:]
        exact, rough = (
            torch.log_softmax(all_logits(one, inputs, kv).double(), dim=-1)
            for one, kv in zip((reference, model), caches, strict=True)
        )  # [window, V]
        klds.append((exact.exp() * (exact - rough)).sum(dim=-1).numpy())
        same.append((exact.argmax(dim=-1) == rough.argmax(dim=-1)).double().numpy())
        losses.append([-one.gather(1, targets[:, None])[:, 0].numpy() for one in (exact, rough)])
        if progress is not None:
            progress(min(start + window, len(token_ids) - 1), len(token_ids) - 1)
    exact_losses, rough_losses = (np.concatenate(part) for part in zip(*losses, strict=True))
    return _report(
        config, model, reference_dtype, (np.concatenate(klds), np.concatenate(same)), exact_losses, rough_losses
    )


def all_logits(model: DecoderModel, token_ids: torch.Tensor, kv: KVCache) -> torch.Tensor:
    """Logits after each of `token_ids` [T] as one sequence from position 0: [T, V]. `kv` holds at least T slots."""
    num_tokens = token_ids.shape[0]
    num_blocks = -(-num_tokens // kv.block_size)
    batch = ForwardBatch(
        token_ids=token_ids,
        positions=torch.arange(num_tokens, dtype=torch.int32),
        slot_mapping=torch.arange(num_tokens, dtype=torch.int32),
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32),
        context_lens=torch.tensor([num_tokens], dtype=torch.int32),
        block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
        logits_rows=torch.arange(num_tokens),
    )
    return model.forward(batch, kv)


def bootstrap_interval(values: Figures) -> tuple[float, float]:
    """95 % interval of the mean of `values` [n], by resampling runs of neighbours; fixed seed."""
    edges = np.arange(0, len(values), BOOTSTRAP_RUN_TOKENS)
    sums = np.add.reduceat(values, edges)
    sizes = np.diff(np.append(edges, len(values)))
    picks = np.random.Generator(np.random.PCG64(BOOTSTRAP_SEED)).integers(0, len(edges), (BOOTSTRAP_ROUNDS, len(edges)))
    means = sums[picks].sum(axis=1) / sizes[picks].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _decoder(config: ModelConfig) -> DecoderModel:
    model = load_model(config)
    if not isinstance(model, DecoderModel):
        raise EngineError(f"{config.name} is not a generating model: it has no next-token distribution")
    return model


def _cache(model: DecoderModel, window: int) -> KVCache:
    spec = model.spec
    num_blocks = -(-window // BLOCK_SIZE)
    return allocate_kv_cache(spec.num_layers, num_blocks, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim, spec.kv_dtype)


def _report(
    config: ModelConfig,
    model: DecoderModel,
    reference_dtype: str,
    figures: tuple[Figures, Figures],
    exact_losses: Figures,
    rough_losses: Figures,
) -> KLDReport:
    klds, same = figures
    kld_low, kld_high = bootstrap_interval(klds)
    same_low, same_high = bootstrap_interval(same)
    perplexity, reference_perplexity = float(np.exp(rough_losses.mean())), float(np.exp(exact_losses.mean()))
    return KLDReport(
        model=config.name,
        digest=model.spec.digest,
        dtype=model.spec.dtype,
        reference_dtype=reference_dtype,
        tokens=len(klds),
        mean_kld=float(klds.mean()),
        mean_kld_low=kld_low,
        mean_kld_high=kld_high,
        median_kld=float(np.median(klds)),
        p99_kld=float(np.quantile(klds, 0.99)),
        p999_kld=float(np.quantile(klds, 0.999)),
        same_top1=float(same.mean()),
        same_top1_low=same_low,
        same_top1_high=same_high,
        perplexity=perplexity,
        reference_perplexity=reference_perplexity,
        perplexity_ratio=perplexity / reference_perplexity,
    )
