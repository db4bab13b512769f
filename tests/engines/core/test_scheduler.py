"""The scheduler alone: who gets how many tokens and which blocks, and who has to make way."""

from __future__ import annotations

import pytest

from engines.api import GenerateRequest, SamplingParams
from engines.config import CacheConfig, SchedulerConfig
from engines.core.queues import fcfs_queue, priority_queue
from engines.core.request import Arrival, Request, Status
from engines.core.scheduler import Scheduler
from engines.kv.manager import KVManager

SIZE = 4


class Bench:
    """A scheduler without an engine: `step` schedules, pretends to compute, and draws token 9 for all who caught up."""

    def __init__(self, num_blocks: int, **config: int) -> None:
        self.kv = KVManager(CacheConfig(block_size=SIZE), num_blocks)
        self.settings = SchedulerConfig(**{"max_batch_tokens": 32, "chunk_tokens": 32, "max_running": 8, **config})
        self.scheduler = Scheduler(self.settings, self.kv, priority_queue())
        self.requests: dict[str, Request] = {}

    def add(self, name: str, num_tokens: int, *, priority: int = 0) -> Request:
        number = len(self.requests)
        prompt = [10 * number + i % 7 for i in range(num_tokens)]
        source = GenerateRequest(
            request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=99), priority=priority
        )
        request = Request(source, 0, Arrival(number, 0.0, self.kv.root(b"", "d", number)), block_size=SIZE)
        self.requests[name] = request
        self.scheduler.enqueue(request)
        return request

    def step(self) -> dict[str, int]:
        """Tokens scheduled by name."""
        scheduled = self.scheduler.schedule(0.0)
        grants = {request.source.request_id: request.num_scheduled_tokens for request in scheduled}
        assert sum(grants.values()) == self.settings.max_batch_tokens - self.scheduler._budget
        for request in scheduled:
            request.num_computed_tokens += request.num_scheduled_tokens
            self.kv.publish(request)
            if request.num_computed_tokens == request.num_tokens:
                request.append(9)
        self.kv.check_invariants()
        self.scheduler.check_invariants()
        return grants

    def blocks(self, name: str) -> list[int]:
        return self.requests[name].block_ids


def test_the_budget_is_spent_on_single_tokens_first_then_on_prompts() -> None:
    bench = Bench(32, max_batch_tokens=10, chunk_tokens=6)
    bench.add("a", 3)
    bench.add("b", 20)
    assert bench.step() == {"a": 3, "b": 6}
    bench.add("c", 20)
    assert bench.step() == {"a": 1, "b": 6, "c": 3}
    assert bench.step() == {"a": 1, "b": 6, "c": 3}
    assert bench.step() == {"a": 1, "b": 2, "c": 6}
    assert bench.step() == {"a": 1, "b": 1, "c": 6}


def test_more_urgent_prompts_come_first_among_those_that_catch_up() -> None:
    bench = Bench(32, max_batch_tokens=8, chunk_tokens=8)
    bench.add("slow", 20)
    assert bench.step() == {"slow": 8}
    bench.add("urgent", 8, priority=-1)
    assert bench.step() == {"slow": 8}
    assert bench.step() == {"slow": 4, "urgent": 4}
    assert bench.step() == {"slow": 1, "urgent": 4}


def test_a_prompt_never_holds_up_a_stream_however_urgent_it_is() -> None:
    bench = Bench(32, max_batch_tokens=8)
    bench.add("stream", 3, priority=9)
    bench.step()
    bench.add("urgent", 20)
    assert bench.step() == {"stream": 1, "urgent": 7}
    assert bench.step() == {"stream": 1, "urgent": 7}


def test_at_most_max_running() -> None:
    bench = Bench(32, max_running=2)
    for name in "abc":
        bench.add(name, 4)
    assert bench.step() == {"a": 4, "b": 4}
    bench.scheduler.finish(bench.requests["a"])
    assert bench.requests["a"].status is Status.FINISHED
    assert bench.step() == {"b": 1, "c": 4}


def test_a_spent_budget_leaves_the_rest_for_the_next_step() -> None:
    bench = Bench(32, max_batch_tokens=2)
    for name in "abc":
        bench.add(name, 1)
    assert bench.step() == {"a": 1, "b": 1}
    assert bench.step() == {"a": 1, "b": 1}
    bench.scheduler.finish(bench.requests["a"])
    assert bench.step() == {"b": 1, "c": 1}


def test_a_prompt_waits_until_all_of_it_fits_beside_what_runs() -> None:
    bench = Bench(8, chunk_tokens=4)
    bench.add("a", 16)
    bench.add("b", 12)
    # a needs 4 blocks and one more to go on; b's 3 fit beside them.
    assert bench.step() == {"a": 4, "b": 4}
    bench.add("c", 4)
    assert bench.step() == {"a": 4, "b": 4}
    assert bench.requests["c"].status is Status.WAITING
    bench.scheduler.finish(bench.requests["b"])
    assert bench.step() == {"a": 4, "c": 4}


