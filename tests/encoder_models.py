"""Folders with tiny random encoders of `transformers`, and the same models in `transformers`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

#: The letters, as words and as parts of words, and the special tokens of BERT.
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS += [chr(97 + index) for index in range(26)] + [f"##{chr(97 + index)}" for index in range(26)]
#: The tasks of a model like jina-embeddings-v3, with their prompts.
TASKS = {"separation": "a b ", "text-matching": "c "}
RANK, SCALE = 4, 0.5
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "initializer_range": 0.25,
    "layer_norm_eps": 1e-5,
}
#: The names of sizes in configs of DistilBERT.
DISTIL = {
    "dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 4, "vocab_size": 61,
    "max_position_embeddings": 64, "initializer_range": 0.25, "pad_token_id": 0,
}  # fmt: skip


def hf_encoder(family: str, head: str = "Model", **settings: Any) -> Any:
    """A random float32 encoder of `transformers`, with random norms and biases."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    sizes = DISTIL if family == "DistilBert" else SIZES
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(**{**sizes, **settings}, attn_implementation="eager")
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}{head}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "embeddings" not in name:
                torch.nn.init.normal_(parameter, std=0.25)
    return model


def save_encoder(model: Any, folder: Path, **config: Any) -> Path:
    """Write the model with a WordPiece tokenizer of letters; `config` changes its config."""
    model.save_pretrained(folder)
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return add_letters(folder)


def add_letters(folder: Path) -> Path:
    """Write a WordPiece tokenizer of letters."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    vocab = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens(WORDS[:5])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def declare_pooling(
    folder: Path,
    mode: str,
    *,
    is_normalized: bool = True,
    modules: tuple[str, ...] = (),
    prompts: Mapping[str, str] | None = None,
    default_prompt: str | None = None,
    max_tokens: int | None = None,
) -> Path:
    """Write the files of sentence-transformers; `modules` are further ones."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if is_normalized else []), *modules]
    listed = [
        {"idx": index, "path": f"{index}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    names = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    pooling = {f"pooling_mode_{name}": name == mode for name in names}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    settings = {"prompts": dict(prompts or {}), "default_prompt_name": default_prompt}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    if max_tokens is not None:
        limits = {"max_seq_length": max_tokens}
        (folder / "sentence_bert_config.json").write_text(json.dumps(limits))
    return folder


def save_published_jina_v3(model: Any, folder: Path, **config: Any) -> dict[str, np.ndarray]:
    """Save a model with the layout of its repository: with random updates of each matrix and of the
    tables of embeddings, for each task. Returns the updates."""
    from safetensors.numpy import load_file, save_file

    declare_pooling(
        save_encoder(model, folder),
        "lasttoken",
        is_normalized=False,
        prompts={"separation": "b ", "other": "b"},
    )
    path, tensors, rng = folder / "model.safetensors", {}, np.random.default_rng(0)
    updates: dict[str, np.ndarray] = {}
    for name, tensor in load_file(path).items():
        assert ".self_attn." not in name, "saved in its published layout"
        if name.endswith("weight") and tensor.ndim == 2:
            parametrised = name.replace("weight", "parametrizations.weight")
            tensors[f"roberta.{parametrised}.original"] = tensor
            size, width = tensor.shape
            shapes = [(2, RANK, width), (2, size, RANK)]
            if "embeddings" in name:
                shapes = [(2, size, RANK), (2, RANK, width)]
            pair = [rng.normal(size=shape).astype(np.float32) * 0.3 for shape in shapes]
            for part, values in zip("AB", pair, strict=True):
                tensors[f"roberta.{parametrised}.0.lora_{part}"] = values
            first, second = pair if "embeddings" in name else pair[::-1]
            updates[name] = first @ second * np.float32(SCALE)
        else:
            tensors[f"roberta.{name}"] = tensor
    save_file(tensors, path)
    stored = json.loads((folder / "config.json").read_text())
    del stored["rope_parameters"]
    stored |= {
        "model_type": "xlm-roberta",
        "architectures": ["XLMRobertaModel"],
        "auto_map": {"AutoModel": "jinaai/xlm-roberta--modeling_lora.XLMRobertaLoRA"},
        "position_embedding_type": "rotary",
        "rotary_emb_base": 20000.0,
        "lora_adaptations": list(TASKS),
        "task_instructions": TASKS,
        "lora_rank": RANK,
        "lora_alpha": SCALE * RANK,
    }
    (folder / "config.json").write_text(json.dumps({**stored, **config}))
    return updates


def hf_states(model: Any, tokens: list[int], types: list[int] | None = None) -> np.ndarray:
    """The states after the last layer, float32 `[tokens, hidden_size]`."""
    import torch

    given = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.inference_mode():
        return model(torch.tensor([tokens]), **given).last_hidden_state[0].numpy()
