"""OmniDraft: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.speculative.omnidraft import Translation
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("omnidraft")


def test_certificate_rejects_a_translation_that_learns_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Translation, "learn", lambda *_: None)
    assert_rejected("omnidraft")


def test_translation_prefers_the_longest_run() -> None:
    translation = Translation()
    translation.direct = {b"a": 1, b"b": 2, b"c": 3}
    letters = [b"a", b"b", b"c"]
    assert translation.translate([10, 11, 12], letters) == [1, 2, 3]
    translation.learn([10, 11], 4)
    translation.learn([10, 11, 12], 5)
    assert translation.translate([10, 11, 12], letters) == [5]
    assert translation.translate([10, 11], letters[:2]) == [4]
    assert translation.translate([10, 13], [b"a", b"?"]) == [1]
