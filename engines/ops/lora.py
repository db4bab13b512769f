"""Low-rank adapters for a batch in which every token may have its own: y += scale B A x.

Letters: T tokens, K inputs, N outputs, A adapters, R the largest rank (smaller ones are padded with zeros).

Contract: `lora_plan(adapter_ids [T], num_adapters)` -> LoraPlan: tokens sorted by adapter, -1 (none) left out.
`lora_shrink(x [T, K], a [A, R, K], scales [A] float32, plan)` -> [T, R] float32, new memory, scale A x of each token's
own adapter; rows of tokens without one are undefined.
`lora_expand(hidden [T, R] float32, b [A, N, R], plan, out [T, N])` adds B hidden to `out` in place, the sum rounded
once to its dtype; rows of tokens without an adapter are left alone. `out` may be a slice of columns.
Row-local: neighbours with other adapters, or with none, change nothing.

Source: Chen et al., 2023 (Punica), https://arxiv.org/abs/2310.18547.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """Adapter a's tokens are order[start[a] : start[a + 1]]: `order` [T] int32 (the rest unused), `start` [A + 1]."""

    order: torch.Tensor
    start: torch.Tensor


def lora_plan(adapter_ids: torch.Tensor, num_adapters: int) -> LoraPlan:
    """adapter_ids [T] integers in -1 .. A - 1. Device work only: no number comes back to the host."""
    ids = torch.where(adapter_ids < 0, num_adapters, adapter_ids).long()
    order = torch.argsort(ids, stable=True).int()
    counts = torch.zeros(num_adapters + 1, dtype=torch.int64, device=ids.device).scatter_add_(
        0, ids, torch.ones_like(ids)
    )
    start = torch.zeros(num_adapters + 1, dtype=torch.int32, device=ids.device)
    start[1:] = counts[:num_adapters].cumsum(0)
    return LoraPlan(order, start)


def reference_lora_shrink(x: torch.Tensor, a: torch.Tensor, scales: torch.Tensor, plan: LoraPlan) -> torch.Tensor:
    """The definition, in double precision; zeros for tokens without an adapter."""
    out = torch.zeros(x.shape[0], a.shape[1])
    for adapter, tokens in enumerate(_tokens(plan)):
        out[tokens] = (x[tokens].double() @ a[adapter].double().t() * scales[adapter].double()).float()
    return out


def reference_lora_expand(hidden: torch.Tensor, b: torch.Tensor, plan: LoraPlan, out: torch.Tensor) -> None:
    """The definition, in double precision."""
    for adapter, tokens in enumerate(_tokens(plan)):
        out[tokens] = (out[tokens].double() + hidden[tokens].double() @ b[adapter].double().t()).to(out.dtype)


def _tokens(plan: LoraPlan) -> list[torch.Tensor]:
    start = plan.start.tolist()
    return [plan.order[first:last].long() for first, last in pairwise(start)]
