"""Folders of encoders that `anydecode quantize` writes as GGUF files, against `transformers` and
llama.cpp."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

import gguf_encoders
from anydecode import LLM
from anydecode.cli import main
from anydecode.errors import CheckpointError
from anydecode.models.loading import load_checkpoint
from anydecode.models.loading.gguf_file import GGUFFile
from anydecode.models.tokenizers import HFTokenizer
from anydecode.quantization.gguf import quantize_file
from anydecode.quantization.gguf_folder import FolderFile
from encoder_models import declare_pooling, hf_encoder, hf_states, save_encoder
from llama_cpp_logits import GELU_MARGIN, llama_cpp_embedding, llama_cpp_tokens
from tokenizer_files import strings

TOKENS = [2, *(int(token) for token in np.random.default_rng(0).integers(5, 57, 30)), 3]
#: Of unit vectors of random models in Q8_0.
PACKED_ERROR = 0.1
SIZES = {"hidden_size": 64, "intermediate_size": 96}
ROBERTA = {**SIZES, "pad_token_id": 1, "type_vocab_size": 1}
MODERN: dict[str, Any] = {**SIZES, **gguf_encoders.CASES["modernbert"].settings}


@dataclass
class Case:
    """An encoder of `transformers`, its pooling, and the architecture of its file."""

    family: str
    pooling: str
    settings: dict[str, Any] = field(default_factory=dict)
    architecture: str = "bert"


CASES = {
    "bert": Case("Bert", "mean_tokens", SIZES),
    "roberta": Case("Roberta", "cls_token", ROBERTA),
    "xlm-roberta": Case("XLMRoberta", "mean_tokens", ROBERTA),
    "camembert": Case("Camembert", "lasttoken", ROBERTA),
    "distilbert": Case("DistilBert", "mean_tokens", {"dim": 64, "hidden_dim": 96}),
    "modernbert": Case("ModernBert", "cls_token", MODERN, "modern-bert"),
}


def unit(vector: np.ndarray) -> np.ndarray:
    found: np.ndarray = vector / np.linalg.norm(vector)
    return found


def pooled(states: np.ndarray, pooling: str) -> np.ndarray:
    """The embedding of a text from the states of its tokens."""
    rows = {"mean_tokens": slice(None), "cls_token": [0], "lasttoken": [-1]}[pooling]
    return unit(states[rows].mean(0))


def folder_of(case: Case, path: Path) -> tuple[Any, Path]:
    """A random model, and its repository."""
    model = hf_encoder(case.family, **case.settings)
    folder = save_encoder(model, path / "repository")
    return model, declare_pooling(folder, case.pooling)


def written(folder: Path, format: str = "f32") -> Path:
    out = folder.parent / f"{format}.gguf"
    quantize_file(FolderFile(load_checkpoint(folder)), out, format)
    return out


def embedding(path: Path) -> np.ndarray:
    with LLM(path, threads=1) as llm:
        return np.array(llm.embed(TOKENS))


@pytest.mark.parametrize("name", CASES)
def test_a_written_encoder_has_the_same_embeddings(name: str, tmp_path: Path) -> None:
    """Rejects another pooling, positions that are counted from another one, and windows of another
    size."""
    case = CASES[name]
    model, folder = folder_of(case, tmp_path)
    expected = pooled(hf_states(model, TOKENS), case.pooling)
    path = written(folder)
    metadata = GGUFFile(path).metadata
    assert metadata["general.architecture"] == case.architecture
    assert metadata[f"{case.architecture}.attention.causal"] is False
    assert np.abs(embedding(path) - expected).max() < 1e-4
    packed = written(folder, "q8_0")
    assert "Q8_0" in {info.format for info in GGUFFile(packed).tensors.values()}
    assert 0 < np.abs(embedding(packed) - expected).max() < PACKED_ERROR


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_has_the_same_embeddings(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model, folder = folder_of(case, tmp_path)
    expected = pooled(hf_states(model, TOKENS), case.pooling)
    for format, margin in (("f32", GELU_MARGIN), ("q8_0", PACKED_ERROR)):
        found = unit(llama_cpp_embedding(written(folder, format), TOKENS))
        assert np.abs(found - expected).max() < margin


RERANKERS = {
    "bert": Case("Bert", "", {**SIZES, "num_labels": 1}),
    "xlm-roberta": Case("XLMRoberta", "", {**ROBERTA, "num_labels": 1}),
    "modernbert": Case("ModernBert", "", {**MODERN, "num_labels": 1, "classifier_pooling": "mean"}),
}


def reranker_of(case: Case, path: Path) -> tuple[Any, Path]:
    model = hf_encoder(case.family, "ForSequenceClassification", **case.settings)
    return model, save_encoder(model, path / "repository")


def logit_of(model: Any, tokens: list[int], types: list[int] | None = None) -> float:
    import torch

    given = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.inference_mode():
        return float(model(torch.tensor([tokens]), **given).logits[0, 0])


@pytest.mark.parametrize("name", RERANKERS)
def test_a_written_cross_encoder_has_the_same_scores(name: str, tmp_path: Path) -> None:
    model, folder = reranker_of(RERANKERS[name], tmp_path)
    path = written(folder, "q8_0")
    stored = {x: info.format for x, info in GGUFFile(path).tensors.items() if x.startswith("cls.")}
    assert "cls.output.weight" in stored and set(stored.values()) == {"F32"}
    with LLM(written(folder), threads=1) as llm:
        tokens, types = llm.tokenizer.encode_pair("ab", "cde fg")  # type: ignore[attr-defined]
        logit = logit_of(model, tokens, types if name == "bert" else None)
        assert abs(llm.relevance("ab", ["cde fg"])[0] - 1 / (1 + np.exp(-logit))) < 1e-4


@pytest.mark.parametrize("name", RERANKERS)
def test_llama_cpp_has_the_same_scores(name: str, tmp_path: Path) -> None:
    """Of one text, since llama.cpp has no types of tokens."""
    model, folder = reranker_of(RERANKERS[name], tmp_path)
    found = llama_cpp_embedding(written(folder), TOKENS)[0]
    assert abs(found - logit_of(model, TOKENS)) < GELU_MARGIN


def test_labels_of_classifiers_are_written(tmp_path: Path) -> None:
    case = Case("Bert", "", {"id2label": {0: "good", 1: "bad", 2: "neither"}})
    _, folder = reranker_of(case, tmp_path)
    metadata = GGUFFile(written(folder)).metadata
    assert metadata["bert.classifier.output_labels"] == ["good", "bad", "neither"]
    assert metadata["bert.pooling_type"] == 4


def test_what_has_no_form_is_refused(tmp_path: Path) -> None:
    """A classifier of the first state, which llama.cpp reads as one of the mean, and layers whose
    pattern is no period."""
    settings = {**MODERN, "num_labels": 1, "classifier_pooling": "cls"}
    _, folder = reranker_of(Case("ModernBert", "", settings), tmp_path)
    with pytest.raises(CheckpointError, match=r"modern-bert have no form .*classifier\.pooling"):
        FolderFile(load_checkpoint(folder))
    kinds = [f"{kind}_attention" for kind in ("full", "sliding", "full", "full", "sliding")]
    _, folder = folder_of(
        Case("ModernBert", "cls_token", {**MODERN, "layer_types": kinds}), tmp_path / "b"
    )
    with pytest.raises(CheckpointError, match=r"no form for this model's layers\[3\]"):
        FolderFile(load_checkpoint(folder))


def trained(kind: str) -> Tokenizer:
    """A tokenizer as the kinds of repositories have them."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    ends = ("[CLS]", "[SEP]")
    trainer: Any = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special)
    if kind.startswith("bert"):
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=kind == "bert uncased")
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    elif kind == "unigram":
        special, ends = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], ("<s>", "</s>")
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.Replace(" {2,}", " ")
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    else:
        if kind == "roberta":
            special, ends = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], ("<s>", "</s>")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.train_from_iterator(strings(7), trainer)
    first, last = ends
    is_typed = first == "[CLS]"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1"
        if is_typed
        else f"{first} $A {last} {last} $B {last}",
        special_tokens=[(text, tokenizer.token_to_id(text)) for text in ends],
    )
    return tokenizer


