"""Which drafted tokens stand, and the token that follows them: speculation that changes no distribution.

Letters: S sequences, D drafts in all, V vocabulary, W the most drafts of a sequence (`width`).

Sequence s drafted n tokens, draft_ids[draft_start[s] : draft_start[s + 1]], and has n + 1 rows in what the model gave:
row draft_start[s] + s + j follows its first j drafts (row n: the bonus). Both ops return (tokens [S, W + 1] int32, -1
after the last, counts [S] int32): the drafts that stand and one token more.

Contract of `verify_matching(draft_ids [D] int32, draft_start [S + 1] int32, drawn_ids [D + S] int32, width)`:
drawn_ids are what plain decoding would take in each row (argmax, or `draw` of `engines/ops/truncation.py` at that row's
own position). A draft stands while it equals what was drawn; the first drawn token that differs ends the run. Greedy
speculation is this. So is stochastic speculation by a drafter without a distribution: the drawn token has distribution
p and equals draft x with probability p(x), so x is accepted with p(x), and else a token of p without x is emitted: the
usual rule, with the added gift that the tokens are those that plain decoding draws from the same seeds.

Contract of `verify_sampled(draft_ids, draft_start, probabilities [D + S, V], draft_probabilities [D, V], keys, width,
has_q [S] bool or None)`, float32: draft x of distribution q stands if p(x) > 0 and u q(x) <= p(x), u in (0, 1];
else a token of max(p - q, 0), normalised, by an exponential race, ends the run (a token of p if p - q is nowhere
positive, which only rounding can bring about). After the last draft comes a token of p, as plain decoding draws it.
p is what is left after temperature, truncation and grammar; greedy rows are one-hot. keys: one a sequence, positions of
its first token here; token j belongs to position + j, and its three uses have streams of their own. Sequences with
has_q False take the rule of `verify_matching`; their rows of q are not read.

Source: Leviathan et al., 2022, https://arxiv.org/abs/2211.17192; Chen et al., 2023, https://arxiv.org/abs/2302.01318.
Read next: `engines/ops/philox.py`.
"""

from __future__ import annotations

import torch

from engines.ops.philox import (
    STREAM_ACCEPT,
    STREAM_DRAW,
    STREAM_RECOVER,
    StreamKeys,
    random_bits,
    unit_interval,
)
from engines.ops.truncation import NO_TOKEN, reference_race


def reference_verify_matching(
    draft_ids: torch.Tensor, draft_start: torch.Tensor, drawn_ids: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the contract."""
    starts, drafts, drawn = draft_start.tolist(), draft_ids.tolist(), drawn_ids.tolist()
    runs = []
    for s, first in enumerate(starts[:-1]):
        num_drafts = starts[s + 1] - first
        own, ends = drafts[first : first + num_drafts], drawn[first + s : first + s + num_drafts + 1]
        runs.append(_run(own, ends, [x == y for x, y in zip(own, ends[:-1], strict=True)]))
    return _table(runs, width)


def reference_verify_sampled(
    draft_ids: torch.Tensor,
    draft_start: torch.Tensor,
    probabilities: torch.Tensor,
    draft_probabilities: torch.Tensor,
    keys: StreamKeys,
    width: int,
    has_q: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the contract."""
    starts = draft_start.long()
    lengths, drafts = starts.diff(), draft_ids.long()
    num_sequences = len(lengths)
    owner = torch.arange(num_sequences).repeat_interleave(lengths + 1)  # [D + S], whose row
    step = torch.arange(len(owner)) - starts[owner] - owner
    row = (step < lengths[owner]).nonzero()[:, 0]  # [D], of each draft
    places = StreamKeys(keys.seeds[owner], keys.choices[owner], keys.positions[owner] + step)
    draft_places = StreamKeys(places.seeds[row], places.choices[row], places.positions[row])
    with_q = torch.ones(len(row), dtype=torch.bool) if has_q is None else has_q[owner[row]]

    ends = reference_race(probabilities, places, STREAM_DRAW)  # [D + S]
    p = probabilities[row]
    recovered = reference_race((p - draft_probabilities).clamp(min=0.0), draft_places, STREAM_RECOVER)
    matches = ends[row] == drafts
    ends[row] = torch.where(with_q & (recovered != NO_TOKEN), recovered, ends[row])
    u = unit_interval(
        random_bits(draft_places.seeds, draft_places.choices, draft_places.positions, STREAM_ACCEPT, torch.tensor(0))
    )
    p_x, q_x = (table.gather(1, drafts[:, None])[:, 0] for table in (p, draft_probabilities))
    stands = torch.where(with_q, (p_x > 0) & (u * q_x <= p_x), matches).tolist()

    runs = []
    for s, first in enumerate(starts[:-1].tolist()):
        last = int(starts[s + 1])
        runs.append(_run(draft_ids[first:last].tolist(), ends[first + s : last + s + 1].tolist(), stands[first:last]))
    return _table(runs, width)


def _run(drafts: list[int], ends: list[int], stands: list[bool]) -> list[int]:
    accepted = next((j for j, stood in enumerate(stands) if not stood), len(drafts))
    return [*drafts[:accepted], ends[accepted]]


def _table(runs: list[list[int]], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.full((len(runs), width + 1), NO_TOKEN, dtype=torch.int32)
    for s, run in enumerate(runs):
        tokens[s, : len(run)] = torch.tensor(run, dtype=torch.int32)
    return tokens, torch.tensor([len(run) for run in runs], dtype=torch.int32)
