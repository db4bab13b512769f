"""The table of number formats: every format of the weights with every format of keys and values, for one model.

Quality is divergence from the exact model (`engines/models/evaluate.py`). Speed is that of `forward` alone, no sampler
and no scheduler: 512 tokens of one prompt, then single tokens behind them; the cells take turns, and the median of the
rounds counts. Knows nothing of tokenizers or of where the text is from.

Read next: `engines/evaluate.py` (the command).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from engines.api import EngineError
from engines.config import DType, KVDType, ModelConfig
from engines.layers.forward_batch import ForwardBatch
from engines.models.base import DecoderModel
from engines.models.evaluate import (
    BLOCK_SIZE,
    WINDOW_TOKENS,
    Comparison,
    ExactWindow,
    KLDReport,
    all_logits,
    load_decoder,
    window_cache,
)
from engines.models.llama import LlamaModel
from engines.models.llama_native import NativeLlama
from engines.ops.kv_cache import KVCache

WEIGHTS: tuple[DType, ...] = ("float32", "int8", "native", "q8", "q4", "w8a8")
KEYS: tuple[KVDType, ...] = ("float32", "bfloat16", "int8", "float8", "int4")
DECODE_TOKENS = 24


class TableRow(msgspec.Struct, frozen=True, kw_only=True):
    """One cell. `weights` is what was asked for, `quality.dtype` what that became; bytes of a token over all layers."""

    weights: DType
    kv_dtype: KVDType
    weight_bytes: int
    kv_token_bytes: int
    prefill_tok_s: float
    decode_tok_s: float
    quality: KLDReport


@dataclass(slots=True)
class _Cell:
    weights: DType
    model: DecoderModel
    kv: KVCache
    comparison: Comparison = field(default_factory=Comparison)
    prefill_tok_s: list[float] = field(default_factory=list)
    decode_tok_s: list[float] = field(default_factory=list)


def measure_table(
    config: ModelConfig,
    token_ids: Sequence[int],
    *,
    clock: Callable[[], float],
    weights: Sequence[DType] = WEIGHTS,
    keys: Sequence[KVDType] = KEYS,
    runs: int = 3,
    progress: Callable[[str], None] | None = None,
) -> list[TableRow]:
    """One row a cell, weights by weights. `clock` in seconds. Raises EngineError if the model is no decoder."""
    if len(token_ids) < 2 or runs < 1:
        raise EngineError(f"{len(token_ids)} tokens and {runs} runs are too few (2 and 1 at least)")
    say = progress or (lambda _: None)
    reference = load_decoder(msgspec.structs.replace(config, dtype="float32", kv_dtype="float32"))
    window = min(WINDOW_TOKENS, reference.spec.max_model_len - DECODE_TOKENS)
    cells = []
    for dtype in weights:
        say(f"weights {dtype}: loading")
        model = reference if dtype == "float32" else load_decoder(msgspec.structs.replace(config, dtype=dtype))
        cells += [_Cell(dtype, model, window_cache(model, window + DECODE_TOKENS, kind)) for kind in keys]
    _compare(reference, cells, token_ids, window, say)
    ids = torch.tensor(list(token_ids) * -(-(window + DECODE_TOKENS) // len(token_ids)))[: window + DECODE_TOKENS]
    for run in range(runs):
        for number, cell in enumerate(cells):
            say(f"speed: run {run + 1} of {runs}, cell {number + 1} of {len(cells)}")
            _time(cell, ids, window, clock)
    return [_row(cell) for cell in cells]


def markdown(rows: Sequence[TableRow]) -> str:
    """The table as documents show it."""
    lines = [
        "| weights | KV | mean KLD (95 %) | median | p99 | p99.9 | same top-1 | PPL ratio (95 %)"
        " | prefill tok/s | decode tok/s | weights MB | KV bytes a token |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        q = row.quality
        lines.append(
            f"| {q.dtype} | {row.kv_dtype} | {q.mean_kld:.5f} ({q.mean_kld_low:.5f}-{q.mean_kld_high:.5f})"
            f" | {q.median_kld:.5f} | {q.p99_kld:.4f} | {q.p999_kld:.4f} | {100 * q.same_top1:.2f} %"
            f" | {q.perplexity_ratio:.4f} ({q.perplexity_ratio_low:.4f}-{q.perplexity_ratio_high:.4f})"
            f" | {row.prefill_tok_s:.0f} | {row.decode_tok_s:.1f}"
            f" | {row.weight_bytes / 1e6:.0f} | {row.kv_token_bytes} |"
        )
    return "\n".join(lines)


def _compare(
    reference: DecoderModel, cells: list[_Cell], token_ids: Sequence[int], window: int, say: Callable[[str], None]
) -> None:
    exact_kv = window_cache(reference, window, "float32")
    for start in range(0, len(token_ids) - 1, window):
        ids = torch.tensor(token_ids[start : start + window + 1])
        exact = ExactWindow(all_logits(reference, ids[:-1], exact_kv), ids[1:])
        for number, cell in enumerate(cells):
            cell.comparison.add(exact, all_logits(cell.model, ids[:-1], cell.kv))
            say(f"quality: tokens {start} of {len(token_ids) - 1}, cell {number + 1} of {len(cells)}")


def _time(cell: _Cell, ids: torch.Tensor, window: int, clock: Callable[[], float]) -> None:
    began_s = clock()
    cell.model.forward(_batch(ids, 0, window), cell.kv)
    prefilled_s = clock()
    for place in range(window, len(ids)):
        cell.model.forward(_batch(ids, place, place + 1), cell.kv)
    cell.prefill_tok_s.append(window / (prefilled_s - began_s))
    cell.decode_tok_s.append((len(ids) - window) / (clock() - prefilled_s))


def _batch(ids: torch.Tensor, start: int, stop: int) -> ForwardBatch:
    """Tokens start..stop of one sequence in blocks 0, 1, ...; logits of the last."""
    places = torch.arange(start, stop, dtype=torch.int32)
    return ForwardBatch(
        token_ids=ids[start:stop],
        positions=places,
        slot_mapping=places,
        query_start=torch.tensor([0, stop - start], dtype=torch.int32),
        context_lens=torch.tensor([stop], dtype=torch.int32),
        block_tables=torch.arange(-(-len(ids) // BLOCK_SIZE), dtype=torch.int32)[None],
        logits_rows=torch.tensor([stop - start - 1]),
    )


def _row(cell: _Cell) -> TableRow:
    spec = cell.model.spec
    assert isinstance(cell.model, LlamaModel | NativeLlama)
    row_bytes = cell.kv.format.row_bytes(spec.head_dim)
    return TableRow(
        weights=cell.weights,
        kv_dtype=cell.kv.dtype,
        weight_bytes=cell.model.weight_bytes,
        kv_token_bytes=2 * spec.num_layers * spec.num_kv_heads * row_bytes,
        prefill_tok_s=round(statistics.median(cell.prefill_tok_s), 1),
        decode_tok_s=round(statistics.median(cell.decode_tok_s), 2),
        quality=cell.comparison.report(spec, "float32", cell.kv.dtype),
    )
