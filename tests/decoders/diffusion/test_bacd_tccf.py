"""Bounded adaptive thresholds (bacd-tccf): its certificate, and mistakes that it rejects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode.certification.denoising import bidirectional
from anydecode.certification.oracles.diffusion.bacd_tccf import CRITIC, MARKER, thinking
from anydecode.decoders.diffusion.canvas import Canvas
from certificates import assert_certified, assert_rejected, ignore_parameter, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("bacd-tccf")


@pytest.mark.parametrize("parameter", ["high", "coarse", "fine", "marker", "low", "critic"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "bacd-tccf", parameter)
    assert_rejected("bacd-tccf")


@pytest.mark.parametrize(
    "defaults",
    [{"low": 0.55}, {"high": 0.95}, {"coarse": 17}, {"fine": 5}, {"marker": "</done>"},
     {"critic": ""}],
)  # fmt: skip
def test_certificate_rejects_other_defaults(
    defaults: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_defaults(monkeypatch, "bacd-tccf", **defaults)
    assert_rejected("bacd-tccf")


@pytest.mark.parametrize("decoder", ["bacd-tccf", "bacd-tccf:cache=dual", "bacd-tccf:cache=window"])
def test_streams_never_show_a_marker_that_the_critic_replaces(decoder: str) -> None:
    with bidirectional(thinking(5)) as llm:
        answer = llm.generate([5, 6, 7], decoder=decoder, max_tokens=100, ignore_eos=True)
        parts = [*llm.stream([5, 6, 7], decoder=decoder, max_tokens=100, ignore_eos=True)]
    text = "".join(part.text for part in parts)
    assert text == answer.text and MARKER.decode() not in text
    assert text[5:].startswith(CRITIC.decode())


def test_certificate_rejects_rows_that_see_coarse_blocks_in_the_second_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    visible = Canvas.visible

    def coarse(self: Canvas, positions: np.ndarray) -> np.ndarray:
        ends = visible(self, positions)
        if self.later_blocks is None:
            return ends
        return np.where(positions < self.later_blocks[0], ends, len(self)).astype(np.int32)

    monkeypatch.setattr(Canvas, "visible", coarse)
    assert_rejected("bacd-tccf")
