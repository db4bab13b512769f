"""The engine over the toy model: exact answers, exact steps, exact counts."""

from __future__ import annotations

import pytest

from engines.api import BlockStored, EngineOverloadedError, InvalidRequestError, Timings, Usage
from engines.config import SchedulerConfig
from engines.text.block_hash import block_hashes, root_hash

PROMPT = [7, 3, 9, 1, 4, 4, 8, 2, 6, 5]


def test_greedy_answer_equals_the_oracle(toy) -> None:
    engine = toy.engine()
    answer = engine.run([toy.request("a", PROMPT, max_tokens=9)])["a", 0]
    assert answer.token_ids == toy.greedy(PROMPT, 9)
    assert answer.finish_reason == "length"
    assert answer.usage == Usage(prompt_tokens=10, cached_tokens=0, completion_tokens=9)
    assert engine.model.batches == [(10, 1, 1), *[(1, 1, 1)] * 8]


def test_a_step_without_work_is_empty_and_idle_is_known(toy) -> None:
    engine = toy.engine()
    assert not engine.core.has_work()
    assert engine.core.step() == []
    engine.core.add_request(toy.request("a", PROMPT, max_tokens=1))
    assert engine.core.has_work()
    engine.step()
    assert not engine.core.has_work()


def test_a_long_prompt_is_computed_in_chunks(toy) -> None:
    engine = toy.engine(scheduler=SchedulerConfig(max_batch_tokens=8, chunk_tokens=4))
    answer = engine.run([toy.request("a", PROMPT, max_tokens=3)])["a", 0]
    assert engine.model.batches == [(4, 1, 0), (4, 1, 0), (2, 1, 1), (1, 1, 1), (1, 1, 1)]
    assert answer.token_ids == toy.greedy(PROMPT, 3)


def test_streams_go_on_while_a_long_prompt_is_computed(toy) -> None:
    engine = toy.engine(scheduler=SchedulerConfig(max_batch_tokens=6, chunk_tokens=6))
    engine.core.add_request(toy.request("stream", [1, 2], max_tokens=6))
    engine.step()
    engine.run([toy.request("long", [5] * 20, max_tokens=1)])
    # One token for the stream and what is left of the budget for the prompt, each step.
    assert engine.model.batches == [(2, 1, 1), *[(6, 2, 1)] * 3, (6, 2, 2), (1, 1, 1)]
    assert engine.answers["stream", 0].token_ids == toy.greedy([1, 2], 6)
    assert engine.answers["long", 0].token_ids == toy.greedy([5] * 20, 1)


def test_stop_token_ends_and_is_not_among_the_tokens(toy) -> None:
    expected = toy.greedy(PROMPT, 8)
    stop = expected[3]
    answer = toy.engine().run([toy.request("a", PROMPT, stop_token_ids=(stop,))])["a", 0]
    assert answer.token_ids == expected[: expected.index(stop)]
    assert (answer.finish_reason, answer.stop_token_id) == ("stop", stop)
    assert answer.usage == Usage(prompt_tokens=10, completion_tokens=expected.index(stop))


def test_min_tokens_bans_stop_tokens_until_then(toy) -> None:
    first = toy.greedy(PROMPT, 1)[0]
    plain = toy.engine().run([toy.request("a", PROMPT, stop_token_ids=(first,))])["a", 0]
    assert (plain.token_ids, plain.finish_reason) == ([], "stop")
    held = toy.engine().run([toy.request("a", PROMPT, stop_token_ids=(first,), min_tokens=4)])["a", 0]
    assert len(held.token_ids) >= 4
    assert first not in held.token_ids


def test_the_context_limit_ends_a_choice(toy) -> None:
    engine = toy.engine(max_model_len=12)
    answer = engine.run([toy.request("a", PROMPT, max_tokens=50)])["a", 0]
    assert answer.token_ids == toy.greedy(PROMPT, 2)
    assert answer.finish_reason == "length"


def test_logprobs_come_with_every_token(toy) -> None:
    answer = toy.engine().run([toy.request("a", PROMPT, max_tokens=3, logprobs=2)])["a", 0]
    assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
    assert all(entry.top[0] == (entry.token_id, entry.logprob) for entry in answer.logprobs)
    assert all(len(entry.top) == 2 for entry in answer.logprobs)


