"""Runs one batch: pack, model, sampler. Owns the model and the KV tensors; no other file of the core touches them.

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
    """`run` writes the KV of the scheduled tokens and draws the next token of every request that they catch up."""

    def __init__(self, model: DecoderModel, kv: KVCache, packer: BatchPacker) -> None:
        self._model = model
        self._kv = kv
        self._packer = packer

    @property
    def kv_bytes(self) -> int:
        """Size of the KV tensors."""
        return self._kv.num_bytes

    @torch.inference_mode()
    def run(self, scheduled: Sequence[Request]) -> list[tuple[Request, Sampled]]:
        """Changes no request: until the caller commits, running again writes the same KV and draws the same tokens."""
        batch, requests = self._packer.pack(scheduled)
        logits = self._model.forward(batch, self._kv)  # [R, V]
        if not requests:
            return []
        drawn = sample(logits, [sampler_row(request) for request in requests])
        return list(zip(requests, drawn, strict=True))


def sampler_row(request: Request) -> SamplerRow:
    """What the sampler needs of a request. Before `min_tokens`, stop tokens are banned rather than ignored."""
    params = request.source.sampling
    return SamplerRow(
        params=params,
        choice=request.choice,
        position=request.num_tokens,
        prompt_ids=request.prompt_ids,
        output_ids=request.output_ids,
        banned_ids=params.stop_token_ids if request.num_output_tokens < params.min_tokens else (),
    )
