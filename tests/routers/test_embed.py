"""Embeddings through the routers."""

from __future__ import annotations

import struct

import pytest

from routers.embed import CanonicalEmbedding
from routers.types import BadRequestError


def values(vector: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(vector) // 4}f", vector)


async def test_vectors_and_usage(bench) -> None:
    bench.add("v", model="vectors", task="embed")
    asked = CanonicalEmbedding(request_id="e", model="vectors", texts=("ab", "c"))
    embedded = await bench.executor.embed(asked, bench.policy)
    assert [len(values(vector)) for vector in embedded.vectors] == [8, 8]
    assert (embedded.usage.prompt_tokens, embedded.usage.replica) == (3, "v")


async def test_fewer_dimensions_have_length_one_again(bench) -> None:
    bench.add("v", model="vectors", task="embed")
    asked = CanonicalEmbedding(request_id="e", model="vectors", ids=((20, 30),), dimensions=3)
    (vector,) = (await bench.executor.embed(asked, bench.policy)).vectors
    assert sum(value**2 for value in values(vector)) == pytest.approx(1.0)
    assert len(values(vector)) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"texts": ("x" * 200,)}, r"maximum input length is 128 tokens; input\[0\] has 200"),
        ({"ids": ((5,), ())}, r"input\[1\] is empty"),
        ({"ids": ((5, 999),)}, r"input\[0\] holds the token id 999"),
        ({"texts": ("x",), "dimensions": 9}, "dimensions is 9; allowed: 1 to 8"),
        ({"texts": ("x",), "model": "small"}, "'small' generates text; this route needs one that embeds: vectors"),
    ],
)
async def test_refusals(bench, changes, message) -> None:
    bench.add("v", model="vectors", task="embed")
    asked = CanonicalEmbedding(**{"request_id": "e", "model": "vectors", **changes})
    with pytest.raises(BadRequestError, match=message):
        await bench.executor.embed(asked, bench.policy)
