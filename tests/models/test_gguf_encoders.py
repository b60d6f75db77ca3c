"""Encoders in GGUF files as llama.cpp's converter writes them, against the same models in
`transformers`, against llama.cpp, and against the tokenizers of their repositories."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import (
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

import encoder_models
from anydecode import LLM
from anydecode.errors import CheckpointError
from anydecode.models.tokenizers import HFTokenizer
from encoder_models import TASKS, hf_states, save_published_jina_v3
from gguf_encoders import (
    CASES,
    REMOTE_CASES,
    Case,
    original,
    remote_tensors,
    write_encoder,
    write_remote,
)
from gguf_models import finish, tensor_names, usual_metadata, writer_with
from llama_cpp_logits import GELU_MARGIN, llama_cpp_embedding, llama_cpp_tokens
from tiny_models import hf_model

pytestmark = pytest.mark.slow

TOKENS = [int(token) for token in np.random.default_rng(0).integers(5, 57, 40)]
MEAN, CLS, LAST, RANK = 1, 2, 3, 4


def unit(vector: np.ndarray) -> np.ndarray:
    found: np.ndarray = vector / np.linalg.norm(vector)
    return found


@pytest.mark.parametrize("name", CASES)
def test_states_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Rejects windows of another size, positions that are off by the padding token's id, swapped
    gates, and the base of the other type of layers."""
    case = CASES[name]
    model = original(case)
    path = write_encoder(tmp_path / "tiny.gguf", case, model)
    with LLM(path, threads=1) as llm:
        for tokens in (TOKENS, TOKENS[:9], TOKENS[:1]):
            expected = unit(hf_states(model, tokens)[-1])
            assert np.abs(np.array(llm.embed(tokens)) - expected).max() < 1e-4


@pytest.mark.parametrize("name", CASES)
def test_embeddings_equal_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = write_encoder(tmp_path / "tiny.gguf", case, original(case))
    expected = unit(llama_cpp_embedding(path, TOKENS))
    with LLM(path, threads=1) as llm:
        found = np.array(llm.embed(TOKENS))
    assert np.abs(found - expected).max() < GELU_MARGIN


@pytest.mark.parametrize("name", REMOTE_CASES)
def test_states_equal_those_of_the_code_of_repositories(name: str, tmp_path: Path) -> None:
    architecture, _, metadata = REMOTE_CASES[name]
    kind, tensors = remote_tensors(name)
    path = write_remote(tmp_path / "tiny.gguf", architecture, kind, tensors, metadata)
    with LLM(path, threads=1) as llm:
        for tokens in (TOKENS, TOKENS[:9], TOKENS[:1]):
            expected = unit(kind.states(tensors, kind.config, tokens)[-1])
            assert np.abs(np.array(llm.embed(tokens)) - expected).max() < 1e-4


@pytest.mark.parametrize("name", REMOTE_CASES)
def test_embeddings_of_repositories_equal_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    architecture, _, metadata = REMOTE_CASES[name]
    kind, tensors = remote_tensors(name)
    path = write_remote(tmp_path / "tiny.gguf", architecture, kind, tensors, metadata)
    expected = unit(llama_cpp_embedding(path, TOKENS))
    with LLM(path, threads=1) as llm:
        assert np.abs(np.array(llm.embed(TOKENS)) - expected).max() < GELU_MARGIN


