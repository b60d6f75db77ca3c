"""S2D2 passes its certificate; wrong verifications do not."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from anydecode.decoders.diffusion import s2d2
from anydecode.decoders.diffusion.s2d2 import SelfVerified, TwoStreamSpan
from anydecode.kernels.interface import Rows
from certificates import assert_certified, assert_rejected

rejection_steps = s2d2.rejection_steps


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("s2d2")


def test_a_rejected_token_replaced_by_a_plain_sample_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def from_target(
        p: np.ndarray, q: np.ndarray, kind: str, tokens: list[int]
    ) -> Iterator[tuple[float, np.ndarray]]:
        for acceptance, _ in rejection_steps(p, q, kind, tokens):
            yield acceptance, p

    monkeypatch.setattr(s2d2, "rejection_steps", from_target)
    assert_rejected("s2d2")


def test_swapped_distributions_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        s2d2, "rejection_steps", lambda p, q, kind, tokens: rejection_steps(q, p, kind, tokens)
    )
    assert_rejected("s2d2")


def test_masks_that_see_their_own_draft_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows = TwoStreamSpan.write_rows

    def leaky(self: TwoStreamSpan, rows: Rows, at: int, count: int) -> None:
        write_rows(self, rows, at, count)
        assert self._slots is not None
        num_drafted, tails = count - self.masks, [rows.tails]
        for number in range(self.masks):
            row, stop = num_drafted + number, num_drafted - self.masks + number + 1
            tail = np.append(self._slots[:stop], self._slots[row])
            rows.tail_start[at + row] = sum(map(len, tails))
            rows.tail_length[at + row] = len(tail)
            tails.append(tail)
        rows.tails = np.concatenate(tails)

    monkeypatch.setattr(TwoStreamSpan, "write_rows", leaky)
    assert_rejected("s2d2")


def test_a_router_that_never_verifies_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SelfVerified, "verifies", lambda *given: False)
    assert_rejected("s2d2")
