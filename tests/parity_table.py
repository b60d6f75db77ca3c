"""The table of docs/reference/parity.md, made from the parameters of the parity tests.

`PYTHONPATH=tests python tests/parity_table.py` prints it; a test compares it with the page. It
needs `transformers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gguf_models import CLASSES
from parity_cases import first_cases, parity_module
from plain_families import FAMILIES as PLAIN
from remote_encoders import REMOTE

#: What has no classes in `transformers`: what the logits are compared with, by model type.
OTHER_REFERENCES = {
    "minicpm": "Granite of `transformers`",
    **dict.fromkeys(("rwkv6", "rwkv7", "arwkv7"), "the paper's equations"),
    "rwkv6qwen2": "the equations of the published code",
    "step3_text": "an implementation of the published code",
    "step3p5": "Step-3.7 of `transformers`",
    "muse_glimmer_text": "`transformers`, 1 setting",
    "nanbeige": "Llama of `transformers`, 3 settings",
    "kimi_k3": "a forward pass in numpy, 8 settings",
    "ouro": "HyperCLOVA X of `transformers`, 2 settings",
    **dict.fromkeys(PLAIN, "a forward pass in numpy, 1 setting"),
    "cohere2_moe_rms": "Cohere 2 with experts of `transformers`",
    "blockffn": "an implementation of the paper",
    "phi4flash": "an implementation of the paper",
    "nemotron_labs_diffusion_ar": "an implementation of its repository, tokens alone",
    "mimo": "Qwen2 of `transformers`",
    **dict.fromkeys(("kimi_k2", "sarvam_mla"), "DeepSeek-V3 of `transformers`"),
    "nemotron-nas": "Llama of `transformers`",
    "paddleocr_vl_text": "PaddleOCR-VL of `transformers`",
    "glm_ocr_text": "GLM-OCR of `transformers`",
    **dict.fromkeys(("molmo2_text", "molmo2_o_text"), "Molmo 2 of `transformers`"),
    **dict.fromkeys(
        (
            *("internlm3", "internlm2", "internlm", "exaone", "xverse", "aquila"),
            *("pangu-embedded", "kormo", "telechat", "telechat3"),
        ),
        "Llama of `transformers`",
    ),
    "baichuan": "Llama of `transformers`, 2 settings; a forward pass in numpy, 2 settings",
    "openelm": "a forward pass in numpy, 2 settings",
    "gpt_refact": "a forward pass in numpy",
    "orion": "StableLM of `transformers`",
    "qwen": "Qwen2 of `transformers`",
    "chatglm": "GLM of `transformers`",
    "deepseek": "Qwen2-MoE of `transformers`",
    "qwen3_vl_moe_text": "Qwen3-VL of `transformers`",
    "bailing_moe": "Granite of `transformers`",
    "llama_bidirec": "EuroBERT of `transformers`",
    "embedding_gemma": "Gemma 3 of `transformers`",
    **dict.fromkeys(("bailing_moe_v2", "sarvam_moe"), "GLM-4.5 of `transformers`"),
}
#: Families that differ from another one in names alone.
SAME_AS = {
    "minicpm": "granite",
    "mimo": "qwen2",
    "cohere2_moe_rms": "cohere2_moe",
    "step3p5": "laguna",
    "muse_glimmer_text": "afmoe",
    **dict.fromkeys(("kimi_k2", "sarvam_mla"), "deepseek_v3"),
    **dict.fromkeys(
        (
            *("internlm3", "internlm2", "internlm", "exaone", "xverse", "aquila"),
            *("pangu-embedded", "kormo", "telechat", "telechat3"),
        ),
        "llama",
    ),
    "qwen": "qwen2",
    "chatglm": "glm",
    "orion": "stablelm",
    "deepseek": "qwen2_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
    "bailing_moe": "granitemoeshared",
    "paddleocr_vl_text": "ernie4_5",
    "glm_ocr_text": "glm4",
    "molmo2_text": "qwen3",
    "molmo2_o_text": "olmo2",
    **dict.fromkeys(("bailing_moe_v2", "sarvam_moe"), "glm4_moe"),
}
#: The model types of files that are compared with a model of another type.
OF_FILES = {"paddleocr": "paddleocr_vl_text", "deepseek2-ocr": "deepseek"}
#: The diffusion models' tests have it.
ELSEWHERE = {"nemotron_labs_diffusion_ar": "tokens of drafts"}


def model_type(family: str) -> str:
    """The model type of the classes of `transformers` that start with `family`."""
    import transformers

    config = getattr(transformers, f"{family}TextConfig", None)
    found: str = (config or getattr(transformers, f"{family}Config")).model_type
    return found


def gguf_cases() -> Iterator[tuple[str, str, bool]]:
    """The model type and the architecture of every GGUF file that is compared with the original
    model, and whether it is compared with llama.cpp too."""
    for architecture, (family, _) in CLASSES.items():
        yield model_type(family), architecture, True
    for name in ("test_gguf_families", "test_gguf_hybrids"):
        module = parity_module(name)
        for key, case in module.CASES.items():
            is_other = case.architecture in OTHER_REFERENCES
            kind = case.architecture if is_other else model_type(case.family)
            kind = OF_FILES.get(case.architecture, kind)
            yield kind, case.architecture, key not in module.NOT_OF_LLAMA_CPP
    named = {"gemma-embedding": "embedding_gemma", "llama-embed": "llama_bidirec"}
    for case in parity_module("test_gguf_encoders").CASES.values():
        kind = named.get(case.architecture) or model_type(case.family)
        yield kind, case.architecture, True
    for architecture, name, _ in parity_module("test_gguf_encoders").REMOTE_CASES.values():
        yield REMOTE[name][0], architecture, True
    experts = parity_module("test_gguf_experts")
    for architecture, (family, *_) in experts.FAMILIES.items():
        yield model_type(family), architecture, architecture not in experts.NOT_OF_LLAMA_CPP
    deepseek = parity_module("test_gguf_deepseek")
    for key, (family, *_) in deepseek.CASES.items():
        architecture = deepseek.ARCHITECTURES.get(key, "deepseek2")
        yield model_type(family), architecture, key not in deepseek.NOT_OF_LLAMA_CPP
    yield "rwkv6", "rwkv6", True
    yield "rwkv6qwen2", "rwkv6qwen2", True
    for _ in range(2):
        yield "arwkv7", "arwkv7", True
    yield "rwkv7", "rwkv7", True
    yield "hrm_text", "hrm_text", True
    yield "kimi_k3", "kimi-k3", True
    yield "hy_v4", "hy_v4", True
    yield "nemotron-nas", "deci", True
    for name in parity_module("families/test_renamed_llama").FILES:
        yield OF_FILES.get(name, name), name, True
    yield "baichuan", "baichuan", True
    yield "deepseek_v4", "deepseek4", True
    yield "minimax", "minimax-01", True
    for is_llama in (True, False):
        yield "openelm", "openelm", is_llama
    yield "granite_swa", "granite_swa", True
    for _ in range(2):
        yield "granitemoe_swa", "granite_swa", True
    yield "bailing_moe", "bailingmoe", True
    yield "bailing_moe_v2", "bailingmoe2", True
    yield "step3p5", "step35", True
    yield "muse_glimmer_text", "muse-glimmer", True
    for _ in parity_module("families/test_nanbeige").CASES:
        yield "nanbeige", "nanbeige", True
    for name in PLAIN:
        yield name, name, True
    yield "bitnet", "bitnet-b1.58", False
    yield "gpt_refact", "refact", False
    if "gguf" in parity_module("test_gpt_oss").LAYOUTS:
        yield "gpt_oss", "gpt-oss", False


def references() -> dict[str, str]:
    """What the logits or states of each model type are compared with."""
    causal, encoders = (parity_module(name).CASES for name in ("test_parity", "test_encoders"))
    cases = [*causal.values(), *encoders.values()]
    counts = Counter(model_type(family) for family, _ in cases)
    found = {kind: f"`transformers`, {_settings(count)}" for kind, count in counts.items()}
    remote = Counter(kind for kind, _ in REMOTE.values())
    for kind, count in remote.items():
        own = f"the code of its repositories, {_settings(count)}"
        found[kind] = f"{found[kind]}; {own}" if kind in found else own
    return {**found, **OTHER_REFERENCES}


def _settings(count: int) -> str:
    return "1 setting" if count == 1 else f"{count} settings"


def table() -> str:
    """The table as Markdown."""
    from anydecode.models.families.table import FAMILIES

    found = references()
    tested = {model_type(family) for family in first_cases()}
    tested |= set(parity_module("../engine/test_every_family").OTHERS)
    files: dict[str, dict[str, list[bool]]] = {}
    for kind, architecture, is_llama in gguf_cases():
        files.setdefault(kind, {}).setdefault(architecture, []).append(is_llama)
    lines = ["| model type | safetensors | GGUF | engine |", "|---|---|---|---|"]
    for kind, family in FAMILIES.items():
        if family.denoising is None:
            cells = [f"`{kind}`", found[kind], _files(files.get(kind, {}))]
            engine = "yes" if kind in tested else ELSEWHERE.get(kind, "")
            if kind in SAME_AS:
                engine = f"as `{SAME_AS[kind]}`"
            cells.append("encoder" if family.is_encoder else engine)
            lines.append("| " + " | ".join(cells).replace("|  |", "| |").rstrip() + " |")
    return "\n".join(lines)


def _files(files: dict[str, list[bool]]) -> str:
    """The architectures of a model type, and what their logits are compared with."""
    return "; ".join(
        f"`{architecture}`: {_settings(len(compared))}"
        + (f", {sum(compared)} with llama.cpp" if any(compared) else "")
        for architecture, compared in files.items()
    )


if __name__ == "__main__":
    print(table())
