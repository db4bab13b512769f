"""Runs one packed batch: model, then sampler. Owns the model and the KV tensors; the only file of the core path that
touches both.

Knows nothing of scheduling or of who asked. On another device it is this file's neighbour that differs, not the engine.

Read next: `engines/models/llama.py`, `engines/core/sampler.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engines.core.batch import BatchPacker
from engines.core.request import Request
from engines.core.sampler import Sampled, SamplerRow, sample
from engines.models.base import DecoderModel
from engines.ops.kv_cache import KVCache


class Runner:
    """`run` writes the KV of the scheduled tokens and draws the next token of every request that has caught up."""

    def __init__(self, model: DecoderModel, kv: KVCache, packer: BatchPacker) -> None:
        self.model = model
        self.kv = kv
        self._packer = packer

    def run(self, scheduled: Sequence[Request]) -> list[tuple[Request, Sampled]]:
        """Idempotent until the caller commits: running the same again writes the same KV and draws the same."""
        batch, sampling = self._packer.pack(scheduled)
        with torch.inference_mode():
            logits = self.model.forward(batch, self.kv)  # [R, V]
            drawn = sample(logits, [sampler_row(request) for request in sampling])
        return list(zip(sampling, drawn, strict=True))


def sampler_row(request: Request) -> SamplerRow:
    """What the sampler needs of a request. Before `min_tokens`, stop tokens are banned rather than ignored."""
    params = request.source.sampling
    banned = params.stop_token_ids if request.num_output_tokens < params.min_tokens else ()
    prompt_ids = request.source.prompt_token_ids
    return SamplerRow(
        params=params,
        choice=request.choice,
        position=request.num_tokens,
        prompt_ids=prompt_ids[: request.num_prompt_tokens] if request.source.num_emitted_tokens else prompt_ids,
        output_ids=request.output_ids,
        banned_ids=banned,
    )
