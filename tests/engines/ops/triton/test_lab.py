"""The laboratory itself: what it must catch, it catches; and a process that dies fails one case, not the rest."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import triton.language as tl

from engines.ops.triton.kernel import jit


@jit
def _copy_kernel(x: tl.tensor, out: tl.tensor, reads: tl.constexpr, writes: tl.constexpr) -> None:
    lane = tl.arange(0, 16)
    tl.store(out + lane, tl.load(x + lane, mask=lane < reads, other=0.0), mask=lane < writes)


@jit
def _dot_kernel(x: tl.tensor, out: tl.tensor) -> None:
    lane = tl.arange(0, 16)
    tile = tl.load(x + lane[:, None] * 16 + lane[None, :])
    tl.store(out + lane[:, None] * 16 + lane[None, :], tl.dot(tile, tile))


def copy(x: torch.Tensor, reads: int, writes: int) -> torch.Tensor:
    out = torch.empty((10,), dtype=torch.float32)
    _copy_kernel[(1,)](x, out, reads, writes)
    return out


def good(lab: Any) -> None:
    x = lab.randn(10)
    lab.same(lab.run(copy, x, 10, 10), x)


def writes_past_the_end(lab: Any) -> None:
    lab.run(copy, lab.randn(16), 16, 11)


def reads_past_the_end(lab: Any) -> None:
    x = lab.randn(9)
    lab.close(lab.run(copy, x, 10, 10), torch.cat((x, torch.zeros(1))))


def reads_past_a_row(lab: Any) -> None:
    x = lab.randn(2, 9)
    lab.close(lab.run(copy, x[0], 10, 10), torch.cat((x[0], torch.zeros(1))))


def forgets_an_element(lab: Any) -> None:
    x = lab.randn(10)
    lab.close(lab.run(copy, x, 10, 9), x)


def writes_its_input(lab: Any) -> None:
    x = lab.randn(10)
    _copy_kernel[(1,)](lab.randn(16, seed=1), x, 16, 10)


def multiplies_bfloat16(lab: Any) -> None:
    lab.run(lambda: _dot_kernel[(1,)](lab.randn(16, 16, dtype=torch.bfloat16), torch.empty((16, 16))))


CASES = {
    "good": good,
    "dies": lambda lab: os._exit(3),
    "writes-past-the-end": writes_past_the_end,
    "reads-past-the-end": reads_past_the_end,
    "reads-past-a-row": reads_past_a_row,
    "forgets-an-element": forgets_an_element,
    "writes-its-input": writes_its_input,
    "multiplies-bfloat16": multiplies_bfloat16,
}


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("writes-past-the-end", "a guard band was written"),
        ("reads-past-the-end", "too far, first at \\[9\\]: nan for 0.0"),
        ("reads-past-a-row", "too far, first at \\[9\\]: nan for 0.0"),
        ("forgets-an-element", "too far, first at \\[9\\]: nan for"),
        ("writes-its-input", "a read-only tensor was written"),
        ("multiplies-bfloat16", "multiplies the bits of bfloat16"),
    ],
)
def test_a_wrong_kernel_is_caught(interpreted: Any, name: str, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        interpreted(name)


def test_a_process_that_dies_fails_its_case_alone(interpreted: Any) -> None:
    with pytest.raises(pytest.fail.Exception, match="died with 3"):
        interpreted("dies")
    interpreted("good")
