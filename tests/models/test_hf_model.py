"""Models of `transformers` run through `HuggingFaceModel`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CpmAntConfig,
    CpmAntForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from anydecode.api.llm import LLM
from anydecode.errors import AnydecodeError, CheckpointError, UnsupportedCombinationError
from anydecode.kernels.interface import KeyValues, OutputSpec, Rows
from anydecode.models.families import advice, spec_from_config
from anydecode.models.hf import HuggingFaceModel
from anydecode.models.scripted import ByteTokenizer
from model_files import tokenizer_json
from tiny_models import hf_logits, hf_model


def tiny(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        small = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
        return GPT2LMHeadModel(GPT2Config(vocab_size=61, **small))
    if kind == "mamba":
        return MambaForCausalLM(MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2))
    if kind == "window":
        config = MistralConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=5,
        )
        return MistralForCausalLM(config)
    return BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4))


def rows_of(
    model: HuggingFaceModel, tokens: list[int], slots: list[int], paths: list[list[int]]
) -> Rows:
    """Rows whose tails are complete paths of slots (each ends with the row's own slot)."""
    count = len(tokens)
    lengths = np.array([len(path) for path in paths], np.int32)
    return Rows(
        tokens=np.array(tokens, np.int32),
        positions=lengths - 1,
        slots=np.array(slots, np.int32),
        tables=[np.empty(0, np.int32)],
        table=np.zeros(count, np.int32),
        prefix=np.zeros(count, np.int32),
        tails=np.array([slot for path in paths for slot in path], np.int32),
        tail_start=(np.cumsum(lengths) - lengths).astype(np.int32),
        tail_length=lengths,
        start=np.zeros(count, np.int32),
        stop=np.full(count, model.spec.num_layers, np.int32),
    )


def forward_chain(
    model: HuggingFaceModel,
    cache: KeyValues,
    tokens: list[int],
    slots: list[int],
    before: list[int],
) -> np.ndarray:
    """Logits of a chain of tokens after the slots `before`."""
    paths = [before + slots[: i + 1] for i in range(len(slots))]
    output_spec = np.arange(len(tokens), dtype=np.int32)
    return model.run(rows_of(model, tokens, slots, paths), cache, OutputSpec(output_spec)).logits


KINDS = ("gpt2", "bloom", "mamba", "window")


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_generate(kind: str) -> None:
    inner = tiny(kind)
    model = HuggingFaceModel(inner)
    cache = model.new_cache(64)
    prompt = [5, 9, 33, 2, 17]
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = inner.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist()
    slots = list(range(63, 63 - len(prompt), -1))
    logits = forward_chain(model, cache, prompt, slots, [])
    out = []
    for step in range(20):
        out.append(int(logits[-1].argmax()))
        logits = forward_chain(model, cache, out[-1:], [step], slots)
        slots.append(step)
    assert out == expected


@pytest.mark.parametrize("kind", KINDS)
def test_tree_branches_equal_separate_sequences(kind: str) -> None:
    model = HuggingFaceModel(tiny(kind))
    cache = model.new_cache(32)
    prompt = [7, 8, 9, 1, 2, 3, 4]
    before = list(range(7))
    forward_chain(model, cache, prompt, before, [])
    tokens, parents = [10, 11, 12, 13, 14], [-1, -1, 0, 0, 1]
    slots = [20, 21, 22, 23, 24]
    branches = [[0], [1], [0, 2], [0, 3], [1, 4]]
    paths = [before + [slots[i] for i in branch] for branch in branches]
    assert [branch[-2] if len(branch) > 1 else -1 for branch in branches] == parents
    rows = rows_of(model, tokens, slots, paths)
    logits = model.run(rows, cache, OutputSpec(np.arange(5, dtype=np.int32))).logits

    def alone(branch: list[int]) -> np.ndarray:
        return hf_logits(model.model, prompt + [tokens[i] for i in branch])[-1]

    for row, branch in enumerate(branches):
        assert np.allclose(logits[row], alone(branch), atol=1e-5)
    # Negative control: the row of another branch does not match.
    assert not np.allclose(logits[3], alone(branches[2]), atol=1e-5)


def test_a_long_rewind_keeps_the_other_sequence() -> None:
    inner = tiny("bloom")
    model = HuggingFaceModel(inner)
    cache = model.new_cache(256)
    long = [i % 61 for i in range(90)]
    forward_chain(model, cache, long, list(range(90)), [])
    forward_chain(model, cache, [3], [100], list(range(10)))
    logits = forward_chain(model, cache, [5], [90], list(range(90)))
    expected = hf_logits(inner, [*long, 5])[-1]
    assert np.allclose(logits[0], expected, atol=1e-5)


#: Architectures without an implementation of their own, with states that are no keys and values.
RECURRENT = {
    "Jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 3,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "Bamba": {
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 12,
        "mamba_d_state": 16,
    },
    "MiniMax": {"num_local_experts": 3, "head_dim": 12},
}


