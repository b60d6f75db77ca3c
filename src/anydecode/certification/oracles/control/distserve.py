"""Oracle test of distserve (DistServe, arXiv:2401.09670): goodputs that are known in closed form.

A prompt takes `prompt` seconds of a worker and an answer `answer`, and everything is within the
limits up to the rate that the slower stage can serve."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from anydecode import catalogue
from anydecode.certification.checks import Check, oracle_test
from anydecode.cluster.control.distserve import (
    Latency,
    Limits,
    Placement,
    placements,
    units,
)

_LIMITS = Limits(ttft=1.0, tpot=0.1)


def _capacity(placement: Placement, prompt: Fraction, answer: Fraction) -> Fraction:
    if placement.mixed:
        return placement.mixed / (prompt + answer)
    return min(placement.prefill / prompt, placement.decode / answer)


@oracle_test("distserve")
def distserve() -> Iterator[Check]:
    """The best of all placements of 1 to 6 workers, and its goodput within 5%."""
    for workers in range(1, 7):
        for prompt, answer in ((1, 5), (3, 4), (7, 2), (1, 1)):
            yield _known(workers, Fraction(prompt, 10), Fraction(answer, 10))
    for prompt, answer, rate in ((1, 5, 40), (3, 4, 7), (7, 2, 100), (1, 1, 1)):
        yield _replicas(Fraction(prompt, 10), Fraction(answer, 10), rate)
    yield from _shares()
    yield _next_placement()
    yield _all_placements()


def _known(workers: int, prompt: Fraction, answer: Fraction) -> Check:
    def serve(placement: Placement, rate: float) -> list[Latency]:
        is_within = rate <= _capacity(placement, prompt, answer)
        return [(0.5, 0.05) if is_within else (9.0, 9.0)] * 10

    candidates = placements(workers)
    best = max(_capacity(one, prompt, answer) for one in candidates)
    found = catalogue.build("distserve").search(candidates, _LIMITS, serve)
    errors = [
        one.placement
        for one in found
        if not (
            one.goodput <= _capacity(one.placement, prompt, answer) <= Fraction(105, 100)
            * Fraction(one.goodput)
        )
    ]  # fmt: skip
    is_best = _capacity(found[0].placement, prompt, answer) * Fraction(105, 100) >= best
    name = f"{workers} workers, prompts of {prompt} s and answers of {answer} s"
    return Check(name, is_best and not errors, f"{found[0]}, {errors}")


def _replicas(prompt: Fraction, answer: Fraction, rate: int) -> Check:
    """Units of up to 6 workers, where prompts and answers on one worker take twice as long: the
    best one serves the most per worker, and its replicas are the fewest that serve the rate."""

    def total(one: Placement) -> Fraction:
        return _capacity(one, prompt, answer) / (2 if one.mixed else 1)

    def serve(placement: Placement, rate: float) -> list[Latency]:
        is_within = rate <= total(placement)
        return [(0.5, 0.05) if is_within else (9.0, 9.0)]

    def per_worker(one: Placement) -> Fraction:
        return total(one) / (one.mixed + one.prefill + one.decode)

    candidates = units(6)
    num_of_each_size = [
        sum(one.mixed + one.prefill + one.decode == size for one in candidates)
        for size in range(1, 7)
    ]
    best = catalogue.build("distserve").search(candidates, _LIMITS, serve)[0]
    share = max(map(per_worker, candidates))
    number, goodput = best.replicas(rate), Fraction(best.goodput)
    is_right = (
        num_of_each_size == [1, 2, 3, 4, 5, 6]
        and per_worker(best.placement) * Fraction(105, 100) >= share
        and number * goodput >= rate > (number - 1) * goodput
    )
    name = f"replicas for {rate} requests/s, prompts of {prompt} s and answers of {answer} s"
    return Check(name, is_right, f"{number} x {best}, {num_of_each_size}")


def _shares() -> Iterator[Check]:
    """At any rate the same requests are within the limits: 90% are enough, 89% are not; a request
    that is within one limit alone does not count."""
    within, late, slow = (1.0, 0.1), (1.1, 0.0), (0.0, 0.11)
    for name, latencies, is_enough in (
        ("90 of 100", [within] * 90 + [late] * 10, True),
        ("89 of 100", [within] * 89 + [slow] * 11, False),
        ("6 late and 6 slow of 100", [within] * 88 + [late] * 6 + [slow] * 6, False),
        ("failed requests", [within] * 80 + [(float("inf"), float("inf"))] * 20, False),
    ):
        search = catalogue.build("distserve")
        rates: list[float] = []

        def serve(
            placement: Placement, rate: float, latencies: list[Latency] = latencies,
            rates: list[float] = rates,
        ) -> list[Latency]:  # fmt: skip
            rates.append(rate)
            return latencies

        [found] = search.search([Placement(mixed=1)], _LIMITS, serve)
        expected = max(rates) if is_enough else 0.0
        yield Check(
            name, found.goodput == expected and len(rates) == (24 if is_enough else 11), str(found)
        )


def _next_placement() -> Check:
    """Two placements serve every rate within the limits, the one between them 0.75 requests per
    second at most: its goodput does not depend on theirs."""
    between = Placement(prefill=1, decode=1)

    def serve(placement: Placement, rate: float) -> list[Latency]:
        return [(0.5, 0.05) if placement != between or rate <= 0.75 else (9.0, 9.0)]

    candidates = [Placement(mixed=1), between, Placement(mixed=2)]
    search = catalogue.build("distserve").search(candidates, _LIMITS, serve)
    found = {one.placement: one.goodput for one in search}
    is_right = found == {candidates[0]: 2.0**23, between: 0.75, candidates[2]: 2.0**23}
    return Check("a placement after one that serves every rate", is_right, str(found))


def _all_placements() -> Check:
    found = {(one.mixed, one.prefill, one.decode) for one in placements(4)}
    expected = {(4, 0, 0), (0, 1, 3), (0, 2, 2), (0, 3, 1)}
    return Check("the placements of four workers", found == expected, str(found))
