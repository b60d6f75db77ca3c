"""Compressed prompts: memory, and unsupported requests."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.checks import scripted_llm
from anydecode.certification.tiny import tiny_model
from anydecode.decoders.prefill import prefilled
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring.prompt_embeds import PromptEmbeds


def test_compression_frees_memory() -> None:
    """A compressed prompt of 600 tokens uses only a part of a cache of 700 positions."""
    model = tiny_model(layers=4)
    prompt = np.random.default_rng(1).integers(97, 123, 600).tolist()
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=700) as llm:
        pool, used = llm.engine.runners["target"].pool, []
        request = llm.request(prompt, decoder="quickprefill:keep=0.25,query=20", max_tokens=8,
                              ignore_eos=True)  # fmt: skip
        request.notify(lambda: used.append(pool.num_used))
        llm.start(request, background=False)
        llm.driver.advance(lambda: request.done)
        assert 0 < max(used) < 0.25 * 600 + 50
        assert pool.num_used == 0


def test_a_compressed_prompt_is_continued_with_a_diffusion_draft_model() -> None:
    target, tokenizer = tiny_model(layers=4), ByteTokenizer()
    draft = ScriptedModel(vocab_size=target.spec.vocab_size, causal=False)
    options = {"max_tokens": 12, "ignore_eos": True}
    with LLM(target, tokenizer=tokenizer, draft=draft, cache_positions=400) as llm:
        plain = llm.generate("abc" * 30, decoder="fastkv:budget=20", **options)
        drafted = llm.generate(
            "abc" * 30, decoder="fastkv:budget=20,decoder=specdiff-2", trace=True, **options
        )
        assert drafted.tokens == plain.tokens
        assert any(one["drafted"] for one in drafted.trace)


def test_unsupported_requests_raise_an_error() -> None:
    with scripted_llm() as llm:
        for decoder, message in (
            ("fastkv:budget=0", "budget"), ("quickprefill:keep=2", "keep"),
            ("mustdrop:key=2", "key"), ("gear:bits=9", "bits"),
            ("fastkv:decoder=fastkv", "given context"), ("fastkv:decoder=sarathi", "not a decoder"),
            ("fastkv:decoder=llada", "given context"),
        ):  # fmt: skip
            with pytest.raises(InvalidRequestError, match=message):
                llm.generate("abc", decoder=decoder)
        with pytest.raises(UnsupportedCombinationError, match="from no file"):
            llm.generate("abc" * 30, decoder="fastkv:budget=20", max_tokens=2)
        rows = PromptEmbeds(0, np.zeros((2, 4)))
        with pytest.raises(UnsupportedCombinationError, match="does not support prompt_embeds"):
            llm.generate("abcd", decoder="prompt-lookup", prompt_embeds=rows)
        with pytest.raises(UnsupportedCombinationError, match="take one block of embeddings"):
            both = [PromptEmbeds(0, np.zeros((1, 4))), PromptEmbeds(1, np.zeros((1, 4)))]
            llm.generate("abcd", decoder="quickprefill", prompt_embeds=both)
        for wrong in (PromptEmbeds(0, np.zeros((2, 5))), PromptEmbeds(2, np.zeros((2, 4))),
                      PromptEmbeds(0, np.zeros((2, 4)), np.zeros(3))):  # fmt: skip
            with pytest.raises(InvalidRequestError):
                llm.generate("abcd", decoder="quickprefill", prompt_embeds=wrong)
    packed = tiny_model(layers=4)
    packed.network.release_matrices()
    with LLM(packed, tokenizer=ByteTokenizer(), cache_positions=200) as llm:
        with pytest.raises(UnsupportedCombinationError, match="backend='torch'"):
            llm.generate("abc" * 30, decoder="fastkv:budget=20", max_tokens=2)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("window", 8, "sliding window"),
        ("chunk", 8, "chunked attention"),
        ("slopes", (0.5, 0.25), "linear biases"),
    ],
)
def test_models_that_read_positions_of_keys_raise_an_error(
    name: str, value: object, message: str
) -> None:
    model = tiny_model(layers=4)
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=200) as llm:
        pool = llm.engine.runners["target"].pool
        prefilled.check_compressible(pool)
        shape = model.spec.layers[0].attention
        object.__setattr__(shape, name, value)
        with pytest.raises(UnsupportedCombinationError, match=message):
            prefilled.check_compressible(pool)
