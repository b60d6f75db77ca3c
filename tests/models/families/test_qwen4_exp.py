"""Qwen3.8: the table of n-grams in parts, the published config, settings that matter, and what is
refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.kernels.interface import NgramHash, OutputSpec
from anydecode.kernels.library import load_library
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import load_network, spec_from_config
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from gguf_models import write_folder
from mtp_models import assert_module_drafts, last_streams, mtp_llm
from parity_cases import parity_module
from tiny_models import built, chain, checkpoint_of, hf_logits, hf_model, logits, whole

#: With the token that ends a text in reach of n-grams.
TOKENS = [64 if i % 7 == 3 else (11 * i + 5) % 131 for i in range(40)]
EMBEDDING = "layers.0.ple.ple_embedding"


def model(**changes: Any) -> Any:
    return hf_model("Qwen4Exp", **{**parity_module("test_parity").QWEN_4_EXP, **changes})


def in_parts(tensors: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """The tensors as published: tables of n-grams in parts, in a multimodal checkpoint."""
    found = {}
    for name, tensor in tensors.items():
        name = name.replace("model.", "model.language_model.", 1)
        start, _, leaf = name.rpartition(".ngram_embedding.")
        if not start:
            found[name] = tensor
            continue
        for number, part in enumerate(np.array_split(tensor, count)):
            found[f"{start}.ngram_embedding.shard_{number}.{leaf}"] = part
    return found


def test_the_published_names_and_config(tmp_path: Path) -> None:
    """Wrong twins: another token that ends texts, other positions and blocks, another gate."""
    theirs = model()
    config = {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "tie_word_embeddings": False,
        "vision_config": {},
    }
    text = theirs.config.to_dict()
    kinds = {"indexed_attention": "full_attention"}
    text["layer_types"] = [kinds.get(kind, kind) for kind in text["layer_types"]]
    tensors = in_parts(checkpoint_of(theirs).tensors, 11)
    expected = hf_logits(theirs, TOKENS)
    changes: list[dict[str, Any]] = [
        {},
        {"eos_token_id": 5},
        {"indexer_budget": 6},
        {"indexer_compress_ratio": 4},
        {"output_gate_type": "silu"},
        {"norm_topk_prob": False},
        {"rms_norm_eps": 0.1},
    ]
    for number, change in enumerate(changes):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_folder(folder, tensors, **config, text_config={**text, **change})
        found = logits(built(load_checkpoint(folder)), chain(TOKENS))
        difference = np.abs(found - expected).max()
        assert difference > 1e-3 if change else difference < 1e-4, change


class _WithModule:
    """A model with a module that predicts further tokens, in torch: a layer between projections of
    the streams and a mixer of them."""

    def __init__(self) -> None:
        import torch

        self.target = model(indexer_budget=60)  # all of the text
        layer = {"layer_types": ["indexed_attention"], "ple_layer_ids": [], "num_hidden_layers": 1}
        self.module = hf_model(
            "Qwen4Exp",
            1,
            **{**parity_module("test_parity").QWEN_4_EXP, **layer, "indexer_budget": 60},
        )
        size, streams = self.target.config.hidden_size, self.target.config.hc_count
        self.parts = {
            "pre_fc_norm_embedding": 0.3 * torch.randn(size),
            "pre_fc_norm_hidden": 0.3 * torch.randn(streams * size),
            "fc_embedding": 0.25 * torch.randn(size, size),
            "fc_hidden": 0.25 * torch.randn(size, size),
        }

    def checkpoint(self) -> Checkpoint:
        whole = checkpoint_of(self.target, mtp_num_hidden_layers=1)
        own = {
            name.replace("model.", "mtp.", 1): tensor.numpy()
            for name, tensor in self.module.state_dict().items()
            if name.startswith(("model.layers.0.", "model.hyper_connection_mixer."))
        }
        own |= {f"mtp.{name}.weight": tensor.numpy() for name, tensor in self.parts.items()}
        return Checkpoint("tiny", Path("tiny"), whole.config, {**whole.tensors, **own})

    def chain(self, text: list[int], count: int) -> list[int]:
        """The `count` most probable tokens after `text`, in order."""
        import torch

        with torch.inference_mode():
            states = list(_streams(self.target.model, input_ids=torch.tensor([text]))[0][:-1])
            tokens, drafted = text[1:], list[int]()
            for _ in range(count):
                embedded = self.target.model.embed_tokens(torch.tensor(tokens))
                embedded = self._normed(embedded, "pre_fc_norm_embedding")
                embedded = embedded @ self.parts["fc_embedding"].T
                rows = self._normed(torch.stack(states), "pre_fc_norm_hidden")
                rows = rows.unflatten(-1, (-1, embedded.shape[-1])) @ self.parts["fc_hidden"].T
                rows = (rows + embedded[:, None]).flatten(-2)
                after, mixed = _streams(self.module.model, rows, inputs_embeds=embedded[None])
                drafted.append(int(self.target.lm_head(mixed[-1]).argmax()))
                states.append(after[-1])
                tokens.append(drafted[-1])
        return drafted

    def _normed(self, x: Any, name: str) -> Any:
        eps = self.target.config.rms_norm_eps
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + self.parts[name])


def _streams(part: Any, inputs: Any = None, **given: Any) -> tuple[Any, Any]:
    return last_streams(part, part.hyper_connection_mixer, inputs, **given)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_module_drafts_as_a_forward_pass_does(backend: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    if backend == "native" and load_library() is None:
        pytest.skip("there are no compiled kernels")
    reference = _WithModule()
    with mtp_llm(reference.checkpoint(), backend) as llm:
        assert_module_drafts(llm, TOKENS[:9], reference.chain)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_states_are_normed_outside_a_pass_as_within(backend: str) -> None:
    """What the head reads of the last streams."""
    if backend == "native" and load_library() is None:
        pytest.skip("there are no compiled kernels")
    own = built(checkpoint_of(model()), executor=choose_executor(backend, 1))
    rows, depth = whole(chain(TOKENS), own), own.spec.num_layers
    every = np.arange(len(TOKENS))
    output = own.run(rows, own.new_cache(len(TOKENS)), OutputSpec(every, {depth: every}))
    expected = np.array(output.logits)
    found = own.logits_of(output.hidden[depth], np.arange(own.spec.vocab_size))
    assert np.abs(found - expected).max() < 1e-4


def test_n_grams_end_at_the_text_and_at_its_end_token() -> None:
    """Wrong twin: the last token itself ends them."""
    hashes = NgramHash(np.array([3, 5, 7]), np.array([97, 89]), np.array([0, 97]), end_token=2)

    def rows(last: int, before: int, first: int) -> list[int]:
        two, three = (last * 3) ^ (before * 5), (last * 3) ^ (before * 5) ^ (first * 7)
        return [two % 97, three % 89 + 97]

    tokens = np.array([[10, 11, 12], [10, 2, 12], [10, 11, 2], [2, 11, 12], [10, 11, -1]])
    expected = [rows(10, 11, 12), rows(10, 2, 2), rows(10, 11, 2), rows(2, 11, 12), rows(10, 11, 2)]
    assert hashes.rows(tokens).tolist() == expected
    assert hashes.rows(np.array([[10, -1, -1]])).tolist() == [rows(10, 2, 2)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ple_layer_ids": [0, 2]}, "ple_layer_ids is .0, 2.; allowed is numbers from 1 to 5"),
        ({"ple_layer_ids": [6]}, "ple_layer_ids is .6."),
        ({"eos_token_id": None}, "the config lacks 'eos_token_id'"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads is 2"),
        ({"indexer_budget": None}, "the config lacks 'indexer_budget'"),
        ({"indexer_budget": 13}, "top_k is 13; allowed is a multiple of the block, 3"),
        ({"indexer_head_dim": 24}, "head_dim is 24; allowed is at most 16"),
        ({"output_gate_type": "tanh"}, "output_gate_type is 'tanh'"),
        ({"hc_count": 1}, "hc_count is 1"),
        ({"hc_lowrank": 0}, "hc_lowrank is 0"),
        ({"ngram_size": 1}, "ngram_size is 1"),
        ({"ple_conv_kernel_size": 40}, "ple_conv_kernel_size is 40; allowed is fewer positions"),
        ({"layer_types": ["sliding_attention"] * 5}, "sliding_window"),
    ],
)
def test_other_configs_are_refused(change: dict[str, Any], message: str) -> None:
    config = checkpoint_of(model()).config
    with pytest.raises(CheckpointError, match=message) as error:
        spec_from_config({**config, **change})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("ngram_embedding.weight", None, "ngram_embedding is missing, or in several formats"),
        ("ngram_embedding.weight", np.zeros((20, 12), np.float32), "exceed the 20 rows"),
        ("ngram_embedding.weight", np.zeros((400, 7), np.float32), "has shape"),
        ("layer_multipliers", None, "layer_multipliers is missing"),
        ("layer_multipliers", np.zeros(3, np.float32), "layer_multipliers has no integers"),
        ("layer_multipliers", np.array([1, -1, 1]), "has a negative number"),
        ("ngram_heads_offsets", np.zeros(3, np.int64), "has shape"),
        ("ngram_heads_vocab_sizes", np.zeros(4, np.int64), "exceed the"),
    ],
)
def test_broken_tables_are_refused(name: str, tensor: np.ndarray | None, message: str) -> None:
    stored: Checkpoint = checkpoint_of(model())
    full = f"model.{EMBEDDING}.{name}"
    tensors = {key: value for key, value in stored.tensors.items() if key != full}
    stored.tensors = tensors if tensor is None else {**tensors, full: tensor}
    with pytest.raises(CheckpointError, match=message) as error:
        load_network(stored)
    assert "\n" not in str(error.value)
