"""The figure of a plan: how many requests are within the limits, by rate and placement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from anydecode.cluster.control.distserve import Found, Limits
from anydecode.plots import COLOURS, INK, figure, logarithmic

#: Placements that are drawn, the best ones.
_MAX_CURVES = len(COLOURS)


def draw_goodput(file: Path, found: Sequence[Found], limits: Limits, attainment: float) -> None:
    """Draw the share of requests within the limits by rate, and the goodput of each placement.

    Args:
        file: The file of the figure.
        found: The placements, the best first.
        limits: The limits.
        attainment: The share of requests that have to be within them.
    """
    within = f"first token within {limits.ttft:g} s, others within {limits.tpot:g} s"
    with figure(file, f"Requests within the limits ({within})") as [panel]:
        for one, colour in zip(found[:_MAX_CURVES], COLOURS, strict=False):
            rates, shares = zip(*one.probes, strict=True)
            panel.plot(rates, shares, marker="o", color=colour, label=str(one.placement))
            if one.goodput:
                panel.axvline(one.goodput, color=colour, linestyle=":")
        panel.axhline(attainment, color=INK, linestyle="--")
        panel.set(xlabel="requests per second", ylim=(0, 1.05))
        logarithmic(panel, "x")
        panel.yaxis.set_major_formatter("{x:.0%}")