def test_old_files_of_jina_bert_have_a_matrix_of_gates(tmp_path: Path) -> None:
    """Rejects the two matrices the other way round."""
    kind, tensors = remote_tensors("jina bert")
    apart: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if "gated_layers" in name:
            gate, up = np.split(tensor, 2)
            apart[name.replace("gated_layers", "gated_layers_w")] = gate
            apart[name.replace("gated_layers", "gated_layers_v")] = up
        else:
            apart[name] = tensor
    path = write_remote(tmp_path / "tiny.gguf", "jina-bert-v2", kind, apart, {})
    expected = unit(kind.states(tensors, kind.config, TOKENS)[-1])
    with LLM(path, threads=1) as llm:
        assert np.abs(np.array(llm.embed(TOKENS)) - expected).max() < 1e-4


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("nomic bert with experts", {"expert_count": None}, "expert_count is missing"),
        ("nomic bert with experts", {"moe_every_n_layers": None}, "moe_every_n_layers is missing"),
        ("nomic bert with experts", {"moe_every_n_layers": 4}, "'model.layers.3.mlp.up_proj"),
        ("nomic bert with experts", {"expert_used_count": 6}, "experts_per_token is 6"),
        ("jina bert", {"feed_forward_length": 40}, "has shape"),
    ],
)
def test_invalid_metadata_of_repositories_end_in_one_line(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    architecture, _, metadata = REMOTE_CASES[name]
    kind, tensors = remote_tensors(name)
    changed = {**metadata, **change}
    path = write_remote(tmp_path / "tiny.gguf", architecture, kind, tensors, changed)
    with pytest.raises(CheckpointError, match=message) as error:
        LLM(path)
    assert "\n" not in str(error.value)


def test_additional_norms_of_jina_bert_are_refused(tmp_path: Path) -> None:
    kind, tensors = remote_tensors("jina bert")
    tensors["encoder.layer.0.layer_norm_1.weight"] = np.ones(48, np.float32)
    path = write_remote(tmp_path / "tiny.gguf", "jina-bert-v2", kind, tensors, {})
    with pytest.raises(CheckpointError, match="jina-embeddings-v2-base-code"):
        LLM(path)


@pytest.mark.parametrize(("pooling", "rows"), [(MEAN, slice(None)), (CLS, [0]), (LAST, [-1])])
def test_the_pooling_is_that_of_the_file(pooling: int, rows: Any, tmp_path: Path) -> None:
    model = original(CASES["bert"])
    path = write_encoder(tmp_path / "tiny.gguf", CASES["bert"], model, pooling=pooling)
    with LLM(path, threads=1) as llm:
        tokens = llm.encode("ab c")
        assert tokens == [2, 5, 32, 7, 3]
        expected = unit(hf_states(model, tokens)[rows].mean(0))
        assert np.abs(np.array(llm.embed("ab c")) - expected).max() < 1e-4


def test_dense_modules_follow_the_pooling(tmp_path: Path) -> None:
    model = original(CASES["embedding gemma"])
    random = np.random.default_rng(1)
    first = random.standard_normal((80, 48), np.float32) / 7
    second = random.standard_normal((48, 80), np.float32) / 7
    extra = {"dense_2.weight": first, "dense_3.weight": second}
    case = CASES["embedding gemma"]
    path = write_encoder(tmp_path / "tiny.gguf", case, model, pooling=MEAN, extra=extra)
    expected = unit(second @ (first @ hf_states(model, TOKENS).mean(0)))
    with LLM(path, threads=1) as llm:
        assert np.abs(np.array(llm.embed(TOKENS)) - expected).max() < 1e-4
    write_encoder(path, case, model, pooling=MEAN, extra={"dense_2.weight": first})
    with pytest.raises(CheckpointError, match="have 80 outputs; allowed are 48"):
        LLM(path)


HEADS = {
    "xlm-roberta": Case(
        "XLMRoberta",
        "bert",
        {"num_labels": 1, "pad_token_id": 1, "type_vocab_size": 1},
        head="ForSequenceClassification",
    ),
    "modernbert": Case(
        "ModernBert",
        "modern-bert",
        {**CASES["modernbert"].settings, "num_labels": 1, "classifier_pooling": "mean"},
        CASES["modernbert"].metadata,
        head="ForSequenceClassification",
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_scores_of_cross_encoders_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = original(HEADS[name])
    path = write_encoder(tmp_path / "tiny.gguf", HEADS[name], model, pooling=RANK)
    with LLM(path, threads=1) as llm:
        tokens, types = llm.tokenizer.encode_pair("ab", "cde fg")  # type: ignore[attr-defined]
        assert (tokens.count(3), types.count(1)) == (2, 6)
        with torch.inference_mode():
            logit = model(torch.tensor([tokens])).logits[0]
        [score] = llm.relevance("ab", ["cde fg"])
        assert abs(score - float(torch.sigmoid(logit)[0])) < 1e-4


QWEN: dict[str, Any] = {
    "vocab_size": 131, "head_dim": 16, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}  # fmt: skip


def qwen3(path: Path, model: Any, metadata: dict[str, Any], *, is_reranker: bool = False) -> Path:
    """A GGUF file of Qwen3; of a reranker it has the rows of two tokens, not the head."""
    config = model.config.to_dict()
    usual = usual_metadata(config, config["num_hidden_layers"])
    writer = writer_with(path, "qwen3", {**usual, **metadata}, config["vocab_size"])
    names = tensor_names("qwen3", config["num_hidden_layers"])
    for name, parameter in model.state_dict().items():
        if is_reranker and name == "lm_head.weight":
            writer.add_tensor("cls.output.weight", parameter.numpy()[[7, 9]].copy())
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(target, parameter.numpy())
    finish(writer)
    return path


def test_a_causal_model_with_a_pooling_embeds(tmp_path: Path) -> None:
    model = hf_model("Qwen3", **QWEN)
    path = qwen3(tmp_path / "tiny.gguf", model, {"pooling_type": LAST})
    with LLM(path, threads=1) as llm:
        expected = unit(hf_states(model.model, TOKENS)[-1])
        assert np.abs(np.array(llm.embed(TOKENS)) - expected).max() < 1e-4


def test_the_reranker_compares_yes_with_no(tmp_path: Path) -> None:
    """Rejects the two rows swapped, and a score of one row alone."""
    model = hf_model("Qwen3", **QWEN)
    path = qwen3(
        tmp_path / "tiny.gguf",
        model,
        {"pooling_type": RANK, "classifier.output_labels": ["yes", "no"]},
        is_reranker=True,
    )
    with LLM(path, threads=1) as llm:
        [score] = llm.relevance("È", ["ÉÊ"], instruction="Ë")
        prompt = llm.model.reranker.prompt.texts("È", "ÉÊ", "Ë")
        tokens = [token for text in prompt for token in llm.encode(text, special=False)]
        states = hf_states(model.model, tokens)[-1].astype(np.float64)
        head = model.lm_head.weight.detach().numpy().astype(np.float64)
        assert abs(score - 1 / (1 + np.exp((head[9] - head[7]) @ states))) < 1e-4


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"pooling_type": 9}, "pooling_type is 9; allowed is one of 0, 1, 2, 3, 4"),
        ({"attention.layer_norm_epsilon": None}, "layer_norm_epsilon is missing"),
    ],
)
def test_invalid_metadata_end_in_one_line(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    case = CASES["bert"]
    path = write_encoder(tmp_path / "tiny.gguf", case, original(case), metadata=metadata)
    with pytest.raises(CheckpointError, match=message) as error:
        LLM(path)
    assert "\n" not in str(error.value)


def test_a_missing_tensor_ends_in_one_line(tmp_path: Path) -> None:
    case = CASES["bert"]
    model = original(case)
    with pytest.MonkeyPatch.context() as patch:
        add = gguf.GGUFWriter.add_tensor

        def without(writer: Any, name: str, tensor: Any, **options: Any) -> None:
            if name != "blk.1.layer_output_norm.bias":
                add(writer, name, tensor, **options)

        patch.setattr(gguf.GGUFWriter, "add_tensor", without)
        path = write_encoder(tmp_path / "tiny.gguf", case, model)
    with pytest.raises(CheckpointError, match="post_feedforward_layernorm.bias' is missing"):
        LLM(path)


ALPHABET = "abcdefgh ABC éÉß日本ع́12.,!?-'/\t\n\u00a0"
CORPUS = [
    "".join(random.Random(seed).choices(ALPHABET + "      abcdefgh", k=200)) for seed in range(40)
]


def texts() -> Iterator[str]:
    """A thousand strings of letters, marks, digits, signs and spaces of several scripts."""
    generator = random.Random(1)
    for _ in range(1000):
        yield "".join(generator.choices(ALPHABET, k=generator.randrange(1, 40)))


def word_piece(is_cased: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not is_cased)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return tokenizer


def word_piece_metadata(tokenizer: Tokenizer) -> dict[str, Any]:
    ids = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    types = [3 if index < 5 else 1 for _, index in ids]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [
            word if index < 5 else word[2:] if word.startswith("##") else f"▁{word}"
            for word, index in ids
        ],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.mask_token_id": 4,
    }


