"""Prometheus metrics of a fleet, read when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from anydecode.cluster.ledger import Frame

#: Workers with metrics of their own, in the order of their names. The others are summed.
MAX_LABELLED = 64
#: Their label, which no worker can have as its name.
OTHER = "(others)"

_COUNTS = {
    "tasks": "Samples that were given to the fleet.",
    "encodings": "Images that encode workers have encoded and handed over.",
    "handovers": "Prompts whose keys and values went from one worker to another.",
    "restarts": "Answers that went on, or started again, at another worker.",
    "lost_workers": "Workers that were lost.",
    "quarantines": "Samples that ran alone on a worker, because others were lost under them.",
    "refusals": "Tasks that a worker refused.",
    "role_changes": "Changes of the role of a worker, or of its scenario.",
    "migrations": "Answers that went on at a worker with a larger free cache.",
}
#: By name of the metric: the name in `Fleet.status`, and the help text.
_GAUGES = {
    "tasks": ("tasks", "Tasks on a worker."),
    "waiting_rows": ("waiting_rows", "Rows to compute before all its answers have started."),
    "leases": ("leases", "Prompts whose blocks it keeps for other workers."),
    "cache_positions": ("positions", "Capacity of its key-value cache, in positions."),
    "cache_used": ("used", "Used positions, including cached prefixes."),
}
_COUNTERS = {
    "passes": ("passes", "Forward passes of a worker."),
    "rows": ("rows", "Rows computed in forward passes."),
    "prefix_hit_tokens": ("hits", "Prompt tokens found in its prefix cache."),
    "prefix_restored_tokens": (
        "restored",
        "Prompt tokens restored from stored blocks, or from others'.",
    ),
}


class FleetCollector:
    """A Prometheus collector of the state of a fleet and of its workers.

    Args:
        status: Returns what `FleetLLM.status` does.
    """

    def __init__(self, status: Callable[[], Frame]) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        """Nothing: the metrics depend on the workers."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Counters of the fleet; the workers, and gauges and counters of each."""
        status = self._status()
        for name, text in _COUNTS.items():
            yield CounterMetricFamily(f"anydecode_fleet_{name}", text, value=status["counts"][name])
        workers = sorted(status["workers"], key=lambda one: str(one["name"]))
        numbers = GaugeMetricFamily(
            "anydecode_fleet_workers", "Workers by role and state.", labels=["role", "state"]
        )
        kinds = [(one["role"], one["state"]) for one in workers]
        for kind in sorted(set(kinds)):
            numbers.add_metric(kind, kinds.count(kind))
        yield numbers
        for family, entries in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (entry, text) in entries.items():
                metric = family(f"anydecode_worker_{name}", text, labels=["worker"])
                for worker in workers[:MAX_LABELLED]:
                    metric.add_metric([worker["name"]], worker[entry])
                if rest := workers[MAX_LABELLED:]:
                    metric.add_metric([OTHER], sum(one[entry] for one in rest))
                yield metric
