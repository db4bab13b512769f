"""Tokens that a grammar forbids get the logit -inf.

Contract: `grammar_mask(logits [R, V] float, bitmask [M, W] int32, rows [M] or None)`, in place: bit t % 32 of word
t // 32 of bitmask row m allows token t in logits row rows[m] (rows None: m); W >= ceil(V / 32), and bits past V are
not read. Rows that no bitmask row names are left alone. A bitmask of zeros leaves a row of -inf, which the sampler
reports as a fault (`engines/ops/truncation.py`: token -1), never as a token.

The bitmask is what grammar compilers fill in (xgrammar: least significant bit first).
Read next: `engines/ops/truncation.py`.
"""

from __future__ import annotations

import torch

BITS = 32


def words(vocab_size: int) -> int:
    """int32 words of one bitmask row."""
    return -(-vocab_size // BITS)


def pack_mask(allowed: torch.Tensor) -> torch.Tensor:
    """allowed [M, V] bool -> bitmask [M, ceil(V / 32)] int32."""
    rows, vocab_size = allowed.shape
    padded = torch.zeros(rows, words(vocab_size) * BITS, dtype=torch.int64, device=allowed.device)
    padded[:, :vocab_size] = allowed
    weights = 1 << torch.arange(BITS, device=allowed.device)
    packed = (padded.view(rows, -1, BITS) * weights).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def unpack_mask(bitmask: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """bitmask [M, W] int32 -> allowed [M, V] bool."""
    bits = bitmask[:, :, None] >> torch.arange(BITS, dtype=torch.int32, device=bitmask.device) & 1
    return bits.flatten(1)[:, :vocab_size].bool()


def reference_grammar_mask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    """See the contract."""
    forbidden = ~unpack_mask(bitmask, logits.shape[1])
    where = torch.arange(len(bitmask), device=logits.device) if rows is None else rows.long()
    logits[where] = logits[where].masked_fill(forbidden, float("-inf"))
