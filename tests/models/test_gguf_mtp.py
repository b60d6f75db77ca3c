"""Modules that predict further tokens in GGUF files, where llama.cpp's converter has them: as
blocks behind those of the model. They draft as in the published files of safetensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from anydecode import LLM
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families.config import text_config
from anydecode.models.families.table import FAMILIES
from anydecode.models.loading import load_checkpoint
from anydecode.models.mtp import has_mtp
from gguf_models import rewrite
from llama_cpp_logits import llama_cpp_logits
from mtp_models import mtp_llm
from parity_cases import parity_module
from tiny_models import built, chain, checkpoint_of, hf_model, logits

pytest.importorskip("torch")
pytest.importorskip("transformers")

PROMPT = [5, 17, 99, 3, 128, 64, 64, 11, 42]
#: The tensors of a module beside those of its layer, by their names in GGUF files and in others.
USUAL = {
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.eh_proj": "eh_proj",
    "nextn.shared_head_norm": "shared_head.norm",
}
#: Ling 2 and 3.
LING = {**USUAL, "layer_output_norm": "final_layernorm"}
del LING["nextn.shared_head_norm"]
#: Hy3.
HY = {**USUAL, "nextn.shared_head_norm": "final_layernorm"}
STEP = {
    **USUAL,
    "nextn.shared_head_norm": "transformer.shared_head.norm",
    "nextn.shared_head_head": "transformer.shared_head.output",
}
MIMO = "model.mtp.layers.0."


def _experts(architecture: str, **changes: Any) -> Callable[[Path], tuple[Path, Checkpoint]]:
    """A case of `test_gguf_experts.py`."""

    def write(path: Path) -> tuple[Path, Checkpoint]:
        module = parity_module("test_gguf_experts")
        family, settings, _ = module.FAMILIES[architecture]
        model = hf_model(family, **{**settings, **changes})
        return module.write(path, architecture, model), checkpoint_of(model)

    return write


def _deepseek(case: str) -> Callable[[Path], tuple[Path, Checkpoint]]:
    """A case of `test_gguf_deepseek.py`."""

    def write(path: Path) -> tuple[Path, Checkpoint]:
        file, model = parity_module("test_gguf_deepseek").write(path, case)
        return file, checkpoint_of(model)

    return write


def _hybrid(
    case: str, settings: dict[str, Any], **metadata: Any
) -> Callable[[Path], tuple[Path, Checkpoint]]:
    """A case of `test_gguf_hybrids.py`."""

    def write(path: Path) -> tuple[Path, Checkpoint]:
        module = parity_module("test_gguf_hybrids")
        found = module.CASES[case]
        # llama.cpp has the eps of the model's norms where it divides by those of keys and queries.
        model = hf_model(found.family, **{**found.settings, "rms_norm_eps": 1e-6, **settings})
        file = module.converted(model, found, path / "tiny.gguf", **metadata)
        return file, checkpoint_of(model)

    return write


def _ling_2(path: Path) -> tuple[Path, Checkpoint]:
    module = parity_module("families/test_bailing_moe")
    model = module.original("second")
    folder = module.write(path, "second", model)
    return module.as_gguf(path / "tiny.gguf", model), load_checkpoint(folder)


def _mimo(path: Path) -> tuple[Path, Checkpoint]:
    """MiMo-V2-Flash, whose module has a window and no experts."""
    changes = {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    }
    return _experts("mimo2", **changes)(path)


def _fused_mimo(path: Path) -> tuple[Path, Checkpoint]:
    """MiMo-V2.5, whose queries, keys and values have one matrix."""
    file, whole = _mimo(path)
    stored = {one.name: np.array(one.data) for one in gguf.GGUFReader(file).tensors}
    parts = {
        f"blk.{layer}.attn_qkv.weight": [f"blk.{layer}.attn_{part}.weight" for part in "qkv"]
        for layer in range(4)
    }
    fused = {name: np.concatenate([stored[one] for one in own]) for name, own in parts.items()}
    rewrite(file, [one for own in parts.values() for one in own], tensors=fused)
    return file, whole


def _step(path: Path) -> tuple[Path, Checkpoint]:
    """Step-3.5, whose module has a window and no experts."""
    types = ["full_attention", *["sliding_attention"] * 3]
    multimodal, step = (
        parity_module(f"families/test_{name}") for name in ("multimodal", "step3p5")
    )
    settings = {
        "num_hidden_layers": 4,
        "layer_types": types,
        "rope_theta": [5e4, 500.0, 500.0, 500.0],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0],
        "moe_layers_enum": "1,2",
        "swiglu_limits": [0.0, 0.0, 0.2, 0.0],
        "swiglu_limits_shared": [0.0, 0.3, 0.0, 0.0],
    }
    with pytest.MonkeyPatch.context() as patch:
        usual, tower = multimodal.CASES["Step3p7"]
        patch.setitem(multimodal.CASES, "Step3p7", ({**usual, **settings}, tower))
        _, file = step.write(path)
    whole = load_checkpoint(path)
    return file, replace(whole, config=text_config(whole.config))


#: What writes a model in both forms, whose last layer becomes that of the module; the names of the
#: module's tensors; and the prefix of them in the published files, if it is not that of the layer.
CASES: dict[str, tuple[Callable[[Path], tuple[Path, Checkpoint]], dict[str, str], str]] = {
    "deepseek v3.2": (_deepseek("deepseek32"), USUAL, ""),
    "glm 5": (_deepseek("glm-dsa"), USUAL, ""),
    "hy3": (_experts("hy_v3"), HY, ""),
    "ling 2": (_ling_2, LING, ""),
    "ling 3": (
        _hybrid(
            "ling 3",
            {
                "layer_types": ["linear_attention", *["full_attention"] * 3],
                "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
            },
            **{"attention.head_count_kv": [0, 1, 1, 1]},
        ),
        LING,
        "",
    ),
    "mimo v2": (_mimo, {**USUAL, "nextn.shared_head_norm": "final_layernorm"}, MIMO),
    "mimo v2.5": (_fused_mimo, LING, MIMO),
    "step 3.5": (_step, STEP, ""),
    "glm 5.3": (
        _hybrid(
            "glm 5.3",
            {"index_topk": 60, "indexer_types": ["full"] * 4},  # all of the text
            **{"attention.indexer.top_k": 60, "attention.indexer.types": [True] * 4},
        ),
        USUAL,
        "",
    ),
}


def with_module(
    path: Path, whole: Checkpoint, names: dict[str, str], prefix: str
) -> tuple[Path, Checkpoint]:
    """Both forms of a model with its last layer as that of a module."""
    random = np.random.default_rng(0)
    size, count = whole.config["hidden_size"], whole.config["num_hidden_layers"]
    last = count - 1
    shapes = {
        "nextn.eh_proj": (size, 2 * size),
        "nextn.shared_head_head": (whole.config["vocab_size"], size),
    }
    module = {
        name: (0.2 * random.standard_normal(shapes[name])).astype(np.float32)
        if name in shapes
        else 1 + random.random(size, np.float32)
        for name in names
    }
    added = np.float32(FAMILIES[whole.config["model_type"]].norm_offset)
    stored = {
        f"blk.{last}.{name}.weight": tensor + added * (tensor.ndim == 1)
        for name, tensor in module.items()
    }
    rewrite(path, metadata={"nextn_predict_layers": 1}, tensors=stored)
    layer = f"model.layers.{last}."
    tensors = {}
    for name in whole.tensors:
        own = name.replace(layer, prefix or layer)
        if prefix:
            own = own.replace(f"{prefix}post_attention_", f"{prefix}pre_mlp_")
        tensors[own] = whole.tensors[name]
    tensors |= {f"{prefix or layer}{names[name]}.weight": x for name, x in module.items()}
    config = {
        key: value[:last] if isinstance(value, list) and len(value) == count else value
        for key, value in whole.config.items()
    }
    config |= {"num_hidden_layers": last, "num_nextn_predict_layers": 1}
    return path, replace(whole, config=config, tensors=tensors)


def drafts(llm: LLM) -> list[list[int]]:
    """What `mtp` drafts behind the prompt, whose text is that of the model alone."""
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    with llm:
        plain = llm.generate(PROMPT, decoder="autoregressive", **options)
        drafted = llm.generate(PROMPT, decoder="mtp", trace=True, **options)
    assert drafted.tokens == plain.tokens
    return [event["drafted"] for event in drafted.trace or () if event["drafted"]]


@pytest.mark.parametrize("case", CASES)
def test_modules_draft_as_in_the_published_files(case: str, tmp_path: Path) -> None:
    write, names, prefix = CASES[case]
    path, published = with_module(*write(tmp_path), names, prefix)
    opened = load_checkpoint(path)
    assert has_mtp(opened)
    found, expected = drafts(LLM(path)), drafts(mtp_llm(published))
    assert found == expected
    assert len(found) > 3


def test_the_module_of_qwen_3_8_drafts_as_in_the_published_files(tmp_path: Path) -> None:
    """Its projections are one matrix in GGUF, and what reads the streams of the target is beside
    those."""
    path, whole = _hybrid("qwen 3.8", {})(tmp_path)
    random, size = np.random.default_rng(0), whole.config["hidden_size"]
    streams, rank = whole.config["hc_count"], whole.config["hc_lowrank"]

    def matrix(*shape: int) -> np.ndarray:
        return (0.2 * random.standard_normal(shape)).astype(np.float32)

    halves = [matrix(size, size) for _ in range(2)]
    mixer = {
        "hc_norm": ("norm", matrix(streams * size)),
        "input_mix_weight_down": ("down", matrix(rank, streams * size)),
        "input_mix_weight_up": ("up", matrix(streams * size, rank)),
    }
    norms = {"embedding": ("enorm", matrix(size)), "hidden": ("hnorm", matrix(streams * size))}
    stored = {f"hc_head_{name}": tensor for name, tensor in mixer.values()}
    stored |= {"eh_proj": np.concatenate(halves, 1), **dict(norms.values())}
    rewrite(
        path,
        metadata={"nextn_predict_layers": 1},
        tensors={
            # as the converter has norms: with 1 added
            f"blk.3.nextn.{name}.weight": tensor + np.float32(name.endswith("norm"))
            for name, tensor in stored.items()
        },
    )
    tensors = {
        name.replace("model.layers.3.", "mtp.layers.0."): whole.tensors[name]
        for name in whole.tensors
    }
    tensors |= {f"mtp.pre_fc_norm_{part}.weight": x for part, (_, x) in norms.items()}
    tensors |= {f"mtp.hyper_connection_mixer.{name}.weight": x for name, (_, x) in mixer.items()}
    for part, half in zip(norms, halves, strict=True):
        tensors[f"mtp.fc_{part}.weight"] = half
    config = {
        **whole.config,
        "num_hidden_layers": 3,
        "layer_types": whole.config["layer_types"][:3],
    }
    found = drafts(LLM(path))
    assert found == drafts(mtp_llm(replace(whole, config=config, tensors=tensors)))
    assert len(found) > 3


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_opens_the_files(case: str, tmp_path: Path) -> None:
    """As models whose layers are those without the module's."""
    write, names, prefix = CASES[case]
    path, _ = with_module(*write(tmp_path), names, prefix)
    found = logits(built(load_checkpoint(path)), chain(PROMPT))
    margin = 5e-4 if case in ("ling 3", "glm 5.3") else 1e-4  # as in test_gguf_hybrids.py
    assert np.abs(found - llama_cpp_logits(path, PROMPT)).max() < margin
