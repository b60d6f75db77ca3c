"""Methods whose tokens may change, each on its default build and on one that changes many tokens:
what they stream, and how they work with stop strings, limits, seeds, constraints, infilling,
batches, restarts and little memory."""

from __future__ import annotations

import json
from functools import cache
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest

from anydecode import LLM, JsonSchema, Regex, catalogue
from anydecode.certification.checks import Restarts
from anydecode.certification.denoising import VOCABULARY, bidirectional, dense
from anydecode.certification.oracles.diffusion.levenshtein_editing import (
    DELETE,
    SPLIT,
    controlled,
)
from anydecode.certification.oracles.diffusion.token_editing import drifting
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.models.scripted import EOS, MASK, ByteTokenizer

#: The default builds, and others that change more tokens.
WHOLE = (
    "p2",
    "p2:block=8,steps=5",
    "p2:block=8,steps=5,cache=dual",
    "remedi",
    "remedi:block=8,steps=5",
    "remdm",
    "remdm:block=8,eta=0.3",
    "remdm:block=8,eta=0.3,cache=prefix",
    "wino",
    "wino:block=8,threshold=0.3",
    "gidd",
    "gidd:block=8,steps=5,corrections=6",
    "duo",
    "duo:block=8,steps=5",
    "duo:kappa=0.5,rho=0.3,read_out=true,steps=6",
    "diffusion-gemma",
    "diffusion-gemma:block=8,steps=5",
)
#: Those for models with blocks, and all others on such a model with its cache.
BLOCKS = (
    "token-editing",
    "token-editing:threshold=0.3,edit=0.2",
    "token-editing:threshold=0.3,edit=0.2,revisit=1",
    "levenshtein-editing",
    "levenshtein-editing:steps=3,max_post_steps=4",
    "p2:cache=block",
    "remedi:cache=block",
    "remdm:eta=0.3,cache=block",
    "gidd:corrections=6,cache=block",
    "duo:cache=block",
    "diffusion-gemma:cache=block",
    "wino:block=6",
)
#: For models whose rows predict the position after their own, the second with blocks.
SHIFTED = ("p2:steps=6", "gidd:steps=6,corrections=4", "duo:steps=6", "remdm:eta=0.2,steps=9")
SHIFTED_BLOCKS = ("token-editing:threshold=0.4,edit=0.1", "remedi:steps=3,cache=block")
METHODS = (*WHOLE, *BLOCKS, *SHIFTED, *SHIFTED_BLOCKS)
#: The builds that change no token of the script.
UNCHANGING = ("remdm",)
#: The slow tests run all builds.
SOME = pytest.mark.one_in(9)  # an odd number: both temperatures
PROMPTS = [[5, 6, 7], [9], [80, 81, 82, 83, 84], [3, 3]]
BLOCK = 6


@cache
def lettered(is_drifting: bool) -> Any:
    """Logits of letters: of which a part depends on how many tokens are masked, or that depend on
    all tokens."""
    inner = drifting(5.0) if is_drifting else dense(spread=5.0)
    letters = [*ascii_lowercase.encode()]

    def logits(path: tuple[int, ...]) -> np.ndarray:
        row = np.full(VOCABULARY, -30.0, np.float32)
        row[letters] = inner(path)[letters]
        return row

    return logits


def opened(decoder: str, *, is_drifting: bool = True) -> LLM:
    """An engine over such logits, with blocks and control tokens for the methods that need them."""
    script = lettered(is_drifting)
    if decoder.startswith("levenshtein"):
        return bidirectional(controlled(script), block_size=BLOCK, edit_tokens=(DELETE, SPLIT))
    shift = int(decoder in (*SHIFTED, *SHIFTED_BLOCKS))
    block_size = BLOCK if decoder in (*BLOCKS, *SHIFTED_BLOCKS) else None
    return bidirectional(script, shift=shift, block_size=block_size)


def generate(llm: LLM, decoder: str, prompts: Any, **options: Any) -> Any:
    options = {"max_tokens": 20, "ignore_eos": True, "seed": 4, **options}
    return llm.generate(prompts, decoder=decoder, **options)


def outputs(answers: Any) -> list[Any]:
    """What must not depend on the batch, on restarts or on memory, bit by bit."""
    return [(one.tokens, one.text, one.logprobs, one.finish_reason) for one in answers]


