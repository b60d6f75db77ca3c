"""The guarantee of `Model`: the result of a row does not depend on the other rows of the pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.oracles.transformer import rotate
from anydecode.certification.tiny import tiny_model
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.formats import DTYPES
from anydecode.kernels.interface import (
    STORE_ONLY,
    KeyValues,
    OutputSpec,
    ParallelLayers,
    Rows,
    Weight,
)
from anydecode.kernels.library import load_library
from anydecode.models.opening import choose_executor
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.models.transformer import Transformer
from tiny_models import LATENT_SIZES, chain, hf_model, logits, make_rows, own_model, whole

PROMPT = [5, 17, 99, 3, 128, 64, 64, 11, 42, 7, 7, 90]

MODELS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "llama": ("Llama", "float32", {}),
    "llama bfloat16": ("Llama", "bfloat16", {"attention_bias": True}),
    "llama int8": ("Llama", "int8", {"hidden_size": 64, "intermediate_size": 96}),
    "llama int4": ("Llama", "int4", {"hidden_size": 64, "intermediate_size": 96}),
    "gemma2": ("Gemma2", "float32", {"head_dim": 20, "sliding_window": 5}),
    "gemma4": (
        "Gemma4",
        "float32",
        {
            "initializer_range": 0.05,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "head_dim": 12,
            "global_head_dim": 20,
            "sliding_window": 5,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 131,
            "num_kv_shared_layers": 2,
        },
    ),
    "gemma4 experts int8": (
        "Gemma4",
        "int8",
        {
            "initializer_range": 0.05,
            "hidden_size": 64,
            "intermediate_size": 96,
            "head_dim": 16,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 131,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma3n": (
        "Gemma3n",
        "float32",
        {
            "initializer_range": 0.05,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "head_dim": 12,
            "sliding_window": 5,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 131,
            "num_kv_shared_layers": 2,
            "laurel_rank": 6,
            "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0],
        },
    ),
    "gemma3n int8": (
        "Gemma3n",
        "int8",
        {
            "initializer_range": 0.05,
            "hidden_size": 64,
            "intermediate_size": 96,
            "head_dim": 16,
            "layer_types": ["full_attention"] * 3,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 131,
            "num_kv_shared_layers": 1,
            "laurel_rank": 32,
            "activation_sparsity_pattern": [0.9, 0.5, 0.0],
        },
    ),
    "llama4 int8": (
        "Llama4",
        "int8",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "intermediate_size_mlp": 96,
            "head_dim": 16,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 5,
            "floor_scale": 4,
            "no_rope_layers": [1, 0, 1],
        },
    ),
    "bloom": ("Bloom", "float32", {"num_attention_heads": 6}),
    "mpt int8": ("Mpt", "int8", {"hidden_size": 64, "attn_config": {"clip_qkv": 0.5}}),
    "olmo2": ("Olmo2", "float32", {"vocab_size": 129, "intermediate_size": 77}),
    "smollm3": ("SmolLM3", "float32", {"num_hidden_layers": 4}),
    "qwen3 moe": (
        "Qwen3Moe",
        "float32",
        {
            "head_dim": 12,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
        },
    ),
    "granite int8": (
        "Granite",
        "int8",
        {"hidden_size": 64, "intermediate_size": 96, "residual_multiplier": 0.3},
    ),
    "glm4": ("Glm4", "float32", {"head_dim": 12, "partial_rotary_factor": 0.5}),
    "exaone4": ("Exaone4", "float32", {"sliding_window": 5, "num_hidden_layers": 4}),
    "hunyuan": ("HunYuanDenseV1", "float32", {"head_dim": 12}),
    "ministral3": (
        "Ministral3",
        "float32",
        {
            "head_dim": 12,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 4,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "starcoder2 int8": ("Starcoder2", "int8", {"hidden_size": 64, "intermediate_size": 96}),
    "cohere2": ("Cohere2", "float32", {"sliding_window": 5, "num_hidden_layers": 4}),
    "gpt2": ("GPT2", "float32", {}),
    "gpt neox": ("GPTNeoX", "float32", {"hidden_size": 64}),
    "falcon": ("Falcon", "bfloat16", {}),
    "mixtral int8": (
        "Mixtral",
        "int8",
        {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4},
    ),
    "gpt oss": (
        "GptOss",
        "float32",
        {
            "head_dim": 12,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "tie_word_embeddings": False,
        },
    ),
    "glm4 moe int8": (
        "Glm4Moe",
        "int8",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
        },
    ),
    "deepseek v3": (
        "DeepseekV3",
        "float32",
        {
            **LATENT_SIZES,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek v2 int8": (
        "DeepseekV2",
        "int8",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "kv_lora_rank": 64,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 24,
            "moe_intermediate_size": 32,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen2 moe": (
        "Qwen2Moe",
        "float32",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
        },
    ),
}

_built: dict[str, Transformer] = {}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Transformer:
    return tiny(request.param)


def tiny(name: str) -> Transformer:
    if name not in _built:
        family, dtype, settings = MODELS[name]
        _built[name] = own_model(hf_model(family, **settings), dtype)
    return _built[name]


@pytest.mark.one_in(3)
def test_chunked_prefill_is_bit_equal(model: Transformer) -> None:
    expected = logits(model, chain(PROMPT))
    for sizes in ([1] * 12, [5, 7], [3, 1, 8], [11, 1]):
        cache, parts, first = model.new_cache(20), [], 0
        for size in sizes:
            parts.append(logits(model, chain(PROMPT[first : first + size], first), cache))
            first += size
        assert np.array_equal(np.concatenate(parts), expected)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "name",
    [
        *("granite int8", "ministral3", "starcoder2 int8", "cohere2", "gpt2", "gpt neox"),
        *("deepseek v3", "deepseek v2 int8"),
    ],
)
def test_native_kernels_of_every_kind_of_layer_are_bit_equal(name: str, threads: int) -> None:
    """A prompt at once, row by row and after other rows of the pass."""
    if load_library() is None:
        pytest.skip("the native kernels are not available here")
    family, dtype, settings = MODELS[name]
    native = choose_executor("native", threads)
    model = own_model(hf_model(family, **settings), dtype, executor=native)
    expected = logits(model, chain(PROMPT))
    cache = model.new_cache(64)
    single = [logits(model, chain([token], i), cache)[0] for i, token in enumerate(PROMPT)]
    assert np.array_equal(expected, np.stack(single))
    count = len(PROMPT)
    tables = [np.arange(40, 43), np.arange(count)]
    both = make_rows(
        [9, 8, 7, *PROMPT],
        [0, 1, 2, *range(count)],
        [40, 41, 42, *range(count)],
        tables,
        [0] * 3 + [1] * count,
        [1, 2, 3, *range(1, count + 1)],
    )
    assert np.array_equal(logits(model, both)[3:], expected)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize(
    "decoder", ["prompt-lookup", "lookahead", "space", "jump-forward", "multi-step"]
)
def test_drafts_may_end_after_the_position_embeddings(decoder: str, backend: str) -> None:
    if backend == "native" and load_library() is None:
        pytest.skip("the native kernels are not available here")
    tokenizer = ByteTokenizer()
    settings = {"max_position_embeddings": 32, "vocab_size": tokenizer.vocab_size}
    model = own_model(hf_model("GPT2", **settings), executor=choose_executor(backend))
    with LLM(model, tokenizer=tokenizer) as llm:
        plain = llm.generate("hello hello hello ", max_tokens=99, decoder="autoregressive")
        assert plain.finish_reason == "length"
        assert llm.generate("hello hello hello ", max_tokens=99, decoder=decoder).text == plain.text


def test_embeddings_in_place_of_tokens_get_position_embeddings() -> None:
    model = tiny("gpt2")
    rows = chain(PROMPT)
    rows.inputs, rows.tokens = model.embed(rows.tokens), np.full(len(PROMPT), -1, np.int32)
    assert np.array_equal(logits(model, rows), logits(model, chain(PROMPT)))


def test_easyspec_layers_of_parallel_residuals() -> None:
    """In groups of one layer, layers in parallel are the layers in sequence."""
    model = tiny("cohere2")
    rows = chain(PROMPT)
    rows.variant, rows.variants = np.zeros(len(PROMPT), np.int32), [ParallelLayers(1)]
    expected = logits(model, chain(PROMPT))
    assert np.array_equal(logits(model, rows), expected)
    rows.variants = [ParallelLayers(2)]
    assert not np.allclose(logits(model, rows), expected)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_rows_that_are_only_stored(backend: str) -> None:
    """Each layer stores the keys and values of the row's input; rows of the same pass see them."""
    if backend == "native" and load_library() is None:
        pytest.skip("the native kernels are not available here")
    hf = hf_model("Llama")
    model, readable = own_model(hf, executor=choose_executor(backend)), own_model(hf)
    inputs = np.random.default_rng(0).standard_normal((5, model.spec.hidden_size), np.float32)
    rows = chain([7] * 5 + [3, 9])
    rows.tokens[:5] = -1
    rows.inputs = np.concatenate([inputs, np.full((2, len(inputs[0])), np.nan, np.float32)])
    rows.variant, rows.variants = np.array([0] * 5 + [-1, -1], np.int32), [STORE_ONLY]
    cache, depth = model.new_cache(16), model.spec.num_layers
    outputs = np.arange(5, 7, dtype=np.int32)
    together = model.run(
        whole(rows, model), cache, OutputSpec(outputs, {depth: np.arange(5, dtype=np.int32)})
    )
    assert np.array_equal(together.hidden[depth], inputs)
    expected = together.logits.copy()
    for layer, (spec, weights) in enumerate(
        zip(model.spec.layers, readable.network.weights.layers, strict=True)
    ):
        assert spec.rope is not None and weights.key is not None and weights.value is not None
        keys, values = (
            (inputs @ one.weight.data.T).reshape(5, -1, 12) for one in (weights.key, weights.value)
        )
        keys = rotate(keys, np.arange(5), spec.rope.frequencies)
        assert np.allclose(cache.keys[layer][:5], keys, atol=1e-4)
        assert np.allclose(cache.values[layer][:5], values, atol=1e-4)
    assert np.array_equal(logits(model, chain([3, 9], 5), cache), expected)


