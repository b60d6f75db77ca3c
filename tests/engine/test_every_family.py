"""The engine's promises for every causal family: the same tokens whatever the batch, the chunks,
the cache, the drafter and the number of restarts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

import rwkv6_qwen2_models
from anydecode.api.llm import LLM
from anydecode.certification.tiny_blockffn import blockffn_checkpoint
from anydecode.certification.tiny_sambay import sambay_checkpoint
from anydecode.certification.tiny_step3 import step3_checkpoint
from anydecode.kernels.library import load_library
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import build_model
from anydecode.models.opening import choose_executor
from anydecode.models.scripted import ByteTokenizer
from baichuan_models import baichuan_checkpoint
from kimi_k3_models import kimi_k3_checkpoint
from nanbeige_models import as_ouro, nanbeige_checkpoint, ouro_base
from nemotron_models import nemotron_checkpoint
from openelm_models import openelm_checkpoint
from parity_cases import first_cases
from plain_families import FAMILIES, checkpoint
from refact_models import refact_checkpoint
from rwkv6_models import rwkv6_checkpoint
from rwkv_models import ARWKV_CONFIG, rwkv_checkpoint
from tiny_models import hf_model, own_model

BACKEND = "torch" if load_library() is None else "native"
CASES = first_cases()
#: Families that `transformers` does not have.
OTHERS: dict[str, Callable[[int], Checkpoint]] = {
    "phi4flash": sambay_checkpoint,
    "blockffn": blockffn_checkpoint,
    "step3_text": step3_checkpoint,
    "baichuan": baichuan_checkpoint,
    "openelm": openelm_checkpoint,
    "gpt_refact": refact_checkpoint,
    "kimi_k3": kimi_k3_checkpoint,
    "nanbeige": nanbeige_checkpoint,
    "ouro": lambda seed: as_ouro(ouro_base(seed)),
    **{name: functools.partial(checkpoint, name) for name in FAMILIES},
    "nemotron-nas": lambda seed: nemotron_checkpoint(seed, vocab_size=ByteTokenizer().vocab_size),
    "rwkv6": lambda seed: rwkv6_checkpoint(seed, ByteTokenizer().vocab_size),
    "rwkv6qwen2": lambda seed: rwkv6_qwen2_models.checkpoint(seed, ByteTokenizer().vocab_size),
    "arwkv7": lambda seed: rwkv_checkpoint(
        seed, **ARWKV_CONFIG | {"vocab_size": ByteTokenizer().vocab_size}
    ),
    "rwkv7": lambda seed: rwkv_checkpoint(seed, vocab_size=ByteTokenizer().vocab_size),
}
#: Repeated tokens, for drafts, and common beginnings, for caches.
PROMPTS = [
    [5, 17, 99, 3, 64, 11] * 4,
    [5, 17, 99, 3, 64, 11] * 3 + [7, 8],
    [42, 43] * 9,
]
OPTIONS: dict[str, Any] = {"max_tokens": 14, "ignore_eos": True, "seed": 3, "temperature": 0.8}


@functools.cache
def model(family: str, seed: int = 0) -> Any:
    size, executor = ByteTokenizer().vocab_size, choose_executor(BACKEND, threads=1)
    if family in OTHERS:
        return build_model(OTHERS[family](seed), executor=executor)
    sizes = {"vocab_size": size}
    settings = CASES[family][1]
    if "vocab_size_per_layer_input" in settings:
        sizes["vocab_size_per_layer_input"] = size
    theirs = hf_model(family, seed, **{**settings, **sizes})
    return own_model(theirs, executor=executor)


def tokens(family: str, prompts: list[list[int]], engine: dict[str, Any], **options: Any) -> Any:
    """The tokens after each prompt, generated together."""
    with LLM(model(family), tokenizer=ByteTokenizer(), **engine) as llm:
        found = [one.tokens for one in llm.generate(prompts, **{**OPTIONS, **options})]
        llm.engine.check_integrity()
        return found


def check(family: str) -> None:
    """Batches, chunks, preemption, cached prefixes, trees and beams."""
    plain = {"prefix_cache": False, "cache_positions": 256}
    alone = [tokens(family, [prompt], plain)[0] for prompt in PROMPTS]
    assert tokens(family, PROMPTS, {"row_budget": 5, "cache_positions": 512}) == alone
    with LLM(model(family), tokenizer=ByteTokenizer(), cache_positions=64) as llm:
        found = [one.tokens for one in llm.generate(PROMPTS, **OPTIONS)]
        assert found == alone and llm.engine.num_preemptions
        again = [llm.generate(prompt, **OPTIONS).tokens for prompt in PROMPTS[:1] * 2]
        assert again == alone[:1] * 2 and llm.engine.runners["target"].prefixes.num_hits
        llm.engine.check_integrity()
    trees = {"draft": model(family, 1), "cache_positions": 1024}
    assert tokens(family, PROMPTS, trees, decoder="opt-tree") == alone
    beam = {"decoder": "beam:width=3", "temperature": 0.0}
    expected = [tokens(family, [prompt], plain, **beam)[0] for prompt in PROMPTS]
    assert tokens(family, PROMPTS, {"cache_positions": 1024}, **beam) == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", [*CASES, *OTHERS])
def test_nothing_changes_the_tokens(family: str) -> None:
    check(family)


def test_rows_that_depend_on_the_pass_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = model("Llama")
    run = own.run

    def dependent(rows: Any, cache: Any, output_spec: Any) -> Any:
        rows.positions[:] += len(rows) == 5
        return run(rows, cache, output_spec)

    monkeypatch.setattr(own, "run", dependent)
    with pytest.raises(AssertionError):
        check("Llama")
