"""Sampling rules by name, and several rules together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anydecode import JsonSchema, catalogue
from anydecode.api.llm import LLM
from anydecode.certification.certify import load_oracle_tests
from anydecode.certification.checks import Restarts
from anydecode.certification.oracles.sampling.autodeco import random_heads
from anydecode.certification.samplers import (
    ORACLES,
)
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.sampling.autodeco import Heads
from toy_models import PROMPTS, toy_llm

KEYS = (
    "autodeco", "dola", "dry", "eta", "min-p", "mirostat", "momentum", "top-n-sigma", "top-w",
    "typical", "xtc",
)  # fmt: skip


def test_every_rule_has_a_card_and_an_oracle() -> None:
    cards = {card.key: card for card in catalogue.cards("sampling")}
    assert {*KEYS, "contrastive-search"} <= set(cards)
    load_oracle_tests()
    assert set(KEYS) <= set(ORACLES)
    for key in KEYS:
        assert cards[key].exactness == "lossy" and cards[key].citation
        assert "speculation" in cards[key].works_with


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
            ({"sampler": "beam"}, "'beam' is not a sampler"),
            ({"constraint": "min-p"}, "'min-p' is not a constraint"),
            ({"sampler": ["mirostat", "min-p"]}, "mirostat and min_p exclude each other"),
            ({"sampler": ["mirostat", "mirostat"]}, "set it once"),
            ({"sampler": "mirosat"}, "did you mean mirostat"),
            ({"decoder": "dola:layers=middle"}, "layers must be low, high or numbers"),
            ({"decoder": "dola:layers=0+9"}, "dola_layers names layer 9; this model has layers 0"),
            ({"dola_layers": "midst"}, "dola_layers must be low, high or layers"),
            ({"dola_layers": [1.5]}, "dola_layers must be low, high or layers"),
            ({"decoder": "dola", "guidance_scale": 2}, "cannot be combined"),
            ({"decoder": "layerskip", "sampler": "dola:layers=low"}, "reads earlier ones"),
            ({"decoder": "contrastive-search:k=0"}, "k is 0; allowed are 1 to 1024"),
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
        with toy_llm() as llm, Restarts(llm.engine, seed=1):
            again = llm.generate(PROMPTS, **options)
        texts = [answer.text for answer in alone]
        assert sum(answer.constraint["tries"] for answer in alone) > 0
        assert texts == [answer.text for answer in drafted] == [answer.text for answer in again]


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
