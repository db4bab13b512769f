"""How far a number format is from the exact model: Kullback-Leibler divergence on given tokens, teacher-forced.

Both models read the same windows of text; at every position KL(reference || format) of the next-token distribution, in
nats, and whether the likeliest token is the same. Windows are independent (no context crosses a border), as in the
perplexity tools of llama.cpp. Knows nothing of tokenizers or of where the text is from.

Read next: `engines/evaluate.py` (the command), `engines/models/quality_table.py`, `engines/models/registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from engines.api import EngineError
from engines.config import DType, KVDType, ModelConfig
from engines.layers.forward_batch import ForwardBatch
from engines.models.base import DecoderModel, ModelSpec
from engines.models.registry import load_model
from engines.ops.kv_cache import KVCache, allocate_kv_cache

WINDOW_TOKENS = 512
# Distributions of a window are compared some rows at a time, while those are in the processor's cache.
CACHED_ROWS = 16
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
    kv_dtype: str
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
    perplexity_ratio_low: float
    perplexity_ratio_high: float


class ExactWindow:
    """The reference's distributions over one window, kept for every format that is compared with them."""

    def __init__(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """logits [T, V], targets [T]: the tokens that follow."""
        self.log_p = torch.log_softmax(logits.double(), dim=-1)  # [T, V]
        self.p = self.log_p.exp()
        self.top = self.log_p.argmax(dim=-1)
        self.targets = targets[:, None]
        self.losses = -self.log_p.gather(1, self.targets)[:, 0].numpy()


class Comparison:
    """Figures of one format, window after window."""

    def __init__(self) -> None:
        """Empty."""
        self._klds: list[Figures] = []
        self._same: list[Figures] = []
        self._exact_losses: list[Figures] = []
        self._losses: list[Figures] = []

    def add(self, exact: ExactWindow, logits: torch.Tensor) -> None:
        """Compare the format's logits [T, V] over a window with the reference's."""
        self._exact_losses.append(exact.losses)
        for start in range(0, logits.shape[0], CACHED_ROWS):
            some = slice(start, start + CACHED_ROWS)
            log_q = torch.log_softmax(logits[some].double(), dim=-1)
            self._klds.append(torch.sub(exact.log_p[some], log_q).mul_(exact.p[some]).sum(dim=-1).numpy())
            self._same.append((exact.top[some] == log_q.argmax(dim=-1)).double().numpy())
            self._losses.append(-log_q.gather(1, exact.targets[some])[:, 0].numpy())

    def report(self, spec: ModelSpec, reference_dtype: str, kv_dtype: str) -> KLDReport:
        """Of all windows so far (at least one). `spec`: of the format's model."""
        klds, same = np.concatenate(self._klds), np.concatenate(self._same)
        exact_losses, losses = np.concatenate(self._exact_losses), np.concatenate(self._losses)
        (kld_low, kld_high), (same_low, same_high) = bootstrap_interval(klds), bootstrap_interval(same)
        ratio_low, ratio_high = np.exp(bootstrap_interval(losses - exact_losses)).tolist()
        perplexity, reference_perplexity = float(np.exp(losses.mean())), float(np.exp(exact_losses.mean()))
        return KLDReport(
            model=spec.name,
            digest=spec.digest,
            dtype=spec.dtype,
            kv_dtype=kv_dtype,
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
            perplexity_ratio_low=ratio_low,
            perplexity_ratio_high=ratio_high,
        )


def evaluate_kld(
    config: ModelConfig,
    token_ids: Sequence[int],
    *,
    reference_dtype: DType = "float32",
    progress: Callable[[int, int], None] | None = None,
) -> KLDReport:
    """Compare `config` with the same weights in `reference_dtype` (and float32 keys) on `token_ids` (at least two).

    `progress(tokens done, tokens in all)` is called after each window. Raises EngineError if the model is no decoder.
    """
    if len(token_ids) < 2:
        raise EngineError(f"{len(token_ids)} tokens are too few to compare distributions on; give at least 2")
    reference = load_decoder(msgspec.structs.replace(config, dtype=reference_dtype, kv_dtype="float32"))
    model = load_decoder(config)
    window = min(WINDOW_TOKENS, model.spec.max_model_len)
    exact_kv, kv = (window_cache(one, window, one.spec.kv_dtype) for one in (reference, model))
    comparison = Comparison()
    for start in range(0, len(token_ids) - 1, window):
        ids = torch.tensor(token_ids[start : start + window + 1])
        exact = ExactWindow(all_logits(reference, ids[:-1], exact_kv), ids[1:])
        comparison.add(exact, all_logits(model, ids[:-1], kv))
        if progress is not None:
            progress(min(start + window, len(token_ids) - 1), len(token_ids) - 1)
    return comparison.report(model.spec, reference_dtype, model.spec.kv_dtype)


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


def load_decoder(config: ModelConfig) -> DecoderModel:
    """Raises EngineError if it is no decoder."""
    model = load_model(config)
    if not isinstance(model, DecoderModel):
        raise EngineError(f"{config.name} is not a generating model: it has no next-token distribution")
    return model


def window_cache(model: DecoderModel, window: int, kv_dtype: KVDType) -> KVCache:
    """Keys and values of `window` tokens of one sequence."""
    spec, num_blocks = model.spec, -(-window // BLOCK_SIZE)
    return allocate_kv_cache(spec.num_layers, num_blocks, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim, kv_dtype)
