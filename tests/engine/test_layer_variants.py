"""The engine's promises for models whose layers differ: shared keys and values, embeddings of
tokens in every layer, heads of several sizes, chunked attention,
linear biases. The text is the same whatever the
batch, the cache, the drafter and the number of restarts."""

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
from tiny_models import PROMPTS, chain, hf_model, logits, own_model

BACKEND = "torch" if load_library() is None else "native"
#: Everything that Gemma 4 has, in one model.
GEMMA_4: dict[str, Any] = {
    "initializer_range": 0.05,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": ByteTokenizer().vocab_size,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
GEMMA_3N: dict[str, Any] = {
    "initializer_range": 0.05,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "head_dim": 8,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": ByteTokenizer().vocab_size,
    "num_kv_shared_layers": 3,
    "laurel_rank": 6,
    "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0, 0.0, 0.0],
}
#: With chunks and growing queries within a few positions.
LLAMA_4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size_mlp": 72,
    "num_local_experts": 5,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 24,
    "floor_scale": 10,
    "no_rope_layers": [1, 0, 1, 1],
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("Gemma4", GEMMA_4),
    "gemma3n": ("Gemma3n", GEMMA_3N),
    "bloom": ("Bloom", {"num_attention_heads": 6}),
    "llama4": ("Llama4", LLAMA_4),
}
#: Families whose layers share keys and values, and read embeddings of tokens in every layer.
SHARED = ("gemma3n", "gemma4")
OPTIONS: dict[str, Any] = {"max_tokens": 32, "ignore_eos": True, "seed": 3, "temperature": 0.8}

pytestmark = pytest.mark.parametrize("family", FAMILIES)


def theirs(family: str, seed: int = 0) -> Any:
    name, settings = FAMILIES[family]
    return hf_model(name, seed, vocab_size=ByteTokenizer().vocab_size, **settings)


@functools.cache
def model(family: str, seed: int = 0, threads: int = 1, backend: str = BACKEND) -> Any:
    return own_model(theirs(family, seed), executor=choose_executor(backend, threads=threads))


def texts(family: str, prompts: list[str], engine: dict[str, Any], **options: Any) -> list[Any]:
    """The tokens after each prompt, generated together."""
    with LLM(model(family), tokenizer=ByteTokenizer(), **engine) as llm:
        found = llm.generate(prompts, **{**OPTIONS, **options})
        llm.engine.check_integrity()
        return [one.tokens for one in found]


@functools.cache
def _alone(family: str, temperature: float, decoder: str | None) -> list[Any]:
    engine = {"prefix_cache": False, "cache_positions": 512}
    options = {"temperature": temperature} | ({"decoder": decoder} if decoder else {})
    return [texts(family, [prompt], engine, **options)[0] for prompt in PROMPTS]


def alone(family: str, temperature: float = 0.8, decoder: str | None = None) -> list[Any]:
    """The tokens after each prompt, each by itself, without a prefix cache."""
    return _alone(family, temperature, decoder)


def test_layers_that_share_have_no_cache_of_their_own(family: str) -> None:
    spec, cache = model(family).spec, model(family).new_cache(8, "float16")
    sizes = [
        2 * layer.attention.num_kv_heads * layer.attention.head_dim
        for layer in spec.layers
        if layer.attention is not None and layer.cache_layer is None
    ]
    assert bytes_per_position(cache) == 2 * sum(sizes)
    assert (len(sizes) < spec.num_layers) == (family in SHARED)


@pytest.mark.parametrize("row_budget", [1, 5, 512])
def test_batches_and_chunks(family: str, row_budget: int) -> None:
    engine = {"row_budget": row_budget, "cache_positions": 1024}
    assert texts(family, PROMPTS, engine) == alone(family)


