"""The engine's promises for recurrent models: the same text whatever the batch, the chunks, the
cache, the drafter and the number of restarts."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from anydecode.api.llm import LLM
from anydecode.errors import UnsupportedCombinationError
from anydecode.kernels.library import load_library
from anydecode.kernels.recurrent import StatePool
from anydecode.models.opening import choose_executor
from anydecode.models.scripted import ByteTokenizer
from rwkv_models import rwkv_checkpoint
from tiny_models import PROMPTS, built, hf_model, own_model

BACKEND = "torch" if load_library() is None else "native"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "qwen3.5": (
        "Qwen3_5",
        {
            "full_attention_interval": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 8,
        },
    ),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 12, "state_size": 16, "n_groups": 2}),
    "falcon mamba": ("FalconMamba", {"intermediate_size": 128, "state_size": 12}),
    "jamba": (
        "Jamba",
        {
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 12,
        },
    ),
    "rwkv7": ("", {}),
    "recurrent gemma": ("RecurrentGemma", {"num_hidden_layers": 4, "attention_window_size": 9}),
}
OPTIONS: dict[str, Any] = {"max_tokens": 32, "ignore_eos": True, "seed": 3, "temperature": 0.8}
_BUILT: dict[tuple[str, int], Any] = {}


@pytest.fixture(params=MODELS)
def name(request: Any) -> str:
    return str(request.param)


def model(name: str, seed: int = 0) -> Any:
    if (name, seed) not in _BUILT:
        family, settings = MODELS[name]
        size, executor = ByteTokenizer().vocab_size, choose_executor(BACKEND, threads=1)
        if name == "rwkv7":
            _BUILT[name, seed] = built(rwkv_checkpoint(seed, vocab_size=size), executor=executor)
        else:
            theirs = hf_model(family, seed, vocab_size=size, **settings)
            _BUILT[name, seed] = own_model(theirs, executor=executor)
    return _BUILT[name, seed]


def texts(name: str, prompts: list[str], engine: dict[str, Any], **options: Any) -> list[Any]:
    """The tokens after each prompt, generated together."""
    with LLM(model(name), tokenizer=ByteTokenizer(), **engine) as llm:
        found = llm.generate(prompts, **{**OPTIONS, **options})
        llm.engine.check_integrity()
        return [one.tokens for one in found]


@functools.cache
def alone(name: str, **options: Any) -> list[Any]:
    """The tokens after each prompt, each by itself, without a prefix cache."""
    engine = {"prefix_cache": False, "cache_positions": 512}
    return [texts(name, [prompt], engine, **options)[0] for prompt in PROMPTS]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("row_budget", [1, 5, 512])
def test_batches_and_chunks(name: str, row_budget: int) -> None:
    engine = {"row_budget": row_budget, "cache_positions": 1024}
    assert texts(name, PROMPTS, engine) == alone(name)


def test_preempted_requests_start_again_with_the_same_text(name: str) -> None:
    with LLM(model(name), tokenizer=ByteTokenizer(), cache_positions=160) as llm:
        found = [one.tokens for one in llm.generate(PROMPTS, **OPTIONS)]
        assert llm.engine.num_preemptions
        llm.engine.check_integrity()
    assert found == alone(name)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("max_states", [1, 2, 64])
def test_cached_prefixes(name: str, max_states: int) -> None:
    expected = alone(name)
    with LLM(model(name), tokenizer=ByteTokenizer(), cache_positions=1024) as llm:
        cache, spec = llm.engine.runners["target"].pool.cache, model(name).spec
        if cache.states is not None:
            cache.states = StatePool(spec.recurrences, max_states, interval=16)
        for _ in range(2):
            found = [llm.generate(prompt, **OPTIONS) for prompt in PROMPTS]
            assert [one.tokens for one in found] == expected
        assert llm.engine.runners["target"].prefixes.num_hits >= 4 * 16
        assert cache.states is None or cache.states.num_states <= max_states


@pytest.mark.one_in(5)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "decoder", ["auto", "multi-step", "prompt-lookup", "opt-tree", "fixed-tree", "layerskip"]
)
def test_drafts_and_trees(name: str, decoder: str, temperature: float) -> None:
    engine = {"draft": model(name, 1), "cache_positions": 2048}
    expected = alone(name, temperature=temperature)
    assert texts(name, PROMPTS, engine, decoder=decoder, temperature=temperature) == expected


def test_states_within_generated_text_are_kept_for_the_next_turn() -> None:
    """Steps that the backend takes by itself end where a state is kept: at positions 63 and 127."""
    with LLM(model("mamba2"), tokenizer=ByteTokenizer(), cache_positions=1024) as llm:
        cache, spec = llm.engine.runners["target"].pool.cache, model("mamba2").spec
        cache.states = StatePool(spec.recurrences, interval=64)
        llm.generate(PROMPTS[2], **{**OPTIONS, "max_tokens": 120, "decoder": "multi-step"})
        assert cache.states.num_states >= 2


def test_beams_share_states(name: str) -> None:
    options = {"decoder": "beam:width=3", "temperature": 0.0}
    assert texts(name, PROMPTS, {"cache_positions": 2048}, **options) == alone(name, **options)


def test_restored_blocks_have_no_state_of_their_slots_before(name: str) -> None:
    """Blocks that were spilled come back into slots that held other positions."""
    engine = {"cache_positions": 128, "prefix_spill": "memory"}
    with LLM(model(name), tokenizer=ByteTokenizer(), **engine) as llm:
        for _ in range(2):
            found = [llm.generate(prompt, **OPTIONS).tokens for prompt in PROMPTS]
            assert found == alone(name)
        assert llm.engine.runners["target"].prefixes.num_restored


@pytest.mark.parametrize("decoder", ["gear", "fastkv", "mustdrop", "quickprefill", "wedlm"])
def test_methods_that_edit_the_cache_are_refused(name: str, decoder: str) -> None:
    with pytest.raises(UnsupportedCombinationError, match="edits the target model's") as caught:
        texts(name, PROMPTS, {"cache_positions": 512}, decoder=decoder)
    assert "\n" not in str(caught.value)


def test_a_draft_model_whose_cache_is_a_window_must_have_attention_only(name: str) -> None:
    engine = {"draft": model(name, 1), "cache_positions": 512}
    with pytest.raises(UnsupportedCombinationError, match="edits the draft model's"):
        texts(name, PROMPTS, engine, decoder="longspec")
