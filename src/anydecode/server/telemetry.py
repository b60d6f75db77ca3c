"""OpenTelemetry tracing: one tree of spans per request, if the environment enables it.

Configured by the standard variables: `OTEL_TRACES_EXPORTER` (otlp, console, or any installed one),
`OTEL_EXPORTER_OTLP_ENDPOINT` and related ones, `OTEL_SERVICE_NAME`, `OTEL_SDK_DISABLED`, and those
for sampling. Attributes follow the semantic conventions for HTTP and generative AI. Prompts,
answers, texts of errors and API keys are never recorded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from anydecode.errors import InvalidRequestError, MissingPackageError

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
#: The name of the operation in traces, by path.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/fim/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}
#: Span attributes, by the name of the request's fact.
_FACTS = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "decoder": "anydecode.decoder",
    "passes": "anydecode.passes",
    "error": "error.type",
}


class Telemetry:
    """Records finished requests with a tracer provider."""

    def __init__(self, provider: Any, model: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("anydecode")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def record(
        self,
        *,
        method: str,
        path: str,
        status: int,
        headers: Mapping[str, str],
        start_ns: int,
        end_ns: int,
        facts: Mapping[str, Any],
    ) -> None:
        """Record one request as a span, a child of the caller's span if `headers` name one. Child
        spans cover the time to the first token and the time after it.

        Args:
            method: HTTP method.
            path: Path of the endpoint, with the names of its parameters.
            status: HTTP status.
            headers: Request headers.
            start_ns: Start, in nanoseconds since the Unix epoch.
            end_ns: End, in nanoseconds since the Unix epoch.
            facts: What the handler recorded about the request, by the names in `_FACTS`.
        """
        from opentelemetry import trace

        operation = OPERATIONS.get(path)
        attributes: dict[str, Any] = {
            "http.request.method": method,
            "http.route": path,
            "http.response.status_code": status,
        }
        if operation is not None:
            attributes["gen_ai.operation.name"] = operation
            attributes["gen_ai.request.model"] = self._model
        attributes |= {name: facts[fact] for fact, name in _FACTS.items() if fact in facts}
        if "finish" in facts:
            attributes["gen_ai.response.finish_reasons"] = [facts["finish"]]
        span = self._tracer.start_span(
            f"{operation} {self._model}" if operation else f"{method} {path}",
            context=self._propagator.extract(headers),
            kind=trace.SpanKind.SERVER,
            attributes=attributes,
            start_time=start_ns,
        )
        if status >= 500:
            span.set_status(trace.Status(trace.StatusCode.ERROR))
        if "ttft_ms" in facts:
            parent = trace.set_span_in_context(span)
            first = min(end_ns, start_ns + int(facts["ttft_ms"] * 1e6))
            for name, start, end in (("first token", start_ns, first), ("decode", first, end_ns)):
                self._tracer.start_span(name, context=parent, start_time=start).end(end)
        span.end(end_ns)

    def close(self) -> None:
        """Export the remaining spans and shut down."""
        self._provider.shutdown()


def from_environment(model: str) -> Telemetry | None:
    """The telemetry that the environment configures; None if it configures none.

    Raises:
        MissingPackageError: If OpenTelemetry is not installed.
        InvalidRequestError: If an exporter is not installed.
    """
    chosen = os.environ.get("OTEL_TRACES_EXPORTER", "").strip()
    is_requested = chosen or any(os.environ.get(name) for name in _ENDPOINTS)
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not is_requested or disabled or chosen == "none":
        return None
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        what, extra = "telemetry, which the environment enables (OTEL_...),", "telemetry"
        raise MissingPackageError(what, "OpenTelemetry", f"'anydecode[{extra}]'") from None
    name = os.environ.get("OTEL_SERVICE_NAME") or "anydecode"
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    for exporter in (chosen or "otlp").split(","):
        provider.add_span_processor(BatchSpanProcessor(_exporter(exporter.strip())))
    return Telemetry(provider, model)


def _exporter(name: str) -> Any:
    """An instance of the exporter that an installed package registers under `name`."""
    entry_point = name
    if name == "otlp":
        protocol = next((os.environ[n] for n in _PROTOCOLS if os.environ.get(n)), "http/protobuf")
        entry_point = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    for point in entry_points(group="opentelemetry_traces_exporter", name=entry_point):
        return point.load()()
    raise InvalidRequestError(
        f"OTEL_TRACES_EXPORTER: no installed package exports to {name!r};"
        " for otlp: pip install 'anydecode[telemetry]'"
    )
