"""Gated activation of an MLP: silu(gate) * up.

Contract: `silu_mul(gate_up)`: [T, 2 I] float32, gate first -> [T, I] float32, new memory;
y = gate / (1 + exp(-gate)) * up. Row-local.

Source: Shazeer, 2020, https://arxiv.org/abs/2002.05202.
"""

from __future__ import annotations

import torch

# torch splits an elementwise operation between threads from this many elements on, anywhere in a row; the elements
# beside a cut go through the scalar exp, which rounds differently from the vector one.
PARALLEL_GRAIN_ELEMENTS = 32768


def reference_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The definition, in double precision, rounded once at the end."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (gate / (1.0 + torch.exp(-gate)) * up).float()


def cpu_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Row blocks small enough to stay on one thread: exp is the one function whose bits would depend on the cut."""
    width = gate_up.shape[-1] // 2
    out = torch.empty(gate_up.shape[0], width)
    rows = max(1, (PARALLEL_GRAIN_ELEMENTS - 1) // width)
    for start in range(0, gate_up.shape[0], rows):
        torch.ops.aten.silu.out(gate_up[start : start + rows, :width], out=out[start : start + rows])
    return out.mul_(gate_up[:, width:])
