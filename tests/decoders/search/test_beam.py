"""Beam search: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.api.llm import LLM
from anydecode.decoders.search.beam import Beam
from anydecode.decoders.search.beam_group import BeamGroup, LengthRule
from anydecode.models.scripted import ByteTokenizer
from certificates import assert_certified, assert_rejected, replace_defaults
from tiny_models import hf_model

ENDS = [2, 9, 28]


class Tokenizer(ByteTokenizer):
    """A vocabulary of which several tokens end a text."""

    vocab_size = 131
    eos_ids = frozenset(ENDS)


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("beam")


def test_certificate_rejects_a_score_without_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LengthRule, "score", lambda self, total, length: total)
    assert_rejected("beam")


def test_certificate_rejects_a_search_that_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Beam.__init__
    monkeypatch.setattr(
        Beam, "__init__", lambda self, *given, **more: made(self, *given, **{**more, "early": True})
    )
    assert_rejected("beam")


def test_certificate_rejects_a_greedy_expansion(monkeypatch: pytest.MonkeyPatch) -> None:
    expand = BeamGroup._expand

    def greedy(self: BeamGroup, rows: Any, costs: Any) -> Any:
        return [one for one in expand(self, rows, costs) if one.number == 0]

    monkeypatch.setattr(BeamGroup, "_expand", greedy)
    assert_rejected("beam")


@pytest.mark.parametrize("other", [{"width": 1}, {"penalty": 0.0}])
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, float]
) -> None:
    replace_defaults(monkeypatch, "beam", **other)
    assert_rejected("beam")


@pytest.mark.parametrize("choose", [max, min])
def test_certificate_rejects_a_bound_from_the_present_length_or_the_worst_beam(
    monkeypatch: pytest.MonkeyPatch, choose: Any
) -> None:
    def is_finished(self: LengthRule, totals: Any, finished: Any, depth: int, limit: int) -> bool:
        length = depth if choose is max else limit
        bound = choose(self.score(total, max(1, length)) for total in totals)
        return len(finished) == self.width and bool(bound <= finished[-1].score)

    monkeypatch.setattr(LengthRule, "is_finished", is_finished)
    assert_rejected("beam")


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_texts_and_scores_equal_those_of_transformers(penalty: float, early: bool) -> None:
    torch = pytest.importorskip("torch")
    from anydecode.models.hf import HuggingFaceModel

    limit, num_ended = 12, 0
    for family in ("Llama", "GPT2"):
        model = hf_model(family, **({} if family == "Llama" else {"n_embd": 48, "n_head": 4}))
        with LLM(HuggingFaceModel(model), tokenizer=Tokenizer(), draft="none") as llm:
            for prompt in ([5, 9, 33, 5, 9, 33, 3, 17], [7, 5, 8], [40, 41, 42, 43, 44]):
                for width in (2, 5):
                    reference = model.generate(
                        torch.tensor([prompt]),
                        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                        num_beams=width,
                        num_return_sequences=width,
                        length_penalty=penalty,
                        early_stopping=early or "never",
                        do_sample=False,
                        max_new_tokens=limit,
                        eos_token_id=ENDS,
                        pad_token_id=0,
                        return_dict_in_generate=True,
                        output_scores=True,
                    )
                    texts = [row[len(prompt) :] for row in reference.sequences.tolist()]
                    ends = [[at for at, token in enumerate(row) if token in ENDS] for row in texts]
                    texts = [
                        row[: end[0] + 1] if end else row
                        for row, end in zip(texts, ends, strict=True)
                    ]
                    decoder = Beam(width, penalty, early)
                    found = llm.generate(prompt, decoder=decoder, n=width, max_tokens=limit).samples
                    assert [one.tokens for one in found] == texts
                    scores = reference.sequences_scores.tolist()
                    assert [one.score for one in found] == pytest.approx(scores, abs=1e-4)
                    num_ended += any(ends)
    assert num_ended