@pytest.mark.one_in(3)
def test_batch_of_sixteen_is_bit_equal_to_single_sequences(model: Transformer) -> None:
    generator = np.random.default_rng(0)
    texts = [generator.integers(3, 120, 1 + 5 * i % 37).tolist() for i in range(16)]
    slots = generator.permutation(600)
    tables, positions, cache = [], 0, model.new_cache(600)
    for text in texts:
        tables.append(slots[positions : positions + len(text)])
        positions += len(text)
    order = generator.permutation(sum(len(text) for text in texts))
    pairs = [(i, p) for i, text in enumerate(texts) for p in range(len(text))]
    pairs = [pairs[i] for i in order]
    rows = make_rows(
        [texts[i][p] for i, p in pairs],
        [p for _, p in pairs],
        [tables[i][p] for i, p in pairs],
        tables,
        [i for i, _ in pairs],
        [p + 1 for _, p in pairs],
    )
    together = logits(model, rows, cache)
    for number, text in enumerate(texts):
        batch_rows = [r for r, (i, _) in enumerate(pairs) if i == number]
        batch_rows.sort(key=lambda r: pairs[r][1])
        assert np.array_equal(together[batch_rows], logits(model, chain(text)))


def test_plain_matmul_is_not_bit_equal_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with torch's matmul instead of tiles, chunks are not bit-equal."""

    pytest.importorskip("torch")
    from anydecode.kernels.tiled import TiledProduct
    from anydecode.kernels.torch_arrays import as_tensor

    def plain(product: TiledProduct, x: Any, weight: Weight) -> Any:
        return x @ as_tensor(weight.data).T

    monkeypatch.setattr(TiledProduct, "__call__", plain)
    model = tiny("llama")
    cache = model.new_cache(20)
    parts = [
        logits(model, chain([token], position), cache) for position, token in enumerate(PROMPT)
    ]
    assert not np.array_equal(np.concatenate(parts), logits(model, chain(PROMPT)))


