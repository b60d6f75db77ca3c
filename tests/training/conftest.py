"""A random model that drafters are trained for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gguf_models import SIZES, make_tensors, write_folder
from model_files import tokenizer_json

CHAT_TEMPLATE = "{% for m in messages %}u{{ m['content'] }}\nb{% endfor %}"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a random model of six layers whose next token depends mostly on the last one."""
    tensors = make_tensors("llama")
    for name in list(tensors):
        if name.startswith("model.layers."):
            layer, _, rest = name.removeprefix("model.layers.").partition(".")
            scale = 0.02 if rest.startswith(("self_attn.o_proj", "mlp.down_proj")) else 0.3
            tensors[name] *= scale
            tensors[f"model.layers.{int(layer) + 3}.{rest}"] = tensors[name].copy()
    config: dict[str, Any] = {
        **SIZES,
        "num_hidden_layers": 6,
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 30,
    }
    folder = write_folder(tmp_path_factory.mktemp("target"), tensors, **config)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    settings = {"chat_template": CHAT_TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
