"""What was used and what it cost, in integer micro-USD, appended to the store in batches off the request's path.

A row is settled once, whatever ends the request. Rows wait in memory for at most `FLUSH_S`; a store that fails keeps
them waiting and is tried again, and `close` writes what is left. Knows nothing of limits.

Read next: `gateway/stores/base.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from gateway.stores.base import Store, StoreError, UsageRow
from gateway.tenants import Caller
from policies.schema import Policy
from routers.types import AspectUsage

logger = logging.getLogger("facet.ledger")
FLUSH_S = 0.5
USD_MICROS = 1_000_000


def cost_usd_micros(policy: Policy, model: str, prompt_tokens: int, completion_tokens: int) -> int:
    """Rounded up to a whole micro-USD. Prices are per million tokens."""
    price = policy.models[model].price
    per_mtok = (
        round(price.input_usd_per_mtok * USD_MICROS) * prompt_tokens
        + round(price.output_usd_per_mtok * USD_MICROS) * completion_tokens
    )
    return -(-per_mtok // 1_000_000)


class Ledger:
    """Start it with `start()` on the event loop; `close()` flushes."""

    def __init__(self, store: Store, *, wall_clock: Callable[[], float]) -> None:
        self._store = store
        self._wall_clock = wall_clock
        self._rows: list[UsageRow] = []
        self._wake = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin flushing in the background."""
        self._task = asyncio.create_task(self._run(), name="facet-ledger")

    def settle(
        self, request_id: str, caller: Caller, policy: Policy, usage: AspectUsage, *, member: int, status: int
    ) -> None:
        """Record one member's usage; durable soon."""
        self._rows.append(
            UsageRow(
                request_id=request_id,
                step=usage.step,
                member=member,
                attempt=1,
                at_s=self._wall_clock(),
                tenant=caller.tenant,
                key_id=caller.key_id,
                aspect=usage.aspect,
                model=usage.model,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                cost_usd_micros=cost_usd_micros(policy, usage.model, usage.prompt_tokens, usage.completion_tokens),
                status=status,
            )
        )
        self._wake.set()

    async def flush(self) -> None:
        """Write what waits. Raises StoreError and keeps the rows."""
        rows = self._rows
        if rows:
            self._rows = []
            try:
                await self._store.append_usage(rows)
            except StoreError:
                self._rows = rows + self._rows
                raise

    async def close(self) -> None:
        """Flush and end."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self.flush()

    async def _run(self) -> None:
        while not self._closing:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self.flush()
            except StoreError as error:
                logger.error("usage rows wait for the store: %s", error)
                self._wake.set()
            if not self._closing:
                await asyncio.sleep(FLUSH_S)