PARENTS = [-1, 0, 0, 1, 1, 2, 4]
NODES = [30, 31, 32, 33, 34, 33, 30]


def tree_rows(prompt: int, parents: list[int], position_mistake: int = 0) -> Rows:
    """Rows of `NODES` after a prompt in slots 0.., node i in slot 200 - i."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append((paths[parent] if parent >= 0 else []) + [node])
    return make_rows(
        NODES,
        [prompt + len(path) - 1 + position_mistake for path in paths],
        [200 - node for node in range(len(NODES))],
        [np.arange(prompt)],
        [0] * len(NODES),
        [prompt] * len(NODES),
        [[200 - node for node in path] for path in paths],
    )


def tree_logits(model: Transformer, rows: Rows) -> np.ndarray:
    cache = model.new_cache(256)
    logits(model, chain(PROMPT), cache)
    return logits(model, rows, cache)


def chain_logits(model: Transformer, node: int) -> np.ndarray:
    path = [node]
    while PARENTS[path[0]] >= 0:
        path.insert(0, PARENTS[path[0]])
    return logits(model, chain(PROMPT + [NODES[n] for n in path]))[-1]


@pytest.mark.one_in(3)
def test_tree_nodes_equal_chains(model: Transformer) -> None:
    got = tree_logits(model, tree_rows(len(PROMPT), PARENTS))
    for node in range(len(NODES)):
        assert np.array_equal(got[node], chain_logits(model, node))


def test_wrong_trees_change_the_logits() -> None:
    """Negative controls: a node under the wrong parent, a visible sibling, a position off by
    one."""
    model = tiny("llama")
    node = 4
    expected = chain_logits(model, node)
    wrong_parent = tree_rows(len(PROMPT), [-1, 0, 0, 1, 2, 2, 4])
    shifted = tree_rows(len(PROMPT), PARENTS, position_mistake=1)
    leaky = tree_rows(len(PROMPT), PARENTS)
    at = int(leaky.tail_start[node])
    leaky.tails = np.insert(leaky.tails, at + 2, 200 - 3).astype(np.int32)
    leaky.tail_length[node] += 1
    leaky.tail_start[node + 1 :] += 1
    for rows in (wrong_parent, shifted, leaky):
        assert not np.array_equal(tree_logits(model, rows)[node], expected)


def test_split_at_every_layer_is_bit_equal(model: Transformer) -> None:
    """Running on from the hidden state after any number of layers gives the same bits."""
    if model.spec.per_layer_size:
        check_later_rows_are_refused(model)
        return
    layers = model.spec.num_layers
    rows, every = chain(PROMPT), np.arange(len(PROMPT), dtype=np.int32)
    expected = logits(model, rows)
    for split in range(layers + 1):
        cache = model.new_cache(20)
        first = whole(chain(PROMPT), model)
        first.stop[:] = split
        state = model.run(first, cache, OutputSpec(every[:0], {split: every})).hidden[split]
        second = whole(chain(PROMPT), model)
        second.tokens[:], second.start[:], second.inputs = -1, split, state
        assert np.array_equal(model.run(second, cache, OutputSpec(every)).logits, expected)


def check_later_rows_are_refused(model: Transformer) -> None:
    rows, every = whole(chain(PROMPT), model), np.arange(len(PROMPT), dtype=np.int32)
    rows.inputs = np.zeros((len(PROMPT), model.spec.hidden_size), np.float32)
    rows.tokens[2], rows.start[2] = -1, 1
    with pytest.raises(UnsupportedCombinationError, match="passes start at layer 0"):
        model.run(rows, model.new_cache(20), OutputSpec(every))


def test_rows_that_stop_early_leave_embeddings_per_layer_as_they_are() -> None:
    """In the parts of a pass whose rows run different numbers of layers."""
    model = tiny("gemma4")
    rows, count = whole(chain(PROMPT), model), len(PROMPT)
    every = np.arange(count, dtype=np.int32)
    expected = model.run(rows, model.new_cache(20), OutputSpec(every)).logits
    rows.stop[count - 1] = 3
    found = model.run(rows, model.new_cache(20), OutputSpec(every)).logits
    assert np.array_equal(found[:-1], expected[:-1])
    assert not np.array_equal(found[-1], expected[-1])


def test_layer_ranges_of_every_kind_in_one_pass(model: Transformer) -> None:
    """Rows that stop early, start late or run through all layers share a pass without affecting
    each other. Captured states equal the inputs of later layers, and the logits of an early row are
    the head of its state."""
    if model.spec.per_layer_size:
        return  # no row starts late
    layers = model.spec.num_layers
    every = np.arange(len(PROMPT), dtype=np.int32)
    cache, first = model.new_cache(64), whole(chain(PROMPT), model)
    first.stop[:] = 1
    out = model.run(first, cache, OutputSpec(every, {1: every, 0: every}))
    state, early = out.hidden[1].copy(), out.logits.copy()
    assert np.array_equal(model.head(state), early)
    assert np.array_equal(out.hidden[0], model.embed(first.tokens))
    count = len(PROMPT)
    both = make_rows(
        [-1] * count + PROMPT + PROMPT,
        list(range(count)) * 3,
        list(range(count)) + list(range(20, 20 + count)) + list(range(40, 40 + count)),
        [np.arange(count), np.arange(20, 20 + count), np.arange(40, 40 + count)],
        [0] * count + [1] * count + [2] * count,
        list(range(1, count + 1)) * 3,
    )
    whole(both, model)
    both.start[:count], both.stop[count : 2 * count] = 1, layers - 1
    both.inputs = np.concatenate((state, np.full((2 * count, state.shape[1]), np.nan, np.float32)))
    capture_layers = {layers - 1: np.arange(3 * count, dtype=np.int32)}
    out = model.run(both, cache, OutputSpec(np.arange(3 * count, dtype=np.int32), capture_layers))
    expected = logits(model, chain(PROMPT))
    assert np.array_equal(out.logits[:count], expected)
    assert np.array_equal(out.logits[2 * count :], expected)
    captured = out.hidden[layers - 1]
    assert np.array_equal(captured[:count], captured[count : 2 * count])
    assert np.array_equal(out.logits[count : 2 * count], model.head(captured[count : 2 * count]))


def test_embeddings_in_place_of_tokens(model: Transformer) -> None:
    rows = chain(PROMPT)
    if model.spec.per_layer_size:
        rows.tokens[3:7] = 0  # whose embeddings per layer those rows have
    expected = logits(model, rows)
    given = np.zeros((len(PROMPT), model.spec.hidden_size), np.float32)
    given[3:7] = model.embed(rows.tokens[3:7])
    rows.tokens[3:7], rows.inputs = -1, given
    assert np.array_equal(logits(model, rows), expected)


@pytest.mark.parametrize("backend", ["native", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_head_of_no_rows_before_the_first_pass(backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    model = tiny_model(backend=backend)
    assert model.head(np.empty((0, model.spec.hidden_size), np.float32)).shape == (0, 259)


def test_embeddings_are_not_scaled_again() -> None:
    """Negative control: Gemma's scale applies to tokens only, so unscaled embeddings differ."""
    model = tiny("gemma2")
    rows = chain(PROMPT)
    unscaled = model.embed(rows.tokens) / model.spec.embedding_scale
    expected = logits(model, rows)
    rows.tokens[:], rows.inputs = -1, unscaled
    assert not np.array_equal(logits(model, rows), expected)


