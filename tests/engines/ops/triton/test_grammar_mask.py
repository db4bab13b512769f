"""Grammar masks in the interpreter and through the compiler."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from engines.ops.grammar_mask import pack_mask, reference_grammar_mask
from engines.ops.triton.grammar_mask import triton_grammar_mask

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def equals_the_reference(lab: Any, rows: int, vocab_size: int, dtype: torch.dtype, picked: bool = False) -> None:
    generator = torch.Generator().manual_seed(rows + vocab_size)
    logits = lab.put(torch.randn(rows, vocab_size, generator=generator).to(dtype), mutable=True)
    allowed = torch.rand(rows, vocab_size, generator=generator) < 0.5
    allowed[0] = False  # a grammar with nothing left
    if rows > 1:
        allowed[1] = True
    where = lab.put(torch.randperm(rows, generator=generator)[: rows - 1].int()) if picked else None
    bitmask = pack_mask(allowed)[: rows - 1] if picked else pack_mask(allowed)
    expected = logits.clone()
    reference_grammar_mask(expected, bitmask, where)
    lab.run(triton_grammar_mask, logits, lab.put(bitmask), where)
    lab.same(logits, expected)


def bits_past_the_vocabulary_are_not_read(lab: Any) -> None:
    logits = lab.put(torch.zeros(1, 33), mutable=True)
    lab.run(triton_grammar_mask, logits, lab.put(torch.tensor([[0, 1, 0]], dtype=torch.int32)))
    assert logits[0].tolist() == [float("-inf")] * 32 + [0.0]


CASES = {
    **{
        f"{rows}x{vocab_size}-{str(dtype)[6:]}": partial(
            equals_the_reference, rows=rows, vocab_size=vocab_size, dtype=dtype
        )
        for rows, vocab_size in ((1, 1), (3, 31), (2, 64), (4, 4999))
        for dtype in DTYPES
    },
    "picked-rows": partial(equals_the_reference, rows=5, vocab_size=100, dtype=torch.float32, picked=True),
    "wide-mask": bits_past_the_vocabulary_are_not_read,
}
MASK = torch.zeros(4, 1536, dtype=torch.int32)
LAUNCHES = {
    "all": lambda: triton_grammar_mask(torch.empty(4, 49152), MASK),
    "picked": lambda: triton_grammar_mask(torch.empty(4, 49152, dtype=torch.bfloat16), MASK, MASK[:, 0].contiguous()),
}


def test_case(interpreted: Any, case: str) -> None:
    interpreted(case)


def test_compiles(compiles: Any, launch: str, target: int) -> None:
    compiles(launch, target)
