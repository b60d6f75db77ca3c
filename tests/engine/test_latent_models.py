"""The engine's promises for models with latent attention (DeepSeek), whose cache has one row per
position, and for those whose rows attend to selected positions (DeepSeek-V3.2, GLM-5, MiniMax-M3):
the same text whatever the batch, the cache, the drafter and the number of restarts."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from anydecode.api.llm import LLM
from anydecode.decoders.framework.attention_probe import AttentionProbe
from anydecode.errors import UnsupportedCombinationError
from anydecode.kernels.cache import CACHE_FORMATS, bytes_per_position
from anydecode.kernels.library import load_library
from anydecode.models.opening import choose_executor
from anydecode.models.scripted import ByteTokenizer
from tiny_models import LATENT_SIZES, PROMPTS, chain, hf_model, logits, own_model

BACKEND = "torch" if load_library() is None else "native"
SETTINGS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    **LATENT_SIZES,
    "kv_lora_rank": 24,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
#: The prompts and texts have several times as many positions as a row attends to.
INDEXER = {"index_topk": 12, "index_n_heads": 8, "index_head_dim": 16}
#: Layers with a window alone, and with entries of which some, or all, are attended to.
ENTRIES: dict[str, Any] = {
    "num_key_value_heads": 1,
    "partial_rotary_factor": 1 / 3,
    "q_lora_rank": 20,
    "o_groups": 2,
    "o_lora_rank": 12,
    "sliding_window": 7,
    "layer_types": [
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "sliding_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 12},
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "index_n_heads": 8,
    "index_head_dim": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "hc_mult": 2,
}
#: kind -> (classes of `transformers`, settings)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("DeepseekV3", SETTINGS),
    "sparse": ("DeepseekV32", {**SETTINGS, **INDEXER}),
    "shared": (
        "GlmMoeDsa",
        {**SETTINGS, **INDEXER, "n_group": 1, "topk_group": 1}
        | {"indexer_types": ["full", "full", "shared"]},
    ),
    "blocks": (
        "MiniMaxM3VL",
        {
            "head_dim": 16,
            "intermediate_size": 24,
            "dense_intermediate_size": 56,
            "shared_intermediate_size": 40,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rotary_dim": 8,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000.0,
                "partial_rotary_factor": 0.5,
            },
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 4,
            "index_topk_blocks": 3,
            "layer_types": ["full_attention", *["minimax_m3_sparse"] * 2],
        },
    ),
    "entries": ("DeepseekV4", {**ENTRIES, "head_dim": 24, "index_topk": 5}),
}
OPTIONS: dict[str, Any] = {"max_tokens": 32, "ignore_eos": True, "seed": 3, "temperature": 0.8}


@functools.cache
def model(kind: str, seed: int = 0, threads: int = 1, backend: str = BACKEND) -> Any:
    family, settings = KINDS[kind]
    theirs = hf_model(family, seed, vocab_size=ByteTokenizer().vocab_size, **settings)
    return own_model(theirs, executor=choose_executor(backend, threads=threads))


def texts(kind: str, prompts: list[str], engine: dict[str, Any], **options: Any) -> list[Any]:
    """The tokens after each prompt, generated together."""
    with LLM(model(kind), tokenizer=ByteTokenizer(), **engine) as llm:
        found = llm.generate(prompts, **{**OPTIONS, **options})
        llm.engine.check_integrity()
        return [one.tokens for one in found]


@functools.cache
def alone(kind: str, cache_positions: int = 512, **options: Any) -> list[Any]:
    """The tokens after each prompt, each by itself, without a prefix cache."""
    engine = {"prefix_cache": False, "cache_positions": cache_positions}
    return [texts(kind, [prompt], engine, **options)[0] for prompt in PROMPTS]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_cache_holds_the_latent_and_the_key_of_each_indexer(kind: str) -> None:
    cache = model(kind).new_cache(8, "float16")
    size = SETTINGS["kv_lora_rank"] + SETTINGS["qk_rope_head_dim"]
    if kind == "blocks":  # two heads of keys and values
        size = 2 * 2 * KINDS[kind][1]["head_dim"]
    if kind == "entries":  # three keys, two entries, and the inputs of two entries in float32
        size, indexers = KINDS[kind][1]["head_dim"], INDEXER["index_head_dim"]
        inputs = 4 * (size + indexers) + 2 * size
        assert bytes_per_position(cache) == 2 * (5 * size + indexers) + 4 * inputs
        return
    num_indexers = {"dense": 0, "sparse": 3, "shared": 2, "blocks": 2}[kind]
    keys = num_indexers * INDEXER["index_head_dim"]
    assert bytes_per_position(cache) == 2 * (size * SETTINGS["num_hidden_layers"] + keys)


@pytest.mark.parametrize("row_budget", [1, 5, 512])
def test_batches_and_chunks(kind: str, row_budget: int) -> None:
    engine = {"row_budget": row_budget, "cache_positions": 1024}
    assert texts(kind, PROMPTS, engine) == alone(kind)


def test_preempted_requests_start_again_with_the_same_text(kind: str) -> None:
    with LLM(model(kind), tokenizer=ByteTokenizer(), cache_positions=160) as llm:
        found = [one.tokens for one in llm.generate(PROMPTS, **OPTIONS)]
        assert llm.engine.num_preemptions
        llm.engine.check_integrity()
    assert found == alone(kind)


def test_cached_and_spilled_prefixes(kind: str) -> None:
    engine = {"cache_positions": 128, "prefix_spill": "memory"}
    expected = alone(kind)
    with LLM(model(kind), tokenizer=ByteTokenizer(), **engine) as llm:
        for _ in range(2):
            found = [llm.generate(prompt, **OPTIONS).tokens for prompt in PROMPTS]
            assert found == expected
        prefixes = llm.engine.runners["target"].prefixes
        assert prefixes.num_hits and prefixes.num_restored


@pytest.mark.one_in(5)  # each decoder at each temperature once, with kinds in turn
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "decoder", ["auto", "multi-step", "prompt-lookup", "opt-tree", "fixed-tree", "layerskip"]
)
def test_drafts_and_trees(kind: str, decoder: str, temperature: float) -> None:
    engine = {"draft": model(kind, 1), "cache_positions": 2048}
    if kind in ("shared", "entries") and decoder == "layerskip":
        with pytest.raises(UnsupportedCombinationError, match="an earlier one has selected"):
            texts(kind, PROMPTS, engine, decoder=decoder)
        return
    expected = alone(kind, temperature=temperature)
    assert texts(kind, PROMPTS, engine, decoder=decoder, temperature=temperature) == expected


def test_beams_share_rows(kind: str) -> None:
    options = {"decoder": "beam:width=3", "temperature": 0.0}
    found = texts(kind, PROMPTS, {"cache_positions": 2048}, **options)
    assert found == alone(kind, **options)


@pytest.mark.one_in(2)  # each kind and each format
@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_cache_formats(kind: str, format: str) -> None:
    """The same text in batches as alone."""
    engine = {"cache": format, "cache_positions": 512, "prefix_cache": False}
    found = texts(kind, PROMPTS, engine)
    assert found == [texts(kind, [prompt], engine)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("length", [40, 300])
def test_segments_of_a_long_text_on_several_threads(kind: str, length: int) -> None:
    """With two threads, the attention of one row is divided by heads and by positions."""
    if BACKEND != "native":
        pytest.skip("the native kernels are not available here")
    tokens = np.random.default_rng(0).integers(3, 250, length).tolist()
    expected = logits(model(kind), chain(tokens), model(kind).new_cache(512))
    other = model(kind, threads=2)
    cache = other.new_cache(512)
    logits(other, chain(tokens[:-1]), cache)
    assert np.array_equal(logits(other, chain(tokens[-1:], length - 1), cache)[-1], expected[-1])
    reference = logits(model(kind, backend="torch"), chain(tokens), model(kind).new_cache(512))
    assert np.abs(expected - reference).max() < 1e-4


@pytest.mark.parametrize("decoder", ["fastkv", "mustdrop", "quickprefill"])
def test_methods_that_remove_positions(kind: str, decoder: str) -> None:
    """They read keys and move rows, of which values are a part; entries are made of all rows."""
    if kind == "entries":
        with pytest.raises(UnsupportedCombinationError, match="entries of several positions"):
            texts(kind, PROMPTS, {"cache_positions": 2048}, decoder=decoder)
        return
    found = texts(kind, PROMPTS, {"cache_positions": 2048}, decoder=decoder)
    assert [len(tokens) for tokens in found] == [OPTIONS["max_tokens"]] * len(PROMPTS)


def test_attention_weights_of_single_rows() -> None:
    """The weights by which methods choose positions are those of `transformers`."""
    torch = pytest.importorskip("torch")

    theirs = hf_model("DeepseekV3", vocab_size=ByteTokenizer().vocab_size, **SETTINGS)
    tokens = np.random.default_rng(0).integers(3, 250, 12)
    with torch.inference_mode():
        output = theirs(torch.from_numpy(tokens[None]), output_attentions=True)
    ours, positions = own_model(theirs), np.arange(12)
    cache = ours.new_cache(12)
    logits(ours, chain(tokens.tolist()), cache)
    found = AttentionProbe(ours).attention(
        0, ours.embed(tokens), positions, cache, positions, positions
    )
    assert np.abs(found - output.attentions[0][0].numpy()).max() < 1e-5


def test_the_triton_kernels_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anydecode.kernels.cuda.available.unavailable_reason", lambda: None)
    with pytest.raises(UnsupportedCombinationError, match="latent attention") as caught:
        own_model(hf_model("DeepseekV3", **SETTINGS), executor=choose_executor("triton"))
    assert "\n" not in str(caught.value)


def test_gear_is_refused(kind: str) -> None:
    with pytest.raises(UnsupportedCombinationError, match="keys and values|key-value") as caught:
        texts(kind, PROMPTS, {"cache_positions": 512}, decoder="gear")
    assert "\n" not in str(caught.value)