def test_bidirectional_block_does_not_depend_on_the_order_of_rows() -> None:
    """Every row of a block attends to the whole block; rows may have any order and any slots."""
    model = tiny("llama")

    def block(order: list[int], slots: np.ndarray) -> np.ndarray:
        count = len(PROMPT)
        rows = make_rows(
            [PROMPT[i] for i in order], order, slots[order], [slots], [0] * count, [count] * count
        )
        out = logits(model, rows, model.new_cache(64))
        return out[np.argsort(order)]

    count = len(PROMPT)
    straight = block(list(range(count)), np.arange(count))
    generator = np.random.default_rng(1)
    shuffled = block(generator.permutation(count).tolist(), generator.permutation(64)[:count])
    assert np.array_equal(straight, shuffled)
    assert not np.array_equal(straight[0], logits(model, chain(PROMPT))[0])


def test_layers_may_have_different_slots() -> None:
    """One table per layer, with a hole in one of them."""
    model = tiny("llama")
    cache = model.new_cache(64)
    logits(model, chain(PROMPT), cache)
    count, layers = len(PROMPT), model.spec.num_layers
    table = np.tile(np.arange(count + 1, dtype=np.int32), (layers, 1))
    tables = {"same": table.copy(), "hole": table.copy()}
    tables["hole"][1, 4] = -1
    got = {}
    for name, given in tables.items():
        rows = make_rows([9], [count], [count], [given], [0], [count + 1])
        got[name] = logits(model, rows, cache)
    assert np.array_equal(got["same"], logits(model, chain([9], count), cache))
    assert not np.array_equal(got["hole"], got["same"])


