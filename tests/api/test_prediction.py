"""A prediction of the answer: the same tokens in fewer passes, true counts, and the request field
of the server."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.errors import InvalidRequestError
from anydecode.scoring.prediction import Prediction
from anydecode.scoring.tree import TokenTree
from toy_models import letters_llm

PROMPT = "Change x to y in this text: "
DRAFTING = ("auto", "prompt-lookup", "copyspec", "suffix", "aggressive")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("decoder", DRAFTING)
def test_a_prediction_takes_fewer_passes_and_changes_nothing(
    decoder: str, temperature: float
) -> None:
    options: dict[str, Any] = {"max_tokens": 80, "temperature": temperature, "seed": 5}
    with letters_llm("abcdefghijklmnop ", 3, cache_positions=4096) as llm:
        llm.cost_model = FixedCosts(lambda rows, _: 1 + 0.02 * rows)
        plain = llm.generate(PROMPT, decoder="autoregressive", **options)
        edited = plain.text[:30] + "XYZ" + plain.text[40:]
        predictions = (plain.text, edited, "nothing of that kind", "", plain.tokens)
        results = {}
        for prediction in predictions:
            llm.clear()
            answer = llm.generate(PROMPT, decoder=decoder, prediction=prediction, **options)
            assert answer.tokens == plain.tokens and not answer.ignored
            results[str(prediction)] = answer.stats
        right, edited_stats, wrong, without, ids = results.values()
        assert max(right.passes, ids.passes) < 20 and edited_stats.passes < 50
        assert right.passes < without.passes - 30
        assert right.num_accepted_predictions >= 50 and right.num_rejected_predictions < 10
        assert edited_stats.num_rejected_predictions > 0 == without.num_accepted_predictions
        assert wrong.num_accepted_predictions < 5
        # In a batch, and with little memory.
        prompts = ["a " + PROMPT, PROMPT, "b " + PROMPT]
        alone = [llm.generate(one, decoder="autoregressive", **options).tokens for one in prompts]
        batch = llm.generate(prompts, decoder=decoder, prediction=plain.text, **options)
        assert [one.tokens for one in batch] == alone
    with letters_llm("abcdefghijklmnop ", 3, cache_positions=140, row_budget=40) as llm:
        batch = llm.generate(prompts, decoder=decoder, prediction=plain.text, **options)
        assert [one.tokens for one in batch] == alone and llm.engine.num_preemptions > 0


def test_a_prediction_works_with_banned_strings_and_samples() -> None:
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 5}
    with letters_llm("abcdefghijklmnop ", 3, cache_positions=8192) as llm:
        free = llm.generate(PROMPT, **options).text
        options |= {"banned_strings": [free[20:24]], "n": 3}
        plain = llm.generate(PROMPT, **options)
        predicted = llm.generate(PROMPT, prediction=plain.text, **options)
        assert [one.tokens for one in predicted.samples] == [one.tokens for one in plain.samples]
        assert predicted.stats.passes < plain.stats.passes
        assert predicted.stats.num_accepted_predictions > 20


def test_other_decoders_ignore_a_prediction() -> None:
    with letters_llm("abcdefghijklmnop ", 3, cache_positions=4096) as llm:
        for decoder in ("autoregressive", "multi-step", "speculative-sampling", "lookahead"):
            plain = llm.generate(PROMPT, decoder=decoder, max_tokens=20)
            answer = llm.generate(PROMPT, decoder=decoder, max_tokens=20, prediction=plain.text)
            assert (answer.tokens, answer.stats.passes) == (plain.tokens, plain.stats.passes)
            assert answer.ignored == ["prediction"] and not plain.ignored
            assert answer.stats.num_accepted_predictions == 0


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (5, "is 5; it must be a text or a list of token ids"),
        (True, "is True; it must be a text or a list of token ids"),
        ({"type": "content"}, "is {'type': 'content'}; it must be a text or a list of token ids"),
        (["a"], "contains 'a'; allowed are token ids from 0 to"),
    ],
)
def test_a_prediction_that_is_no_text_is_named(value: Any, fault: str) -> None:
    with letters_llm("ab", 3, cache_positions=256) as llm:
        for name in ("prediction", "negative_prompt"):
            with pytest.raises(InvalidRequestError, match=f"^{name} {fault}"):
                llm.generate("ab", **{name: value})


def test_counts_are_those_of_drafts_that_the_prediction_has() -> None:
    prediction = Prediction([9, 1, 2], [3, 4, 5])
    tree = TokenTree([3, 4, 7, 5, 8], [-1, 0, 0, 1, 3])
    prediction.record([1, 2], tree, [0, 1])
    assert (prediction.num_accepted, prediction.num_rejected) == (2, 1)  # 3 and 4; 5
    prediction.record([7, 7], TokenTree.chain([3, 4, 5]), [])
    assert (prediction.num_accepted, prediction.num_rejected) == (2, 2)  # 5, behind 3 and 4
