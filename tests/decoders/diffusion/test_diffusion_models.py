"""Diffusion models in their published layouts against a reference implementation, on tiny random
checkpoints: full canvases, cached rows, blocks and reordered windows, on both backends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file

from anydecode import LLM
from anydecode.decoders.diffusion.approximate_caches import DualCachePolicy, PrefixCachePolicy
from anydecode.decoders.diffusion.blocks import FixedBlocks, SlidingWindow, WholeCanvas
from anydecode.decoders.diffusion.caches import (
    BlockCausalCache,
    CachePolicy,
    CausalCache,
    NoCache,
)
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.unmasking import TopKUnmasking
from anydecode.errors import CheckpointError
from anydecode.kernels.library import load_library
from anydecode.models.families import spec_from_config
from anydecode.models.loading import load_checkpoint
from anydecode.models.scripted import ByteTokenizer
from anydecode.scoring.sequence import Sequence
from diffusion_checkpoints import LLADA_NAMES, NAMES
from dit_checkpoints import BD3LM, reference_dit, write_dit

V, D, HEADS, KV, HEAD, WIDE, LAYERS = 64, 32, 4, 2, 8, 48, 2
MASK = 63
THETA, EPS = 1000.0, 1e-5

HF_CONFIG = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD,
    "intermediate_size": WIDE,
    "max_position_embeddings": 128,
    "rope_theta": THETA,
    "rms_norm_eps": EPS,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LLADA_CONFIG = {
    "model_type": "llada",
    "architectures": ["LLaDAModelLM"],
    "block_type": "llama",
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "rope": True,
    "alibi": False,
    "d_model": D,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "n_kv_heads": KV,
    "mlp_hidden_size": WIDE,
    "embedding_size": V,
    "vocab_size": V - 4,
    "max_sequence_length": 128,
    "rope_theta": THETA,
    "rms_norm_eps": EPS,
    "weight_tying": False,
    "mask_token_id": MASK,
}

#: The published configs, with small sizes.
PUBLISHED_DREAM = {
    **HF_CONFIG,
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_dream.DreamConfig"},
    "bos_token_id": 61,
    "eos_token_id": 61,
    "mask_token_id": MASK,
    "max_window_layers": 28,
    "pad_token_id": 61,
    "rope_scaling": None,
    "sliding_window": None,
    "use_cache": False,
    "use_mrope": False,
    "use_sliding_window": False,
}
PUBLISHED_SDAR = {
    **HF_CONFIG,
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_sdar.SDARConfig"},
    "bos_token_id": 61,
    "eos_token_id": 62,
    "max_window_layers": LAYERS,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
}

#: name -> (config, tensor names, has q/k/v biases, has query and key norms, logit shift, block
#: size)
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, str], bool, bool, int, int | None]] = {
    "llada": (LLADA_CONFIG, LLADA_NAMES, False, False, 0, None),
    "llada tied": ({**LLADA_CONFIG, "weight_tying": True}, LLADA_NAMES, False, False, 0, None),
    "dream": ({**HF_CONFIG, "model_type": "Dream"}, NAMES, True, False, 1, None),
    "a2d": ({**HF_CONFIG, "model_type": "a2d-qwen3"}, NAMES, False, True, 0, None),
    "sdar": ({**HF_CONFIG, "model_type": "sdar", "block_size": 4}, NAMES, False, True, 0, 4),
    "dream as published": (PUBLISHED_DREAM, NAMES, True, False, 1, None),
    "sdar as published": (PUBLISHED_SDAR, NAMES, False, True, 0, 4),
    "fast-dllm-v2": (
        {**HF_CONFIG, "model_type": "Fast_dLLM_Qwen", "bd_size": 4},
        NAMES,
        True,
        False,
        1,
        4,
    ),
    "wedlm": (
        {**HF_CONFIG, "model_type": "wedlm", "qk_norm": True},
        NAMES,
        False,
        True,
        0,
        None,
    ),
    "wedlm biases": (
        {**HF_CONFIG, "model_type": "wedlm", "qk_norm": False, "attention_bias": True},
        NAMES,
        True,
        False,
        0,
        None,
    ),
}


def write_checkpoint(layout: str, folder: Path) -> dict[str, torch.Tensor]:
    config, names, biases, norms, _, _ = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.35

    tensors = {f"{names['embed']}.weight": random(V, D) * 2}
    tensors[f"{names['norm']}.weight"] = 1 + random(D)
    if not config.get("weight_tying"):
        tensors[f"{names['head']}.weight"] = random(V, D)
    for index in range(LAYERS):
        layer = names["layer"].format(index)
        for key, shape in {
            "q": (HEADS * HEAD, D),
            "k": (KV * HEAD, D),
            "v": (KV * HEAD, D),
            "o": (D, HEADS * HEAD),
            "gate": (WIDE, D),
            "up": (WIDE, D),
            "down": (D, WIDE),
        }.items():
            tensors[f"{layer}{names[key]}.weight"] = random(*shape)
            if biases and key in "qkv":
                tensors[f"{layer}{names[key]}.bias"] = random(shape[0])
        for key in ("n1", "n2"):
            tensors[f"{layer}{names[key]}.weight"] = 1 + random(D)
        if norms:
            for key in ("q_norm", "k_norm"):
                tensors[f"{layer}self_attn.{key}.weight"] = 1 + random(HEAD)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


class ReferenceModel:
    """A reference transformer in float64, with cached keys and values by position."""

    def __init__(self, layout: str, tensors: dict[str, torch.Tensor]) -> None:
        self.names = LAYOUTS[layout][1]
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self.keys = torch.zeros(LAYERS, 128, KV, HEAD, dtype=torch.float64)
        self.values = torch.zeros_like(self.keys)

    def run(self, tokens: Any, positions: Any, visible: Any, keep: bool) -> np.ndarray:
        """Logits of rows at `positions`; `visible[r]` are the positions that row r attends to."""
        at = torch.tensor([int(position) for position in positions])
        keys, values = self.keys.clone(), self.values.clone()
        x = self.get("embed")[torch.tensor([int(token) for token in tokens])]
        allowed = torch.zeros(len(at), 128, dtype=torch.bool)
        for row, attended in enumerate(visible):
            allowed[row, list(attended)] = True
        for index in range(LAYERS):
            y = self.norm(x, self.get("n1", index))
            q, k, v = (self.linear(y, name, index) for name in "qkv")
            q, k = self.heads(q, "q", index, at), self.heads(k, "k", index, at)
            keys[index, at], values[index, at] = k, v.view(len(at), KV, HEAD)
            out = torch.empty_like(q)
            for head in range(HEADS):
                group = head // (HEADS // KV)
                scores = q[:, head] @ keys[index, :, group].T / HEAD**0.5
                weights = torch.softmax(scores.masked_fill(~allowed, -torch.inf), -1)
                out[:, head] = weights @ values[index, :, group]
            x = x + self.linear(out.reshape(len(at), -1), "o", index)
            y = self.norm(x, self.get("n2", index))
            gate = torch.nn.functional.silu(self.linear(y, "gate", index))
            x = x + self.linear(gate * self.linear(y, "up", index), "down", index)
        if keep:
            self.keys, self.values = keys, values
        name = f"{self.names['head']}.weight"
        head = self.tensors[name] if name in self.tensors else self.get("embed")
        return (self.norm(x, self.get("norm")) @ head.T).numpy()

    def get(self, key: str, index: int | None = None) -> torch.Tensor:
        layer = "" if index is None else self.names["layer"].format(index)
        return self.tensors[f"{layer}{self.names[key]}.weight"]

    def linear(self, x: torch.Tensor, key: str, index: int) -> torch.Tensor:
        name = f"{self.names['layer'].format(index)}{self.names[key]}"
        bias = self.tensors.get(f"{name}.bias")
        y = x @ self.tensors[f"{name}.weight"].T
        return y if bias is None else y + bias

    def heads(self, x: torch.Tensor, key: str, index: int, at: torch.Tensor) -> torch.Tensor:
        x = x.view(len(at), -1, HEAD)
        norm = self.tensors.get(f"{self.names['layer'].format(index)}self_attn.{key}_norm.weight")
        if norm is not None:
            x = self.norm(x, norm)
        half = HEAD // 2
        angles = at[:, None] * THETA ** (-torch.arange(half, dtype=torch.float64) / half)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
        return torch.cat([turned.real, turned.imag], -1)

    @staticmethod
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


class RecordingDenoiser(Denoiser):
    """Records (tokens, block, opens_block, logits by position) of every pass."""

    passes: list[tuple[np.ndarray, tuple[int, int], bool, dict[int, np.ndarray]]]

    def unmask_step(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        block = canvas.block or (canvas.frontier, self.blocks.window_end(canvas))
        logits = {
            int(position): predictions.logits(position).copy() for position in predictions.positions
        }
        self.passes.append((canvas.tokens.copy(), block, canvas.block is None, logits))
        super().unmask_step(sequence, canvas, predictions)


PROMPT = [3, 14, 15, 9, 26, 5]
LENGTH = 10


def expected(
    reference: ReferenceModel,
    policy: type[CachePolicy],
    size: int | None,
    shift: int,
    recorder: RecordingDenoiser,
) -> list[dict[int, np.ndarray]]:
    """The expected logits of each pass, computed by the reference from the recorded canvases."""
    results = []
    num_cached = 0
    for tokens, (first, stop), opens_block, logits in recorder.passes:
        total = len(tokens)

        def visible(position: int, total: int = total) -> range:
            return range(total if size is None else min(total, (position // size + 1) * size))

        if policy is CausalCache:
            front = int(np.flatnonzero(tokens == MASK)[0])
            new = range(num_cached, front)
            if new:
                reference.run(tokens[num_cached:front], new, [range(p + 1) for p in new], True)
            num_cached = front
            window = range(front, stop)
            positions = [p for p in window if tokens[p] != MASK]
            positions += [p for p in window if tokens[p] == MASK]
            attended: list[Any] = [
                [*range(front), *positions[: r + 1]] for r in range(len(positions))
            ]
            keep = False
        elif policy is BlockCausalCache:
            assert size is not None
            start = first // size * size
            while num_cached < start:
                end = num_cached + size
                block = range(num_cached, end)
                reference.run(tokens[num_cached:end], block, [visible(p) for p in block], True)
                num_cached = end
            positions, keep = list(range(max(0, start - shift), len(visible(stop - 1)))), False
            attended = [visible(p) for p in positions]
        else:
            keep = opens_block and policy is not NoCache
            begin = 0 if opens_block or policy is NoCache else max(0, first - shift)
            end = stop if policy is DualCachePolicy and not opens_block else total
            positions = list(range(begin, end))
            attended = [visible(p) for p in positions]
        rows = reference.run(tokens[positions], positions, attended, keep)
        results.append({position: rows[positions.index(position - shift)] for position in logits})
    return results


CASES: list[tuple[str, type[CachePolicy], Callable[[], Any]]] = [
    ("llada", NoCache, lambda: FixedBlocks(4)),
    ("llada", PrefixCachePolicy, lambda: FixedBlocks(4)),
    ("llada", DualCachePolicy, lambda: FixedBlocks(4)),
    ("llada tied", DualCachePolicy, lambda: WholeCanvas()),
    ("dream", NoCache, lambda: WholeCanvas()),
    ("dream", PrefixCachePolicy, lambda: FixedBlocks(5)),
    ("dream", DualCachePolicy, lambda: FixedBlocks(5)),
    ("a2d", DualCachePolicy, lambda: FixedBlocks(5)),
    ("sdar", NoCache, lambda: FixedBlocks()),
    ("sdar", BlockCausalCache, lambda: FixedBlocks()),
    ("fast-dllm-v2", NoCache, lambda: FixedBlocks()),
    ("fast-dllm-v2", BlockCausalCache, lambda: FixedBlocks()),
    ("wedlm", CausalCache, lambda: SlidingWindow(5)),
    ("wedlm biases", CausalCache, lambda: SlidingWindow(5)),
]


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize(
    ("layout", "policy", "blocks"), CASES, ids=[f"{case[0]} {case[1].__name__}" for case in CASES]
)
def test_every_pass_equals_the_reference_implementation(
    layout: str, policy: type[CachePolicy], blocks: Any, backend: str, tmp_path: Path
) -> None:
    if backend == "native" and load_library() is None:
        pytest.skip("the native kernels are not available here")
    tensors = write_checkpoint(layout, tmp_path / "model")
    _, _, _, _, shift, size = LAYOUTS[layout]
    recorder = RecordingDenoiser(blocks(), unmask=TopKUnmasking(), cache=policy(), mask=MASK)
    recorder.passes = []
    options = {"tokenizer": ByteTokenizer(), "backend": backend, "threads": 1}
    with LLM(str(tmp_path / "model"), cache_positions=256, **options) as llm:
        assert llm.model.spec.logit_shift == shift
        assert llm.model.spec.block_size == size
        assert llm.model.spec.causal == (policy is CausalCache)
        answer = llm.generate(PROMPT, decoder=recorder, max_tokens=LENGTH, ignore_eos=True)
    assert len(answer.tokens) == LENGTH
    assert len(recorder.passes) >= LENGTH
    results = expected(ReferenceModel(layout, tensors), policy, size, shift, recorder)
    for (_, _, _, logits), reference in zip(recorder.passes, results, strict=True):
        assert logits and logits.keys() == reference.keys()
        for position, row in logits.items():
            row[MASK] = reference[position][MASK]
            np.testing.assert_allclose(row, reference[position], rtol=0, atol=2e-4)


def test_the_logits_of_another_cache_policy_differ(tmp_path: Path) -> None:
    """Negative control: the reference with another cache policy gives other logits."""
    tensors = write_checkpoint("llada", tmp_path)
    recorder = RecordingDenoiser(
        FixedBlocks(4), unmask=TopKUnmasking(), cache=DualCachePolicy(), mask=MASK
    )
    recorder.passes = []
    with LLM(str(tmp_path), tokenizer=ByteTokenizer(), cache_positions=256) as llm:
        llm.generate(PROMPT, decoder=recorder, max_tokens=LENGTH, ignore_eos=True)
    logits = recorder.passes[2][3]
    for policy in (NoCache, PrefixCachePolicy):
        other = expected(ReferenceModel("llada", tensors), policy, None, 0, recorder)[2]
        assert max(np.abs(row - other[p])[:MASK].max() for p, row in logits.items()) > 1e-2


def test_the_mask_token_is_read_from_the_config(tmp_path: Path) -> None:
    write_checkpoint("llada", tmp_path)
    vocab = {f"w{number}": number for number in range(V)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0")).save(
        str(tmp_path / "tokenizer.json")
    )
    tokenizer = load_checkpoint(tmp_path).tokenizer
    assert tokenizer is not None and tokenizer.mask_id == MASK


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_type": "sequential"}, "block_type 'sequential' is not supported"),
        ({"alibi": True}, "alibi True is not supported"),
        ({"d_model": None}, "lacks 'hidden_size'"),
    ],
)
def test_other_architectures_raise_an_error(change: Any, message: str, tmp_path: Path) -> None:
    write_checkpoint("llada", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**LLADA_CONFIG, **change}))
    with pytest.raises(CheckpointError, match=message):
        spec_from_config(load_checkpoint(tmp_path).config)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"model_type": "sdar"}, 4),
        ({"model_type": "sdar", "block_size": None}, 4),
        ({"model_type": "sdar", "block_size": 8}, 8),
        ({"model_type": "sdar_moe", "num_experts": 4, "num_experts_per_tok": 2}, 4),
        ({"model_type": "Fast_dLLM_Qwen"}, 32),
        ({"model_type": "a2d-llama"}, None),
    ],
)
def test_the_block_size_of_a_config_and_its_default(config: Any, size: int | None) -> None:
    assert spec_from_config({**HF_CONFIG, **config}).block_size == size


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("SDAR-8B-Chat-b32", 32),
        ("SDAR-1.7B-Chat", 4),
        ("models--JetLM--SDAR-4B-Chat-b16/snapshots/0123", 16),
        ("other-b32", 4),
    ],
)
def test_the_block_size_of_sdar_is_read_from_its_name(name: str, size: int, tmp_path: Path) -> None:
    (tmp_path / name).mkdir(parents=True)
    write_checkpoint("sdar as published", tmp_path / name)
    with LLM(str(tmp_path / name), tokenizer=ByteTokenizer(), cache_positions=256) as llm:
        assert llm.default_decoder == "sdar"
        assert llm.model.spec.block_size == size


def test_the_default_decoders(tmp_path: Path) -> None:
    for layout, decoder in (("dream as published", "dream"), ("llada", "llada")):
        write_checkpoint(layout, tmp_path / layout)
        with LLM(str(tmp_path / layout), tokenizer=ByteTokenizer(), cache_positions=256) as llm:
            assert llm.default_decoder == decoder


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llada", "num_experts": 64}, "mixture of experts of model type 'llada'"),
        ({"model_type": "edlm", "auto_map": {"AutoModel": "m.Edlm"}}, "'edlm' .Edlm."),
        ({"model_type": "qwen3", "auto_map": {"AutoModel": "m.Odd"}}, "architecture Odd"),
        ({"model_type": "diffusion_gemma"}, "model type 'diffusion_gemma'"),
        ({"model_type": "Dream", "architectures": ["DreamForCausalLM"]}, "lacks 'block_size'"),
        ({"model_type": "sdar", "architectures": ["SDARV2ForCausalLM"]}, "SDARV2ForCausalLM"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLME"),
        ({"model_type": "SDAR"}, "model type 'SDAR'"),
        (
            {"model_type": "odd", "architectures": ["Odd"], "text_config": {"model_type": "qwen2"}},
            "architecture Odd of model type 'odd'",
        ),
    ],
)
def test_a_model_similar_to_a_supported_one_raises_an_error(
    config: Any, message: str, tmp_path: Path
) -> None:
    write_checkpoint("sdar", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**HF_CONFIG, **config}))
    with pytest.raises(CheckpointError, match=message) as caught:
        LLM(str(tmp_path), tokenizer=ByteTokenizer())
    assert "\n" not in str(caught.value)


def test_the_error_for_a_missing_tensor_has_its_name(tmp_path: Path) -> None:
    write_checkpoint("llada", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**LLADA_CONFIG, "n_layers": 3}))
    with pytest.raises(CheckpointError, match="layers.2"):
        LLM(str(tmp_path), tokenizer=ByteTokenizer())


DITS = {
    "bd3-lm": (BD3LM, 4),
    "bd3-lm without modulation": ({**BD3LM, "adaln": False}, 4),
    "its pretraining": ({**BD3LM, "cross_attn": False}, None),
    "mdlm": ({**BD3LM, "model_type": "mdlm", "block_size": 16}, None),
}


def recorded_passes(folder: Path, backend: str, size: int | None) -> RecordingDenoiser:
    recorder = RecordingDenoiser(FixedBlocks(0), unmask=TopKUnmasking(), mask=MASK)
    recorder.cache = BlockCausalCache() if size else NoCache()
    recorder.passes = []
    options = {"tokenizer": ByteTokenizer(), "backend": backend, "threads": 1}
    with LLM(str(folder), cache_positions=256, **options) as llm:
        assert llm.model.spec.block_size == size and not llm.model.spec.causal
        llm.generate(PROMPT, decoder=recorder, max_tokens=LENGTH, ignore_eos=True)
    return recorder


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("name", DITS)
def test_the_diffusion_transformer_equals_the_reference(
    name: str, backend: str, tmp_path: Path
) -> None:
    if backend == "native" and load_library() is None:
        pytest.skip("the native kernels are not available here")
    config, size = DITS[name]
    tensors = write_dit(tmp_path, config)
    recorder = recorded_passes(tmp_path, backend, size)
    assert len(recorder.passes) >= LENGTH
    for tokens, _, _, logits in recorder.passes:
        expected_logits = reference_dit(tensors, tokens, size)
        for position, row in logits.items():
            row[MASK] = expected_logits[position][MASK]
            np.testing.assert_allclose(row, expected_logits[position], rtol=0, atol=2e-4)


def test_another_time_or_norm_changes_the_logits(tmp_path: Path) -> None:
    """Negative control: another time input, or norms that do not subtract the mean."""
    tensors = write_dit(tmp_path, BD3LM)
    tokens, _, _, logits = recorded_passes(tmp_path, "torch", 4).passes[0]

    def uncentred(x: torch.Tensor, shape: Any, eps: float) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    for wrong in ({"time": 0.5}, {"normed": uncentred}):
        other = reference_dit(tensors, tokens, 4, **wrong)
        assert max(np.abs(row - other[p])[:MASK].max() for p, row in logits.items()) > 1e-2


def test_blocks_of_unknown_size_raise_an_error(tmp_path: Path) -> None:
    write_dit(tmp_path, {**BD3LM, "block_size": None})
    with pytest.raises(CheckpointError, match="lacks 'block_size'"):
        LLM(str(tmp_path), tokenizer=ByteTokenizer())


@pytest.mark.parametrize("key", ["time_conditioning", "causal"])
def test_a_diffusion_transformer_with_a_time_input_raises_an_error(
    key: str, tmp_path: Path
) -> None:
    write_dit(tmp_path, {**BD3LM, key: True})
    with pytest.raises(CheckpointError, match=f"{key}=true is not supported"):
        LLM(str(tmp_path), tokenizer=ByteTokenizer())