@pytest.mark.parametrize("kind", RECURRENT)
def test_several_tokens_after_recurrent_states(kind: str) -> None:
    """Their passes of several tokens do not start from a state; and a rewind has none."""
    inner = hf_model(kind, **RECURRENT[kind])
    model = HuggingFaceModel(inner)
    cache, tokens = model.new_cache(64), [(7 * i + 3) % 131 for i in range(20)]
    expected, slots = hf_logits(inner, tokens), list(range(20))
    for first, last in ((0, 9), (9, 10), (10, 14), (14, 15), (12, 16), (16, 20)):
        found = forward_chain(model, cache, tokens[first:last], slots[first:last], slots[:first])
        assert np.abs(found - expected[first:last]).max() < 1e-4


#: An architecture that only `transformers` has.
UNSUPPORTED = "RoFormer"


def save(kind: str, folder: Path) -> Path:
    """A folder with a model of `transformers` and a tokenizer."""
    model = hf_model(kind, vocab_size=300, hidden_size=48, is_decoder=True)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_folder_of_another_architecture_opens_when_asked(tmp_path: Path) -> None:
    folder = save(UNSUPPORTED, tmp_path / "tiny")
    with pytest.raises(CheckpointError, match="model type 'roformer'") as caught:
        LLM(str(folder))
    assert "--backend transformers" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.warns(UserWarning, match="^tiny runs through transformers: slower"):
        llm = LLM(str(folder), backend="transformers")
    with llm:
        inner = llm.model.model
        found = llm.generate([5, 9, 33], max_tokens=6, temperature=0.0, ignore_eos=True).tokens
    tokens = [5, 9, 33]
    for _ in range(6):
        tokens.append(int(hf_logits(inner, tokens)[-1].argmax()))
    assert found == tokens[3:]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"model_type": "unheard-of"}, {}, "transformers cannot open it"),
        ({}, {"dtype": "int4"}, "dtype='int4' is not possible"),
        ({"hidden_size": "x"}, {}, "transformers cannot open it"),
    ],
)
def test_what_transformers_cannot_open(
    change: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save(UNSUPPORTED, tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(AnydecodeError, match=message) as caught:
        LLM(str(folder), backend="transformers", **options)
    assert "\n" not in str(caught.value)


def test_an_unknown_model_type_has_no_advice(tmp_path: Path) -> None:
    folder = save(UNSUPPORTED, tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "unheard-of"}))
    with pytest.raises(
        CheckpointError, match="no causal model of this type either; supported"
    ) as x:
        LLM(str(folder))
    assert "'unheard-of' (RoFormerForCausalLM) is not supported; " in str(x.value)
    assert "\n" not in str(x.value)


