"""Drafters that predict blocks, opened from folders: published layouts, and files that do not fit.
The oracle test of `dflash` compares each layout with an independent forward pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from anydecode import LLM
from anydecode.certification.oracles.speculative import dflash as oracle
from anydecode.certification.tiny import tiny_network
from anydecode.certification.tiny_blocks import (
    as_deepspec,
    as_speculators,
    dflash2_checkpoint,
    dflash_checkpoint,
    domino_checkpoint,
    dspark_checkpoint,
    pard_checkpoint,
    peagle_checkpoint,
)
from anydecode.errors import CheckpointError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.draft_heads import load_draft_head
from anydecode.models.families import load_network
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import Network
from anydecode.models.spec import BlockSpec
from gguf_models import SIZES, make_tensors, write_folder
from model_files import tokenizer_json

Change = Callable[[dict[str, Any], dict[str, np.ndarray]], None]
VOCAB = 259


@pytest.fixture(scope="module")
def target() -> Network:
    return tiny_network(layers=4)


def _changed(checkpoint: Checkpoint, change: Change) -> Checkpoint:
    config, tensors = dict(checkpoint.config), dict(checkpoint.tensors)
    if "dflash_config" in config:
        config["dflash_config"] = dict(config["dflash_config"])
    change(config, tensors)  # type: ignore[arg-type]
    return Checkpoint(checkpoint.name, checkpoint.path, config, tensors)


def _set(**values: Any) -> Change:
    return lambda config, tensors: config.update(values)


def _inner(**values: Any) -> Change:
    return lambda config, tensors: config["dflash_config"].update(values)


def _tensor(name: str, value: Any) -> Change:
    return lambda config, tensors: tensors.update({name: np.asarray(value)})


def _without(name: str) -> Change:
    return lambda config, tensors: [tensors.pop(name)][:0]  # type: ignore[return-value]


def _refuse(checkpoint: Checkpoint, target: Network, change: Change, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as refused:
        load_draft_head(_changed(checkpoint, change), target)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set(vocab_size=300), "vocab_size is 300"),
        (_set(hidden_size=128), "hidden size 64, not 128"),
        (_set(target_hidden_size=32), "target_hidden_size is 32"),
        (_set(num_attention_heads=0), "num_attention_heads"),
        (_set(num_hidden_layers=3), "layers.2"),
        (_set(num_hidden_layers=1), "layers.1.input_layernorm.weight is not a part"),
        (_set(model_type="mamba"), "model_type"),
        (_set(model_type="qwen3_moe"), "num_experts"),
        (_set(model_type=5), "model type 5"),
        (_set(block_size=1), "block_size is 1"),
        (_set(block_size=None), "lacks 'block_size'"),
        (_set(block_size="8"), "block_size"),
        (_set(dflash_config=[]), "dflash_config"),
        (_inner(mask_token_id=VOCAB), "mask_token_id is 259"),
        (_inner(mask_token_id=-1), "mask_token_id is -1"),
        (_inner(mask_token_id=None), "lacks 'mask_token_id'"),
        (_inner(target_layer_ids=[0, 1, 3]), "target_layer_ids is .* without the output of the la"),
        (_inner(target_layer_ids=[-2, 1, 2]), "target_layer_ids"),
        (_inner(target_layer_ids="all"), "target_layer_ids"),
        (_inner(target_layer_ids=[]), "target_layer_ids"),
        (_inner(target_layer_ids=[0, 1]), "fc.weight"),
        (_inner(causal_head=3), "causal_head"),
        (_inner(projector_type="eagle"), "projector_type is 'eagle'"),
        (_inner(selector_rank=256), "candidate_selector"),
        (_inner(conv_kernel_size=2), "lacks 'conv_group_size'"),
        (_inner(use_swa=True), "use_swa"),
        (_inner(attention_sink_bias=True), "attention_sink_bias"),
        (_tensor("fc.weight", np.ones((64, 64), np.float32)), "fc.weight"),
        (_tensor("mask_embedding", np.ones(64, np.float32)), "mask_embedding is not a part"),
        (_tensor("layers.0.self_attn.sinks", np.ones(4, np.float32)), "sinks is not a part"),
        (_tensor("layers.2.mlp.up_proj.weight", np.ones((2, 2))), "is not a part"),
        (_tensor("d2t", np.zeros(3, np.int64)), "lacks 'draft_vocab_size'"),
        (_without("hidden_norm.weight"), "hidden_norm"),
        (_without("norm.weight"), "norm.weight"),
        (_without("layers.0.self_attn.q_norm.weight"), "q_norm"),
        (_without("layers.1.mlp.down_proj.weight"), "layers.1.mlp.down_proj"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_drafter_that_does_not_fit_is_refused(
    target: Network, change: Change, message: str
) -> None:
    _refuse(dflash_checkpoint(target), target, change, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_inner(markov_rank=32), "markov_w1"),
        (_inner(markov_rank=-1), "markov_rank"),
        (_inner(markov_head_type="transformer"), "markov_head_type is 'transformer'"),
        (_inner(markov_head_type="gated"), "gate_proj"),
        (_inner(markov_head_type="rnn"), "joint_proj"),
        (_inner(confidence_head_with_markov=False), "confidence_head.proj"),
        (_tensor("markov_head.markov_w2.weight", np.ones((2, 64), np.float32)), "markov_w2"),
        (_tensor("confidence_head.proj.bias", np.ones(2, np.float32)), "proj.bias"),
        (_without("markov_head.markov_w2.weight"), "markov_w2"),
        (_without("confidence_head.proj.bias"), "proj.bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_heads_that_do_not_fit_are_refused(target: Network, change: Change, message: str) -> None:
    _refuse(dspark_checkpoint(target), target, change, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_inner(gru_hidden_dim=25), "prefix_gru.weight_ih_l0"),
        (_inner(gru_hidden_dim=None), "lacks 'gru_hidden_dim'"),
        (_inner(emb_dim=None), "lacks 'emb_dim'"),
        (_inner(emb_dim=8), "embed_proj.2"),
        (_inner(pure_draft_prefix_len=-1), "pure_draft_prefix_len is -1"),
        (_without("prefix_gru.weight_hh_l0"), "weight_hh_l0"),
        (_without("embed_proj.0.weight"), "embed_proj.0"),
        (_tensor("prefix_gru.bias_ih_l0", np.ones(72, np.float32)), "bias_ih_l0 is not a part"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_domino_heads_that_do_not_fit_are_refused(
    target: Network, change: Change, message: str
) -> None:
    _refuse(domino_checkpoint(target), target, change, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_inner(conv_kernel_size=2), "attention_conv.kernel_projection"),
        (_inner(conv_kernel_size=None), "attention_conv.base_kernel is not a part"),
        (_inner(conv_group_size=24), "conv_group_size is 24"),
        (_inner(conv_group_size=0), "conv_group_size is 0"),
        (_inner(selector_rank=32), "candidate_selector.hidden_projection"),
        (_inner(selector_rank=None), "candidate_selector.hidden_projection.weight is not a part"),
        (_inner(selector_top_k=None), "lacks 'selector_top_k'"),
        (_inner(selector_top_k=VOCAB + 1), "selector_top_k is 260"),
        (_inner(output_multiplier="x"), "output_multiplier"),
        (_without("layers.1.mlp_conv.base_kernel"), "layers.1.mlp_conv.base_kernel"),
        (_without("candidate_selector.successor_codebook"), "successor_codebook"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_dflash2_parts_that_do_not_fit_are_refused(
    target: Network, change: Change, message: str
) -> None:
    _refuse(dflash2_checkpoint(target), target, change, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set(speculators_model_type="dfly"), "speculators_model_type is 'dfly'"),
        (_set(aux_hidden_state_layer_ids=[1, 2, 4]), "aux_hidden_state_layer_ids is"),
        (_set(draft_vocab_size=5), "d2t is int64"),
        (_tensor("lm_head.weight", np.ones((5, 64), np.float32)), "lm_head"),
        (_tensor("t2d", np.ones(VOCAB, bool)), "name different tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_of_speculators_that_do_not_fit_are_refused(
    target: Network, change: Change, message: str
) -> None:
    _refuse(as_speculators(dflash_checkpoint(target), target), target, change, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("mask_hidden"), "mask_hidden"),
        (_tensor("mask_hidden", np.ones((1, 1, 64), np.float32)), "mask_hidden"),
        (_set(mask_token_id=None), "lacks 'mask_token_id'"),
        (_set(mask_token_id=VOCAB), "mask_token_id is 259"),
        (_set(speculators_config=3), "speculators_config"),
        (_set(speculators_config={"proposal_methods": [3]}), "proposal_methods"),
        (
            _set(speculators_config={"proposal_methods": [{"speculative_tokens": 0}]}),
            "speculative_tokens is 0",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_of_p_eagle_that_do_not_fit_are_refused(
    target: Network, change: Change, message: str
) -> None:
    _refuse(peagle_checkpoint(target), target, change, message)


def test_p_eagle_drafts_as_many_tokens_as_its_config_proposes(target: Network) -> None:
    """8 where it does not say, as in SpecForge."""

    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        layers = config.pop("transformer_layer_config")
        del config["speculators_model_type"], config["speculators_config"]
        config |= {**layers, "architectures": ["PEagleDraftModel"]}

    checkpoint = peagle_checkpoint(target)
    block = _block(load_draft_head(checkpoint, target))
    assert block == BlockSpec(6, VOCAB - 1, predicts_next=True)
    network = load_draft_head(_changed(checkpoint, change), target)
    assert _block(network) == BlockSpec(8, VOCAB - 1, predicts_next=True)
    assert network.spec.states is not None and network.spec.states.taps == (1, 2, 4)  # of outputs


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id"])
def test_the_mask_token_of_p_eagle_may_be_named_as_vllm_names_it(target: Network, key: str) -> None:
    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        config[key] = config.pop("mask_token_id") - 1

    network = load_draft_head(_changed(peagle_checkpoint(target), change), target)
    assert _block(network).mask_token == VOCAB - 2


@pytest.mark.parametrize("mask", [VOCAB, -1, "x", [3]])
def test_a_mask_token_that_a_parallel_draft_model_lacks_is_refused(
    target: Network, mask: Any
) -> None:
    with pytest.raises(CheckpointError, match=r"pard_token|mask_token_id") as refused:
        load_network(_changed(pard_checkpoint(target), _set(pard_token=mask)))
    assert "\n" not in str(refused.value)


def test_a_confidence_that_reads_a_missing_markov_head_is_refused(target: Network) -> None:
    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        for name in ("markov_w1", "markov_w2"):
            del tensors[f"markov_head.{name}.weight"]
        config["dflash_config"]["markov_rank"] = 0

    _refuse(dspark_checkpoint(target), target, change, "there is no Markov head")


def _block(network: Network) -> BlockSpec:
    assert network.spec.block is not None
    return network.spec.block


def test_what_a_block_predicts_is_read_as_the_files_mean_it(target: Network) -> None:
    """DSpark's first row predicts too; speculators say so, and Domino's key."""
    dflash, dspark = dflash_checkpoint(target), dspark_checkpoint(target)
    expected = {
        False: [dflash, as_speculators(dflash, target), domino_checkpoint(target)],
        True: [
            dspark,
            as_deepspec(dspark, target),
            as_speculators(dspark, target),
            as_speculators(dflash, target, sample_from_anchor=True),
            _changed(dflash, _inner(shift_label=True)),
            domino_checkpoint(target, shifted=True),
            as_speculators(domino_checkpoint(target, shifted=True), target),
        ],
    }
    for predicts_next, checkpoints in expected.items():
        for checkpoint in checkpoints:
            block = _block(load_draft_head(checkpoint, target))
            assert block.predicts_next == predicts_next
            assert (block.size, block.max_drafts) == (8, 8 if predicts_next else 7)
            assert block.mask_token == VOCAB - 1


def test_causal_layers_are_read_as_the_files_mean_them(target: Network) -> None:
    """Layers with a window see no later rows of the block, unless the config says otherwise."""

    def layers(checkpoint: Checkpoint) -> tuple[int, ...]:
        return _block(load_draft_head(checkpoint, target)).causal_layers

    windowed = dflash_checkpoint(target, window=4)
    assert layers(dflash_checkpoint(target)) == ()
    assert layers(windowed) == (0,)
    assert layers(dflash_checkpoint(target, causal_head=True)) == (0, 1)
    assert layers(dflash_checkpoint(target, window=4, causal=False)) == ()
    assert layers(_changed(windowed, _set(is_causal=False))) == ()
    assert layers(as_speculators(windowed, target)) == (0,)
    assert layers(as_speculators(windowed, target, sliding_window_non_causal=True)) == ()


@pytest.mark.parametrize(
    ("layers", "ids", "taps"),
    [
        (1, None, (3,)),  # the middle
        (2, None, (2, 4)),  # from 1 to the last but two
        (2, [-1, 0], (0, 1)),  # -1: the embeddings
    ],
)
def test_taps_are_outputs_of_layers(
    layers: int, ids: list[int] | None, taps: tuple[int, ...]
) -> None:
    deep, count = tiny_network(layers=6 if layers > 1 else 4), len(taps)
    if layers == 1:
        taps = (deep.spec.num_layers // 2 + 1,)

    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        config["dflash_config"]["target_layer_ids"] = ids
        tensors["fc.weight"] = np.ones((64, 64 * count), np.float32)

    checkpoint = _changed(dflash_checkpoint(deep, layers=layers), change)
    network = load_draft_head(checkpoint, deep)
    assert network.spec.states is not None and network.spec.states.taps == taps


def test_taps_of_speculators_are_inputs_of_layers(target: Network) -> None:
    plain = load_draft_head(dflash_checkpoint(target), target)
    nested = load_draft_head(as_speculators(dflash_checkpoint(target), target), target)
    assert plain.spec.states == nested.spec.states
    assert plain.spec.states is not None and plain.spec.states.taps == (1, 2, 3)


def test_a_smaller_head_may_be_rows_of_the_targets(target: Network) -> None:
    checkpoint = as_speculators(dflash_checkpoint(target), target)
    bare = _changed(checkpoint, _without("lm_head.weight"))
    own, shared = (load_draft_head(one, target).weights for one in (checkpoint, bare))
    assert own.head_tokens is not None and shared.head_tokens is not None
    assert np.array_equal(own.head_tokens, shared.head_tokens)
    assert shared.head.format == "BF16"
    assert np.allclose(shared.head.data.astype(np.float32), own.head.data, rtol=1e-2)


def test_heads_in_a_module_of_their_own_are_found(target: Network) -> None:
    """Early checkpoints of SpecForge have them in `logit_head`."""

    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            if name.startswith(("markov_head.", "confidence_head.")):
                tensors[f"logit_head.{name}"] = tensors.pop(name)

    network = load_draft_head(_changed(dspark_checkpoint(target), change), target)
    heads = network.weights.block_heads
    assert heads is not None and heads.markov is not None and heads.confidence is not None


TARGET_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


@pytest.mark.parametrize(
    "name", ["DFlash", "DFlash of speculators", "DSpark, gated", "P-EAGLE", "PARD"]
)
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_folder_drafts_for_its_target(tmp_path: Path, name: str, dtype: str | None) -> None:
    model, drafter = _folders(tmp_path, oracle.DRAFTERS[name])
    options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.7, "seed": 1}
    with LLM(model, draft=drafter, dtype=dtype) as llm:
        plain = llm.generate([5, 6, 7], decoder="autoregressive", **options)
        decoder = "dflash:tree=true,threshold=0"
        drafted = llm.generate([5, 6, 7], decoder=decoder, trace=True, **options)
    assert drafted.tokens == plain.tokens
    assert any(event["drafted"] for event in drafted.trace or ())


def _folders(folder: Path, make: Callable[..., Checkpoint]) -> tuple[Path, Path]:
    """The folders of a target and of its drafter."""
    model = write_folder(folder / "model", make_tensors("llama"), **SIZES, **TARGET_CONFIG)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    network = load_network(load_checkpoint(model))
    drafter = make(network)
    path = folder / "drafter"
    path.mkdir()
    save_file(
        {key: np.array(value) for key, value in drafter.tensors.items()},
        path / "model.safetensors",
    )
    (path / "config.json").write_text(json.dumps(drafter.config))
    return model, path
