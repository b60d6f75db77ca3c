"""Encoders against `transformers`, on tiny random models: their states through the pooling of their
repositories, and the scores of cross-encoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.errors import CheckpointError, InvalidRequestError
from encoder_models import (
    TASKS,
    add_letters,
    declare_pooling,
    hf_encoder,
    hf_states,
    save_encoder,
    save_published_jina_v3,
)
from remote_encoders import REMOTE

#: Longer than the windows of the cases, and than the blocks of keys of the kernels.
LONG = list(np.random.default_rng(0).integers(5, 57, 50))
WINDOWED = {"local_attention": 12, "global_attn_every_n_layers": 2, "num_hidden_layers": 4}
DEBERTA: dict[str, Any] = {
    "relative_attention": True,
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 16,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
EMBEDDING_GEMMA_2: dict[str, Any] = {
    "initializer_range": 0.05,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_key_value_heads": 2,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 12,
    "embedding_dim": 40,
    "layer_types": None,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "bert with tanh gelu": ("Bert", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
    "bert with one type": ("Bert", {"type_vocab_size": 1, "num_attention_heads": 3}),
    "roberta": ("Roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {"pad_token_id": 3}),
    "camembert": ("Camembert", {"pad_token_id": 0}),
    "distilbert": ("DistilBert", {}),
    "modernbert": ("ModernBert", {"norm_eps": 1e-5}),
    "modernbert with windows": ("ModernBert", WINDOWED),
    "modernbert with odd window": ("ModernBert", {**WINDOWED, "local_attention": 5}),
    "modernbert with biases": ("ModernBert", {"attention_bias": True, "mlp_bias": True}),
    "modernbert with bases": (
        "ModernBert",
        {
            **WINDOWED,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 50.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
            },
        },
    ),
    "nomic bert": ("NomicBert", {}),
    "nomic bert with base": (
        "NomicBert",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 30.0}},
    ),
    "mpnet": ("MPNet", {"pad_token_id": 1, "max_position_embeddings": 200}),
    "mpnet with three heads": ("MPNet", {"pad_token_id": 1, "num_attention_heads": 3}),
    "electra": ("Electra", {"embedding_size": 48}),
    "ernie": ("Ernie", {"type_vocab_size": 4}),
    "deberta": ("DebertaV2", DEBERTA),
    "deberta with few buckets": (
        "DebertaV2",
        {
            **DEBERTA,
            "num_attention_heads": 3,
            "type_vocab_size": 2,
            "position_buckets": 6,
            "max_relative_positions": 24,
            "norm_rel_ebd": "none",
            "pos_att_type": "p2c|c2p",
        },
    ),
    "jina embeddings v3": ("JinaEmbeddingsV3", {"type_vocab_size": 1}),
    "gte": ("Gte", {}),
    "gte without types": (
        "Gte",
        {"type_vocab_size": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 30.0}},
    ),
    "embedding gemma 2": ("EmbeddingGemma2Text", EMBEDDING_GEMMA_2),
    "embedding gemma 2 with a pattern": (
        "EmbeddingGemma2Text",
        {
            **EMBEDDING_GEMMA_2,
            "num_hidden_layers": 5,
            "sliding_window_pattern": 2,
            "sliding_window": 3,
            "num_global_key_value_heads": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 50.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
            },
        },
    ),
    "eurobert": ("EuroBert", {"rms_norm_eps": 1e-4, "mask_token_id": 4}),
    "eurobert with fewer keys": (
        "EuroBert",
        {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "mask_token_id": 4},
    ),
}


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_states_equal_those_of_transformers(name: str, backend: str, tmp_path: Path) -> None:
    """The states of single tokens: rejects a window that is off by one, a wrong base, a norm on
    the wrong side of a sum."""
    family, settings = CASES[name]
    model = hf_encoder(family, **settings)
    folder = declare_pooling(save_encoder(model, tmp_path), "lasttoken", is_normalized=False)
    with LLM(folder, backend=backend, threads=1) as llm:
        for text in (LONG, LONG[:7], LONG[:1]):
            tokens = [int(token) for token in text]
            expected = hf_states(model, tokens)
            assert np.abs(np.array(llm.embed(tokens)) - expected[-1]).max() < 1e-4


def test_llama_embed_is_eurobert_by_another_name(tmp_path: Path) -> None:
    family, settings = CASES["eurobert with fewer keys"]
    model = hf_encoder(family, **settings)
    names = {"model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalModel"]}
    folder = declare_pooling(save_encoder(model, tmp_path, **names), "mean_tokens")
    tokens = [int(token) for token in LONG]
    mean = hf_states(model, tokens).mean(0)
    with LLM(folder, threads=1) as llm:
        found = np.array(llm.embed(tokens))
    assert np.abs(found - mean / np.linalg.norm(mean)).max() < 1e-4


def test_another_number_of_buckets_is_refused(tmp_path: Path) -> None:
    save_encoder(hf_encoder("MPNet"), tmp_path, relative_attention_num_buckets=16)
    with pytest.raises(CheckpointError, match="num_buckets is 16; allowed is 32"):
        LLM(tmp_path)


def test_biases_by_distance_of_long_texts(tmp_path: Path) -> None:
    """Rejects distances beyond the last bucket that have another bias."""
    model = hf_encoder("MPNet", pad_token_id=1, max_position_embeddings=300)
    folder = declare_pooling(save_encoder(model, tmp_path), "lasttoken", is_normalized=False)
    tokens = [int(token) for token in np.random.default_rng(2).integers(5, 57, 250)]
    with LLM(folder, threads=1) as llm:
        found = np.array(llm.embed(tokens))
    assert np.abs(found - hf_states(model, tokens)[-1]).max() < 1e-4


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("name", REMOTE)
def test_states_equal_those_of_the_code_of_repositories(
    name: str, backend: str, tmp_path: Path
) -> None:
    """Rejects linear biases on one side, halves of a matrix the other way round, and weights of
    experts that are normalised."""
    kind = REMOTE[name][1]
    tensors = kind.tensors()
    folder = declare_pooling(
        kind.write(add_letters(tmp_path), tensors), "lasttoken", is_normalized=False
    )
    with LLM(folder, backend=backend, threads=1) as llm:
        for text in (LONG, LONG[:7], LONG[:1]):
            tokens = [int(token) for token in text]
            expected = kind.states(tensors, kind.config, tokens)
            assert np.abs(np.array(llm.embed(tokens)) - expected[-1]).max() < 1e-4


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("jina bert", {"layer_norm_eps": 1e-2}),
        ("gte of its repositories", {"rope_scaling": {"factor": 4.0, "type": "ntk"}}),
        ("gte of its repositories", {"rope_scaling": None}),
        ("nomic bert with experts", {"moe_top_k": 1}),
        ("nomic bert with experts", {"rotary_emb_base": 100}),
    ],
)
def test_every_key_of_repositories_changes_the_states(
    name: str, change: dict[str, Any], tmp_path: Path
) -> None:
    kind = REMOTE[name][1]
    tensors = kind.tensors()
    folder = kind.with_config(**change).write(add_letters(tmp_path), tensors)
    declare_pooling(folder, "lasttoken", is_normalized=False)
    tokens = [int(token) for token in LONG]
    with LLM(folder, threads=1) as llm:
        found = np.array(llm.embed(tokens))
    assert np.abs(found - kind.states(tensors, kind.config, tokens)[-1]).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("jina bert", {"feed_forward_type": "original"}, "feed_forward_type 'original'"),
        ("jina bert", {"position_embedding_type": "absolute"}, "position_embedding_type"),
        ("gte of its repositories", {"logn_attention_scale": True}, "logn_attention_scale"),
        ("gte of its repositories", {"rope_scaling": {"type": "ntk"}}, "factor of rope_scaling"),
        (
            "gte of its repositories",
            {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}},
            "mixed_b of rope_scaling is 0.6; allowed is null",
        ),
        ("nomic bert with experts", {"expert_choice_router": True}, "expert_choice_router"),
        ("nomic bert with experts", {"num_experts": 7}, "router.layer.weight has shape"),
        ("nomic bert with experts", {"moe_top_k": 6}, "experts_per_token is 6"),
        ("nomic bert with experts", {"moe_every_n_layers": 4}, "is missing"),
    ],
)
def test_other_settings_of_repositories_are_refused(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    kind = REMOTE[name][1]
    folder = kind.with_config(**change).write(add_letters(tmp_path), kind.tensors())
    with pytest.raises(CheckpointError, match=message) as error:
        LLM(folder)
    assert "\n" not in str(error.value)


def test_experts_with_a_row_too_many_are_refused(tmp_path: Path) -> None:
    kind = REMOTE["nomic bert with experts"][1]
    tensors, name = kind.tensors(), "encoder.layers.1.mlp.experts.mlp.w2"
    tensors[name] = np.concatenate((tensors[name], tensors[name][:1]))
    folder = kind.write(add_letters(tmp_path), tensors)
    with pytest.raises(CheckpointError, match=r"\[401, 48\]; allowed .* 5 experts, one below"):
        LLM(folder)


@pytest.mark.parametrize(
    ("mode", "is_normalized"), [("mean_tokens", True), ("cls_token", False), ("lasttoken", True)]
)
def test_pooling_is_read_from_the_repository(
    mode: str, is_normalized: bool, tmp_path: Path
) -> None:
    model = hf_encoder("Bert")
    declare_pooling(save_encoder(model, tmp_path), mode, is_normalized=is_normalized)
    with LLM(tmp_path, threads=1) as llm:
        states = hf_states(model, llm.encode("ab c"))
        rows = {"mean_tokens": states.mean(0), "cls_token": states[0], "lasttoken": states[-1]}
        expected = rows[mode] / (np.linalg.norm(rows[mode]) if is_normalized else 1.0)
        assert np.abs(np.array(llm.embed("ab c")) - expected).max() < 1e-4


def test_mean_and_length_one_without_modules(tmp_path: Path) -> None:
    model = hf_encoder("ModernBert")
    with LLM(save_encoder(model, tmp_path), threads=1) as llm:
        mean = hf_states(model, llm.encode("abc")).mean(0)
        expected = mean / np.linalg.norm(mean)
        assert np.abs(np.array(llm.embed("abc")) - expected).max() < 1e-4


EUROBERT = {"num_labels": 1, "mask_token_id": 4}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {"num_labels": 1}),
    "xlm-roberta": ("XLMRoberta", {"num_labels": 1, "pad_token_id": 1, "type_vocab_size": 1}),
    "distilbert": ("DistilBert", {"num_labels": 1}),
    "mpnet": ("MPNet", {"num_labels": 1, "pad_token_id": 1}),
    "gte": ("Gte", {"num_labels": 1}),
    "deberta": ("DebertaV2", {**DEBERTA, "num_labels": 1, "type_vocab_size": 2}),
    "deberta with tanh": (
        "DebertaV2",
        {**DEBERTA, "num_labels": 1, "type_vocab_size": 2, "pooler_hidden_act": "tanh"},
    ),
    "electra": ("Electra", {"num_labels": 1, "embedding_size": 48}),
    "ernie": ("Ernie", {"num_labels": 1}),
    "eurobert first": ("EuroBert", {**EUROBERT, "classifier_pooling": "bos"}),
    "eurobert mean": ("EuroBert", {**EUROBERT, "classifier_pooling": "mean"}),
    "modernbert cls": ("ModernBert", {"num_labels": 1, "classifier_bias": True}),
    "modernbert mean": ("ModernBert", {"num_labels": 1, "classifier_pooling": "mean"}),
}


@pytest.mark.parametrize("name", HEADS)
def test_scores_of_cross_encoders_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """The sigmoid of the logit of a pair: rejects token types that are all 0 (BERT), a missing
    activation, and the pooling of the other kind."""
    torch = pytest.importorskip("torch")

    family, settings = HEADS[name]
    model = hf_encoder(family, "ForSequenceClassification", **settings)
    with LLM(save_encoder(model, tmp_path), threads=1) as llm:
        tokens, types = llm.tokenizer.encode_pair("ab", "cde fg")  # type: ignore[attr-defined]
        has_types = family in ("Bert", "Gte", "DebertaV2", "Electra", "Ernie")
        given = {"token_type_ids": torch.tensor([types])} if has_types else {}
        with torch.inference_mode():
            logit = model(torch.tensor([tokens]), **given).logits[0]
        [score] = llm.relevance("ab", ["cde fg"])
        assert abs(score - float(torch.sigmoid(logit)[0])) < 1e-4
        assert types.count(1) == 6


def test_the_repository_names_the_function_of_scores(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    model = hf_encoder("Bert", "ForSequenceClassification", num_labels=1)
    name = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    with LLM(save_encoder(model, tmp_path, **name), threads=1) as llm:
        tokens, types = llm.tokenizer.encode_pair("ab", "cd")  # type: ignore[attr-defined]
        with torch.inference_mode():
            pair = torch.tensor([tokens]), torch.tensor([types])
            logit = model(pair[0], token_type_ids=pair[1]).logits[0, 0]
        assert abs(llm.relevance("ab", ["cd"])[0] - float(logit)) < 1e-4


@pytest.mark.parametrize("family", ["Bert", "ModernBert", "DebertaV2", "JinaEmbeddingsV3"])
def test_batches_equal_single_texts_bit_for_bit(family: str, tmp_path: Path) -> None:
    """Texts of several lengths share passes: rejects attention to another text, and sums whose
    order depends on the pass."""
    settings = {"ModernBert": WINDOWED, "DebertaV2": DEBERTA}.get(family, {})
    save_encoder(hf_encoder(family, **settings), tmp_path)
    texts = [[int(token) for token in LONG[start : start + size]] for start, size in
             ((0, 1), (3, 20), (1, 45), (9, 33), (2, 7), (0, 50))]  # fmt: skip
    with LLM(tmp_path, threads=2, row_budget=64) as llm:
        together = llm.embed(texts)
        assert together == [llm.embed(text) for text in texts]
        assert llm.engine.runners["target"].num_passes < 2 * len(texts)  # some were shared


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification"),
    ],
)
def test_what_is_not_supported_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_encoder(hf_encoder("Bert"), tmp_path, **change)
    with pytest.raises(CheckpointError, match=message) as error:
        LLM(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("DebertaV2", {"pos_att_type": ["c2p"]}, "pos_att_type is"),
        ("DebertaV2", {"share_att_key": False}, "share_att_key is False; allowed is true"),
        ("DebertaV2", {"conv_kernel_size": 3}, "conv_kernel_size 3"),
        ("DebertaV2", {"embedding_size": 32}, "embedding_size is 32; allowed is 48"),
        ("DebertaV2", {"position_buckets": 0}, "position_buckets is 0"),
        ("DebertaV2", {"position_buckets": 8}, "relative_positions.weight has shape"),
        ("Electra", {"embedding_size": 32}, "embedding_size is 32; allowed is 48"),
        ("Ernie", {"use_task_id": True}, "use_task_id"),
    ],
)
def test_other_settings_are_refused(
    family: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings = {"DebertaV2": DEBERTA, "Electra": {"embedding_size": 48}}.get(family, {})
    save_encoder(hf_encoder(family, **settings), tmp_path, **change)
    with pytest.raises(CheckpointError, match=message) as error:
        LLM(tmp_path)
    assert "\n" not in str(error.value)


def merged_jina_v3(folder: Path, updates: dict[str, np.ndarray], task: int) -> Any:
    """The model of `transformers` with the updates of a task in its matrices."""
    from safetensors.numpy import load_file, save_file

    model = hf_encoder("JinaEmbeddingsV3", type_vocab_size=1)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, update in updates.items():
        tensors[name] = tensors[name] + update[task]
    save_file(tensors, path, metadata={"format": "pt"})
    return type(model).from_pretrained(folder, attn_implementation="eager").eval()


def test_the_published_layout_of_jina_embeddings_v3(tmp_path: Path) -> None:
    """As in its repository: matrices with updates for each task, which are left out without one."""
    model = hf_encoder("JinaEmbeddingsV3", type_vocab_size=1)
    save_published_jina_v3(model, tmp_path)
    tokens = [int(token) for token in LONG]
    with LLM(tmp_path, threads=1) as llm:
        expected = hf_states(model, tokens)[-1]
        assert np.abs(np.array(llm.embed(tokens)) - expected).max() < 1e-4
        with pytest.raises(InvalidRequestError, match="this model's prompts are: other, separ"):
            llm.embed("abc", prompt_name="text-matching")


def test_the_tasks_of_jina_embeddings_v3(tmp_path: Path) -> None:
    """A task has its own updates of every matrix and of the embeddings, and its own prompt. Wrong
    twins: the other task, no task, and updates of the matrices alone."""
    model = hf_encoder("JinaEmbeddingsV3", type_vocab_size=1)
    updates = save_published_jina_v3(model, tmp_path)
    tokens = [int(token) for token in LONG]
    merged = [merged_jina_v3(tmp_path / str(task), updates, task) for task in range(2)]
    in_layers = {name: update for name, update in updates.items() if "embeddings" not in name}
    twin = merged_jina_v3(tmp_path / "2", in_layers, 0)
    with LLM(tmp_path, threads=1) as llm:
        assert llm.tasks == sorted(TASKS)
        plain = llm.embed(tokens)
        for task, (name, prompt) in enumerate(TASKS.items()):
            found = np.array(llm.embed(tokens, task=name))
            assert np.abs(found - hf_states(merged[task], tokens)[-1]).max() < 1e-4
            for other in (merged[1 - task], model, twin):
                assert np.abs(found - hf_states(other, tokens)[-1]).max() > 1e-2
            read = llm.embed(f"{prompt}abc", task=name, prompt_name=None if task else "other")
            with_prompt = llm.tokenizer.encode(f"{prompt if task else 'b'}{prompt}abc")
            assert read == llm.embed(with_prompt, task=name)
        together = llm.embed([tokens, tokens[:9], tokens[3:20]], task="separation")
        assert together[0] == llm.embed(tokens, task="separation")
        assert together[1] == llm.embed(tokens[:9], task="separation")
        assert llm.embed(tokens) == plain
        with pytest.raises(InvalidRequestError, match="tasks are: separation, text-matching"):
            llm.embed("abc", task="other")
        with pytest.raises(InvalidRequestError, match="leave one of them out"):
            llm.embed("abc", task="separation", adapter="mine")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lora_rank": 3}, "matrices of rank 3"),
        ({"lora_adaptations": ["one"]}, "allowed are 1 matrices of rank 4"),
        ({"lora_adaptations": "one"}, "lora_adaptations is 'one'"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"task_instructions": {"separation": 3}}, "task_instructions of separation is 3"),
    ],
)
def test_malformed_tasks_end_in_one_line(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_published_jina_v3(hf_encoder("JinaEmbeddingsV3", type_vocab_size=1), tmp_path, **config)
    with pytest.raises(CheckpointError, match=message) as error:
        LLM(tmp_path)
    assert "\n" not in str(error.value)


def test_modules_and_poolings_that_are_not_supported_are_refused(tmp_path: Path) -> None:
    save_encoder(hf_encoder("Bert"), tmp_path)
    declare_pooling(tmp_path, "mean_tokens", modules=("WordWeights",))
    with pytest.raises(CheckpointError, match="'WordWeights' is not supported"):
        LLM(tmp_path)
    declare_pooling(tmp_path, "max_tokens")
    with pytest.raises(CheckpointError, match="pooling_mode_max_tokens"):
        LLM(tmp_path)
    listed = json.loads((tmp_path / "modules.json").read_text())
    listed[1]["path"] = "../elsewhere"
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match="outside the folder"):
        LLM(tmp_path)
