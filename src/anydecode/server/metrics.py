"""Prometheus metrics; those of the engine are read when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from anydecode.api.generation import Generation
from anydecode.api.llm import LLM
from anydecode.engine.model_runner import ModelRunner

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0)
_PER_PASS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 16.0)

#: By metric name: its help text, and the function that reads it from a model runner.
Readers = dict[str, tuple[str, Callable[[ModelRunner], float]]]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counters and histograms of one server, and the metrics of its engines.

    Args:
        models: Returns the loaded models, by name.
        has_names: Whether the metrics of an engine have the name of its model as a label.
    """

    def __init__(self, models: Callable[[], dict[str, LLM]], has_names: bool = False) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "requests", "HTTP requests, by endpoint and status.", "endpoint", "status"
        )
        self.batch_lines = self._counter(
            "batch_requests", "Requests of batches, by endpoint and status.", "endpoint", "status"
        )
        self.cancelled = self._counter("cancelled_requests", "Requests whose client disconnected.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, as in usage.")
        self.generated = self._counter("generation_tokens", "Generated tokens, as in usage.")
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Time from submission to the first token.", _SECONDS
        )
        self.time_per_token = self._histogram(
            "time_per_output_token_seconds", "Mean time between tokens of a request.", _PER_TOKEN
        )
        self.request_seconds = self._histogram(
            "request_seconds", "Time from submission to the end.", _SECONDS
        )
        self.tokens_per_pass = self._histogram(
            "tokens_per_pass", "Tokens per forward pass of the target model, by request.", _PER_PASS
        )
        self.registry.register(EngineCollector(models, has_names))

    def record(self, generations: list[Generation]) -> None:
        """Record the times and passes of finished generations."""
        for generation in generations:
            stats = generation.stats
            self.time_to_first_token.observe(stats.time_to_first_token)
            self.request_seconds.observe(stats.seconds)
            if stats.passes:
                self.tokens_per_pass.observe(stats.tokens_per_pass)
            if stats.num_later_tokens > 0:
                decode_seconds = stats.seconds - stats.time_to_first_token
                self.time_per_token.observe(decode_seconds / stats.num_later_tokens)

    def exposition(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"anydecode_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"anydecode_{name}", text, registry=self.registry, buckets=buckets)


def _spill_bytes(runner: ModelRunner) -> float:
    spill = runner.prefixes.spill
    return 0 if spill is None else spill.num_bytes


_GAUGES: dict[str, tuple[str, Callable[[LLM], float]]] = {
    "engine_up": ("1 while the engine runs, 0 after a fault has stopped it.",
                  lambda llm: llm.driver.error is None),
    "running_sequences": ("Running sequences.", lambda llm: llm.driver.num_running),
    "waiting_sequences": ("Waiting sequences.", lambda llm: llm.driver.num_waiting),
}  # fmt: skip
_COUNTERS: dict[str, tuple[str, Callable[[LLM], float]]] = {
    "preemptions": ("Preempted sequences.", lambda llm: llm.engine.num_preemptions),
}
_RUNNER_GAUGES: Readers = {
    "cache_positions": ("Capacity of the key-value cache, in positions.",
                        lambda runner: runner.pool.num_slots),
    "cache_used": ("Used positions, including cached prefixes.",
                   lambda runner: runner.pool.num_used),
    "cache_prefix": ("Positions that hold cached prefixes.",
                     lambda runner: runner.prefixes.num_slots),
    "spill_bytes": ("Bytes of prefixes in the spill.", _spill_bytes),
}  # fmt: skip
_RUNNER_COUNTERS: Readers = {
    "prefix_hit_tokens": ("Prompt tokens found in the prefix cache.",
                          lambda runner: runner.prefixes.num_hits),
    "prefix_restored_tokens": ("Prompt tokens restored from the spill.",
                               lambda runner: runner.prefixes.num_restored),
    "passes": ("Forward passes.", lambda runner: runner.num_passes),
    "rows": ("Rows computed in forward passes.", lambda runner: runner.num_rows),
    "pass_seconds": ("Time in forward passes, in seconds.", lambda runner: runner.seconds),
}  # fmt: skip


class EngineCollector:
    """A Prometheus collector of the state of each engine. Arguments as for `Metrics`."""

    def __init__(self, models: Callable[[], dict[str, LLM]], has_names: bool) -> None:
        self._models = models
        self._has_names = has_names

    def describe(self) -> list[Metric]:
        """Nothing: the metrics depend on the model runners."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Gauges and counters of the engines, and those of each model runner."""
        models = self._models()
        yield self._runner_info(models)
        for kind, readers in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (text, read) in readers.items():
                metric = kind(f"anydecode_{name}", text, labels=self._labels())
                for model, llm in models.items():
                    metric.add_metric(self._labels(model), read(llm))
                yield metric
        for kind, runner_readers in (
            (GaugeMetricFamily, _RUNNER_GAUGES),
            (CounterMetricFamily, _RUNNER_COUNTERS),
        ):
            for name, (text, read_runner) in runner_readers.items():
                metric = kind(f"anydecode_{name}", text, labels=[*self._labels(), "runner"])
                for model, llm in models.items():
                    for runner in list(llm.engine.runners.values()):
                        values = [*self._labels(model), runner.name]
                        metric.add_metric(values, read_runner(runner))
                yield metric

    def _runner_info(self, models: dict[str, LLM]) -> Metric:
        metric = GaugeMetricFamily(
            "anydecode_runner_info",
            "The model of each runner, such as the draft model's; always 1.",
            labels=[*self._labels(), "runner", "name"],
        )
        for model, llm in models.items():
            for runner in list(llm.engine.runners.values()):
                metric.add_metric([*self._labels(model), runner.name, runner.model.name], 1)
        return metric

    def _labels(self, value: str = "model") -> list[str]:
        """The label of the model, or its value, if there is one."""
        return [value] if self._has_names else []
