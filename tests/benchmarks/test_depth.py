"""`bench depth` counts the layers and rows of the head that methods run."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from anydecode import LLM, catalogue
from anydecode.benchmarks import reasoning, reasoning_tasks, speculative_answers
from anydecode.benchmarks.depth import counted, measure
from anydecode.certification.agreement import teacher_forced
from anydecode.certification.certify import small_model
from anydecode.certification.oracles.depth.skipped_parts import PartialForward
from anydecode.certification.tiny import predicting_model, tiny_model
from anydecode.cli.main import app
from anydecode.decoders.depth.del_ import head_cost
from anydecode.errors import InvalidRequestError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.tasks import spec_bench


def measured(*methods: str, layers: int = 6) -> dict[str, Any]:
    model = tiny_model(layers=layers, residual=0.1)
    with LLM(model, tokenizer=ByteTokenizer(), prefix_cache=False) as llm:
        results = measure(llm, methods, ["the cat sat", "ab"], 20, 1)
        return {one.method: one for one in results}


def test_plain_decoding_runs_every_layer_and_the_head_once_per_token() -> None:
    result = measured()["autoregressive"]
    assert (result.layers, result.heads, result.cost, result.agreement) == (6.0, 1.0, 1.0, 1.0)
    assert result.speed == 1.0


def test_drafts_count_whether_they_are_accepted_or_not() -> None:
    """Rounds of `layerskip` run each draft's row through all layers, and a row more."""
    result = measured("layerskip:layers=2,size=3")["layerskip:layers=2,size=3"]
    assert result.layers >= 6.0 and result.heads > 1.0 and result.agreement == 1.0


def test_rounds_with_drafts_and_accepted_drafts_are_counted() -> None:
    results = list(measured("multi-step", "layerskip:layers=5,size=3").values())
    assert [one.drafted for one in results[:2]] == [None, None] == [results[0].accepted] * 2
    assert results[2].drafted > 0.5 and 0 < results[2].accepted <= 1


def test_prompts_may_be_tokens() -> None:
    with LLM(tiny_model(layers=3), tokenizer=ByteTokenizer(), prefix_cache=False) as llm:
        text, tokens = (list(measure(llm, [], [one], 4, 1))[0] for one in ("ab", [97, 98]))
    assert (text.layers, text.free) == (tokens.layers, tokens.free) == (3.0, 1.0)


def test_layers_and_mlps_left_out_do_not_count() -> None:
    results = measured(
        "skipdecode:max_layers=3,min_layers=3", "ffn-skip:threshold=-1,count=99,warm_up=0"
    )
    skipped, without = list(results.values())[1:]
    assert skipped.layers == pytest.approx(3.0) and skipped.heads == 1.0
    # Three of six layers have an MLP: the first, the one that starts the skipping, and the last.
    mlp, attention = 3 * 64 * 128, 2 * 64 * 64 + 2 * 32 * 64
    assert without.layers == pytest.approx(6 - 3 * mlp / (mlp + attention))
    assert without.heads == 1.0


@pytest.mark.parametrize("block", [4, 32], ids=["blocks", "one block"])
def test_methods_whose_tokens_cannot_be_forced_have_no_agreement(block: int) -> None:
    """And those that write all tokens at once have a time per token too."""
    result = measured(f"ceed:block={block}")[f"ceed:block={block}"]
    assert result.agreement is None and 0 <= result.free <= 1
    assert result.milliseconds > 0 and result.speed > 0


def test_lossy_texts_are_compared_as_they_are_generated_too() -> None:
    method = "skipdecode:max_layers=3,min_layers=3"
    result = measured(method)[method]
    with LLM(tiny_model(layers=6, residual=0.1), tokenizer=ByteTokenizer()) as llm:
        shares, firsts = [], []
        for prompt in ("the cat sat", "ab"):
            plain, found = (
                llm.generate(prompt, decoder=one, max_tokens=20, ignore_eos=True).tokens
                for one in ("autoregressive", method)
            )
            same = [a == b for a, b in zip(plain, found, strict=True)]
            shares.append(sum(same) / 20)
            firsts.append(same.index(False) if False in same else 20)
    assert result.free == pytest.approx(sum(shares) / 2)
    assert result.first == pytest.approx(sum(firsts) / 2)
    assert result.free < 1 and result.agreement > result.free


