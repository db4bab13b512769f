"""Whether a request may be worked on now. This version counts what is in flight; budgets and quotas come behind the
same two calls. Nothing here pretends to be a budget.

Read next: `gateway/pipeline.py`, `gateway/ledger.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import ApiError
from gateway.tenants import Caller

DEFAULT_IN_FLIGHT = 1024


class Admission:
    """A bound on requests in flight in this gateway; beyond it clients are told to come back, not queued for ever."""

    def __init__(self, *, max_in_flight: int = DEFAULT_IN_FLIGHT) -> None:
        self._max_in_flight = max_in_flight
        self.in_flight = 0
        self.closing = False

    @contextmanager
    def admitted(self, caller: Caller) -> Iterator[None]:
        """Hold a place while the request runs. Raises ApiError 503."""
        if self.closing:
            raise ApiError(503, "The server is shutting down.", retry_after_s=1.0)
        if self.in_flight >= self._max_in_flight:
            raise ApiError(
                503, f"{self.in_flight} requests are in flight, the limit of this server.", retry_after_s=1.0
            )
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
