"""Attention to the positions that an indexer selects (DeepSeek-V3.2, GLM-5, MiniMax-M3), beside
oracles that share no code with it: `transformers`, and dense attention to listed positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode.errors import CheckpointError, UnsupportedCombinationError
from anydecode.kernels.library import load_library
from anydecode.models.families import spec_from_config
from anydecode.models.opening import choose_executor
from parity_cases import parity_module
from tiny_models import built, chain, checkpoint_of, hf_logits, hf_model, logits, make_rows

BACKENDS = ["torch", "native"]
CASES = ["deepseek v3.2", "glm moe dsa", "glm moe dsa with shared indexers"]
BLOCKS = ["minimax m3", "minimax m3 local blocks", "minimax m3 one selection"]
TOKENS = np.random.default_rng(0).integers(3, 130, 90).tolist()


def theirs(case: str, **changes: Any) -> Any:
    """The model of `transformers` of a parity test; rows attend to 8 of up to 90 positions."""
    family, settings = parity_module("test_parity").CASES[case]
    return hf_model(family, **{**settings, **changes})


def executor(backend: str, threads: int = 1) -> Any:
    if backend == "native" and load_library() is None:
        pytest.skip("the native kernels are not available here")
    return choose_executor(backend, threads=threads if backend == "native" else None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_logits_far_beyond_the_selection(case: str, backend: str) -> None:
    """Wrong twins: attention to all positions, and a selection of 7 positions; a selection among
    later positions too."""
    torch = pytest.importorskip("torch")

    model = theirs(case)
    found = logits(built(checkpoint_of(model), executor=executor(backend)), chain(TOKENS))
    assert np.abs(found - hf_logits(model, TOKENS)).max() < 1e-4
    for size in (7, 128):
        stored = checkpoint_of(model, index_topk=size)
        other = logits(built(stored, executor=executor(backend)), chain(TOKENS))
        assert np.array_equal(other[:7], found[:7])
        assert np.abs(other[16:] - found[16:]).max() > 1e-2
    for layer in model.model.layers:
        indexer = layer.self_attn.indexer
        if indexer is not None:
            indexer.register_forward_pre_hook(_without_mask, with_kwargs=True)
    with torch.inference_mode():
        other = hf_logits(model, TOKENS)
    assert np.abs(other[16:] - found[16:]).max() > 1e-2


def test_scores_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of one row are divided among threads by positions; those of many rows by row.

    Scores may be 0 at several positions, of which `transformers` selects any: here the lowest. The
    inputs of a second layer would differ by rounding errors, and with them the order of scores.
    """
    torch = pytest.importorskip("torch")

    def stable(self: Any, count: int, dim: int) -> Any:
        values, indices = self.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values[..., :count], indices[..., :count]))

    sizes = {"num_hidden_layers": 1, "max_position_embeddings": 2048}
    model = theirs("deepseek v3.2", index_topk=200, **sizes)
    tokens = np.random.default_rng(0).integers(3, 130, 1300).tolist()
    stored = checkpoint_of(model)
    one, two = (built(stored, executor=executor("native", threads)) for threads in (1, 2))
    found = logits(one, chain(tokens), one.new_cache(1300))
    monkeypatch.setattr(torch.Tensor, "topk", stable)
    assert np.abs(found - hf_logits(model, tokens)).max() < 1e-4
    cache = two.new_cache(1300)
    assert np.array_equal(logits(two, chain(tokens[:1298]), cache), found[:1298])
    assert np.array_equal(logits(two, chain(tokens[1298:], 1298), cache), found[1298:])


