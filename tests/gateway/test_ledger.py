"""The ledger: exact micro-USD, once each, kept through a failing store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.ledger import Ledger, cost_usd_micros
from gateway.stores.base import StoreError, UsageRow
from gateway.stores.sqlite import SqliteStore
from gateway.tenants import Caller
from policies.load import parse_policy
from routers.types import AspectUsage

POLICY = parse_policy(
    "version: facet/v1\nmodels:\n  a: {source: x, price: {input_usd_per_mtok: 0.02, output_usd_per_mtok: 0.04}}\n"
)
CALLER = Caller(key_id="k", tenant="t", role="user", cache_salt=b"")
USAGE = AspectUsage(
    aspect="answer", step="0-answer", model="a", replica="a-0", prompt_tokens=100, cached_tokens=16, completion_tokens=7
)


@pytest.mark.parametrize(
    ("prompt", "completion", "micros"),
    [(0, 0, 0), (1, 0, 1), (50, 0, 1), (51, 0, 2), (100, 7, 3), (10**6, 10**6, 60000)],
)
def test_cost_is_rounded_up_to_a_micro_usd(prompt: int, completion: int, micros: int) -> None:
    assert cost_usd_micros(POLICY, "a", prompt, completion) == micros


async def test_a_row_is_settled_once(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "facet.db")
    ledger = Ledger(store, wall_clock=lambda: 5.0)
    for _ in range(2):
        ledger.settle("r", CALLER, POLICY, USAGE, member=0, status=200)
        await ledger.flush()
    (row,) = await store.usage()
    assert (row.tenant, row.key_id, row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (
        "t",
        "k",
        100,
        16,
        7,
    )
    assert (row.cost_usd_micros, row.status, row.at_s) == (3, 200, 5.0)
    assert await store.usage(since_s=5.1) == []
    await store.close()


class FailingOnce:
    """A store whose first write fails."""

    def __init__(self) -> None:
        self.rows: list[UsageRow] = []
        self.failed = False

    async def append_usage(self, rows: Sequence[UsageRow]) -> int:
        if not self.failed:
            self.failed = True
            raise StoreError("disk full")
        self.rows += rows
        return len(rows)


async def test_rows_wait_for_a_store_that_fails() -> None:
    store = FailingOnce()
    ledger = Ledger(store, wall_clock=lambda: 5.0)
    ledger.settle("r1", CALLER, POLICY, USAGE, member=0, status=200)
    with pytest.raises(StoreError):
        await ledger.flush()
    ledger.settle("r2", CALLER, POLICY, USAGE, member=0, status=200)
    await ledger.close()
    assert [row.request_id for row in store.rows] == ["r1", "r2"]