def test_a_row_without_a_slot_does_not_change_the_cache() -> None:
    model = tiny("llama")
    cache = model.new_cache(16)
    logits(model, chain(PROMPT), cache)
    before = [keys.copy() for keys in cache.keys]
    rows = make_rows([9], [12], [-1], [np.arange(12)], [0], [12])
    logits(model, rows, cache)
    assert all(np.array_equal(a, b) for a, b in zip(before, cache.keys, strict=True))


def test_half_precision_cache() -> None:
    model = tiny("llama")
    cache = model.new_cache(16, "bfloat16")
    assert cache.keys[0].dtype == DTYPES["BF16"]
    difference = logits(model, chain(PROMPT), cache) - logits(model, chain(PROMPT))
    assert 0 < np.abs(difference).max() < 1.0


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda rows: rows.tokens.fill(-1), "inputs"),
        (lambda rows: rows.tokens.fill(5000), "vocabulary"),
        (lambda rows: rows.start.fill(1), "layer 0"),
        (lambda rows: rows.stop.fill(99), "layer ranges"),
        (lambda rows: setattr(rows, "adapters", np.zeros(12, np.int32)), "no adapter 0"),
    ],
)
def test_invalid_rows_are_rejected(corrupt: Any, message: str) -> None:
    model = tiny("llama")
    rows = whole(chain(PROMPT), model)
    corrupt(rows)
    with pytest.raises(InvalidRequestError, match=message):
        model.run(rows, model.new_cache(16), OutputSpec(np.arange(12, dtype=np.int32)))


