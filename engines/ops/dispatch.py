"""Which implementation of each op a model runs: one table a backend, chosen once when the model is built.

A table holds functions with the contracts of their files; `REFERENCE` is the plain definition of each, `CPU` what runs.
A further backend is one more table here and one more function in each op file. Linears and embeddings are not here:
their number format chooses them (`engines/layers/linear.py`, `engines/layers/embedding.py`).

Read next: `engines/ops/attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from engines.ops.attention import AttentionBackend, CpuAttention, Heads, ReferenceAttention
from engines.ops.rmsnorm import cpu_rms_norm, reference_rms_norm
from engines.ops.rope import cpu_rope, reference_rope
from engines.ops.silu_mul import cpu_silu_mul, reference_silu_mul


class MakeAttention(Protocol):
    """Attention of a model's heads; a layer sees `window` tokens, 0 for all."""

    def __call__(self, heads: Heads, window: int = 0) -> AttentionBackend:
        """Make it."""
        ...


@dataclass(frozen=True, slots=True)
class Ops:
    """Functions of one backend.

    rms_norm(x [T, K], weight [K], eps) -> [T, K];  rope(x [T, N, D], cos [T, D], sin [T, D]) -> [T, N, D];
    silu_mul(gate_up [T, 2 I]) -> [T, I];  attention(heads, window) -> AttentionBackend.
    """

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    rope: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    attention: MakeAttention


REFERENCE = Ops(reference_rms_norm, reference_rope, reference_silu_mul, ReferenceAttention)
CPU = Ops(cpu_rms_norm, cpu_rope, cpu_silu_mul, CpuAttention)
