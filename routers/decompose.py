"""A request to its aspects. Pure: no model is asked, nothing is waited for.

Detectors run cheapest first and each says why it found what it found. This version has the structural one; more come
behind the same seam. Knows nothing of models or replicas.

Read next: `routers/plan.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from routers.types import Aspect, CanonicalRequest

ANSWER = "answer"


class Detector(Protocol):
    """Finds aspects in a request. Must not mutate, block or depend on anything but its arguments."""

    def detect(self, request: CanonicalRequest) -> Sequence[Aspect]:
        """What it found, each with the ground in `why`."""
        ...


class StructuralDetector:
    """Aspects that the form of the request says, exactly."""

    def detect(self, request: CanonicalRequest) -> Sequence[Aspect]:
        """Every chat or completion wants an answer."""
        return (Aspect(name=ANSWER, why=f"structural: a {request.surface} request"),)


DETECTORS: tuple[Detector, ...] = (StructuralDetector(),)


def decompose(request: CanonicalRequest, detectors: Sequence[Detector] = DETECTORS) -> tuple[Aspect, ...]:
    """All aspects in the order found; an aspect found twice keeps its first reason."""
    found: dict[str, Aspect] = {}
    for detector in detectors:
        for aspect in detector.detect(request):
            found.setdefault(aspect.name, aspect)
    return tuple(found.values())
