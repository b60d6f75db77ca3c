"""Figures for Prometheus, read from the engine when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from anydecode.engine.generation import Generation
from anydecode.engine.llm import LLM
from anydecode.engine.model_runner import ModelRunner

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0)
_PER_PASS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 16.0)

#: By name: what it is, and how it is read.
Figures = dict[str, tuple[str, Callable[[ModelRunner], float]]]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counters and histograms of one server; gauges come from its engine."""

    def __init__(self, llm: LLM) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "requests", "Requests answered, by endpoint and status.", "endpoint", "status"
        )
        self.cancelled = self._counter("cancelled_requests", "Clients that left early.")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.generated = self._counter("generation_tokens", "Tokens said.")
        self.first = self._histogram(
            "time_to_first_token_seconds", "From submission to the first token.", _SECONDS
        )
        self.per_token = self._histogram(
            "time_per_output_token_seconds", "Between tokens, the mean of a request.", _PER_TOKEN
        )
        self.whole = self._histogram("request_seconds", "From submission to the end.", _SECONDS)
        self.per_pass = self._histogram(
            "tokens_per_pass", "Tokens accepted per pass of the target, by request.", _PER_PASS
        )
        self.registry.register(EngineFigures(llm))

    def record(self, generations: list[Generation]) -> None:
        """Count finished answers."""
        for generation in generations:
            stats = generation.stats
            self.prompt_tokens.inc(stats.num_prompt_tokens)
            self.generated.inc(stats.num_tokens)
            self.first.observe(stats.time_to_first_token)
            self.whole.observe(stats.seconds)
            if stats.passes:
                self.per_pass.observe(stats.tokens_per_pass)
            if stats.num_tokens > 1:
                spent = stats.seconds - stats.time_to_first_token
                self.per_token.observe(spent / (stats.num_tokens - 1))

    def exposition(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"anydecode_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"anydecode_{name}", text, registry=self.registry, buckets=buckets)


class EngineFigures:
    """The engine's own state as metrics."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.engine
        self._driver = llm.driver

    def describe(self) -> list[Metric]:
        """Nothing ahead of time: what there is depends on the lanes."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Gauges and counters, per lane where lanes differ."""
        engine = self._engine
        yield GaugeMetricFamily(
            "anydecode_engine_up",
            "1 while the engine runs, 0 once a fault of its own has stopped it.",
            float(self._driver.error is None),
        )
        yield GaugeMetricFamily(
            "anydecode_running_sequences", "Sequences being decoded.", len(engine.running)
        )
        yield GaugeMetricFamily(
            "anydecode_waiting_sequences", "Sequences that wait for a place.", len(engine.waiting)
        )
        yield CounterMetricFamily(
            "anydecode_preemptions", "Sequences that gave way to others.", engine.num_preemptions
        )
        lane_gauges: Figures = {
            "cache_positions": ("Positions the cache holds.", lambda runner: runner.pool.num_slots),
            "cache_used": ("Positions in use, shared prefixes included.",
                           lambda runner: runner.pool.num_used),
            "cache_prefix": ("Positions kept for prefixes to come.",
                             lambda runner: runner.prefixes.num_slots),
            "spill_bytes": ("Bytes of prefixes kept outside the cache.", _spilled),
        }  # fmt: skip
        lane_counters: Figures = {
            "prefix_hit_tokens": ("Prompt tokens found in the cache.",
                                  lambda runner: runner.prefixes.num_hits),
            "prefix_restored_tokens": ("Of these, brought back from the spill.",
                                       lambda runner: runner.prefixes.num_restored),
            "passes": ("Passes run.", lambda runner: runner.num_passes),
            "rows": ("Rows run.", lambda runner: runner.num_rows),
            "pass_seconds": ("Time spent in passes.", lambda runner: runner.seconds),
        }  # fmt: skip
        for name, (text, read) in lane_gauges.items():
            gauge = GaugeMetricFamily(f"anydecode_{name}", text, labels=["lane"])
            for runner in list(engine.runners.values()):
                gauge.add_metric([runner.name], read(runner))
            yield gauge
        for name, (text, read) in lane_counters.items():
            counter = CounterMetricFamily(f"anydecode_{name}", text, labels=["lane"])
            for runner in list(engine.runners.values()):
                counter.add_metric([runner.name], read(runner))
            yield counter


def _spilled(runner: ModelRunner) -> float:
    spill = runner.prefixes.spill
    return 0 if spill is None else spill.num_bytes