def test_scores_of_named_tokens_need_one_step(toy) -> None:
    engine = toy.engine()
    labels = (4, 9)
    answer = engine.run([toy.request("a", PROMPT, max_tokens=1, logprob_token_ids=labels)])["a", 0]
    assert [token_id for token_id, _ in answer.logprobs[0].top] == sorted(
        labels, key=lambda i: -dict(answer.logprobs[0].top)[i]
    )
    assert set(dict(answer.logprobs[0].top)) == set(labels)
    assert engine.model.batches == [(10, 1, 1)]


def test_timings_add_up_on_the_engines_clock(toy) -> None:
    engine = toy.engine(scheduler=SchedulerConfig(max_batch_tokens=5, chunk_tokens=5))
    engine.core.add_request(toy.request("a", PROMPT, max_tokens=4))
    engine.clock.advance(0.5)
    timings = engine.run()["a", 0].timings
    assert timings is not None
    assert timings == Timings(
        queue_s=pytest.approx(0.5),
        prefill_s=pytest.approx(2 * toy.STEP_S),
        decode_s=pytest.approx(3 * toy.STEP_S),
        num_preemptions=0,
        num_steps=5,
    )


def test_a_second_turn_is_a_prefix_hit_up_to_the_last_full_block(toy) -> None:
    engine = toy.engine()
    first = engine.run([toy.request("a", PROMPT, max_tokens=8)])["a", 0]
    conversation = [*PROMPT, *first.token_ids, 11, 12]
    second = engine.run([toy.request("b", conversation, max_tokens=4)])["b", 0]
    assert second.token_ids == toy.greedy(conversation, 4)
    # 10 + 8 tokens, of which the last drawn one has no KV: four full blocks.
    assert second.usage == Usage(prompt_tokens=20, cached_tokens=16, completion_tokens=4)
    assert engine.model.batches[8] == (4, 1, 1)


def test_salts_separate_and_the_cache_can_be_off(toy) -> None:
    engine = toy.engine()
    engine.run([toy.request("a", PROMPT, cache_salt=b"x")])
    other = engine.run([toy.request("b", PROMPT, cache_salt=b"y")])["b", 0]
    same = engine.run([toy.request("c", PROMPT, cache_salt=b"x")])["c", 0]
    assert other.usage.cached_tokens == 0
    assert same.usage.cached_tokens == 8
    off = toy.engine(prefix_cache=False)
    off.run([toy.request("a", PROMPT)])
    assert off.run([toy.request("b", PROMPT)])["b", 0].usage.cached_tokens == 0
    assert off.core.take_kv_events() is None


def test_a_replica_that_takes_over_continues_the_same_stream(toy) -> None:
    options = {"temperature": 1.0, "seed": 5, "presence_penalty": 0.5, "max_tokens": 12}
    whole = toy.engine().run([toy.request("a", PROMPT, **options)])["a", 0].token_ids
    for emitted in (1, 5, 11):
        rest = toy.engine().run([toy.request("a", [*PROMPT, *whole[:emitted]], num_emitted_tokens=emitted, **options)])[
            "a", 0
        ]
        assert rest.token_ids == whole[emitted:]
        assert rest.usage == Usage(prompt_tokens=10, cached_tokens=0, completion_tokens=12)


def test_priority_goes_first_then_arrival(toy) -> None:
    engine = toy.engine(scheduler=SchedulerConfig(max_batch_tokens=64, chunk_tokens=64, max_running=1))
    for name, priority in [("late", 5), ("first", 0), ("second", 0), ("urgent", -1)]:
        engine.core.add_request(toy.request(name, PROMPT, max_tokens=1, priority=priority))
    assert engine.waiting() == [("urgent", 0), ("first", 0), ("second", 0), ("late", 0)]
    engine.run()
    assert engine.steps == [[("urgent", 0)], [("first", 0)], [("second", 0)], [("late", 0)]]


def test_fcfs_ignores_priority(toy) -> None:
    engine = toy.engine(scheduler=SchedulerConfig(max_batch_tokens=64, chunk_tokens=64, max_running=1, queue="fcfs"))
    for name, priority in [("a", 5), ("b", 0)]:
        engine.core.add_request(toy.request(name, PROMPT, max_tokens=1, priority=priority))
    engine.run()
    assert engine.steps == [[("a", 0)], [("b", 0)]]