def test_without_transformers_a_refused_model_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for is_installed in (True, False):
        monkeypatch.setattr(
            advice, "find_spec", {"transformers": 1}.get if is_installed else {}.get
        )
        message = advice.unsupported("model type 'unheard-of'", "unheard-of", ["llama"])
        assert (
            "pip install 'anydecode[hf]', then backend='transformers'" in message
        ) != is_installed
        assert len(message) < 300 and message.endswith("; supported are llama")


def test_a_refused_model_names_itself_the_way_through_transformers_and_what_is_supported(
    tmp_path: Path,
) -> None:
    for changes, name in (
        ({}, "model type 'roformer' (RoFormerForCausalLM)"),
        ({"model_type": "mllama", "text_config": {}}, "architecture RoFormerForCausalLM of"),
    ):
        folder = save(UNSUPPORTED, tmp_path / str(len(changes)))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(CheckpointError) as caught:
            LLM(str(folder))
        message = str(caught.value)
        assert name in message and "\n" not in message
        assert "; transformers has it, with fewer guarantees: backend='transformers'" in message
        assert "; supported are the " in message and "docs/guides/models.md" in message
        assert len(message) < 400, message


def test_an_error_names_the_model_types_that_are_close() -> None:
    for name, close in (("qwen3_mo", "qwen3_moe"), ("granitemoeshare", "granitemoeshared")):
        with pytest.raises(CheckpointError, match=f"close to it are .*{close}"):
            spec_from_config({"model_type": name})


def test_an_unsupported_architecture_of_gguf_has_advice(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    advised = "transformers has it"
    for name, hint in (("gptj", "opens as a folder"), ("git", advised), ("wavtokenizer-dec", None)):
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", name)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(CheckpointError, match=f"architecture '{name}' is not") as caught:
            LLM(str(tmp_path / f"{name}.gguf"))
        found = [one for one in ("opens as a folder", advised) if one in str(caught.value)]
        assert found == ([] if hint is None else [hint])
        assert "\n" not in str(caught.value)


def test_unsupported_rows_are_rejected() -> None:
    model = HuggingFaceModel(tiny("gpt2"))
    cache = model.new_cache(8)
    output_spec = OutputSpec(np.array([0], np.int32))

    def rows() -> Rows:
        return rows_of(model, [4], [0], [[0]])

    early_exit = rows()
    early_exit.stop[:] = 1
    with pytest.raises(UnsupportedCombinationError, match="part of its layers"):
        model.run(early_exit, cache, output_spec)
    with_embeddings = rows()
    with_embeddings.tokens[:] = -1
    with pytest.raises(UnsupportedCombinationError, match="hidden states"):
        model.run(with_embeddings, cache, output_spec)
    hole = rows_of(model, [4], [3], [[0, -1, 3]])
    with pytest.raises(UnsupportedCombinationError, match="attends to every earlier position"):
        model.run(hole, cache, output_spec)
    with pytest.raises(UnsupportedCombinationError, match="return hidden"):
        model.run(rows(), cache, OutputSpec(output_spec.logits, {1: output_spec.logits}))
    with pytest.raises(UnsupportedCombinationError, match="hidden states"):
        model.head(np.zeros((1, 32), np.float32))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([65], "it gives logits of 0 positions for 1 tokens"),
        ([65, 66, 67], "fails on these tokens"),
    ],
)
def test_a_model_that_fails_on_tokens_is_named_in_one_line(prompt: list[int], message: str) -> None:
    """CPM-Ant takes the first tokens for something else than text."""
    config = CpmAntConfig(
        vocab_size=300,
        hidden_size=16,
        num_attention_heads=2,
        dim_head=8,
        dim_ff=32,
        num_hidden_layers=2,
        prompt_length=4,
    )
    with LLM(CpmAntForCausalLM(config).eval(), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(UnsupportedCombinationError, match=message) as caught:
            llm.generate(prompt, max_tokens=2)
    assert str(caught.value).startswith("CpmAntForCausalLM runs through transformers")
    assert "\n" not in str(caught.value)
