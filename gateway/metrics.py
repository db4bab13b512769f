"""Prometheus series: ours (`facet_*`) and the vLLM-named aliases that dashboards and autoscalers read.

Request series are observed as requests run; engine series are copied from the replicas' snapshots at scrape. Labels
are model and replica, bounded by the policy. Knows nothing of HTTP.

Read next: docs/operations.md (what each series means).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from routers.fleet import Fleet, Replica

TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TPOT_BUCKETS_S = (0.001, 0.002, 0.004, 0.008, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
E2E_BUCKETS_S = (0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 480)

Kind = Literal["gauge", "counter"]
# (facet name, vLLM name or None, kind, help, field of ReplicaStats)
ENGINE_SERIES: tuple[tuple[str, str | None, Kind, str, str], ...] = (
    ("facet_requests_running", "vllm:num_requests_running", "gauge", "Requests holding KV", "running"),
    ("facet_requests_waiting", "vllm:num_requests_waiting", "gauge", "Requests in the queue", "waiting"),
    ("facet_queued_tokens", None, "gauge", "Tokens of waiting requests", "waiting_tokens"),
    ("facet_kv_blocks_free", None, "gauge", "KV blocks that hold nothing", "free_blocks"),
    ("facet_kv_blocks_cached", None, "gauge", "KV blocks kept for reuse", "cached_blocks"),
    ("facet_kv_blocks_used", None, "gauge", "KV blocks in use", "used_blocks"),
    (
        "facet_prefix_hit_tokens",
        "vllm:prefix_cache_hits",
        "counter",
        "Prompt tokens found cached",
        "cached_tokens_total",
    ),
    (
        "facet_prefix_query_tokens",
        "vllm:prefix_cache_queries",
        "counter",
        "Prompt tokens looked up",
        "prompt_tokens_total",
    ),
    ("facet_prompt_tokens", "vllm:prompt_tokens", "counter", "Prompt tokens", "prompt_tokens_total"),
    ("facet_generation_tokens", "vllm:generation_tokens", "counter", "Generated tokens", "generation_tokens_total"),
    ("facet_preemptions", "vllm:num_preemptions", "counter", "Requests that lost their KV", "preemptions_total"),
    ("facet_engine_aborts", None, "counter", "Requests whose client left", "aborts_total"),
    ("facet_engine_steps", None, "counter", "Engine steps", "steps_total"),
    ("facet_engine_step_age_seconds", None, "gauge", "Time since the last step while busy", "step_age_s"),
    ("facet_engine_step_p50_seconds", None, "gauge", "Median of recent step times", "step_p50_s"),
    ("facet_engine_step_p99_seconds", None, "gauge", "99th percentile of recent step times", "step_p99_s"),
    ("facet_engine_resident_bytes", None, "gauge", "Resident memory of the worker", "rss_bytes"),
)


class Metrics:
    """One registry a gateway; nothing global."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(fleet))
        self._fleet = fleet
        model = ("model_name",)
        self.ttft = self._latency(
            "facet_time_to_first_token_seconds",
            "vllm:time_to_first_token_seconds",
            "Time to first token",
            TTFT_BUCKETS_S,
        )
        self.itl = self._latency(
            "facet_inter_token_latency_seconds",
            "vllm:inter_token_latency_seconds",
            "Time between tokens",
            TPOT_BUCKETS_S,
        )
        self.tpot = self._latency(
            "facet_time_per_output_token_seconds",
            "vllm:request_time_per_output_token_seconds",
            "Mean time per output token of a request",
            TPOT_BUCKETS_S,
        )
        self.e2e = self._latency(
            "facet_e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds", "Whole request", E2E_BUCKETS_S
        )
        self.queue = self._latency(
            "facet_request_queue_time_seconds",
            "vllm:request_queue_time_seconds",
            "Time in the engine's queue",
            E2E_BUCKETS_S,
        )
        self.requests = Counter(
            "facet_requests", "Requests by route and status", ("route", "status"), registry=self.registry
        )
        self.success = Counter(
            "vllm:request_success", "Finished choices", (*model, "finished_reason"), registry=self.registry
        )
        self.in_flight = Gauge("facet_requests_in_flight", "Requests in this gateway", registry=self.registry)

    async def exposition(self) -> bytes:
        """The text format, from fresh snapshots."""
        for replica in self._fleet:
            await replica.observe()
        return generate_latest(self.registry)

    def _latency(self, ours: str, theirs: str, text: str, buckets: Sequence[float]) -> Latency:
        latency = Latency((ours, theirs), text, buckets)
        self.registry.register(latency)
        return latency


class Latency(Collector):
    """A histogram by model under several names. One observation a token: it must cost less than prometheus_client's."""

    def __init__(self, names: Sequence[str], text: str, buckets: Sequence[float]) -> None:
        """`buckets`: upper bounds, seconds, rising."""
        self._names = names
        self._text = text
        self._bounds = tuple(buckets)
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, model: str, seconds: float) -> None:
        """Of one model."""
        counts = self._counts.get(model)
        if counts is None:
            counts = self._counts[model] = [0] * (len(self._bounds) + 1)
            self._sums[model] = 0.0
        counts[bisect_left(self._bounds, seconds)] += 1
        self._sums[model] += seconds

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at scrape."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for name in self._names:
            family = HistogramMetricFamily(name, self._text, labels=("model_name",))
            for model, counts in self._counts.items():
                cumulative = [float(count) for count in accumulate(counts)]
                family.add_metric((model,), list(zip(bounds, cumulative, strict=True)), self._sums[model])
            yield family


class EngineCollector(Collector):
    """The replicas' last snapshots as series."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at scrape."""
        replicas = list(self._fleet)
        for ours, theirs, kind, text, field in ENGINE_SERIES:
            for name in (ours, theirs):
                if name is not None:
                    yield family(name, kind, text, [(replica, getattr(replica.stats, field)) for replica in replicas])
        for name in ("facet_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc"):
            yield family(name, "gauge", "Share of KV blocks in use", [(r, kv_usage(r)) for r in replicas])
        yield family(
            "facet_replica_up", "gauge", "1 while the replica is ready", [(r, float(r.alive)) for r in replicas]
        )


def family(name: str, kind: Kind, text: str, values: list[tuple[Replica, float]]) -> Metric:
    """One series with a sample a replica. vLLM's `engine` label is the replica's name."""
    made = (GaugeMetricFamily if kind == "gauge" else CounterMetricFamily)(name, text, labels=("model_name", "engine"))
    for replica, value in values:
        made.add_metric((replica.model, replica.name), float(value))
    return made


def kv_usage(replica: Replica) -> float:
    """Used blocks over all, 0 to 1."""
    stats = replica.stats
    return stats.used_blocks / stats.total_blocks if stats.total_blocks else 0.0
