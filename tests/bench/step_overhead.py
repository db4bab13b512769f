"""What a step costs outside model and sampler: `python tests/bench/step_overhead.py [requests] [context]`.

The engine runs over a model that computes nothing and a sampler that draws one constant, so that only scheduling,
packing, committing and emitting are left. One JSON document on stdout; times in microseconds a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import torch

from engines.api import GenerateRequest, SamplingParams
from engines.config import CacheConfig, SchedulerConfig
from engines.core import runner
from engines.core.build import build_decoder
from engines.core.sampler import Sampled, SamplerRow
from engines.layers.forward_batch import ForwardBatch
from engines.models.base import ModelSpec
from engines.ops.kv_cache import KVCache

VOCAB_SIZE = 49152


class NoModel:
    """A `DecoderModel` without weights."""

    spec = ModelSpec(
        name="none",
        architecture="none",
        task="generate",
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        hidden_size=2,
        intermediate_size=2,
        vocab_size=VOCAB_SIZE,
        max_model_len=65536,
        rms_norm_eps=1e-5,
    )

    def forward(self, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        return torch.empty(len(batch.logits_rows), 0)


def draw_nothing(logits: torch.Tensor, rows: Sequence[SamplerRow]) -> list[Sampled]:
    return [Sampled(7, None) for _ in rows]


def measure(num_requests: int, context: int, steps: int) -> dict[str, float]:
    num_blocks = (num_requests + 2) * (context + steps) // 16 + 100
    scheduler = SchedulerConfig(max_batch_tokens=8192, chunk_tokens=8192, max_running=num_requests)
    core = build_decoder(NoModel(), CacheConfig(num_blocks=num_blocks), scheduler, clock=time.perf_counter)
    for number in range(num_requests):
        prompt = [(number * 977 + i) % VOCAB_SIZE for i in range(context)]
        sampling = SamplingParams(max_tokens=steps + 10)
        core.add_request(GenerateRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling))
    while any(r.num_tokens_to_compute > 1 for r in core.scheduler.running) or len(core.scheduler.waiting):
        core.step()
    times_us = []
    for _ in range(steps):
        began_s = time.perf_counter()
        core.step()
        core.take_kv_events()
        times_us.append((time.perf_counter() - began_s) * 1e6)
    ordered = sorted(times_us)
    return {
        "requests": num_requests,
        "context": context,
        "p50_us": round(statistics.median(times_us), 1),
        "p99_us": round(ordered[int(len(ordered) * 0.99)], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("requests", type=int, nargs="?", default=16)
    parser.add_argument("context", type=int, nargs="?", default=512)
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    runner.sample = draw_nothing
    print(json.dumps(measure(arguments.requests, arguments.context, arguments.steps)))


if __name__ == "__main__":
    main()
