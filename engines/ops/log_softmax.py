"""Logarithms of a row's softmax.

Contract: `log_softmax(logits [R, V] float)` -> [R, V] float32, new memory: x - max - log(sum(exp(x - max))). -inf stays
-inf; a row without a finite logit is NaN. Row-local: a row's bits do not depend on the other rows.
"""

from __future__ import annotations

import torch


def reference_log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """The definition, in double precision, rounded once at the end."""
    return torch.log_softmax(logits.double(), dim=-1).float()
