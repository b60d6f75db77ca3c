"""Spans of OpenTelemetry, one tree per request, where the environment asks for them.

The standard variables decide: `OTEL_TRACES_EXPORTER` (otlp, console, or any that is installed),
`OTEL_EXPORTER_OTLP_ENDPOINT` and its kin, `OTEL_SERVICE_NAME`, `OTEL_SDK_DISABLED`, sampling.
Attributes go by the conventions for HTTP and generative AI; prompts and answers are never told.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from anydecode.errors import InvalidRequestError, MissingPackageError

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
}
#: Attributes by the names of a request's facts.
_FACTS = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "decoder": "anydecode.decoder",
    "passes": "anydecode.passes",
    "error": "error.type",
}


class Telemetry:
    """Records finished requests with a provider of spans."""

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
        began: int,
        ended: int,
        facts: Mapping[str, Any],
    ) -> None:
        """One request from `began` to `ended` (nanoseconds since 1970), below the caller's span if
        `headers` name one; below it, the time to the first token and the time after it."""
        from opentelemetry import trace

        operation = _OPERATIONS.get(path)
        attributes: dict[str, Any] = {
            "http.request.method": method,
            "url.path": path,
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
            start_time=began,
        )
        if status >= 500:
            span.set_status(trace.Status(trace.StatusCode.ERROR))
        if "ttft_ms" in facts:
            within = trace.set_span_in_context(span)
            first = min(ended, began + int(facts["ttft_ms"] * 1e6))
            for name, start, end in (("first token", began, first), ("decode", first, ended)):
                self._tracer.start_span(name, context=within, start_time=start).end(end)
        span.end(ended)

    def close(self) -> None:
        """Send what has not been sent yet."""
        self._provider.shutdown()


def from_environment(model: str) -> Telemetry | None:
    """What the environment asks for; None if it asks for nothing. Raises `InvalidRequestError`
    where what it asks for is not installed."""
    chosen = os.environ.get("OTEL_TRACES_EXPORTER", "").strip()
    asked = chosen or any(os.environ.get(name) for name in _ENDPOINTS)
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not asked or disabled or chosen == "none":
        return None
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        what, extra = "telemetry, which the environment asks for (OTEL_...),", "telemetry"
        raise MissingPackageError(what, "OpenTelemetry", f"'anydecode[{extra}]'") from None
    name = os.environ.get("OTEL_SERVICE_NAME") or "anydecode"
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    for exporter in (chosen or "otlp").split(","):
        provider.add_span_processor(BatchSpanProcessor(_exporter(exporter.strip())))
    return Telemetry(provider, model)


def _exporter(name: str) -> Any:
    """The exporter that an installed package registers under `name`."""
    known = name
    if name == "otlp":
        protocol = next((os.environ[n] for n in _PROTOCOLS if os.environ.get(n)), "http/protobuf")
        known = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    for point in entry_points(group="opentelemetry_traces_exporter", name=known):
        return point.load()()
    raise InvalidRequestError(
        f"OTEL_TRACES_EXPORTER: no installed package exports to {name!r};"
        " for otlp: pip install 'anydecode[telemetry]'"
    )
