"""GGUF files of diffusion models as llama.cpp's converter writes them, against a forward pass in
plain torch and against llama.cpp."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import gguf
import numpy as np
import torch

from anydecode import LLM
from anydecode.errors import CheckpointError
from anydecode.models.gguf_tokenizer import PATTERNS, make_pre_tokenizer
from anydecode.models.loading import load_checkpoint
from anydecode.training.denoising import denoise
from anydecode.training.teachers import open_teacher, save_student
from diffusion_checkpoints import (
    MASK,
    SIZES,
    Router,
    Tiny,
    V,
    largest_difference,
    recorded,
    softmax_router,
    write,
)
from gguf_models import finish, interleave
from llama_cpp_logits import llama_cpp_logits

PARTS = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "n1": "attn_norm",
    "n2": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "router": "ffn_gate_inp",
}


@dataclass
class File:
    """What the converter writes for an architecture."""

    shift: int
    metadata: dict[str, Any] = field(default_factory=dict)
    biases: bool = False
    router: Router | None = None
    is_permuted: bool = False
    pre_tokenizer: str = "qwen2"

    @property
    def tiny(self) -> Tiny:
        config = {**SIZES, "rms_norm_eps": 1e-5, "rope_theta": 5000.0}
        return Tiny(
            config,
            shift=self.shift,
            biases=self.biases,
            qk_norm=self.router is not None,
            experts=0 if self.router is None else 8,
            router=self.router,
        )


IN_PLACE = {"diffusion.shift_logits": False}
FILES = {
    "llada": File(0, IN_PLACE, is_permuted=True, pre_tokenizer="llama-bpe"),
    "llada-moe": File(
        0, IN_PLACE, router=softmax_router(2, normalise=False), pre_tokenizer="llada-moe"
    ),
    "dream": File(1, biases=True),
    "rnd1": File(1, router=softmax_router(2, normalise=True)),
}


def write_gguf(
    architecture: str, file: File, folder: Path, **changes: Any
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a random model, and return the path and the tensors."""
    tensors = write(file.tiny, folder / "source")
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    metadata: dict[str, Any] = {
        f"{architecture}.block_count": SIZES["num_hidden_layers"],
        f"{architecture}.context_length": SIZES["max_position_embeddings"],
        f"{architecture}.embedding_length": SIZES["hidden_size"],
        f"{architecture}.feed_forward_length": SIZES["intermediate_size"],
        f"{architecture}.attention.head_count": SIZES["num_attention_heads"],
        f"{architecture}.attention.head_count_kv": SIZES["num_key_value_heads"],
        f"{architecture}.attention.key_length": SIZES["head_dim"],
        f"{architecture}.attention.value_length": SIZES["head_dim"],
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.attention.causal": False,
        f"{architecture}.rope.freq_base": 5000.0,
        "tokenizer.ggml.mask_token_id": MASK,
        **file.metadata,
    }
    if file.router is not None:
        metadata |= {
            f"{architecture}.expert_count": 8,
            f"{architecture}.expert_used_count": 2,
            f"{architecture}.expert_feed_forward_length": file.tiny.inner,
        }
    for key, value in {**metadata, **changes}.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(file.pre_tokenizer)
    letters = [chr(33 + token) for token in range(59)]
    writer.add_token_list([*letters, "AB", *(f"<|special_{token}|>" for token in range(60, V))])
    writer.add_token_types([3 if token >= 60 else 1 for token in range(V)])
    writer.add_token_merges(["A B"])
    writer.add_eos_token_id(60)
    for name, tensor in converted(file, tensors).items():
        writer.add_tensor(name, tensor)
    finish(writer)
    return path, tensors