def unigram_metadata(tokenizer: Tokenizer) -> dict[str, Any]:
    vocab = json.loads(tokenizer.to_str())["model"]["vocab"]
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [word for word, _ in vocab],
        "tokenizer.ggml.scores": [score for _, score in vocab],
        "tokenizer.ggml.token_type": [3, 3, 3, 2] + [1] * (len(vocab) - 4),
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }


def characters(kind: str) -> Tokenizer:
    """Merges of characters: mmBERT's, whose words start at spaces and whose unknown characters are
    bytes, or those of jina-embeddings-v2-base-zh, which leave spaces out."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind == "mmbert"))
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    if kind == "mmbert":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        special += [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 90, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator([text.replace("\u0301", "") for text in CORPUS], trainer)
    rebuilt = json.loads(tokenizer.to_str())
    rebuilt["added_tokens"] = rebuilt["added_tokens"][:5]
    tokenizer = Tokenizer.from_str(json.dumps(rebuilt))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def characters_metadata(kind: str) -> dict[str, Any]:
    model = json.loads(characters(kind).to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special = {"mmbert": [6] * 256, "whitespace": []}[kind]
    return {
        "tokenizer.ggml.model": {"mmbert": "gpt2", "whitespace": "whitespace"}[kind],
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 5 + special + [1] * (len(tokens) - 5 - len(special)),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.normalizer.lowercase": kind == "whitespace",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }


@pytest.mark.parametrize("kind", ["mmbert", "whitespace"])
def test_merges_of_characters_are_those_of_the_repository(kind: str) -> None:
    """Rejects a text or a word without its first space, characters that are no bytes, words that
    are merged across spaces, and another casing. (llama.cpp splits mmBERT's texts at line ends
    too.)"""
    tokenizer, rebuilt = characters(kind), HFTokenizer.from_gguf(characters_metadata(kind))
    assert len({len(tokenizer.encode(text).ids) for text in texts()}) > 10
    for text in texts():
        text = text.replace("\n", "x")
        assert rebuilt.encode(text) == tokenizer.encode(text).ids, text


@pytest.mark.parametrize("is_cased", [False, True])
def test_word_pieces_are_those_of_the_repository(is_cased: bool) -> None:
    """Rejects words whose parts are marked the other way round, another casing, and token types
    that are all 0."""
    tokenizer = word_piece(is_cased)
    rebuilt = HFTokenizer.from_gguf(word_piece_metadata(tokenizer))
    for text in texts():
        assert rebuilt.encode(text) == tokenizer.encode(text).ids
    pair = tokenizer.encode("abc d", "e")
    assert rebuilt.encode_pair("abc d", "e") == (pair.ids, pair.type_ids)


def test_unigrams_are_those_of_the_repository() -> None:
    """Rejects a missing first space, and spaces that are not merged."""
    tokenizer = unigram()
    rebuilt = HFTokenizer.from_gguf(unigram_metadata(tokenizer))
    for text in texts():
        text = text.strip(" ")
        assert rebuilt.encode(text) == tokenizer.encode(text).ids, text
    pair = tokenizer.encode("abc d", "e")
    assert rebuilt.encode_pair("abc d", "e") == (pair.ids, pair.type_ids)


@pytest.mark.parametrize("kind", ["bert", "t5", "mmbert", "whitespace"])
def test_tokens_equal_those_of_llama_cpp(kind: str, tmp_path: Path) -> None:
    if kind == "bert":
        metadata = word_piece_metadata(word_piece(False))
    elif kind == "t5":
        metadata = unigram_metadata(unigram())
    else:
        metadata = characters_metadata(kind)

    def add_tokenizer(writer: gguf.GGUFWriter) -> None:
        for key, value in metadata.items():
            if isinstance(value, list):
                writer.add_array(key, value)
            elif isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            else:
                writer.add_string(key, value)

    case = CASES["bert"]
    size = len(metadata["tokenizer.ggml.tokens"])
    case = Case("Bert", "bert", {"vocab_size": size})
    path = write_encoder(tmp_path / "tiny.gguf", case, original(case), tokenizer=add_tokenizer)
    rebuilt = HFTokenizer.from_gguf(metadata)
    strings = [text for text in texts() if "\u0301" not in text]  # a mark that it keeps
    for text, tokens in zip(strings, llama_cpp_tokens(path, strings), strict=True):
        assert rebuilt.encode(text) == tokens, text


def write_tasks(folder: Path, published: Path, **changes: Any) -> None:
    """The files of tasks that llama.cpp's converter writes beside `tiny.gguf`; `changes` replace
    metadata of the second one."""
    from safetensors.numpy import load_file

    tensors = load_file(published / "model.safetensors")
    names = tensor_names("jina-bert-v3", 8)
    for index, (task, prompt) in enumerate(TASKS.items()):
        writer = gguf.GGUFWriter(folder / f"lora-{task}-tiny.gguf", "jina-bert-v3")
        metadata = {
            "general.type": "adapter",
            "adapter.type": "lora",
            "adapter.lora.task_name": task,
            "adapter.lora.prompt_prefix": prompt,
            "adapter.lora.alpha": encoder_models.SCALE * encoder_models.RANK,
        }
        for key, value in {**metadata, **(changes if index else {})}.items():
            add = writer.add_string if isinstance(value, str) else writer.add_float32
            add(key, value)
        for name, values in tensors.items():
            module, is_update, part = name.partition(".parametrizations.weight.0.lora_")
            if is_update and "pooler" not in module:
                target = names.get_name(module.removeprefix("roberta."))
                stored = values[index]
                if target == "token_embd" and part == "B":
                    stored = stored.T
                elif target == "token_types":
                    part = {"A": "B", "B": "A"}[part]
                name = f"{target}.weight.lora_{part.lower()}"
                writer.add_tensor(name, np.ascontiguousarray(stored))
        finish(writer)


def test_the_tasks_of_jina_embeddings_v3_have_files_of_their_own(tmp_path: Path) -> None:
    """As in the published layout, which is compared with `transformers`. Wrong twins: the other
    task, and no task."""
    case, model = CASES["jina v3"], original(CASES["jina v3"])
    folder = tmp_path / "published"
    save_published_jina_v3(model, folder)
    path = write_encoder(tmp_path / "tiny.gguf", case, model, metadata={"rope.freq_base": 20000.0})
    with LLM(path, threads=1) as llm:
        assert not llm.tasks
        plain = llm.embed(TOKENS)
    write_tasks(tmp_path, folder)
    with LLM(path, threads=1) as llm, LLM(folder, threads=1) as expected:
        assert llm.tasks == expected.tasks == sorted(TASKS)
        assert llm.embed(TOKENS) == plain
        found = [np.array(llm.embed(TOKENS, task=task)) for task in TASKS]
        for task, vector in zip(TASKS, found, strict=True):
            assert np.abs(vector - unit(np.array(expected.embed(TOKENS, task=task)))).max() < 1e-5
        for wrong in (found[1], np.array(plain)):
            assert np.abs(found[0] - wrong).max() > 1e-2
        [*_, (task, prompt)] = TASKS.items()
        tokens = llm.tokenizer.encode(f"{prompt}abc")
        assert llm.embed("abc", task=task) == llm.embed(tokens, task=task)
    for changes, message in (
        ({"adapter.type": "other"}, "holds no updates of a task of jina-embeddings-v3"),
        ({"adapter.lora.task_name": next(iter(TASKS))}, "two of its files .* the same task"),
        ({"adapter.lora.alpha": 9.0}, "has another alpha than"),
    ):
        write_tasks(tmp_path, folder, **changes)
        with pytest.raises(CheckpointError, match=message) as caught:
            LLM(path)
        assert "\n" not in str(caught.value)
