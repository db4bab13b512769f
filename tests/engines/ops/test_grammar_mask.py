"""The order of a bitmask's bits, which grammar compilers share."""

from __future__ import annotations

import torch

from engines.ops.grammar_mask import pack_mask, reference_grammar_mask, unpack_mask


def test_bits_are_least_significant_first() -> None:
    allowed = torch.zeros(2, 40, dtype=torch.bool)
    allowed[0, [0, 5, 31, 32]] = True
    allowed[1] = True
    assert pack_mask(allowed).tolist() == [[1 + 32 - (1 << 31), 1], [-1, 255]]
    assert torch.equal(unpack_mask(pack_mask(allowed), 40), allowed)


def test_only_named_rows_change() -> None:
    logits = torch.zeros(3, 33)
    bitmask = torch.tensor([[2, 0]], dtype=torch.int32)
    reference_grammar_mask(logits, bitmask, torch.tensor([1]))
    assert logits[[0, 2]].eq(0).all()
    assert logits[1].isfinite().nonzero().flatten().tolist() == [1]
