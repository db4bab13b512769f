"""Spans of a request: request -> plan -> aspect -> queue, prefill, decode. Exporter off by default.

The engine's phases come back as durations with the last chunk and become child spans with explicit times, so workers
need no tracing of their own. W3C trace context comes in with the request and goes on to the engine. Content is never
recorded.

Read next: `gateway/genai.py`, `gateway/pipeline.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway import genai
from gateway.settings import SettingsError, TelemetrySettings
from routers.types import CanonicalRequest, Plan, RequestUsage

NANO = 1_000_000_000


class Telemetry:
    """Spans through a provider of our own: nothing global is set. `wall_clock_ns` stamps explicit times."""

    def __init__(self, exporter: SpanExporter | None, *, wall_clock_ns: Callable[[], int]) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "facet"}))
        if exporter is not None:
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.enabled = exporter is not None
        self._tracer = self._provider.get_tracer("facet")
        self._propagator = TraceContextTextMapPropagator()
        self._wall_clock_ns = wall_clock_ns

    def start_request(self, request: CanonicalRequest, headers: Mapping[str, str]) -> RequestSpan:
        """The root span, a child of the client's if it sent a traceparent."""
        if not self.enabled:
            return RequestSpan(self, None, headers.get("traceparent", ""))
        context = self._propagator.extract(headers)
        span = self._tracer.start_span(
            f"{request.surface} {request.model}",
            context=context,
            kind=SpanKind.SERVER,
            attributes={
                genai.OPERATION_NAME: "chat" if request.surface == "chat" else "text_completion",
                genai.PROVIDER_NAME: genai.PROVIDER,
                genai.REQUEST_MODEL: request.model,
                genai.REQUEST_CHOICE_COUNT: request.params.n,
                genai.REQUEST_TEMPERATURE: request.params.temperature,
                genai.REQUEST_TOP_P: request.params.top_p,
                "facet.request_id": request.request_id,
            },
        )
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, trace.set_span_in_context(span))
        return RequestSpan(self, span, carrier.get("traceparent", ""))

    def child(self, parent: Span, name: str, start_ns: int, end_ns: int, attributes: Mapping[str, str | int]) -> Span:
        """A finished span with explicit times."""
        context = trace.set_span_in_context(parent)
        span = self._tracer.start_span(name, context=context, start_time=start_ns, attributes=dict(attributes))
        span.end(end_time=end_ns)
        return span

    def now_ns(self) -> int:
        """Wall clock, nanoseconds since the epoch."""
        return self._wall_clock_ns()

    def close(self) -> None:
        """Export what waits."""
        self._provider.shutdown()


class RequestSpan:
    """The span of one request; does nothing when tracing is off. `trace_parent` goes to the engine."""

    def __init__(self, telemetry: Telemetry, span: Span | None, trace_parent: str) -> None:
        self._telemetry = telemetry
        self._span = span
        self._start_ns = telemetry.now_ns() if span is not None else 0
        self._planned_ns = self._start_ns
        self.trace_parent = trace_parent

    def planned(self, plan: Plan) -> None:
        """The plan is made."""
        if self._span is None:
            return
        self._planned_ns = self._telemetry.now_ns()
        attributes: dict[str, str | int] = {
            "facet.plan": plan.digest,
            "facet.rule": plan.rule,
            "facet.policy_revision": plan.policy_revision,
        }
        self._telemetry.child(self._span, "plan", self._start_ns, self._planned_ns, attributes)

    def finish(self, usage: RequestUsage, error: BaseException | None) -> None:
        """Close the span and those below it."""
        span = self._span
        if span is None:
            return
        end_ns = self._telemetry.now_ns()
        for aspect in usage.aspects:
            attributes: dict[str, str | int] = {
                genai.RESPONSE_MODEL: aspect.model,
                genai.USAGE_INPUT_TOKENS: aspect.prompt_tokens,
                genai.USAGE_OUTPUT_TOKENS: aspect.completion_tokens,
                genai.USAGE_CACHE_READ_TOKENS: aspect.cached_tokens,
                "facet.replica": aspect.replica,
            }
            parent = self._telemetry.child(span, f"aspect {aspect.aspect}", self._planned_ns, end_ns, attributes)
            # The engine reports durations; its last token is the end of the request as near as the gateway can tell.
            start_ns = end_ns - int((aspect.queue_ms + aspect.prefill_ms + aspect.decode_ms) * 1e6)
            for name, length_ms in (
                ("queue", aspect.queue_ms),
                ("prefill", aspect.prefill_ms),
                ("decode", aspect.decode_ms),
            ):
                stop_ns = start_ns + int(length_ms * 1e6)
                self._telemetry.child(parent, name, start_ns, stop_ns, {"facet.replica": aspect.replica})
                start_ns = stop_ns
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            span.set_attribute("error.type", type(error).__name__)
        span.set_attribute(genai.USAGE_INPUT_TOKENS, usage.prompt_tokens)
        span.set_attribute(genai.USAGE_OUTPUT_TOKENS, usage.completion_tokens)
        span.end(end_time=end_ns)


def make_exporter(settings: TelemetrySettings) -> SpanExporter | None:
    """OTLP over HTTP when an endpoint is set. Raises SettingsError when its package is not installed."""
    if not settings.otlp_endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise SettingsError(
            "FACET_TELEMETRY_OTLP_ENDPOINT is set, but the exporter is not installed: pip install 'facet-gateway[otlp]'"
        ) from error
    return OTLPSpanExporter(endpoint=settings.otlp_endpoint)
