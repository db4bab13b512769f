"""Log-softmax in the interpreter and through the compiler."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from engines.ops.log_softmax import reference_log_softmax
from engines.ops.triton.log_softmax import triton_log_softmax


def equals_the_reference(lab: Any, rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    logits = lab.put(4 * lab.randn(rows, vocab_size, dtype=dtype))
    lab.close(lab.run(triton_log_softmax, logits), reference_log_softmax(logits.float()))


def masked(lab: Any) -> None:
    logits = torch.full((2, 9), float("-inf"))
    logits[0, 3:5] = 2.0
    out = lab.run(triton_log_softmax, lab.put(logits))
    lab.close(out[:1], reference_log_softmax(logits[:1]))
    assert bool(out[1].isnan().all())


def alone(lab: Any) -> None:
    logits = lab.randn(4, 5000)
    together = lab.run(triton_log_softmax, logits)
    for row in range(4):
        lab.same(lab.run(triton_log_softmax, logits[row : row + 1]), together[row : row + 1])


CASES = {
    **{
        f"{rows}x{vocab_size}-{str(dtype)[6:]}": partial(
            equals_the_reference, rows=rows, vocab_size=vocab_size, dtype=dtype
        )
        for rows, vocab_size in ((1, 1), (3, 100), (2, 5000))
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    },
    "masked": masked,
    "alone": alone,
}
LAUNCHES = {"rows": lambda: triton_log_softmax(torch.empty(4, 49152))}


def test_case(interpreted: Any, case: str) -> None:
    interpreted(case)


def test_compiles(compiles: Any, launch: str, target: int) -> None:
    compiles(launch, target)
