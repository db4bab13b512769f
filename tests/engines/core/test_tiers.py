"""Tiers under a running engine: what comes back from them is what was computed, and nobody waits who need not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engines.api import BlockRemoved, BlockStored, EngineError
from engines.config import CacheConfig, SchedulerConfig
from engines.core.build import tiers_below
from engines.kv.tiers import BlockName
from engines.ops.kv_cache import allocate_kv_cache
from engines.ops.kv_copy import BlockCopier

BLOCK_BYTES = 2 * 4 * 4 * 2  # K and V, 4 tokens, float32, 2 dimensions
FILE_BYTES = 8 + 32 + 40 + 16 + BLOCK_BYTES


def prompt_of(number: int, length: int) -> list[int]:
    return [(number * 31 + i * 7 + i * i) % 48 for i in range(length)]


@pytest.fixture
def tiered(toy, tmp_path: Path) -> Iterator[Callable[..., object]]:
    """Engines with a disk of 100 blocks (and a DRAM tier on request), closed at the end."""
    made = []

    def make(**options: object) -> object:
        options = {"disk_path": str(tmp_path / "kv"), "disk_bytes": 100 * FILE_BYTES, **options}
        made.append(toy.engine(**options))
        return made[-1]

    yield make
    for engine in made:
        engine.core.close()


class Slow:
    """Stands before a tier's `get` until it is let go."""

    def __init__(self, tier: object) -> None:
        self.go = Event()
        self._tier, self._get = tier, tier.get
        tier.get = self.get

    def get(self, name: BlockName, into: np.ndarray) -> bool:
        assert self.go.wait(10)
        return self._get(name, into)


def test_a_prefix_that_left_the_pool_comes_back(toy, tiered) -> None:
    engine = tiered(num_blocks=12, dram_bytes=50 * BLOCK_BYTES, disk_bytes=0, disk_path="")
    first = prompt_of(1, 21)
    engine.run([toy.request("a", first)])
    engine.run([toy.request("b", prompt_of(2, 40), max_tokens=4)])  # takes the whole pool
    assert engine.core.kv.index.match(b"", []) == []
    answer = engine.run([toy.request("c", first)])["c", 0]
    assert (answer.token_ids, answer.usage.cached_tokens) == (toy.greedy(first, 8), 20)
    assert engine.core.offload.num_loaded_blocks >= 3


def test_a_restarted_engine_goes_on_from_disk(toy, tiered) -> None:
    prompt = prompt_of(3, 30)
    engine = tiered()
    engine.run([toy.request("a", prompt)])
    engine.core.close()
    again = tiered()
    answer = again.run([toy.request("b", prompt)])["b", 0]
    assert (answer.token_ids, answer.usage.cached_tokens) == (toy.greedy(prompt, 8), 28)
    assert sum(tokens for tokens, _, _ in again.model.batches) == 2 + 7, "only the rest of the prompt was computed"


def test_other_salts_find_nothing(toy, tiered) -> None:
    prompt = prompt_of(3, 30)
    engine = tiered()
    engine.run([toy.request("a", prompt, cache_salt=b"one")])
    engine.core.close()
    answer = tiered().run([toy.request("b", prompt, cache_salt=b"two")])["b", 0]
    assert (answer.token_ids, answer.usage.cached_tokens) == (toy.greedy(prompt, 8), 0)


def test_a_damaged_file_costs_computing_and_nothing_else(toy, tiered, tmp_path: Path) -> None:
    prompt = prompt_of(3, 30)
    engine = tiered()
    engine.run([toy.request("a", prompt)])
    (third,) = [
        path
        for path in (tmp_path / "kv").rglob("*.kv")
        if path.name.startswith(engine.core.kv.index._by_block[2].hash.hex())
    ]
    engine.core.close()
    content = bytearray(third.read_bytes())
    content[-1] ^= 1
    third.write_bytes(content)
    again = tiered()
    again.core.take_kv_events()
    answer = again.run([toy.request("b", prompt)])["b", 0]
    assert (answer.token_ids, answer.usage.cached_tokens) == (toy.greedy(prompt, 8), 8)
    assert again.core.offload.num_loaded_blocks == 2
    removed = [e for e in again.core.take_kv_events().events if isinstance(e, BlockRemoved)]
    assert [(e.medium, [h.hex() for h in e.block_hashes]) for e in removed] == [("disk", [third.name[:32]])]


def test_events_tell_the_tier_and_what_survived(toy, tiered) -> None:
    engine = tiered(dram_bytes=50 * BLOCK_BYTES)
    engine.run([toy.request("a", prompt_of(3, 9), max_tokens=1)])
    names = [engine.core.kv.index._by_block[block_id].hash for block_id in (0, 1)]
    told: dict[str | None, list[bytes]] = {}
    for event in engine.core.take_kv_events().events:
        assert isinstance(event, BlockStored)
        told.setdefault(event.medium, []).extend(event.block_hashes)
    assert told == {None: names, "dram": names, "disk": names}
    engine.core.close()
    again = tiered(dram_bytes=50 * BLOCK_BYTES)
    assert again.core.take_kv_events().events == [BlockStored(names, None, [], 4, medium="disk")]


