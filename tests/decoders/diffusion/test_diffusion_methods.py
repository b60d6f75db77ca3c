"""Diffusion methods on a random transformer, whose cached rows become stale: one text alone, in a
batch and after restarts; lossless methods against one-token denoising; bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.certification.checks import Restarts, scripted_llm
from anydecode.decoders.diffusion.learn2pd import model_facts
from anydecode.errors import AnydecodeError
from anydecode.kernels.interface import KeyValues, Output, OutputSpec, Rows
from anydecode.models.scripted import BYTE_VOCABULARY, EOS, MASK, ByteTokenizer, ScriptedModel
from tiny_models import hf_model, own_model

PROMPTS = [[1, 2], [3], [4, 5, 6, 7, 8, 9], [2, 2, 2]]
METHODS = (
    "adablock:block=6,threshold=0.3,cache=dual",
    "bacd-tccf:coarse=6,cache=prefix",
    "bacd-tccf:coarse=6,cache=elastic",
    "ccd:warm_up=0",
    "cd4lm:block=6,threshold=0.3,cache=dual",
    "creditdecoding:block=6,threshold=0.3,cache=dual",
    "dimple:threshold=0.3,prefill=true",
    "dimple:threshold=0.3,cache=dual",
    "dparallel:block=6,entropy=2,cache=prefix",
    "dream-coder:steps=7",
    "eb-sampler:block=6,gamma=2,cache=dual",
    "elastic-cache:window=6,threshold=0.3,drift=0.98",
    "eoser-ass:blocks=2",
    "ete:block=6,threshold=0.3",
    "fast-dllm-v2:block=6,sub_block=3,threshold=0.3,cache=dual",
    "fast-dllm:block=6,threshold=0.3,cache=vicinity",
    "freedave:block=6,drafts=3,cache=dual",
    "freedave:block=6,drafts=3,ahead=1",
    "freedave:block=6,drafts=3,threshold=0.3",
    "learn2pd:cache=dual,filter=FILTER",
    "learn2pd:cache=elastic,filter=FILTER",
    "levenshtein-editing:block=6,threshold=0.3,edit=0.2,delete=40,split=41",
    "localleap:block=6,threshold=0.3,relaxed=0.2,cache=window",
    "lrd:block=6,cache=dual",
    "prophet:block=6",
    "ssd:drafts=5,width=3,cache=dual",
    "token-editing:block=6,threshold=0.3,edit=0.2",
    "window-diffusion:window=8,active=4,cycle=3",
)

#: Decoders of models with blocks.
OF_BLOCKS = (
    "fast-dllm:block=2,threshold=0.3,cache=hierarchical",
    "s2d2:router=always",
    "s2d2:router=bandit",
)


@cache
def model(block_size: int | None = None) -> Any:
    transformer = own_model(hf_model("Llama", vocab_size=BYTE_VOCABULARY, initializer_range=0.5))
    transformer.spec = replace(transformer.spec, causal=False, block_size=block_size)
    return transformer


def llm_of(block_size: int | None = None) -> LLM:
    return LLM(model(block_size), tokenizer=ByteTokenizer(), cache_positions=1024)


@cache
def filter_file() -> str:
    """A random filter for this model."""
    random = np.random.default_rng(0)
    shapes = {"weight": (32, 32), "bias": (32,)}
    tensors = {
        f"{layer}.{name}": random.normal(size=shape).astype(np.float32)
        for layer in ("hidden", "output")
        for name, shape in shapes.items()
    }
    path = Path(mkdtemp()) / "filter"
    described = {"block": 32, "model": model_facts(model(), MASK)}
    save_file(tensors, path, metadata={"learn2pd": json.dumps(described)})
    return str(path)


def texts(llm: LLM, decoder: str, prompts: Any, **options: Any) -> list[list[int]]:
    decoder = decoder.replace("FILTER", filter_file())
    options = {"max_tokens": 18, "ignore_eos": True, "seed": 3, "top_p": 0.95, **options}
    return [answer.tokens for answer in llm.generate(prompts, decoder=decoder, **options)]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
@pytest.mark.parametrize("decoder", [*METHODS, *OF_BLOCKS])
def test_batches_and_restarts_do_not_change_the_text(decoder: str, temperature: float) -> None:
    size = 4 if decoder in OF_BLOCKS else None
    with llm_of(size) as llm:
        alone = [texts(llm, decoder, [p], temperature=temperature)[0] for p in PROMPTS]
        assert texts(llm, decoder, PROMPTS, temperature=temperature) == alone
    with llm_of(size) as llm, Restarts(llm.engine, seed=2):
        assert texts(llm, decoder, PROMPTS, temperature=temperature) == alone
        llm.engine.check_integrity()


@pytest.mark.parametrize(
    ("cache", "temperature"),
    [
        ("none", 0.9),
        ("dual", 0.0),
        ("prefix", 0.9),
        *(
            pytest.param(cache, temperature, marks=pytest.mark.slow)
            for cache, temperature in (("none", 0.0), ("dual", 0.9), ("prefix", 0.0))
        ),
    ],
)
def test_verified_chains_give_the_text_of_one_token_denoising(
    cache: str, temperature: float
) -> None:
    slow = f"fast-dllm:threshold=1,block=6,cache={cache}"
    with llm_of() as llm:
        expected = texts(llm, slow, PROMPTS, temperature=temperature)
        for key in ("freedave", "ssd"):
            decoder = f"{key}:block=6,drafts=4,cache={cache}"
            assert texts(llm, decoder, PROMPTS, temperature=temperature) == expected


def test_the_verified_mode_of_s2d2_is_the_autoregressive_mode() -> None:
    with llm_of(4) as llm:
        slow = texts(llm, "sdar:block=1", PROMPTS, top_p=1.0)
        decoder = "s2d2:router=always,complete=false,caching=causal"
        assert texts(llm, decoder, PROMPTS, top_p=1.0) == slow
        unverified = texts(llm, "s2d2:router=never,threshold=0.1", PROMPTS, top_p=1.0)
        assert unverified != slow


def test_two_infilled_regions_keep_the_text_between_them() -> None:
    mask = 258
    prompt = [65, mask, mask, 66, 67, mask, mask, mask, 68]
    with llm_of() as llm:
        for decoder in METHODS:
            if decoder.startswith(("dream-coder", "eoser")):
                continue  # regions of dream-coder may change their size; ascending passes need none
            found = texts(llm, decoder, [prompt])[0]
            assert found[2:4] == [66, 67], decoder
            assert found[7] == 68 and len(found) == 8, decoder
            assert mask not in found, decoder


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ("localleap:radius=-1", "radius"),
        ("prophet:start=-1", "start is -1; allowed are 0 to 65536"),
        ("adablock:delimiters=", "delimiter"),
        ("cd4lm:max_per_step=0", "max_per_step is 0; allowed are 1 to 65536"),
        ("bacd-tccf:low=0.9,high=0.5", "low <= high"),
        ("ccd:rule=guess", "agreement or averaged"),
        ("eb-sampler:gamma=-1", "gamma"),
        ("eoser-ass:schedule=down", "ascending or uniform"),
        ("dimple:prefill=true,cache=dual", "needs cache=none"),
        ("elastic-cache:window=0", "window is 0; allowed are 1 to 65536"),
        ("ete:candidates=0", "candidates is 0; allowed are 1 to 1024"),
        ("learn2pd:filter=/nowhere.safetensors", "no such file"),
        ("freedave:drafts=0", "drafts is 0; allowed are 1 to 1024"),
        ("lrd:mixture=1", "mixture < 1"),
        ("s2d2:router=maybe", "router='maybe' is unknown"),
        ("window-diffusion:active=9,window=4", "active <= window"),
        ("apd:weight=2", "between 0 and 1"),
        ("wedlm:penalty=-1", "penalty"),
    ],
)
def test_bad_parameters_raise_a_clear_error(decoder: str, message: str) -> None:
    with scripted_llm(causal=False) as llm, pytest.raises(AnydecodeError, match=message):
        llm.generate("x", decoder=decoder, max_tokens=8)


def test_a_draft_model_of_the_wrong_kind_raises_an_error() -> None:
    with scripted_llm() as llm, pytest.raises(AnydecodeError, match="diffusion"):
        llm.generate("x", decoder="deer", max_tokens=8)
    with (
        scripted_llm(draft_causal=False) as llm,
        pytest.raises(AnydecodeError, match="causal draft"),
    ):
        llm.generate("x", decoder="speculative-sampling", max_tokens=8)


def test_every_diffusion_method_is_tested() -> None:
    tested = {decoder.partition(":")[0] for decoder in METHODS}
    tested_elsewhere = {"llada", "dream", "fast-dllm", "sdar", "bd3-lm", "s2d2", "wedlm", "apd"}
    tested_elsewhere |= {"p2", "remedi", "remdm", "wino", "gidd", "duo", "diffusion-gemma"}
    keys = {card.key for card in catalogue.cards("diffusion")}
    assert keys - tested - tested_elsewhere <= {"diffusion-cfg", "dlm-ptq"}


class BoundedModel(ScriptedModel):
    """Raises after more passes than any text here needs."""

    passes = 0

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        self.passes += 1
        assert self.passes <= 120, "the decoder does not end"
        return super().run(rows, cache, output_spec)


EXPAND = 1
REGION = [ord("p"), ord("<"), MASK, ord(">"), ord("x")]


def always_expands(path: tuple[int, ...]) -> np.ndarray:
    row = np.zeros(BYTE_VOCABULARY, np.float32)
    row[EXPAND], row[ord("a")] = 9.0 - 0.1 * path[-1], 5.0
    return row


def grows_and_shrinks(path: tuple[int, ...]) -> np.ndarray:
    """Predicts that one mask expands to two, and that the second of two ends the region."""
    *seen, position = path
    row = np.zeros(BYTE_VOCABULARY, np.float32)
    region = seen.index(ord(">")) - seen.index(ord("<")) - 1
    ends = position == seen.index(ord(">")) - 1
    row[ord("a")] = 5.0
    row[EXPAND if region == 1 else EOS if ends else ord("a")] = 9.0 + position
    return row


def infilled(script: Any, prompts: Any, max_tokens: int, decoder: str) -> list[bytes]:
    bounded = BoundedModel(script, causal=False)
    with LLM(bounded, tokenizer=ByteTokenizer(), cache_positions=1024) as llm:
        found = llm.generate(prompts, decoder=decoder, max_tokens=max_tokens)
    return [bytes(one.tokens) for one in found]


@pytest.mark.parametrize("steps", ["", ",steps=1", ",steps=3"])
@pytest.mark.parametrize(
    ("script", "expected"), [(always_expands, b"a" * 10 + b">x"), (grows_and_shrinks, b"a>x")]
)
def test_expansion_terminates(script: Any, expected: bytes, steps: str) -> None:
    """A model that always expands fills the answer up to max_tokens; a model whose region grows and
    shrinks in turn terminates as well."""
    decoder = f"dream-coder:expand={EXPAND}{steps}"
    assert infilled(script, [REGION], 12, decoder) == [expected]
    # max_tokens leaves no room for an expansion.
    assert infilled(script, [REGION], 3, decoder) == [b"a>x"]


def test_expansion_in_a_batch_gives_the_text_of_each_request_alone() -> None:
    prompts = [REGION, [*REGION[:2], MASK, *REGION[2:]], REGION]
    decoder = f"dream-coder:expand={EXPAND}"
    for script in (always_expands, grows_and_shrinks):
        alone = [infilled(script, [prompt], 8, decoder)[0] for prompt in prompts]
        assert infilled(script, prompts, 8, decoder) == alone


def test_nothing_expands_without_infilling() -> None:
    decoder = f"dream-coder:expand={EXPAND}"
    assert infilled(always_expands, [[ord("p")]], 6, decoder) == [b"a" * 6]