def test_blocks_scored_in_several_parts() -> None:
    model = theirs("minimax m3", index_block_size=50, max_position_embeddings=2048)
    tokens = np.random.default_rng(0).integers(3, 130, 1300).tolist()
    stored = checkpoint_of(model)
    one, two = (built(stored, executor=executor("native", threads)) for threads in (1, 2))
    found = logits(one, chain(tokens), one.new_cache(1300))
    assert np.abs(found - hf_logits(model, tokens)).max() < 1e-3
    cache = two.new_cache(1300)
    assert np.array_equal(logits(two, chain(tokens[:1298]), cache), found[:1298])
    assert np.array_equal(logits(two, chain(tokens[1298:], 1298), cache), found[1298:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", BLOCKS)
def test_logits_far_beyond_the_selected_blocks(case: str, backend: str) -> None:
    """Wrong twins: attention to all positions, one block less, blocks of another size, and without
    the blocks that are always selected; the selection of the first head for all."""
    model = theirs(case)
    stored = checkpoint_of(model)
    found = logits(built(stored, executor=executor(backend)), chain(TOKENS))
    assert np.abs(found - hf_logits(model, TOKENS)).max() < 1e-4
    size, local = (stored.config[f"index_{key}"] for key in ("block_size", "local_blocks"))
    for changes in (
        {"index_topk_blocks": 64},
        {"index_topk_blocks": 2},
        {"index_block_size": size + 1},
        {"index_local_blocks": 0 if local else 1},
    ):
        other = logits(
            built(checkpoint_of(model, **changes), executor=executor(backend)), chain(TOKENS)
        )
        assert np.array_equal(other[: 2 * size], found[: 2 * size])
        assert np.abs(other[3 * size :] - found[3 * size :]).max() > 1e-2
    heads, dim = (stored.config[f"index_{key}"] for key in ("n_heads", "head_dim"))
    for name, tensor in stored.tensors.items():
        if name.endswith("indexer.q_proj.weight"):
            stored.tensors[name] = np.tile(tensor[:dim], (heads, 1))
    other = logits(built(stored, executor=executor(backend)), chain(TOKENS))
    assert (np.abs(other - found).max() > 1e-2) == (heads > 1)


def _without_mask(module: Any, args: Any, kwargs: Any) -> Any:
    """The arguments of an indexer with a mask that hides nothing."""
    hidden, queries, positions, mask, *rest = args
    return (hidden, queries, positions, mask * 0, *rest), kwargs


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("threads", [1, 2])
def test_of_equal_scores_the_lower_positions_are_selected(backend: str, threads: int) -> None:
    """Without weights of heads all scores are zero: rows attend to the first positions. Dense
    attention to only these gives the same bits, to the last ones others."""
    stored = checkpoint_of(theirs("deepseek v3.2"))
    for name in stored.tensors:
        if name.endswith("weights_proj.weight"):
            stored.tensors[name] = np.zeros_like(stored.tensors[name])
    sparse = built(stored, executor=executor(backend, threads))
    stored.config |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    dense = built(stored, executor=executor(backend, threads))
    count, table = len(TOKENS), np.arange(len(TOKENS))
    found = logits(sparse, chain(TOKENS))
    seen = [min(position + 1, 8) for position in range(count)]
    rows = make_rows(TOKENS, range(count), range(count), [table], [0] * count, seen)
    assert np.array_equal(found, logits(dense, rows))
    tables = [table[max(0, position - 7) : position + 1] for position in range(count)]
    rows = make_rows(TOKENS, range(count), range(count), tables, range(count), seen)
    assert not np.array_equal(found[8:], logits(dense, rows)[8:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [*CASES, *BLOCKS])
def test_up_to_the_selection_it_is_dense_attention(case: str, backend: str) -> None:
    """With the same bits, beside rows of another text with more positions."""
    stored = checkpoint_of(theirs(case))
    sparse = built(stored, executor=executor(backend))
    if case in BLOCKS:
        stored.config["layer_types"] = ["full_attention"] * 4
    else:
        stored.config |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    dense = built(stored, executor=executor(backend))
    expected = logits(dense, chain(TOKENS[:8]))
    assert np.array_equal(logits(sparse, chain(TOKENS[:8])), expected)
    tables = [np.arange(8), np.arange(8, 98)]
    positions = [*range(8), *range(90)]
    rows = make_rows(
        [*TOKENS[:8], *TOKENS],
        positions,
        range(98),
        tables,
        [0] * 8 + [1] * 90,
        [position + 1 for position in positions],
    )
    both = logits(sparse, rows)
    assert np.array_equal(both[:8], expected)
    assert np.array_equal(both[8:], logits(sparse, chain(TOKENS)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [CASES[2], *BLOCKS])
def test_slots_and_branches_do_not_matter(case: str, backend: str) -> None:
    """The last rows as branches behind a cached text in scattered slots, and with a table per
    layer, as alone."""
    model = built(checkpoint_of(theirs(case)), executor=executor(backend))
    expected = logits(model, chain(TOKENS))
    other = logits(model, chain([*TOKENS[:88], 5, 6]))
    slots = np.random.default_rng(1).permutation(256)[:92].astype(np.int32)
    cache = model.new_cache(256)
    logits(model, chain(TOKENS[:88], slots=slots), cache)
    branches = ([88], [88, 89], [90], [90, 91])
    rows = make_rows(
        [*TOKENS[88:], 5, 6],
        [88, 89, 88, 89],
        slots[88:],
        [slots[:88]],
        [0] * 4,
        [88] * 4,
        [slots[branch].tolist() for branch in branches],
    )
    found = logits(model, rows, cache)
    assert np.array_equal(found[:2], expected[88:])
    assert np.array_equal(found[2:], other[88:])
    rows.tables = [np.stack([slots[:88]] * model.spec.num_layers)]
    assert np.array_equal(logits(model, rows, cache), found)


def test_layers_on_whole_texts() -> None:
    """Quantisers run layers on texts no longer than what is selected."""
    torch = pytest.importorskip("torch")
    from anydecode.kernels.blocks import BlockBackend

    model = built(checkpoint_of(theirs(BLOCKS[0])), executor=executor("torch"))
    network, x = model.network, torch.from_numpy(model.embed(np.array(TOKENS[:13])))
    for length in (12, 13):
        y, backend = x[:length], BlockBackend(length)
        for layer in range(model.spec.num_layers):
            if length == 13 and layer == 1:
                with pytest.raises(UnsupportedCombinationError, match="12 selected positions"):
                    network.layer(backend, y, layer)
                return
            y = network.layer(backend, y, layer)
        found = network.head(backend, y).numpy()
        assert np.abs(found - logits(model, chain(TOKENS[:12]))).max() < 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_types": ["shared", "full", "full"]}, "there is no indexer in this layer"),
        ({"indexer_types": ["full", "full"]}, r"indexer_types\[2\] is None; allowed is full or"),
        ({"indexer_types": ["full", "none", "full"]}, r"indexer_types\[1\] is 'none'"),
        ({"indexer_types": None, "index_topk_pattern": "FX"}, "a text of F and S"),
        ({"index_topk": 0}, "index_topk is 0"),
        ({"index_head_dim": 12}, "the indexer's head_dim is 12; allowed is a multiple of 8"),
        ({"index_n_heads": -1}, "index_n_heads is -1"),
        ({"q_lora_rank": None}, "lacks one of top_k and low_rank_query"),
    ],
)
def test_malformed_configs_end_in_one_line(changes: dict[str, Any], message: str) -> None:
    _check_refusal(CASES[1], changes, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_n_heads": 3}, "num_selections is 3; allowed is an integer from 1 to 2"),
        ({"index_head_dim": 24}, "the indexer's head_dim is 24; allowed is at most 16"),
        ({"index_topk_blocks": 0}, "index_topk_blocks is 0"),
        ({"index_local_blocks": 4}, "local_blocks is 4; allowed is an integer from 0 to 3"),
        ({"index_block_size": -1}, "index_block_size is -1"),
        (
            {"indexer_types": ["none", "full"]},
            r"indexer_types\[2\] is None; allowed is full or none",
        ),
    ],
)
def test_malformed_configs_of_blocks_end_in_one_line(changes: dict[str, Any], message: str) -> None:
    _check_refusal(BLOCKS[0], changes, message)


def _check_refusal(case: str, changes: dict[str, Any], message: str) -> None:
    config = checkpoint_of(theirs(case)).config
    with pytest.raises(CheckpointError, match=message) as caught:
        spec_from_config({**config, **changes})
    assert "\n" not in str(caught.value)


def test_the_layers_with_an_indexer() -> None:
    """The rule of `transformers`, which makes a list of the three kinds of keys."""
    transformers = pytest.importorskip("transformers")
    config = checkpoint_of(theirs(CASES[1])).config
    config = {**config, "num_hidden_layers": 9, "mlp_layer_types": None, "layer_types": None}
    config |= {"indexer_types": None}
    for keys in (
        {},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 2},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
        {"index_topk_pattern": "FFSSFSFSS"},
    ):
        expected = transformers.GlmMoeDsaConfig(num_hidden_layers=9, **keys).indexer_types
        layers = spec_from_config({**config, **keys}).layers
        found = ["shared" if layer.indexer is None else "full" for layer in layers]
        assert found == expected