def test_every_revising_key_is_audited() -> None:
    """The keys whose card says that tokens are revised, or that noise is random tokens."""
    revising = {
        card.key
        for card in catalogue.cards("diffusion")
        if any("never revised" in one or "become final" in one for one in card.deviations)
    }
    assert revising == {one.partition(":")[0] for one in METHODS}
    assert revising <= {*METHODS} | {"gidd"}, "each on its default build"


@SOME
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("decoder", METHODS)
def test_batches_restarts_and_memory_do_not_change_the_text(
    decoder: str, temperature: float
) -> None:
    options: dict[str, Any] = {"temperature": temperature, "logprobs": 1}
    with opened(decoder) as llm:
        alone = outputs([generate(llm, decoder, p, **options) for p in PROMPTS])
        assert outputs(generate(llm, decoder, PROMPTS, **options)) == alone
        for tokens, _, logprobs, _ in alone:
            assert [entry.token for entry in logprobs] == tokens and MASK not in tokens
    with opened(decoder) as llm, Restarts(llm.engine, seed=2, share=0.4):
        assert outputs(generate(llm, decoder, PROMPTS, **options)) == alone
        assert llm.engine.num_preemptions
        llm.engine.check_integrity()


@SOME
@pytest.mark.parametrize("decoder", METHODS)
def test_requests_that_do_not_fit_in_memory_together_are_preempted(decoder: str) -> None:
    with opened(decoder) as llm:
        model = llm.model
        alone = outputs([generate(llm, decoder, p, temperature=0.8) for p in PROMPTS])
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=56) as llm:
        assert outputs(generate(llm, decoder, PROMPTS, temperature=0.8)) == alone
        assert llm.engine.num_preemptions


@pytest.mark.one_in(2)
@pytest.mark.parametrize("decoder", METHODS)
def test_only_what_cannot_change_is_streamed(decoder: str) -> None:
    """Once a token is emitted, the canvas holds it in all later steps. Before that, tokens do
    change."""
    options: dict[str, Any] = {"decoder": decoder, "max_tokens": 20, "ignore_eos": True, "seed": 4}
    with opened(decoder) as llm:
        chunks = list(llm.stream(PROMPTS[0], **options))
        answer = llm.generate(PROMPTS[0], trace=True, **options)
    final = chunks[-1].generation
    assert final is not None and final.tokens == answer.tokens
    assert "".join(chunk.text for chunk in chunks) == answer.text
    canvases = [entry["canvas"] for entry in answer.trace]
    num_emitted = 0
    for entry in answer.trace:
        num_emitted += len(entry["tokens"])
        assert entry["canvas"][:num_emitted][:20] == answer.tokens[:num_emitted]
    assert num_emitted >= 20
    has_changed = any(
        before[i] not in (-1, later[i])
        for before, later in zip(canvases, canvases[1:], strict=False)
        for i in range(min(20, len(before), len(later)))
    )
    assert has_changed == (decoder not in UNCHANGING)


@SOME
@pytest.mark.parametrize("decoder", METHODS)
def test_stop_strings_end_the_text_where_plain_text_would(decoder: str) -> None:
    """Also where a stop string begins in one block and ends in the next; nothing of it is
    streamed."""
    options: dict[str, Any] = {"temperature": 0.9}
    with opened(decoder) as llm:
        whole = generate(llm, decoder, PROMPTS[0], **options)
        for first in (2, 7, 12):
            stop = whole.text[first : first + 3]
            expected = whole.text[: whole.text.index(stop)]
            cut = generate(llm, decoder, PROMPTS[0], stop=[stop], **options)
            assert cut.text == expected and cut.finish_reason == "stop"
            streamed = llm.stream(
                PROMPTS[0], decoder=decoder, max_tokens=20, ignore_eos=True, seed=4, stop=[stop],
                **options,
            )  # fmt: skip
            assert "".join(chunk.text for chunk in streamed) == expected
        token = whole.tokens[11]
        cut = generate(llm, decoder, PROMPTS[0], stop_tokens=[token], **options)
        assert cut.tokens == whole.tokens[: whole.tokens.index(token) + 1]
        assert cut.finish_reason == "stop"


@SOME
@pytest.mark.parametrize("decoder", METHODS)
def test_the_end_of_text_ends_the_text(decoder: str) -> None:
    with opened(decoder) as llm:
        inner = llm.model.script

        def ending(path: tuple[int, ...]) -> np.ndarray:
            row = inner(path).copy()
            row[EOS] = 40.0 if path[-1] >= 11 else -30.0
            return row

        llm.model.script = ending
        answer = generate(llm, decoder, PROMPTS[0], ignore_eos=False)
    assert answer.finish_reason == "stop" and 8 <= len(answer.tokens) <= 10
    assert EOS not in answer.tokens[:-1]


