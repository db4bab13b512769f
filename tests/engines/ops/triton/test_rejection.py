"""Verification of drafts in the interpreter and through the compiler."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from engines.ops.philox import StreamKeys
from engines.ops.rejection import reference_verify_matching, reference_verify_sampled
from engines.ops.triton.rejection import triton_verify_matching, triton_verify_sampled

LENGTHS = (3, 0, 1, 5, 2, 1)


def starts_of(lab: Any, lengths: tuple[int, ...]) -> torch.Tensor:
    starts: torch.Tensor = lab.put(torch.tensor([0, *lengths]).cumsum(0).int())
    return starts


def keys_of(lab: Any, rows: int) -> StreamKeys:
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=torch.Generator().manual_seed(4))
    return StreamKeys(lab.put(seeds), lab.put(torch.arange(rows).int() % 2), lab.put(torch.arange(rows).int() * 100))


def matching(lab: Any, lengths: tuple[int, ...], width: int, agreement: float) -> None:
    total, generator = sum(lengths), torch.Generator().manual_seed(7)
    drawn = torch.randint(0, 50, (total + len(lengths),), generator=generator).int()
    drawn[-1] = -1  # a row whose grammar left nothing
    drafts = torch.randint(0, 50, (total,), generator=generator).int()
    row = draft = 0
    for length in lengths:
        same = torch.rand(length, generator=generator) < agreement
        drafts[draft : draft + length][same] = drawn[row : row + length][same]
        row, draft = row + length + 1, draft + length
    arguments = lab.put(drafts), starts_of(lab, lengths), lab.put(drawn), width
    for found, wanted in zip(
        lab.run(triton_verify_matching, *arguments), reference_verify_matching(*arguments), strict=True
    ):
        lab.same(found, wanted)


def sampled(lab: Any, lengths: tuple[int, ...], vocab_size: int, sharpness: float, mixed: bool) -> None:
    total, generator = sum(lengths), torch.Generator().manual_seed(vocab_size)
    q = (sharpness * torch.randn(total, vocab_size, generator=generator)).softmax(-1)
    rows = [r for s, length in enumerate(lengths) for r in range(sum(lengths[:s]) + s, sum(lengths[:s]) + s + length)]
    p = (sharpness * torch.randn(total + len(lengths), vocab_size, generator=generator)).softmax(-1)
    p[rows] = 0.5 * p[rows] + 0.5 * q  # drafts that are often, not always, right
    p[0] = 0.0
    p[0, vocab_size // 2] = 1.0  # a greedy row
    if total:
        p[rows[-1]] = q[-1]  # nothing left after p - q
        drafts = torch.multinomial(q, 1, generator=generator)[:, 0].int()
    else:
        drafts = torch.empty(0, dtype=torch.int32)
    has_q = None
    if mixed:
        has_q = torch.arange(len(lengths)) % 2 == 0
        for s, length in enumerate(lengths):
            if not has_q[s]:
                q[sum(lengths[:s]) : sum(lengths[:s]) + length] = float("nan")
    arguments = (
        lab.put(drafts),
        starts_of(lab, lengths),
        lab.put(p),
        lab.put(q),
        keys_of(lab, len(lengths)),
        max(lengths),
        None if has_q is None else lab.put(has_q.to(torch.uint8)).view(torch.bool),
    )
    for found, wanted in zip(
        lab.run(triton_verify_sampled, *arguments), reference_verify_sampled(*arguments), strict=True
    ):
        lab.same(found, wanted)


def a_draft_that_nobody_could_draw(lab: Any) -> None:
    """p(x) = q(x) = 0, and ids outside the vocabulary: none stands."""
    p = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    q = torch.tensor([[1.0, 0.0, 0.0]])
    for draft in (2, -1, 3, 1 << 20):
        tokens, counts = lab.run(
            triton_verify_sampled,
            lab.put(torch.tensor([draft], dtype=torch.int32)),
            starts_of(lab, (1,)),
            lab.put(p),
            lab.put(q),
            keys_of(lab, 1),
            1,
        )
        assert (tokens.tolist(), counts.tolist()) == ([[1, -1]], [1])


def alone(lab: Any) -> None:
    """A sequence verified by itself emits what it emits in a batch."""
    total, generator = sum(LENGTHS), torch.Generator().manual_seed(1)
    q = torch.randn(total, 30, generator=generator).softmax(-1)
    p = torch.randn(total + len(LENGTHS), 30, generator=generator).softmax(-1)
    drafts = torch.multinomial(q, 1, generator=generator)[:, 0].int()
    keys, starts = keys_of(lab, len(LENGTHS)), starts_of(lab, LENGTHS)
    tokens, counts = lab.run(triton_verify_sampled, drafts, starts, p, q, keys, 5)
    for s, length in enumerate(LENGTHS):
        own, first = slice(s, s + 1), sum(LENGTHS[:s])
        one, count = lab.run(
            triton_verify_sampled,
            drafts[first : first + length],
            starts_of(lab, (length,)),
            p[first + s : first + s + length + 1],
            q[first : first + length],
            StreamKeys(keys.seeds[own], keys.choices[own], keys.positions[own]),
            5,
        )
        lab.same(one, tokens[own])
        lab.same(count, counts[own])


CASES = {
    "matching": partial(matching, lengths=LENGTHS, width=5, agreement=0.7),
    "matching-all": partial(matching, lengths=LENGTHS, width=7, agreement=1.0),
    "matching-no-drafts": partial(matching, lengths=(0, 0), width=0, agreement=0.0),
    **{
        f"sampled-{vocab_size}-{sharpness}{'-mixed' if mixed else ''}": partial(
            sampled, lengths=LENGTHS, vocab_size=vocab_size, sharpness=sharpness, mixed=mixed
        )
        for vocab_size, sharpness, mixed in ((5, 1.0, False), (40, 2.0, True), (1500, 3.0, False), (1024, 0.5, True))
    },
    "sampled-no-drafts": partial(sampled, lengths=(0, 0), vocab_size=9, sharpness=1.0, mixed=False),
    "sampled-many": partial(sampled, lengths=(2, 3, 1) * 12, vocab_size=6, sharpness=1.0, mixed=False),
    "nobody": a_draft_that_nobody_could_draw,
    "alone": alone,
}

IDS = torch.zeros(12, dtype=torch.int32)
LAUNCHES = {
    "matching": lambda: triton_verify_matching(IDS, IDS[:5], IDS, 7),
    "sampled-mixed": lambda: triton_verify_sampled(
        IDS,
        IDS[:5],
        torch.empty(16, 49152),
        torch.empty(12, 49152),
        StreamKeys(IDS[:4].long(), IDS, IDS),
        7,
        torch.zeros(4, dtype=torch.bool),
    ),
}


def test_case(interpreted: Any, case: str) -> None:
    interpreted(case)


def test_compiles(compiles: Any, launch: str, target: int) -> None:
    compiles(launch, target)