def test_drafts_of_a_draft_model_count_as_layers() -> None:
    """Four of 16 layers and a head for each token, and the head's product in layers."""
    with predicting_model() as llm:
        plain, never = measure(llm, ["specee:threshold=1"], ["the cat sat"], 12, 1)
        head = head_cost(llm.model)
    assert (plain.draft, never.layers, never.free, never.first) == (0.0, 16.0, 1.0, 12.0)
    assert never.draft == pytest.approx(4 + head)
    assert never.cost == pytest.approx((16 + head + 4 + head) / (16 + head))


def test_the_perplexity_is_that_of_the_full_model_s_text() -> None:
    """Of an exact method it is the full model's own."""
    method = "skipdecode:max_layers=3,min_layers=3"
    plain, exact, lossy = measured("layerskip", method).values()
    model = tiny_model(layers=6, residual=0.1)
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        nats = []
        for prompt in ("the cat sat", "ab"):
            text = llm.generate(prompt, decoder="autoregressive", max_tokens=20, ignore_eos=True)
            forward = PartialForward(model.network)
            logits = [forward.step(token) for token in [*prompt.encode(), *text.tokens]]
            for row, token in zip(logits[len(prompt) - 1 :], text.tokens, strict=False):
                nats.append(np.logaddexp.reduce(row) - row[token])
    assert plain.perplexity == pytest.approx(np.exp(np.mean(nats)), rel=1e-4)
    assert exact.perplexity == plain.perplexity < lossy.perplexity


def test_a_text_that_the_method_would_not_write_is_forced() -> None:
    with LLM(tiny_model(layers=6), tokenizer=ByteTokenizer()) as llm:
        text = [97, 98, 99, 100]
        found = teacher_forced(llm, "skipdecode", "ab", text)
    assert found.generation.tokens == text and found.num_tokens == 4


def test_rows_of_the_prompt_do_not_count() -> None:
    with LLM(tiny_model(layers=3), tokenizer=ByteTokenizer(), prefix_cache=False) as llm:
        with counted(llm.model, 5) as work:
            llm.generate("abcde", decoder="autoregressive", max_tokens=4, ignore_eos=True)
        assert (work.layers, work.heads) == (9.0, 3.0)
        llm.generate("abcde", decoder="autoregressive", max_tokens=4)
        assert (work.layers, work.heads) == (9.0, 3.0)


def test_models_without_layers_are_refused() -> None:
    with LLM(ScriptedModel(), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(InvalidRequestError, match="transformers only"):
            list(measure(llm, [], ["a"], 4, 1))


def test_the_command_prints_a_table_and_json() -> None:
    arguments = ["bench", "depth", "-m", "tiny-autoregressive", "--methods", "layerskip"]
    arguments += ["--tokens", "8", "--limit", "1", "--repeats", "1", "--prompt-tokens", "3"]
    table = CliRunner().invoke(app, arguments)
    assert table.exit_code == 0 and "layerskip" in table.output
    found = CliRunner().invoke(app, [*arguments, "--json"])
    assert [one["method"] for one in json.loads(found.stdout)] == ["autoregressive", "layerskip"]


@pytest.mark.slow
@pytest.mark.parametrize("key", [card.key for card in catalogue.cards("depth")])
def test_the_other_benchmarks_take_methods_of_the_family(key: str) -> None:
    """`bench speculative` and `bench reasoning`, on the small model of the key's certificate."""
    card = catalogue.find(key).card
    _, open_llm = small_model(card, catalogue.build(key).requirements)
    with open_llm() as llm:
        asked = [spec_bench.Question("a", "one two one two")]
        timed = list(speculative_answers.run({"": llm}, asked, [key], [0.0], 12, warm=False))
        asked_too = reasoning_tasks.Question(llm.encode("one two"), lambda text: len(text) > 0)
        plain, found = (
            reasoning.measure(llm, name, [asked_too], 12, 0.0) for name in (reasoning.GREEDY, key)
        )
    assert [one.method for one in timed] == ["autoregressive", key, "multi-step"]
    assert timed[1].num_tokens > 1 and timed[1].passes > 0
    assert found.questions == 1 and found.tokens > 0
    if card.exactness != "lossy":
        assert timed[1].same_text and found.tokens == plain.tokens
