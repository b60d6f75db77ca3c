"""MARS: its certificate, mistakes that the certificate rejects, and texts in company, with a small
cache, in chunks, in number formats and under constraints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode import Regex
from anydecode.api.llm import LLM
from anydecode.certification.chi_square import PROMPT
from anydecode.certification.oracles.speculative import mars as oracle
from anydecode.certification.rounds import rounds, scripted
from anydecode.decoders.speculative.mars import Mars
from anydecode.errors import InvalidRequestError
from anydecode.models.scripted import MASK, ByteTokenizer, ScriptedModel
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.sequence import Sequence
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method
from drafted_texts import CONDITIONS, NUMBERS, PROMPTS, generate
from masked_models import tiny_masked_llm

Patch = pytest.MonkeyPatch


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("mars")


@pytest.mark.parametrize(
    "defaults", [{"block": 3}, {"threshold": 0.8}, {"metric": "margin"}], ids=str
)
def test_certificate_rejects_other_defaults(monkeypatch: Patch, defaults: dict[str, Any]) -> None:
    replace_defaults(monkeypatch, "mars", **defaults)
    assert_rejected("mars")


@pytest.mark.parametrize("other", ["autoregressive", "jacobi"])
def test_certificate_rejects_other_methods(monkeypatch: Patch, other: str) -> None:
    replace_method(monkeypatch, "mars", other)
    assert_rejected("mars")


def test_certificate_rejects_any_confident_token(monkeypatch: Patch) -> None:
    """Also behind one that is not: masks are filled from left to right."""
    own = Mars._tokens

    def tokens(self: Mars, sequence: Sequence, scores: Any, mask: int) -> list[int]:
        kept = own(self, sequence, scores, mask)
        later = range(len(kept) + 1, len(scores))
        for row in (scores.row(i) for i in later):
            row[mask] = -np.inf
            if row.max() > 15:
                return [*kept, int(row.argmax())]
        return kept

    monkeypatch.setattr(Mars, "_tokens", tokens)
    assert_rejected("mars")


def test_certificate_rejects_masks_that_predict_masks(monkeypatch: Patch) -> None:
    own = Mars._tokens
    monkeypatch.setattr(
        Mars, "_tokens", lambda self, sequence, scores, mask: own(self, sequence, scores, 0)
    )
    assert_rejected("mars")


def test_certificate_rejects_the_confidence_of_the_best_token(monkeypatch: Patch) -> None:
    """Above temperature 0 another one may have been sampled."""
    own = Mars.is_confident
    monkeypatch.setattr(
        Mars, "is_confident", lambda self, logits, token: own(self, logits, int(logits.argmax()))
    )
    assert_rejected("mars")


def test_certificate_rejects_the_confidence_at_the_temperature_of_the_text(
    monkeypatch: Patch,
) -> None:
    own = Mars.is_confident
    monkeypatch.setattr(
        Mars, "is_confident", lambda self, logits, token: own(self, logits / 0.8, token)
    )
    assert_rejected("mars")


def test_certificate_rejects_one_noise_for_all_positions(monkeypatch: Patch) -> None:
    own = Sequence.sample

    def sample(self: Sequence, sampler: Sampler, logits: Any, position: int, *given: Any) -> int:
        return own(self, sampler, logits, self.length, *given)

    monkeypatch.setattr(Sequence, "sample", sample)
    assert_rejected("mars")


def test_the_measured_texts_keep_several_tokens() -> None:
    with oracle.marginal_llm() as llm:
        answer = llm.generate(
            PROMPT, decoder="mars", n=60, temperature=1.0, seed=2, max_tokens=16, ignore_eos=True
        )
    assert sum(one.stats.passes for one in answer.samples) < 0.95 * 60 * 16


def test_unsure_masks_lose_more_than_the_margin(monkeypatch: Patch) -> None:
    replace_defaults(monkeypatch, "mars", threshold=0.0)
    assert oracle.loss(60) > 0.3


@CONDITIONS
def test_the_text_does_not_depend_on_company(options: dict[str, Any], temperature: float) -> None:
    """With a metric that keeps several tokens in some passes."""
    if "backend" in options:
        pytest.importorskip("torch")
    key = "mars:threshold=0.3"
    with tiny_masked_llm(prefix_cache=False) as llm:
        expected = [generate(llm, one, key, temperature=temperature) for one in PROMPTS]
    with tiny_masked_llm(**options) as llm:
        together = generate(llm, PROMPTS, key, temperature=temperature)
        llm.engine.check_integrity()
    if "backend" not in options:  # whose sums differ in the last bits
        assert [one.tokens for one in together] == [one.tokens for one in expected]
    assert any(one.stats.tokens_per_pass > 1 for one in together)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_threshold_above_one_gives_the_text_of_plain_decoding(temperature: float) -> None:
    for options in ({}, {"cache": "int8"}):
        with tiny_masked_llm(**options) as llm:
            plain, masked = (
                generate(llm, PROMPTS, key, temperature=temperature, logprobs=2)
                for key in ("autoregressive", "mars:threshold=2")
            )
        assert [one.tokens for one in masked] == [one.tokens for one in plain]
        assert [one.logprobs for one in masked] == [one.logprobs for one in plain]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_constraints_and_limits_hold(temperature: float) -> None:
    with tiny_masked_llm() as llm:
        for constraint in (NUMBERS, Regex("[ae01]{20}")):
            text = generate(
                llm, "x", "mars:threshold=0", constraint=constraint, max_tokens=60,
                ignore_eos=False, temperature=temperature,
            ).text  # fmt: skip
            assert constraint is NUMBERS and text.endswith("]") or len(text) == 20
        short = generate(llm, "x", "mars:threshold=0", max_tokens=6, temperature=temperature)
        assert [len(one["drafted"]) for one in short.trace] == [3, 1]
        assert len(short.tokens) == 6
        llm.engine.check_integrity()


def test_a_token_counts_for_the_penalties_of_those_after_it_in_its_pass() -> None:
    row = np.zeros(MASK + 1, np.float32)
    row[[97, 98, 99]] = 3, 2, 1
    with scripted(lambda seen: row) as llm:
        options = {"max_tokens": 3, "logit_bias": {MASK: -100}, "presence_penalty": 1.5}
        trace = rounds(llm, "mars:threshold=0", "x", **options)
    assert [one.generated for one in trace] == [[97, 98, 97]]


def test_models_without_a_mask_token_and_other_metrics_are_refused_in_one_line() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.mask_id = None
    with (
        LLM(ScriptedModel(), tokenizer=tokenizer) as llm,
        pytest.raises(InvalidRequestError, match="no mask token") as refusal,
    ):
        llm.generate("abc", decoder="mars")
    assert "\n" not in str(refusal.value)
    with pytest.raises(InvalidRequestError, match="allowed are probability or entropy or margin"):
        Mars(metric="surprise")