def test_a_waiting_request_that_does_not_fit_holds_nothing() -> None:
    bench = Bench(4)
    bench.add("a", 8)
    bench.step()
    waiting = bench.add("b", 12)
    bench.step()
    assert (waiting.block_ids, waiting.num_computed_tokens, waiting.tail_node) == ([], 0, None)
    assert waiting.first_scheduled_s is None


def test_when_blocks_run_out_the_last_arrival_makes_way_and_its_blocks_stay_cached() -> None:
    bench = Bench(6)
    bench.add("a", 7)
    bench.add("b", 7)
    assert bench.step() == {"a": 7, "b": 7}
    assert (bench.blocks("a"), bench.blocks("b")) == ([0, 1], [2, 3])
    assert bench.step() == {"a": 1, "b": 1}
    assert bench.step() == {"a": 1, "b": 1}
    assert (bench.blocks("a"), bench.blocks("b")) == ([0, 1, 4], [2, 3, 5])
    for _ in range(3):
        assert bench.step() == {"a": 1, "b": 1}
    # The 13th token of a needs a fourth block: b gives up three, the partial last one first.
    assert bench.step() == {"a": 1}
    assert bench.scheduler.num_preemptions == 1
    assert bench.requests["b"].status is Status.WAITING
    assert bench.requests["b"].num_preemptions == 1
    assert bench.blocks("b") == []
    assert bench.blocks("a") == [0, 1, 4, 5]
    assert bench.kv.pool.cached_in_eviction_order() == [3, 2]
    bench.scheduler.finish(bench.requests["a"])
    # b comes back with two blocks of prefix hit and computes only what was in the partial one.
    assert bench.step() == {"b": 5}
    assert bench.requests["b"].num_cached_tokens == 0, "its own recomputation is no hit of the client's"


def test_the_least_urgent_makes_way_not_the_last_served() -> None:
    bench = Bench(6)
    bench.add("low", 7, priority=9)
    bench.add("high", 7, priority=0)
    while bench.scheduler.num_preemptions == 0:
        grants = bench.step()
    assert grants == {"high": 1}
    assert bench.requests["low"].status is Status.WAITING


def test_a_request_can_be_preempted_after_its_grant_in_the_same_step() -> None:
    """A stream of low priority is served before a prompt of high priority, which then needs the block it holds."""
    bench = Bench(6, chunk_tokens=2)
    bench.add("low", 2, priority=9)
    bench.step()
    bench.add("high", 16)
    while bench.scheduler.num_preemptions == 0:
        grants = bench.step()
        assert grants.get("low", 1) == 1
    assert grants == {"high": 2}
    assert (bench.requests["low"].status, bench.requests["low"].num_scheduled_tokens) == (Status.WAITING, 0)
    assert len(bench.blocks("high")) == 4


def test_alone_and_out_of_blocks_it_preempts_itself() -> None:
    bench = Bench(2)
    request = bench.add("a", 7)
    bench.step()
    bench.step()
    assert bench.kv.pool.num_available == 0  # every block is its own: the ninth token fits nowhere
    assert bench.step() == {}
    assert request.status is Status.WAITING
    assert request.num_preemptions == 1


def test_finish_works_in_every_status() -> None:
    bench = Bench(8, max_running=1)
    running, waiting = bench.add("a", 5), bench.add("b", 5)
    held = Request(running.source, 1, Arrival(9, 0.0, b"r"), block_size=SIZE)
    bench.step()
    assert (running.status, waiting.status, held.status) == (Status.RUNNING, Status.WAITING, Status.HELD)
    for request in (running, waiting, held):
        bench.scheduler.finish(request)
        assert request.status is Status.FINISHED
        bench.scheduler.check_invariants()
    assert (bench.scheduler.running, len(bench.scheduler.waiting)) == ([], 0)
    assert bench.kv.pool.num_used == 0


@pytest.mark.parametrize("queue", [fcfs_queue, priority_queue])
def test_queues_order_and_removal(queue) -> None:
    policy = queue()
    assert (policy.peek(), len(policy)) == (None, 0)
    requests = {}
    for number, (name, priority) in enumerate([("a", 1), ("b", 0), ("c", 1), ("d", 0)]):
        source = GenerateRequest(
            request_id=name, prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1), priority=priority
        )
        requests[name] = Request(source, 0, Arrival(number, 0.0, b""), block_size=SIZE)
        policy.push(requests[name])
    expected = "abcd" if queue is fcfs_queue else "bdac"
    assert "".join(request.source.request_id for request in policy) == expected
    first = policy.pop()
    assert first is requests[expected[0]]
    policy.remove(requests[expected[2]])
    policy.push(first)  # preempted: back to where its arrival says
    assert policy.peek() is first
    assert [request.source.request_id for request in policy] == [expected[0], expected[1], expected[3]]
    assert len(policy) == 3
