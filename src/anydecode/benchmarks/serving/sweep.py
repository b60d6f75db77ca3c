"""Searches for goodput by bisection over given rates: the largest rate at which a server meets a
latency objective, as defined by DistServe (Zhong et al., OSDI 2024, arXiv:2401.09670)."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from anydecode.benchmarks.serving.baselines import Load, median_ratio, request_form
from anydecode.benchmarks.serving.replay import Endpoint, summary
from anydecode.report import table_console


@dataclass
class Search:
    """Bisection over ascending `rates`. `low` is the index of the largest rate known to meet the
    objective (-1 if none), `high` that of the smallest rate known to miss it."""

    rates: list[float]
    low: int = -1
    high: int = field(init=False)

    def __post_init__(self) -> None:
        self.high = len(self.rates)

    @property
    def next(self) -> float | None:
        """The next rate to try; None when the search is complete."""
        return self.rates[(self.low + self.high) // 2] if self.high - self.low > 1 else None

    def record(self, is_met: bool) -> None:
        """Record whether the objective was met at the rate `next`."""
        middle = (self.low + self.high) // 2
        self.low, self.high = (middle, self.high) if is_met else (self.low, middle)

    @property
    def goodput(self) -> float:
        """The largest rate that met the objective; 0 if none did."""
        return self.rates[self.low] if self.low >= 0 else 0.0


def sweep(
    endpoints: list[Endpoint], load: Load, rates: list[float], share: float, rounds: int
) -> dict[str, Any]:
    """Search the goodput of every endpoint: the largest of `rates` at which `share` of the requests
    meet the objective (median over rounds). Endpoints take turns. Also returns the results of every
    run."""
    goodputs: dict[str, list[float]] = {endpoint.name: [] for endpoint in endpoints}
    runs: dict[str, list[dict[str, Any]]] = {endpoint.name: [] for endpoint in endpoints}
    for number in range(rounds):
        searches = [(endpoint, Search(sorted(rates))) for endpoint in endpoints]
        while any(search.next is not None for _, search in searches):
            for endpoint, search in searches:
                if (rate := search.next) is not None:
                    results = summary(load.run(endpoint, rate, number), load.objective)
                    runs[endpoint.name].append({"round": number + 1, "rate": rate, **results})
                    search.record(results["attainment"] >= share)
        for endpoint, search in searches:
            goodputs[endpoint.name].append(search.goodput)
    first = endpoints[0].name
    return {
        endpoint.name: {
            **request_form(endpoint),
            "goodput_requests_per_second": statistics.median(goodputs[endpoint.name]),
            "goodput_per_round": goodputs[endpoint.name],
            "ratio": median_ratio(goodputs[first], goodputs[endpoint.name]),
            "runs": runs[endpoint.name],
        }
        for endpoint in endpoints
    }


def print_sweep(servers: dict[str, Any], rates: list[float], share: float) -> None:
    """Print a table with a line per server and tried rate, then the goodputs."""
    from rich.table import Table

    names = ("rate/s", "met", "tokens/s", "ttft 50%", "99%", "tpot 50%", "99%", "itl 50%", "99%")
    table = Table("server", box=None)
    for name in names:
        table.add_column(name, justify="right")
    for server, server_results in servers.items():
        for run in sorted(server_results["runs"], key=lambda one: one["rate"]):
            times = [run[kind][p] for kind in ("ttft", "tpot", "itl") for p in ("p50", "p99")]
            table.add_row(
                server, f"{run['rate']:g}", f"{run['attainment']:.0%}",
                f"{run['tokens_per_second']:.1f}",
                *("" if value is None else f"{value * 1e3:.0f} ms" for value in times),
            )  # fmt: skip
    table_console().print(table)
    first = next(iter(servers))
    for server, server_results in servers.items():
        goodput = server_results["goodput_requests_per_second"]
        bound = " or more" if goodput == max(rates) else ""
        line = f"{server}: goodput {goodput:g} requests/s{bound}"
        if not goodput:
            line = f"{server}: goodput below {min(rates):g} requests/s"
        if server != first and server_results["ratio"] is not None:
            line += f"; {first}'s is {server_results['ratio']:.2f} times as much"
        print(line)
    print(f"(goodput: the largest rate at which {share:.0%} of the requests met the objective)")
