"""Result rows of the single answers of `anydecode bench speculative`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from anydecode.benchmarks.speculative_answers import MULTI_STEP, PLAIN, TimedAnswer

RESAMPLES = 2000


#: Plain decoding or `multi-step` by temperature and prompt, cold.
Baseline = Mapping[tuple[float, int], TimedAnswer]


def summary(runs: Sequence[TimedAnswer]) -> list[dict[str, Any]]:
    """Result rows by temperature, warm or cold, without or with looping answers, method and
    category. The category "overall" is the mean over categories. Ratios are paired by prompt, to
    plain decoding and to cold `multi-step`."""
    rows: list[dict[str, Any]] = []
    plain, multi_step = (_cold(runs, method) for method in (PLAIN, MULTI_STEP))
    keys = dict.fromkeys((r.temperature, r.warm, r.method) for r in runs if r.method != PLAIN)
    for temperature, warm, method in keys:
        for with_loops in (False, True):
            chosen = [
                r
                for r in runs
                if (r.temperature, r.warm, r.method) == (temperature, warm, method)
                and _is_comparable(r, plain, multi_step, with_loops)
            ]
            label = {
                "temperature": temperature,
                "warm": warm,
                "loops": with_loops,
                "method": method,
            }
            parts = [
                {**label, "category": category, **_results(category_runs, plain, multi_step)}
                for category, category_runs in _by_category(chosen)
            ]
            if parts:
                overall = _overall(parts, chosen, plain, multi_step)
                rows += [*parts, {**label, "category": "overall", **overall}]
    return rows


def _cold(runs: Sequence[TimedAnswer], method: str) -> Baseline:
    return {(r.temperature, r.prompt): r for r in runs if r.method == method and not r.warm}


def _is_comparable(
    answer: TimedAnswer, plain: Baseline, multi_step: Baseline, with_loops: bool
) -> bool:
    """Whether the answer and both baselines have tokens that came after the first and, except
    `with_loops`, do not loop."""
    key = answer.temperature, answer.prompt
    compared = (answer, plain[key], multi_step[key])
    return all(one.rate > 0 and (with_loops or not one.loops) for one in compared)


def _by_category(runs: Sequence[TimedAnswer]) -> Iterator[tuple[str, list[TimedAnswer]]]:
    for category in dict.fromkeys(r.category for r in runs):
        yield category, [r for r in runs if r.category == category]


def _ratios(runs: Sequence[TimedAnswer], baseline: Baseline) -> np.ndarray:
    """float64 `[len(runs)]`: tokens per second over those of the baseline, per prompt."""
    return np.array([r.rate / baseline[r.temperature, r.prompt].rate for r in runs])


def _results(runs: Sequence[TimedAnswer], plain: Baseline, multi_step: Baseline) -> dict[str, Any]:
    return {
        "prompts": len(runs),
        "tokens_per_pass": sum(r.num_tokens for r in runs) / max(1, sum(r.passes for r in runs))
        if runs[0].passes
        else 0.0,
        **speedup([_ratios(runs, plain)]),
        "over_multi_step": speedup([_ratios(runs, multi_step)]),
        "modelled": float(np.mean([r.modelled for r in runs])),
        "draft_share": sum(r.draft_seconds for r in runs) / sum(r.seconds for r in runs),
        "same_text": sum(r.same_text for r in runs),
    }


def _overall(
    parts: Sequence[dict[str, Any]],
    runs: Sequence[TimedAnswer],
    plain: Baseline,
    multi_step: Baseline,
) -> dict[str, Any]:
    groups = [category_runs for _, category_runs in _by_category(runs)]
    mean = {
        name: float(np.mean([part[name] for part in parts]))
        for name in ("tokens_per_pass", "modelled")
    }
    return {
        **_results(runs, plain, multi_step),
        **mean,
        **speedup([_ratios(group, plain) for group in groups]),
        "over_multi_step": speedup([_ratios(group, multi_step) for group in groups]),
    }


def speedup(groups: Sequence[np.ndarray]) -> dict[str, Any]:
    """Ratios in groups: the mean over groups of each group's mean, its interval (None for a single
    ratio), and the smallest ratio and the fifth percentile of all groups together."""
    ratios = np.concatenate(groups)
    return {
        "speedup": float(np.mean([group.mean() for group in groups])),
        "interval": list(interval(groups)) if len(ratios) > 1 else None,
        "smallest": float(ratios.min()),
        "fifth_percentile": float(np.percentile(ratios, 5)),
    }


def interval(groups: Sequence[np.ndarray], resamples: int = RESAMPLES) -> tuple[float, float]:
    """95% bootstrap interval of the mean over groups of each group's mean. Values are resampled
    within their group; if a group has only one, which shows no spread, all values are resampled
    together, each weighted by its share of the mean."""
    random = np.random.default_rng(0)
    if min(map(len, groups)) > 1:
        strata = [(group, np.ones(len(group))) for group in groups]
    else:
        weights = [np.full(len(group), 1 / len(group)) for group in groups]
        strata = [(np.concatenate(groups), np.concatenate(weights))]
    means = []
    for values, shares in strata:
        drawn = random.integers(0, len(values), (resamples, len(values)))
        means.append((values * shares)[drawn].sum(axis=1) / shares[drawn].sum(axis=1))
    low, high = np.percentile(np.mean(means, axis=0), [2.5, 97.5])
    return float(low), float(high)
