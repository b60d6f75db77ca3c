"""Every command that opens a model ends with one line if its files are malformed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anydecode.cli import main
from gguf_models import write_folder
from model_files import EXPERT_CONFIG, expert_tensors, tokenizer_json

#: By the command, its arguments; MODEL is the folder or file, OUT a path that it may write.
COMMANDS = {
    "generate": "--model MODEL --prompt a",
    "generate-draft": "--model tiny-autoregressive --draft MODEL --decoder draft-model --prompt a",
    "chat": "--model MODEL --prompt a",
    "score": "--model MODEL --prompt a --continuation b",
    "serve": "MODEL --port 0",
    "cluster up": "MODEL --workers 1 --port 0",
    "certify": "--model MODEL",
    "quantize": "MODEL OUT",
    "bench cost": "--model MODEL",
    "bench perplexity": "--models MODEL --text TEXT",
    "bench divergence": "--model MODEL",
    "bench quantization": "--model MODEL --count 1",
    "bench aup": "--models MODEL --count 1",
    "bench parallelbench": "--model MODEL",
    "bench neighbour": "--model MODEL",
    "train drafter": "--model MODEL --out OUT --steps 1",
    "train distil": "--method cd4lm --model MODEL --out OUT --steps 1",
    "train filter": "--model MODEL --out OUT --prompts 10 --epochs 1",
    "train block-adapter": "--model MODEL --out OUT --steps 1 --mask 1",
    "train nested": "--model MODEL --out OUT --steps 1",
    "train autodeco": "--model MODEL --out OUT --count 2",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("models")

    def folder(name: str, **changes: Any) -> Path:
        path = write_folder(base / name, expert_tensors(), **EXPERT_CONFIG)
        (path / "config.json").write_text(json.dumps({**EXPERT_CONFIG, **changes}))
        (path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
        return path

    found = [folder("heads", num_attention_heads=0), folder("layers", num_hidden_layers=2**40)]
    for name, content in (
        ("config.json", b'{"a":' * 100_000),
        ("tokenizer.json", b"\xff" * 64),
        ("model.safetensors", b"\xff" * 64),
    ):
        found.append(folder(name))
        (found[-1] / name).write_bytes(content)
    (base / "m.gguf").write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 100)
    (base / "empty").mkdir()
    return [*found, base / "m.gguf", base / "empty"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_malformed_model_is_one_line(
    command: str, models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if command.startswith("train"):
        pytest.importorskip("torch")
    (tmp_path / "text").write_text("a text " * 100)
    names = {"OUT": str(tmp_path / "out.gguf"), "TEXT": str(tmp_path / "text")}
    for model in models:
        names["MODEL"] = str(model)
        arguments = [names.get(one, one) for one in COMMANDS[command].split()]
        with pytest.raises(SystemExit) as ended:
            main.run([*command.removesuffix("-draft").split(), *arguments])
        *progress, last = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2 and last.startswith("anydecode: "), (model, last)
        assert not any("Traceback" in line for line in progress)
        assert model.name in last, last