def test_rows_whose_logits_are_not_read_skip_layers_that_store_nothing(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, stops = model(family), list[int]()
    run = own.run

    def recording(rows: Any, *arguments: Any) -> Any:
        stops.extend(rows.stop.tolist())
        return run(rows, *arguments)

    monkeypatch.setattr(own, "run", recording)
    with LLM(own, tokenizer=ByteTokenizer(), cache_positions=512) as llm:
        llm.generate([65] * 20, max_tokens=1)
        assert stops == [3 if family in SHARED else own.spec.num_layers] * 19 + [
            own.spec.num_layers
        ]


def test_preempted_requests_start_again_with_the_same_text(family: str) -> None:
    with LLM(model(family), tokenizer=ByteTokenizer(), cache_positions=160) as llm:
        found = [one.tokens for one in llm.generate(PROMPTS, **OPTIONS)]
        assert llm.engine.num_preemptions
        llm.engine.check_integrity()
    assert found == alone(family)


def test_cached_and_spilled_prefixes(family: str) -> None:
    engine = {"cache_positions": 128, "prefix_spill": "memory"}
    with LLM(model(family), tokenizer=ByteTokenizer(), **engine) as llm:
        for _ in range(2):
            found = [llm.generate(prompt, **OPTIONS).tokens for prompt in PROMPTS]
            assert found == alone(family)
        prefixes = llm.engine.runners["target"].prefixes
        assert prefixes.num_hits and prefixes.num_restored


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("decoder", ["auto", "multi-step", "prompt-lookup", "opt-tree"])
def test_drafts_and_trees(family: str, decoder: str, temperature: float) -> None:
    engine = {"draft": model(family, 1), "cache_positions": 2048}
    found = texts(family, PROMPTS, engine, decoder=decoder, temperature=temperature)
    assert found == alone(family, temperature)


def test_beams_share_rows(family: str) -> None:
    found = texts(
        family, PROMPTS, {"cache_positions": 2048}, decoder="beam:width=3", temperature=0.0
    )
    assert found == alone(family, 0.0, "beam:width=3")


@pytest.mark.one_in(3)  # each format
@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_cache_formats(family: str, format: str) -> None:
    """The same text in batches as alone."""
    engine = {"cache": format, "cache_positions": 512, "prefix_cache": False}
    found = texts(family, PROMPTS, engine)
    assert found == [texts(family, [prompt], engine)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("length", [40, 300])
def test_several_threads_and_torch(family: str, length: int) -> None:
    """With two threads, the attention of one row is divided by heads and by positions."""
    if BACKEND != "native":
        pytest.skip("the native kernels are not available here")
    tokens = np.random.default_rng(0).integers(3, 250, length).tolist()
    expected = logits(model(family), chain(tokens), model(family).new_cache(512))
    other = model(family, threads=2)
    cache = other.new_cache(512)
    logits(other, chain(tokens[:-1]), cache)
    assert np.array_equal(logits(other, chain(tokens[-1:], length - 1), cache)[-1], expected[-1])
    in_torch = model(family, backend="torch")
    reference = logits(in_torch, chain(tokens), in_torch.new_cache(512))
    assert np.abs(expected - reference).max() < 1e-4


def test_the_triton_kernels_refuse_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anydecode.kernels.cuda.available.unavailable_reason", lambda: None)
    with pytest.raises(
        UnsupportedCombinationError, match="Triton kernels do not support"
    ) as caught:
        own_model(theirs(family), executor=choose_executor("triton"))
    assert "\n" not in str(caught.value)


def test_gear_and_rows_that_start_later(family: str) -> None:
    """What cannot work is refused in one line."""
    if family not in SHARED:
        assert texts(family, PROMPTS[:1], {"cache_positions": 512}, decoder="gear")
        return
    cases = [("gear", "keys and values"), ("layerskip", "start at layer 0")]
    if family == "gemma3n":
        cases.append(("easyspec", "in parallel"))
    for decoder, message in cases:
        with pytest.raises(UnsupportedCombinationError, match=message) as caught:
            engine = {"cache_positions": 512, "draft": model(family, 1)}
            texts(family, PROMPTS[:1], engine, decoder=decoder)
        assert "\n" not in str(caught.value)


def test_attention_weights_of_single_rows(family: str) -> None:
    """Of a layer that attends to the keys of another one, if there is such a layer."""
    torch = pytest.importorskip("torch")
    if family == "gemma3n":
        with pytest.raises(UnsupportedCombinationError, match="several streams") as caught:
            AttentionProbe(own_model(theirs(family)))
        assert "\n" not in str(caught.value)
        return
    tokens = np.random.default_rng(0).integers(3, 250, 7)
    ours, positions, last = own_model(theirs(family)), np.arange(7), -1
    with torch.inference_mode():
        output = theirs(family)(
            torch.from_numpy(tokens[None]), output_attentions=True, output_hidden_states=True
        )
    cache, layer = ours.new_cache(7), ours.spec.num_layers + last
    logits(ours, chain(tokens.tolist()), cache)
    state = output.hidden_states[layer][0].numpy()
    found = AttentionProbe(ours).attention(layer, state, positions, cache, positions, positions)
    assert np.abs(found - output.attentions[layer][0].numpy()).max() < 1e-5