def scripted_logits(model: ScriptedModel, rows: Rows, cache: KeyValues) -> np.ndarray:
    rows.start[:], rows.stop[:] = 0, model.spec.num_layers
    return model.run(rows, cache, OutputSpec(np.arange(len(rows), dtype=np.int32))).logits


def test_scripted_model_depends_on_the_visible_tokens() -> None:
    """Chunks and trees agree with the chain; wrong paths and positions do not."""
    model = ScriptedModel(None, 131)
    expected = scripted_logits(model, chain(PROMPT), model.new_cache(32))
    assert len({int(row.argmax()) for row in expected}) > 5
    cache = model.new_cache(256)
    parts = [
        scripted_logits(model, chain(PROMPT[a:b], a), cache) for a, b in ((0, 4), (4, 5), (5, 12))
    ]
    assert np.array_equal(np.concatenate(parts), expected)
    got = scripted_logits(model, tree_rows(12, PARENTS), cache)
    path = scripted_logits(model, chain([*PROMPT, 30, 31, 34, 30]), model.new_cache(32))
    assert np.array_equal(got[[0, 1, 4, 6]], path[12:])
    wrong = scripted_logits(model, tree_rows(12, [-1, 0, 0, 1, 2, 2, 4]), cache)
    assert not np.array_equal(wrong[6], got[6])
    shifted = scripted_logits(model, tree_rows(12, PARENTS, position_mistake=1), cache)
    assert not np.array_equal(shifted[4], got[4])


