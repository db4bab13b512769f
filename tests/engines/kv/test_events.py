"""KV events: merging, sequence numbers, replay, and the wire form."""

from __future__ import annotations

import msgspec

from engines.api import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from engines.kv.events import EventLog


def test_a_chain_becomes_one_event_and_branches_become_two() -> None:
    log = EventLog(16, 10)
    log.stored(b"a", None)
    log.stored(b"b", b"a")
    log.stored(b"c", b"a")
    assert log.flush(1.5) == KVEventBatch(
        1.5, [BlockStored([b"a", b"b"], None, [], 16), BlockStored([b"c"], b"a", [], 16)], 0
    )


def test_removals_in_a_row_become_one_event_and_order_is_kept() -> None:
    log = EventLog(16, 10)
    log.removed(b"x")
    log.removed(b"y")
    log.stored(b"a", None)
    log.removed(b"z")
    batch = log.flush(0.0)
    assert batch is not None
    assert batch.events == [BlockRemoved([b"x", b"y"]), BlockStored([b"a"], None, [], 16), BlockRemoved([b"z"])]


def test_clearing_says_all_that_is_left_to_say() -> None:
    log = EventLog(16, 10)
    log.removed(b"x")
    log.cleared()
    batch = log.flush(0.0)
    assert batch is not None
    assert batch.events == [AllBlocksCleared()]


def test_nothing_to_tell_is_no_batch_and_takes_no_number() -> None:
    log = EventLog(16, 10)
    assert log.flush(0.0) is None
    log.stored(b"a", None)
    first = log.flush(1.0)
    assert log.flush(2.0) is None
    log.stored(b"b", None)
    second = log.flush(3.0)
    assert first is not None
    assert second is not None
    assert (first.seq, second.seq) == (0, 1)


def test_a_later_event_never_changes_a_flushed_batch() -> None:
    log = EventLog(16, 10)
    log.stored(b"a", None)
    batch = log.flush(0.0)
    log.stored(b"b", b"a")
    assert batch is not None
    assert batch.events == [BlockStored([b"a"], None, [], 16)]
    second = log.flush(0.0)
    assert second is not None
    assert second.events == [BlockStored([b"b"], b"a", [], 16)]


def test_the_ring_replays_what_it_holds_and_shows_what_it_lost() -> None:
    log = EventLog(16, 3)
    for number in range(5):
        log.stored(bytes([number]), None)
        log.flush(float(number))
        log.check_invariants()
    assert [batch.seq for batch in log.since(0)] == [2, 3, 4]
    assert [batch.seq for batch in log.since(4)] == [4]
    assert log.since(5) == []


def test_without_capacity_nothing_is_recorded() -> None:
    log = EventLog(16, 0)
    log.stored(b"a", None)
    log.removed(b"a")
    log.cleared()
    assert log.flush(0.0) is None
    log.check_invariants()


def test_the_wire_form_is_vllms() -> None:
    """Arrays with the class name first: [ts, [[tag, ...], ...], seq]."""
    log = EventLog(16, 10)
    log.stored(b"a", None)
    log.removed(b"z")
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(log.flush(1.0)))
    assert plain[0] == 1.0
    assert plain[1][0][:5] == ["BlockStored", [b"a"], None, [], 16]
    assert plain[1][1][:2] == ["BlockRemoved", [b"z"]]