def test_others_go_on_while_a_prefix_is_loaded(toy, tiered) -> None:
    prompt, other = prompt_of(3, 30), prompt_of(4, 5)
    engine = tiered()
    engine.run([toy.request("a", prompt)])
    engine.core.close()
    engine = tiered()
    slow = Slow(engine.core.offload._tiers[0])
    engine.core.add_request(toy.request("back", prompt))
    engine.core.add_request(toy.request("new", other))
    began_s = time.monotonic()
    while ("new", 0) not in engine.answers or engine.answers["new", 0].finish_reason is None:
        engine.step()
    assert time.monotonic() - began_s < 5
    assert len(engine.core.scheduler.loading) == 1
    assert engine.core.stats().waiting == 1
    slow.go.set()
    answers = engine.run()
    assert answers["new", 0].token_ids == toy.greedy(other, 8)
    assert (answers["back", 0].token_ids, answers["back", 0].usage.cached_tokens) == (toy.greedy(prompt, 8), 28)


def test_an_engine_that_only_waits_for_a_tier_cannot_step(toy, tiered) -> None:
    prompt = prompt_of(3, 30)
    engine = tiered()
    engine.run([toy.request("a", prompt)])
    engine.core.close()
    engine = tiered()
    slow = Slow(engine.core.offload._tiers[0])
    woken = Event()
    engine.core.offload.on_result(woken.set)
    engine.core.add_request(toy.request("back", prompt))
    assert engine.core.can_step()
    engine.step()
    assert (engine.core.has_work(), engine.core.can_step()) == (True, False)
    slow.go.set()
    assert woken.wait(5)
    assert engine.core.can_step()
    assert engine.run()["back", 0].token_ids == toy.greedy(prompt, 8)


def test_a_cancelled_load_ends_in_the_pool(toy, tiered) -> None:
    prompt = prompt_of(3, 30)
    engine = tiered()
    engine.run([toy.request("a", prompt)])
    engine.core.close()
    engine = tiered()
    slow = Slow(engine.core.offload._tiers[0])
    engine.core.add_request(toy.request("gone", prompt))
    engine.step()
    engine.core.abort("gone")
    engine.core.check_invariants()
    assert not engine.core.scheduler.loading
    slow.go.set()
    engine.run()
    engine.core.check_invariants()
    assert engine.core.kv.pool.num_cached == 7
    answer = engine.run([toy.request("b", prompt)])["b", 0]
    assert (answer.token_ids, answer.usage.cached_tokens) == (toy.greedy(prompt, 8), 28)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"dram_bytes": 1 << 20, "prefix_cache": False}, "need prefix_cache"),
        ({"disk_bytes": 1 << 20}, "a disk tier needs both"),
        ({"dram_bytes": 5}, "one block takes 64"),
        ({"disk_bytes": 1 << 20, "disk_path": "/proc/nowhere"}, "a KV tier cannot be used"),
    ],
)
def test_what_cannot_be_configured_is_refused(options: dict[str, object], problem: str) -> None:
    with pytest.raises(EngineError, match=problem):
        tiers_below(CacheConfig(**options), BlockCopier(allocate_kv_cache(1, 2, 1, 4, 2)))


class TieredLife(RuleBasedStateMachine):
    """Requests over a small vocabulary in a pool, a memory and a disk that are all too small; restarts and damage.

    The oracle is the toy's own: whatever came from whichever tier, answers are those of plain computing.
    """

    def __init__(self, toy, folder: Path) -> None:
        super().__init__()
        self.toy, self.folder = toy, folder
        self.prompts: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.answers: dict[str, object] = {}
        self.start()

    def start(self) -> None:
        budget = SchedulerConfig(max_batch_tokens=9, chunk_tokens=5, max_running=4, max_waiting=100)
        self.engine = self.toy.engine(
            num_blocks=9,
            scheduler=budget,
            dram_bytes=4 * BLOCK_BYTES,
            disk_path=str(self.folder),
            disk_bytes=9 * FILE_BYTES,
        )

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), n=st.integers(1, 2), salt=st.sampled_from("ab"))
    def arrive(self, tokens: list[int], n: int, salt: str) -> None:
        name = f"r{len(self.prompts)}"
        self.prompts[name] = tokens
        request = self.toy.request(name, tokens, max_tokens=5, n=n, cache_salt=salt.encode())
        self.engine.core.add_request(request)

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.prompts)))
        self.engine.core.abort(name)
        self.aborted.add(name)

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        self.engine.run()
        self.engine.core.close()
        files = sorted(self.folder.rglob("*.kv"))
        if files and data.draw(st.booleans()):
            path = data.draw(st.sampled_from(files))
            path.write_bytes(path.read_bytes()[: data.draw(st.integers(0, FILE_BYTES - 1))])
        self.check()
        self.start()

    @invariant()
    def holds_together(self) -> None:
        self.engine.core.check_invariants()
        for tier in self.engine.core.offload._tiers:
            assert len(tier.contents()) <= 9 or tier.medium == "disk"

    def check(self) -> None:
        for (name, _), answer in self.engine.answers.items():
            assert answer.token_ids == self.toy.greedy(self.prompts[name], len(answer.token_ids))
            assert answer.finish_reason == "length" or name in self.aborted

    def teardown(self) -> None:
        self.engine.run()
        self.check()
        self.engine.core.close()
        for tier in self.engine.core.offload._tiers:
            if tier.medium == "disk":
                tier.check_invariants()


def test_any_life_with_tiers_gives_the_oracles_answers(toy, tmp_path_factory: pytest.TempPathFactory) -> None:
    run_state_machine_as_test(
        lambda: TieredLife(toy, tmp_path_factory.mktemp("kv")),
        settings=settings(max_examples=40, stateful_step_count=25, deadline=None),
    )