def tokenizer_folder(kind: str, path: Path) -> Path:
    """A repository with such a tokenizer: settings name the tokens as those of `transformers`."""
    tokenizer = trained(kind)
    size = 1 + max(tokenizer.get_vocab().values())
    family = {"roberta": "Roberta", "unigram": "XLMRoberta", "modernbert": "ModernBert"}
    settings = {**(MODERN if kind == "modernbert" else {}), "vocab_size": size + 2}
    case = Case(family.get(kind, "Bert"), "mean_tokens", settings)
    _, folder = folder_of(case, path)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = ["cls", "sep", "mask", "pad", "unk"]
    texts = ["<s>", "</s>", "<mask>", "<pad>", "<unk>"]
    if kind in ("roberta", "unigram"):
        names, texts = ["bos", "eos", *names], ["<s>", "</s>", *texts]
    else:
        texts = [f"[{name.upper()}]" for name in names]
    tokens = {f"{name}_token": text for name, text in zip(names, texts, strict=True)}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return folder


KINDS = ("bert uncased", "bert cased", "unigram", "roberta", "modernbert")


def texts_of(kind: str) -> list[str]:
    """Unigram models are compared without spaces at the ends, which SentencePiece leaves out."""
    return [text.strip(" ") if kind == "unigram" else text for text in strings(1)]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_repository(kind: str, tmp_path: Path) -> None:
    """Also those of pairs. Wrong twin: words and their parts marked the other way round, or another
    first token."""
    folder = tokenizer_folder(kind, tmp_path)
    metadata = GGUFFile(written(folder)).metadata
    source = HFTokenizer.from_folder(folder)
    assert source is not None
    own = HFTokenizer.from_gguf(metadata)
    expected = [source.encode(text) for text in texts_of(kind)]
    assert len(set(map(tuple, expected))) > 250
    assert [own.encode(text) for text in texts_of(kind)] == expected
    assert own.encode_pair("the cat", "Sat") == source.encode_pair("the cat", "Sat")
    assert own.mask_id == source.mask_id
    if kind.startswith("bert"):
        tokens = [text.replace("▁", "") for text in metadata["tokenizer.ggml.tokens"]]
        twin = HFTokenizer.from_gguf({**metadata, "tokenizer.ggml.tokens": tokens})
    else:
        twin = HFTokenizer.from_gguf({**metadata, "tokenizer.ggml.bos_token_id": 3})
    assert [twin.encode(text) for text in texts_of(kind)] != expected