def converted(file: File, tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The tensors with the converter's names and orders."""
    tiny, result = file.tiny, {}
    plain = {name: tensor.numpy() for name, tensor in tensors.items()}
    for role, name in (("embed", "token_embd"), ("norm", "output_norm"), ("head", "output")):
        result[f"{name}.weight"] = plain[f"{tiny.name(role)}.weight"]
    for layer in range(SIZES["num_hidden_layers"]):
        for role, part in PARTS.items():
            for leaf in ("weight", "bias"):
                tensor = plain.get(f"{tiny.name(role, layer)}.{leaf}")
                if tensor is None:
                    continue
                if file.is_permuted and role in "qk":
                    key = "num_attention_heads" if role == "q" else "num_key_value_heads"
                    tensor = interleave(tensor, SIZES[key])
                result[f"blk.{layer}.{part}.{leaf}"] = tensor
        if tiny.experts:
            for part in ("gate", "up", "down"):
                names = [f"{tiny.name('expert', layer).format(e)}{part}_proj" for e in range(8)]
                stack = np.stack([plain[f"{name}.weight"] for name in names])
                result[f"blk.{layer}.ffn_{part}_exps.weight"] = stack
    return result


@pytest.mark.parametrize("architecture", FILES)
def test_every_pass_equals_the_reference(architecture: str, tmp_path: Path) -> None:
    file = FILES[architecture]
    path, tensors = write_gguf(architecture, file, tmp_path)
    for length in (4, 7):
        passes = recorded(path, list(range(length)))
        assert passes and largest_difference(file.tiny, tensors, passes) < 2e-4
    with LLM(str(path), cache_positions=256, threads=1) as llm:
        assert llm.tokenizer.mask_id == MASK and not llm.model.spec.causal
        assert llm.default_decoder == ("dream" if file.shift else "llada")
        assert MASK not in llm.generate([5, 6], max_tokens=4, ignore_eos=True).tokens


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FILES)
def test_every_pass_equals_llama_cpp(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The canvases of passes, as its diffusion example gives them to the model. It opens some
    architectures only if the heads have as many numbers as hidden states."""
    monkeypatch.setitem(SIZES, "hidden_size", SIZES["num_attention_heads"] * SIZES["head_dim"])
    file = FILES[architecture]
    path, _ = write_gguf(architecture, file, tmp_path)
    passes = recorded(path, list(range(5)))
    assert len(passes) >= 2
    for tokens, logits in (passes[0], passes[-1]):
        reference = llama_cpp_logits(path, tokens.tolist())
        for position, row in logits.items():
            difference = np.delete(np.abs(row - reference[position - file.shift]), MASK)
            assert difference.max() < 1e-4, position
    others = np.abs(reference[1:] - reference[:-1]).max()
    assert others > 0.1  # rows of other positions differ


def test_the_file_says_which_position_a_row_predicts(tmp_path: Path) -> None:
    """Files of `dream` may have logits in place."""
    path, _ = write_gguf("dream", FILES["dream"], tmp_path, **IN_PLACE)
    with LLM(str(path), cache_positions=256) as llm:
        assert llm.model.spec.logit_shift == 0


def test_a_causal_file_raises_an_error(tmp_path: Path) -> None:
    path, _ = write_gguf("llada", FILES["llada"], tmp_path, **{"llada.attention.causal": True})
    with pytest.raises(CheckpointError, match="llada with causal attention is unsupported"):
        load_checkpoint(path)


def test_the_words_of_the_tokenizer_of_llada_moe() -> None:
    """Every digit is a word."""
    split = make_pre_tokenizer(PATTERNS["llada-moe"]).pre_tokenize_str("it's 12 a\n\nb")
    assert [word for word, _ in split] == ["it", "'s", "Ġ", "1", "2", "Ġa", "ĊĊ", "b"]


@pytest.mark.parametrize("architecture", ["llada", "dream"])
def test_a_model_that_is_distilled_from_a_file_opens_as_a_folder(
    architecture: str, tmp_path: Path
) -> None:
    path, _ = write_gguf(architecture, FILES[architecture], tmp_path)
    teacher = open_teacher(path)
    save_student(teacher, teacher.model.state_dict(), tmp_path / "new")
    options: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True, "decoder": "llada:block=0"}
    prompts = [[3, 4, 5, 6, 7], [8, 9]]
    expected, _ = denoise(open_teacher(tmp_path / "new").model, prompts, 9, 1.1, teacher.special)
    with LLM(tmp_path / "new", dtype="float32", threads=1) as llm:
        assert [answer.tokens for answer in llm.generate(prompts, **options)] == expected
    weights, other = (open_teacher(one).model.state_dict() for one in (path, tmp_path / "new"))
    assert all(torch.equal(weights[name].bfloat16(), other[name].bfloat16()) for name in weights)