def test_events_of_a_step_name_the_blocks_as_a_router_would(toy) -> None:
    engine = toy.engine()
    engine.core.add_request(toy.request("a", PROMPT, max_tokens=3, cache_salt=b"s"))
    engine.step()
    batch = engine.core.take_kv_events()
    names = block_hashes(PROMPT, 4, root_hash(b"s", "toy"))
    assert batch is not None
    assert (batch.seq, batch.events) == (0, [BlockStored(names, None, [], 4)])
    assert batch.ts == engine.clock.now_s
    engine.step()
    assert engine.core.take_kv_events() is None
    engine.run()
    last = engine.core.take_kv_events()
    assert last is not None
    tokens = [*PROMPT, *engine.answers["a", 0].token_ids]
    assert last.events == [BlockStored(block_hashes(tokens, 4, root_hash(b"s", "toy"))[2:], names[-1], [], 4)]
    assert engine.core.kv_events_since(1) == [last]
    assert engine.core.kv_events_since(0) == [batch, last]


def test_stats_count_everything_once(toy) -> None:
    engine = toy.engine(num_blocks=16, scheduler=SchedulerConfig(max_batch_tokens=64, max_running=1))
    engine.core.add_request(toy.request("a", PROMPT, max_tokens=3))
    engine.core.add_request(toy.request("b", PROMPT, max_tokens=2))
    engine.step()
    engine.clock.advance(2.0)
    stats = engine.core.stats()
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (1, 1, 10)
    assert (stats.total_blocks, stats.used_blocks, stats.cached_blocks, stats.free_blocks) == (16, 3, 0, 13)
    assert stats.step_age_s == pytest.approx(2.0)
    engine.run()
    engine.core.abort("a")
    stats = engine.core.stats()
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (0, 0, 0)
    assert (stats.used_blocks, stats.cached_blocks, stats.free_blocks) == (0, 2 + 1, 13)
    assert (stats.prompt_tokens_total, stats.cached_tokens_total) == (20, 8)
    assert (stats.generation_tokens_total, stats.requests_total, stats.aborts_total) == (5, 2, 0)
    assert stats.steps_total == len(engine.model.batches)
    assert stats.step_age_s == 0.0
    assert stats.step_p50_s == pytest.approx(toy.STEP_S)
    assert stats.rss_bytes > 1 << 20


def test_the_age_of_an_engine_that_was_idle_starts_with_its_work(toy) -> None:
    engine = toy.engine()
    engine.run([toy.request("a", PROMPT, max_tokens=1)])
    engine.clock.advance(3600.0)
    engine.core.add_request(toy.request("b", PROMPT, max_tokens=2))
    engine.clock.advance(0.25)
    assert engine.core.stats().step_age_s == pytest.approx(0.25)


def test_a_full_queue_is_overload_and_changes_nothing(toy) -> None:
    engine = toy.engine(scheduler=SchedulerConfig(max_batch_tokens=64, max_running=1, max_waiting=3))
    engine.core.add_request(toy.request("a", PROMPT, n=2))
    with pytest.raises(EngineOverloadedError, match="2 of 3 places"):
        engine.core.add_request(toy.request("b", PROMPT, n=2))
    engine.core.check_invariants()
    engine.core.add_request(toy.request("b", PROMPT))
    assert set(engine.run()) == {("a", 0), ("a", 1), ("b", 0)}


def test_an_id_in_use_is_refused_and_can_be_used_again_later(toy) -> None:
    engine = toy.engine()
    engine.core.add_request(toy.request("a", PROMPT))
    with pytest.raises(InvalidRequestError, match="request_id is a"):
        engine.core.add_request(toy.request("a", PROMPT))
    engine.run()
    engine.answers.clear()
    assert engine.run([toy.request("a", PROMPT)])["a", 0].token_ids == toy.greedy(PROMPT, 8)


def test_a_prompt_that_could_never_fit_the_pool_is_refused(toy) -> None:
    engine = toy.engine(num_blocks=4, max_model_len=128)
    assert engine.core.capabilities.max_model_len == 16
    with pytest.raises(InvalidRequestError) as refused:
        engine.core.add_request(toy.request("a", [1] * 16))
    assert (refused.value.field, refused.value.value) == ("prompt_token_ids", "16 tokens")
    assert refused.value.limit.startswith("1..15 tokens")
    answer = engine.run([toy.request("b", [1] * 15, max_tokens=9)])["b", 0]
    assert answer.token_ids == toy.greedy([1] * 15, 1)
