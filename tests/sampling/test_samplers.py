"""Sampling rules by name, and mistakes in them that certification must detect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anydecode import JsonSchema, catalogue
from anydecode.api.llm import LLM
from anydecode.certification.certify import load_oracle_tests
from anydecode.certification.checks import _measures, _Restarts
from anydecode.certification.oracles import sampling_claims as claims
from anydecode.certification.oracles import sampling_states as states
from anydecode.certification.oracles.sampling_oracles import random_heads
from anydecode.certification.samplers import (
    PROMPT,
    OracleContext,
    ToyModel,
    _oracles,
    _target_model,
    rows_check,
)
from anydecode.decoders.search import contrastive
from anydecode.errors import CheckpointError, InvalidRequestError, UnsupportedCombinationError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.sampling import autodeco, dola, dry, mirostat, momentum, top_w, truncation, xtc
from anydecode.sampling.autodeco import Heads
from anydecode.sampling.params import SamplingParams
from anydecode.training.autodeco import AutoDecoRecipe, HeadsModule, train_autodeco
from anydecode.training.autodeco import measure as held_out_gain

KEYS = (
    "autodeco", "dola", "dry", "eta", "min-p", "mirostat", "momentum", "top-n-sigma", "top-w",
    "typical", "xtc",
)  # fmt: skip
PROMPTS = ["the cat sat on the cat", "a", "name: name: na"]


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    load_oracle_tests()


def toy_llm() -> LLM:
    draft = ScriptedModel(seed=1, noise=0.5)
    return LLM(ToyModel(seed=1), tokenizer=ByteTokenizer(), draft=draft, cache_positions=2048)


def test_every_rule_has_a_card_and_an_oracle() -> None:
    cards = {card.key: card for card in catalogue.cards("sampling")}
    assert {*KEYS, "contrastive-search"} <= set(cards)
    assert set(KEYS) <= set(_oracles)
    for key in KEYS:
        assert cards[key].exactness == "lossy" and cards[key].citation
        assert "speculation" in cards[key].works_with


def _stale(self: Any, state: np.ndarray, logits: np.ndarray) -> None:
    self.parameters = self.parameters or self.heads(state, logits)


_coin = xtc.ExcludeTopChoices.apply

#: One mistake per rule, in the code that the engine runs.
MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "min-p": (truncation.MinP, "apply", lambda r, c: truncation.Epsilon(r.p).apply(c)),
    "typical": (truncation.Typical, "apply", lambda r, c: truncation.TopP(r.p).apply(c)),
    "eta": (truncation, "entropy", lambda log_p, p: 0.0),
    "top-n-sigma": (truncation.TopNSigma, "apply", lambda r, c: truncation.TopK(2).apply(c)),
    "xtc": (
        xtc.ExcludeTopChoices,
        "apply",
        lambda r, c: _coin(replace(r, probability=r.probability / 2), c),
    ),
    "mirostat": (mirostat.Mirostat, "advance", lambda self, token: None),
    "dry": (dry.Dry, "advance", lambda self, token: None),
    "momentum": (momentum.Momentum, "advance", lambda self, token: None),
    "dola": (dola, "divergence", lambda *row: 0.0),
    "top-w": (top_w, "best_set", lambda p, potential, weight: np.array([p.argmax()])),
    "autodeco": (autodeco.AutoDeco, "observe_hidden", _stale),
}


@pytest.mark.parametrize("key", KEYS)
def test_a_mistake_in_a_rule_is_detected(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written, (setting, *_) = _oracles[key]
    world = OracleContext(_target_model(), PROMPT)

    def exact(tokens: tuple[int, ...]) -> np.ndarray:
        return written(world, tokens, **setting)

    sampler = catalogue.build(key, **setting)
    assert rows_check(sampler, exact, 1.0, "right").passed
    monkeypatch.setattr(*MISTAKES[key])
    assert not rows_check(sampler, exact, 1.0, "wrong").passed


#: The baseline that each rule improves on, in terms of its measure.
RIVALS: dict[str, Callable[[], float]] = {
    "min-p": lambda: claims.wrong_mass(20, temperature=2.0, top_p=0.9),
    "typical": lambda: claims.typicality(40, top_p=0.9),
    "eta": lambda: claims.desmoothing(10, top_p=0.9),
    "top-n-sigma": lambda: claims.changed_sets(20, min_p=0.05),
    "dry": lambda: claims.repetition(claims.circular(), 120),
    "momentum": lambda: claims.repetition(claims.circular(), 80),
    "dola": lambda: claims.facts_missed(20),
    "top-w": lambda: claims.top_w_gain(20, truncation.TopP(0.999)),
    "contrastive-search": lambda: claims.repetition(states.Reflecting(), 60),
}


@pytest.mark.parametrize("key", RIVALS)
def test_the_baseline_of_a_rule_fails_its_measure(key: str) -> None:
    (measure,) = _measures[key]
    assert RIVALS[key]() > measure.margin


def test_mirostat_that_never_learns_misses_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    (measure,) = _measures["mirostat"]
    monkeypatch.setattr(mirostat.Mirostat, "advance", lambda self, token: None)
    assert measure.run(600) > measure.margin


def test_xtc_that_keeps_no_top_choice_fails_its_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    (measure,) = _measures["xtc"]

    def apply(rule: Any, candidates: Any) -> Any:
        p = claims.softmax(candidates.scores)
        left = np.flatnonzero(p < rule.threshold)
        return candidates.keep(left) if len(left) else candidates

    monkeypatch.setattr(xtc.ExcludeTopChoices, "apply", apply)
    assert measure.run(50) > measure.margin


def test_heads_that_learned_nothing_fail_their_measure() -> None:
    (measure,) = _measures["autodeco"]
    model = states.Mixed()
    gain = held_out_gain(model, model.rows(500, 2), HeadsModule(7, 8))
    assert gain.heads - gain.fixed > measure.margin


def test_contrastive_search_without_hidden_states_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contrastive._States, "max_cosine", lambda self, state: 0.0)
    failed = {
        check.name for check in load_oracle_tests()["contrastive-search"]() if not check.passed
    }
    assert "k=4, alpha=0.6 equals the oracle" in failed
    (measure,) = _measures["contrastive-search"]
    assert measure.run(60) > measure.margin


class TestByName:
    def test_a_name_is_its_options(self) -> None:
        options = {"max_tokens": 24, "seed": 4, "ignore_eos": True}
        with toy_llm() as llm:
            named = llm.generate(PROMPTS, decoder="mirostat:tau=2,eta=0.3", **options)
            given = llm.generate(
                PROMPTS, mirostat=2, mirostat_tau=2, mirostat_eta=0.3, temperature=1.0, **options
            )
            drafted = llm.generate(
                PROMPTS, decoder="prompt-lookup", sampler="mirostat:tau=2,eta=0.3", **options
            )
            both = llm.generate(PROMPTS, sampler=["min-p:p=0.1", "dry"], **options)
            spelt = llm.generate(PROMPTS, min_p=0.1, dry_multiplier=0.8, temperature=1.0, **options)
        texts = [[one.tokens for one in batch] for batch in (named, given, drafted)]
        assert texts[0] == texts[1] == texts[2]
        assert [one.tokens for one in both] == [one.tokens for one in spelt]
        assert named[0].decoder == "mirostat:tau=2,eta=0.3"

    @pytest.mark.parametrize(
        "options, words",
        [
            ({"decoder": "min-p", "min_p": 0.1}, "min_p is set by the request and by"),
            ({"decoder": "min-p", "temperature": 0}, "min-p needs a temperature above 0"),
            ({"decoder": "min-p:q=0.1"}, "method 'min-p'"),
            ({"decoder": "min-p:p=2"}, "min_p must be between 0 and 1, not 2"),
            ({"decoder": "beam", "sampler": "xtc"}, "beam does not sample"),
            ({"decoder": "contrastive-search", "sampler": "eta"}, "does not sample"),
            ({"sampler": "beam"}, "'beam' is a Beam"),
            ({"sampler": ["mirostat", "min-p"]}, "mirostat and min_p exclude each other"),
            ({"sampler": ["mirostat", "mirostat"]}, "set it once"),
            ({"sampler": "mirosat"}, "did you mean mirostat"),
            ({"decoder": "dola:layers=middle"}, "layers must be low, high or numbers"),
            ({"decoder": "dola:layers=0+9"}, "dola_layers names layer 9; this model has layers 0"),
            ({"dola_layers": "midst"}, "dola_layers must be low, high or layers"),
            ({"dola_layers": [1.5]}, "dola_layers must be low, high or layers"),
            ({"decoder": "dola", "guidance_scale": 2}, "cannot be combined"),
            ({"decoder": "layer-draft", "sampler": "dola:layers=low"}, "reads early layers"),
            ({"decoder": "contrastive-search:k=0"}, "k >= 1"),
            ({"decoder": "contrastive-search", "guidance_scale": 2}, "guidance"),
            ({"decoder": "autodeco"}, "heads are for states of 576 numbers; this model's have 4"),
            ({"autodeco": "x.safetensors", "temperature": 1}, "autodeco must be heads"),
            ({"decoder": "autodeco:heads=none.safetensors"}, "none.safetensors"),
        ],
    )
    def test_invalid_options_are_refused_in_one_line(
        self, options: dict[str, Any], words: str
    ) -> None:
        with toy_llm() as llm, pytest.raises((InvalidRequestError, CheckpointError)) as caught:
            llm.generate("ab", max_tokens=4, **options)
        assert words in str(caught.value) and "\n" not in str(caught.value)

    def test_autodeco_sets_temperature_and_nucleus_alone(self) -> None:
        heads = random_heads()
        for other in ({"temperature": 0.7}, {"top_p": 0.9}, {"mirostat": 2}, {"temperature": 0}):
            with pytest.raises(InvalidRequestError, match="autodeco"):
                SamplingParams(autodeco=heads, **other)

    def test_a_decoder_alone_is_asked_for(self) -> None:
        with toy_llm() as llm, pytest.raises(InvalidRequestError, match="is a sampler"):
            llm.decoder("min-p")


class TestInCompany:
    def test_rules_of_one_batch_do_not_mix(self) -> None:
        """Requests with different rules share passes and generate the same as alone."""
        chosen = [catalogue.build("autodeco", heads=random_heads()), "dola", "mirostat", "top-w",
                  "momentum", "min-p"]  # fmt: skip
        options = {"max_tokens": 16, "seed": 9, "ignore_eos": True}
        with toy_llm() as llm:
            alone = [llm.generate("abc", sampler=rule, **options).tokens for rule in chosen]
        with toy_llm() as llm:
            requests = [llm.request("abc", sampler=rule, **options) for rule in chosen]
            for request in requests:
                llm.start(request, background=False)
            llm.driver.advance(lambda: all(request.done for request in requests))
            together = [request.generation().tokens for request in requests]
        assert together == alone
        assert len({tuple(text) for text in alone}) > 3

    @pytest.mark.parametrize("rule", ["mirostat:tau=2,eta=0.5", "autodeco", "dola", "dry"])
    def test_checked_constraints_and_restarts(self, rule: Any) -> None:
        """A schema whose values are validated as they close: text is retracted, jobs are restarted,
        and the result is the same."""
        if rule == "autodeco":
            heads = random_heads()
            hot = Heads(replace(heads.temperature, offset=3.0), replace(heads.top_p, offset=6.0))
            rule = catalogue.build("autodeco", heads=hot)
        schema = {
            "type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9},
            "uniqueItems": True, "minItems": 2, "maxItems": 3,
        }  # fmt: skip
        constraint = JsonSchema(schema)
        options = {"max_tokens": 40, "seed": 2, "sampler": rule, "constraint": constraint}
        options["temperature"] = 1.0
        with toy_llm() as llm:
            alone = [llm.generate(prompt, **options) for prompt in PROMPTS]
            drafted = llm.generate(PROMPTS, decoder="prompt-lookup", **options)
        with toy_llm() as llm, _Restarts(llm.engine, seed=1):
            again = llm.generate(PROMPTS, **options)
        texts = [answer.text for answer in alone]
        assert sum(answer.constraint["tries"] for answer in alone) > 0
        assert texts == [answer.text for answer in drafted] == [answer.text for answer in again]

    def test_contrastive_search_with_a_constraint_and_a_shared_prefix(self) -> None:
        prompt = "a long prompt that fills a block of the prefix cache: "
        options = {"max_tokens": 12, "decoder": "contrastive-search:k=3", "ignore_eos": True}
        constraint = JsonSchema({"enum": ["yes", "no", "maybe"]})
        with toy_llm() as llm:
            first, second = (llm.generate(prompt, **options).tokens for _ in range(2))
            bound = llm.generate(prompt, **{**options, "constraint": constraint, "logprobs": 1})
        assert first == second
        assert bound.text in ('"yes"', '"no"', '"maybe"')
        assert all(np.isfinite(token.logprob) for token in bound.logprobs)


class TestHeads:
    def test_files_that_are_none(self, tmp_path: Path) -> None:
        from safetensors.numpy import save_file

        (tmp_path / "torn").write_bytes(b"\x08")
        save_file({"x": np.zeros(1, np.float32)}, tmp_path / "other")
        tensors = random_heads().tensors()
        tensors["top_p_head.mlp.0.weight"] = np.zeros((5, 4), np.float32)
        save_file(tensors, tmp_path / "crooked")
        for name in ("torn", "other", "crooked", "absent"):
            with pytest.raises(CheckpointError, match="autodeco heads") as caught:
                Heads.load(tmp_path / name)
            assert "\n" not in str(caught.value)

    def test_the_learner_and_the_engine_agree(self) -> None:
        torch.manual_seed(1)
        learner = HeadsModule(6, 9)
        for part in learner.parameters():
            torch.nn.init.normal_(part, std=0.5)
        rows, logits = torch.randn(5, 6), 3 * torch.randn(5, 40)
        temperatures = learner.temperature(rows)
        edges = learner.top_p(rows, logits, temperatures)
        heads = learner.heads()
        for row in range(5):
            found = heads(rows[row].numpy(), logits[row].numpy())
            assert found == pytest.approx((temperatures[row].item(), edges[row].item()), abs=1e-5)

    def test_heads_are_trained_on_a_models_own_text(self, tmp_path: Path) -> None:
        recipe = AutoDecoRecipe(prompts=6, samples=2, tokens=6, width=3, epochs=2, batch=8)
        with toy_llm() as llm:
            learner, gain = train_autodeco(llm, recipe)
            given, _ = train_autodeco(llm, recipe, ["abc", "de"])
            learner.heads().save(tmp_path / "heads.safetensors")
            named = f"autodeco:heads={tmp_path / 'heads.safetensors'}"
            answers = llm.generate(PROMPTS, decoder=named, max_tokens=5, seed=1)
            with pytest.raises(InvalidRequestError, match="at least two prompts"):
                train_autodeco(llm, recipe, ["abc"])
        assert gain.rows > 0 and np.isfinite(gain.heads) and "held-out" in gain.summary()
        assert given.heads().temperature.inner.shape == (3, 4)
        assert all(answer.tokens for answer in answers)

    def test_the_heads_that_come_along_fit_the_default_model(self) -> None:
        heads = autodeco.default_heads()
        heads.check(576)
        rng = np.random.default_rng(0)
        for _ in range(5):
            state = rng.normal(size=576).astype(np.float32)
            temperature, top_p = heads(state, rng.normal(0, 3, 2000).astype(np.float32))
            assert 0 < temperature < 2 and 0 < top_p <= 1


def test_uncaptured_hidden_states_do_not_affect_drafts() -> None:
    """Early-exit rows pass no hidden states to the sampler, without an error."""
    heads = random_heads()
    options = {"max_tokens": 20, "seed": 3, "ignore_eos": True}
    options["sampler"] = catalogue.build("autodeco", heads=heads)
    with toy_llm() as llm:
        plain = llm.generate(PROMPTS, **options)
        for decoder in ("layer-draft", "parallel-draft", "awrs", "s2d"):
            try:
                found = llm.generate(PROMPTS, decoder=decoder, **options)
            except UnsupportedCombinationError:
                continue
            if decoder != "awrs":
                assert [one.tokens for one in found] == [one.tokens for one in plain]


@pytest.mark.model
@pytest.mark.parametrize("rule", ["dola", "autodeco", "mirostat:tau=3"])
def test_rules_on_the_default_model(default_model_path: Path, rule: str) -> None:
    """Early layers and last hidden states of a real model: drafts and batches do not change the
    output."""
    prompts = ["The list of numbers: 1, 2, 3, 1, 2, 3, 1,", "Once upon a time there was"]
    options = {"max_tokens": 10, "seed": 5, "sampler": rule, "ignore_eos": True}
    with LLM(default_model_path, cache_positions=2048) as llm:
        alone = [llm.generate(p, decoder="autoregressive", **options).tokens for p in prompts]
        drafted = llm.generate(prompts, decoder="prompt-lookup", **options)
    assert [one.tokens for one in drafted] == alone
    assert alone[0] != alone[1]