@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_has_the_same_tokens(kind: str, tmp_path: Path) -> None:
    folder = tokenizer_folder(kind, tmp_path)
    source = HFTokenizer.from_folder(folder)
    assert source is not None
    found = llama_cpp_tokens(written(folder), texts_of(kind))
    assert found == [source.encode(text) for text in texts_of(kind)]


def test_the_table_of_characters_of_sentencepiece_is_written_as_bytes(tmp_path: Path) -> None:
    """A table without entries: the size of its tree, the tree, and no texts."""
    folder = tokenizer_folder("unigram", tmp_path)
    path, table = folder / "tokenizer.json", bytes([0, 4, 0, 0]) + bytes(1025)
    state = json.loads(path.read_text())
    charsmap = {
        "type": "Precompiled",
        "precompiled_charsmap": base64.b64encode(table).decode(),
    }
    state["normalizer"] = {"type": "Sequence", "normalizers": [charsmap, state["normalizer"]]}
    path.write_text(json.dumps(state))
    file = GGUFFile(written(folder))
    assert bytes(file.metadata["tokenizer.ggml.precompiled_charsmap"]) == table


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_calibration_weighs_the_matrices_of_an_encoder(name: str, tmp_path: Path) -> None:
    """Rejects calibration that is left out."""
    case = CASES[name]
    settings = {**case.settings, "max_position_embeddings": 256}
    _, folder = folder_of(Case(case.family, case.pooling, settings), tmp_path)
    texts = tmp_path / "texts.txt"
    texts.write_text("a b c d\n\nef gh")
    out = tmp_path / "new.gguf"
    options = ["--format", "q4_0", "--prompt", "", "--calibrate", str(texts)]
    with pytest.raises(SystemExit) as stopped:
        main.run(["quantize", str(folder), str(out), *options])
    assert not stopped.value.code
    files = [GGUFFile(path) for path in (out, written(folder, "q4_0"))]
    qkv = "attn_qkv" if name == "modernbert" else "attn_q"
    for part in (qkv, "attn_output", "ffn_up", "ffn_down"):
        data = [file.read(f"blk.1.{part}.weight").data for file in files]
        assert not np.array_equal(*data), part


def test_the_command_says_how_long_the_embedding_of_the_text_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = folder_of(CASES["bert"], tmp_path)
    out = tmp_path / "new.gguf"
    with pytest.raises(SystemExit) as stopped:
        main.run(["quantize", str(folder), str(out), "--format", "q8_0", "--prompt", "a b"])
    assert not stopped.value.code
    assert "'a b' is represented by 64 numbers" in capsys.readouterr().err
