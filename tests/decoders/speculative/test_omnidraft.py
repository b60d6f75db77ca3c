"""OmniDraft: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tokenizers

from anydecode.api.llm import LLM
from anydecode.certification.oracles.speculative import omnidraft as oracle
from anydecode.decoders.speculative import omnidraft
from anydecode.decoders.speculative.acceptance_head import OnlineHead
from anydecode.decoders.speculative.omnidraft import (
    Lesson,
    OmniDrafter,
    Translation,
    continuation,
    hybrid_loss,
)
from anydecode.errors import InvalidRequestError
from anydecode.models.scripted import ScriptedModel
from anydecode.models.tokenizers import HFTokenizer
from certificates import assert_certified, assert_rejected, replace_defaults


def test_certificate() -> None:
    assert_certified("omnidraft")


def test_certificate_rejects_a_translation_that_learns_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Translation, "learn", lambda *_: None)
    assert_rejected("omnidraft")


def test_certificate_rejects_a_drafter_that_is_never_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OmniDrafter, "train", lambda self: None)
    assert_rejected("omnidraft")


def test_certificate_rejects_the_forward_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(lessons: list[Lesson], direct: np.ndarray) -> Any:
        def loss(logits: np.ndarray) -> tuple[float, np.ndarray]:
            total, errors = rest(logits)
            for row, error, lesson in zip(logits, errors, lessons, strict=True):
                if lesson.target is not None:
                    q = np.exp(row[direct]) / np.exp(row[direct]).sum()
                    error[direct] = (q - lesson.target) / len(lessons)
            return total, errors

        rest = hybrid_loss(lessons, direct)
        return loss

    monkeypatch.setattr(oracle, "hybrid_loss", forward)
    assert_rejected("omnidraft")


def test_certificate_rejects_lessons_behind_the_first_rejection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lessons = omnidraft._Session._lessons

    def all_of_them(self: Any, round: Any, *tested: int) -> list[Lesson]:
        return lessons(self, round, len(round.tree), len(round.tree))

    monkeypatch.setattr(omnidraft._Session, "_lessons", all_of_them)
    assert_rejected("omnidraft")


def test_certificate_rejects_runs_of_equal_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    lessons = omnidraft._Session._lessons

    def equal(self: Any, *given: Any) -> list[Lesson]:
        return [replace(one, weight=1.0) for one in lessons(self, *given)]

    monkeypatch.setattr(omnidraft._Session, "_lessons", equal)
    assert_rejected("omnidraft")


def test_certificate_rejects_another_number_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_defaults(monkeypatch, "omnidraft", size=7)
    assert_rejected("omnidraft")


def test_translation_prefers_the_longest_run() -> None:
    translation = Translation()
    translation.direct = {b"a": 1, b"b": 2, b"c": 3}
    letters = [b"a", b"b", b"c"]
    assert translation.translate([10, 11, 12], letters) == [(1, 1), (2, 1), (3, 1)]
    translation.learn([10, 11], 4)
    translation.learn([10, 11, 12], 5)
    assert translation.translate([10, 11, 12], letters) == [(5, 3)]
    assert translation.translate([10, 11], letters[:2]) == [(4, 2)]
    assert translation.translate([10, 13], [b"a", b"?"]) == [(1, 1)]


class SentencePiece(HFTokenizer):
    """A tokenizer that puts a space before every text: letters, the space and bytes, and a token
    for "ab"."""

    vocab_size = 288

    def __init__(self) -> None:
        letters = [chr(code) for code in range(97, 123)]
        names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *letters, "ab"]
        vocab = {name: number for number, name in enumerate(names)}
        model = tokenizers.models.BPE(
            vocab=vocab, merges=[("a", "b")], unk_token="<unk>", byte_fallback=True
        )
        backend = tokenizers.Tokenizer(model)
        marks = tokenizers.normalizers.Replace(" ", "\u2581")
        first = tokenizers.normalizers.Prepend("\u2581")
        backend.normalizer = tokenizers.normalizers.Sequence([first, marks])
        backend.decoder = tokenizers.decoders.Replace("\u2581", " ")
        super().__init__(backend)


@pytest.mark.parametrize("text", ["ca", " ca", "abba", "\nab", "a\u00e9 "])
def test_a_tokenizer_that_puts_a_space_before_texts_continues_them(text: str) -> None:
    tokenizer = SentencePiece()
    written = tokenizer.encode(text, special=False)
    assert b"".join(map(tokenizer.token_bytes, written)) == b" " + text.encode()
    found = continuation(tokenizer, text)
    assert b"".join(map(tokenizer.token_bytes, found)) == text.encode()
    assert found == tokenizer.encode("x" + text, special=False)[2:]


def _read_by_the_draft_model() -> tuple[str, str, set[tuple[int, ...]]]:
    """A text, the longest that a draft model with such a tokenizer has read of it, and the
    spellings that are learned."""
    ours, theirs, read = oracle.PairTokenizer(), SentencePiece(), [()]
    text = "cabd ca ab" * 4

    def target_logits(seen: tuple[int, ...]) -> np.ndarray:
        row = np.zeros(ours.vocab_size, np.float32)
        row[ours.encode(text)[len(seen) % len(ours.encode(text))]] = 30.0
        return row

    def draft_logits(seen: tuple[int, ...]) -> np.ndarray:
        read[0] = max(read[0], seen, key=len)
        return np.zeros(theirs.vocab_size, np.float32)

    draft = ScriptedModel(draft_logits, vocab_size=theirs.vocab_size)
    draft.tokenizer = theirs  # type: ignore[attr-defined]
    target = ScriptedModel(target_logits, vocab_size=ours.vocab_size)
    with LLM(target, tokenizer=ours, draft=draft, cache_positions=1024) as llm:
        method = llm.decoder("omnidraft:size=1")
        llm.generate(ours.encode("cabd"), decoder=method, max_tokens=20, ignore_eos=True)
        runs = set(method.drafter.translation.runs)  # type: ignore[attr-defined]
    return text, b"".join(map(theirs.token_bytes, read[0])).decode(), runs


def test_a_draft_model_with_such_a_tokenizer_reads_the_text_as_it_is() -> None:
    text, read, runs = _read_by_the_draft_model()
    assert len(read) > 24 and text.startswith(read[1:])
    spelled = SentencePiece().encode
    assert runs == {tuple(spelled(pair, special=False)[1:]) for pair in ("ca", "bd")}


def test_spaces_between_the_parts_of_a_text_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        omnidraft, "continuation", lambda tokenizer, text: tokenizer.encode(text, special=False)
    )
    text, read, runs = _read_by_the_draft_model()
    assert not text.startswith(read[1:]) and not runs


def test_certificate_rejects_a_head_that_is_never_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnlineHead, "train", lambda self: None)
    assert_rejected("omnidraft")


def test_certificate_rejects_a_length_that_ignores_the_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace_defaults(monkeypatch, "omnidraft", bound=1.0)
    assert_rejected("omnidraft")


def test_certificate_rejects_acceptances_behind_the_first_rejection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add = omnidraft._Session._add_acceptances

    def all_of_them(self: Any, *tested: int) -> None:
        add(self, len(self._runs), len(self._runs))

    monkeypatch.setattr(omnidraft._Session, "_add_acceptances", all_of_them)
    assert_rejected("omnidraft")


def test_certificate_rejects_drafts_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        omnidraft._Session, "_choose", lambda self, row, draft_bytes: int(row.argmax())
    )
    assert_rejected("omnidraft")


def test_certificate_rejects_the_noise_of_the_draft_models_own_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def own(self: Any, row: np.ndarray, draft_bytes: list[bytes]) -> int:
        position = self.sequence.length + len(draft_bytes)
        return int(self.sequence.sample(self.sequence.sampler.fork(), row, position))

    monkeypatch.setattr(omnidraft._Session, "_choose", own)
    assert_rejected("omnidraft")


def test_certificate_rejects_noise_under_the_rule_for_chosen_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = OmniDrafter.__init__

    def sharing(self: Any, *given: Any, **options: Any) -> None:
        own(self, *given, **options)
        self.shares_noise = True

    monkeypatch.setattr(OmniDrafter, "__init__", sharing)
    assert_rejected("omnidraft")


@pytest.mark.parametrize("bound", [0, 1.5])
def test_a_bound_out_of_range_is_refused(bound: float) -> None:
    with pytest.raises(InvalidRequestError, match=f"bound is {bound}"):
        OmniDrafter(0.01, bound)