def test_scripted_layer_ranges() -> None:
    model = ScriptedModel(None, 131)
    every = np.arange(12, dtype=np.int32)
    expected = scripted_logits(model, chain(PROMPT), model.new_cache(32))
    cache, rows = model.new_cache(32), chain(PROMPT)
    rows.stop[:] = 2
    out = model.run(rows, cache, OutputSpec(every, {2: every}))
    assert not np.array_equal(out.logits, expected)
    assert np.array_equal(model.head(out.hidden[2]), out.logits)
    rows.tokens[:], rows.start[:], rows.stop[:], rows.inputs = -1, 2, 4, out.hidden[2]
    assert np.array_equal(model.run(rows, cache, OutputSpec(every)).logits, expected)
    rows = chain([1], 12)
    rows.stop[:] = 4
    fresh = model.new_cache(32)
    with pytest.raises(RuntimeError, match="stored nothing"):
        model.run(rows, fresh, OutputSpec(every[:1]))


def test_scripted_tables_and_functions() -> None:
    table = ScriptedModel({(): {7: 1.0}, (5,): {9: 2.0}, (5, 17): {3: 4.0}}, 131)
    got = scripted_logits(table, chain(PROMPT), table.new_cache(16))
    assert got.argmax(-1)[:3].tolist() == [9, 3, 7]
    function = ScriptedModel(lambda path: np.eye(131, dtype=np.float32)[(sum(path)) % 131], 131)
    got = scripted_logits(function, chain(PROMPT), function.new_cache(16))
    assert got.argmax(-1).tolist() == (np.cumsum(PROMPT) % 131).tolist()


def test_byte_tokenizer() -> None:
    tokenizer = ByteTokenizer()
    text = tokenizer.render_chat([{"role": "user", "content": "né"}])
    ids = tokenizer.encode(text)
    assert text == "user: né\nassistant: "
    assert tokenizer.decode([*ids, *tokenizer.eos_ids]) == text
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert [tokenizer.is_special(token) for token in (255, 256, 258)] == [False, True, True]


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_token_0_is_embedded_beside_rows_with_inputs(backend: str) -> None:
    if backend == "native" and load_library() is None:
        pytest.skip("the native kernels are not available here")
    model = own_model(hf_model("Llama"), executor=choose_executor(backend))
    tokens = [0, 7, 0, 9]
    rows = chain(tokens)
    rows.inputs = model.embed(np.array(tokens))
    rows.inputs[[0, 2]] = np.nan  # not read
    rows.tokens[[1, 3]] = -1
    assert np.array_equal(logits(model, rows), logits(model, chain(tokens)))


def test_embeddings_are_read_beside_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders read them while a pass, whose buffers the executor's `embed` shares, may run."""
    if load_library() is None:
        pytest.skip("the native kernels are not available here")
    model = own_model(hf_model("Llama"), executor=choose_executor("native"))
    tokens = np.array([5, 0, 9], np.int32)
    expected = model.executor.embed(tokens)
    monkeypatch.setattr(model.executor, "embed", None)
    assert np.array_equal(model.embed(tokens), expected)