@SOME
@pytest.mark.parametrize("decoder", METHODS)
def test_the_seed_decides_and_limits_hold(decoder: str) -> None:
    with opened(decoder, is_drifting=False) as llm:
        texts = [
            generate(llm, decoder, PROMPTS[0], temperature=0.9, seed=seed).tokens
            for seed in (4, 4, 5)
        ]
        assert texts[0] == texts[1] != texts[2]
        # Within a block and at its ends; a block of 8 needs as many tokens.
        for limit in (8, 12, 13) if "block=8" in decoder else (1, 7, 12, 13):
            short = generate(llm, decoder, PROMPTS[0], temperature=0.9, max_tokens=limit)
            assert len(short.tokens) == limit and short.finish_reason == "length"


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}


@SOME
@pytest.mark.parametrize("decoder", METHODS)
def test_constraints_hold_in_batches_and_after_restarts(decoder: str) -> None:
    options: dict[str, Any] = {"max_tokens": 16, "seed": 3, "temperature": 0.8, "decoder": decoder}
    with opened(decoder) as llm:
        for constraint in (Regex("[a-f]{12}"), JsonSchema(SCHEMA)):
            options["constraint"] = constraint
            alone = outputs([llm.generate(p, **options) for p in PROMPTS])
            assert outputs(llm.generate(PROMPTS, **options)) == alone
            with Restarts(llm.engine, seed=5, share=0.4):
                assert outputs(llm.generate(PROMPTS, **options)) == alone
            for _, text, _, reason in alone:
                assert reason == "stop"
                if isinstance(constraint, Regex):
                    assert len(text) == 12 and set(text) <= set("abcdef")
                else:
                    assert 0 <= json.loads(text)["a"] <= 99


@SOME
@pytest.mark.parametrize("decoder", METHODS)
def test_penalties_and_biases_are_applied(decoder: str) -> None:
    """A bias holds in every step of the revision; a penalty works from left to right."""
    banned = {token: -100.0 for token in b"abcdefghijklm"}
    with opened(decoder) as llm:
        for options in ({"logit_bias": banned}, {"logit_bias": banned, "frequency_penalty": 50.0}):
            answer = generate(llm, decoder, PROMPTS[0], temperature=0.8, max_tokens=12, **options)
            assert not set(answer.text) & set("abcdefghijklm")
        assert len(set(answer.tokens)) == 12, "a penalty that forbids repetitions"


@SOME
@pytest.mark.parametrize("decoder", METHODS)
def test_prompts_and_fixed_tokens_do_not_change(decoder: str) -> None:
    template = [5, 6, MASK, MASK, 7, MASK, 8, MASK]
    key = decoder.replace("block=8", "block=0")
    with opened(decoder) as llm:
        answer = llm.generate(template, decoder=key, max_tokens=6, ignore_eos=True, seed=1)
    assert len(answer.tokens) == 6 and MASK not in answer.tokens
    assert (answer.tokens[2], answer.tokens[4]) == (7, 8)


@pytest.mark.parametrize("decoder", [one for one in BLOCKS if "cache=block" in one])
def test_the_cache_of_finished_blocks_is_exact(decoder: str) -> None:
    prompts, options = ["sort Leo Ada Ben:", "copy Mia:"], {"temperature": 0.7}
    plain = decoder.replace("cache=block", "cache=none")
    with LLM("tiny-blocks") as llm:
        cached = generate(llm, decoder, prompts, **options)
        expected = generate(llm, plain, prompts, **options)
        assert [one.tokens for one in cached] == [one.tokens for one in expected]
        assert cached[0].stats.rows < expected[0].stats.rows


def test_what_holds_no_token_cannot_be_masked_again() -> None:
    canvas = Canvas(np.array([3, 9, 9]), mask=9)
    canvas.commit([1], [4], [0.5])
    for position in (0, 2):
        with pytest.raises(ValueError, match="masked again"):
            canvas.remask([position])
    canvas.remask([1])
    assert canvas.masks.tolist() == [1, 2] and canvas.meter.committed == 0
    canvas.renoise([2], [6])
    assert canvas.tokens.tolist() == [3, 9, 6] and canvas.masks.tolist() == [1, 2]
    with pytest.raises(ValueError, match="holds no noise"):
        canvas.renoise([0], [6])
