"""Every command that opens a model ends with one line if its files are malformed: `generate` with
every malformed model, the others with one for each kind of file."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer

from anydecode.benchmarks import compare
from anydecode.cli import main
from anydecode.cli.bench import BENCHES
from anydecode.cli.train.recipes import RecipeGroup
from anydecode.server import logs
from gguf_models import write_folder
from model_files import EXPERT_CONFIG, expert_tensors, tokenizer_json

#: By the command, its arguments; MODEL is the folder or file, OUT a path that it may write, TEXT a
#: file, PAIRS, NUMBERS and TRACE files of examples, and SCHEMAS a folder of schemas.
COMMANDS = {
    "generate": "--model MODEL --prompt a",
    "generate-draft": "--model tiny-autoregressive --draft MODEL --decoder pearl --prompt a",
    "chat": "--model MODEL --prompt a",
    "score": "--model MODEL --prompt a --continuation b",
    "serve": "MODEL --port 0",
    "cluster up": "MODEL --workers 1 --port 0",
    "certify": "--model MODEL",
    "doctor": "--model MODEL",
    "quantize": "MODEL OUT",
    "export-drafter": "MODEL OUT --draft MODEL",
    "cluster worker": "MODEL --secret-file TEXT --patience 0",
    "cluster ffn": "MODEL --secret-file TEXT --port 0 --single",
    "bench constrained": "--data SCHEMAS --model MODEL",
    "bench reasoning": "--model MODEL --count 1",
    "bench search": "--model MODEL",
    "bench baselines": "--model MODEL --engines anydecode",
    "bench compare": "--ref HEAD --model MODEL",
    "bench footprint": "--model MODEL",
    "bench kernels": "--model MODEL",
    "bench batched": "--bench TEXT --model MODEL",
    "bench speculative": "--model MODEL --limit 1",
    "bench cost": "--model MODEL",
    "bench perplexity": "--models MODEL --text TEXT",
    "bench divergence": "--models MODEL",
    "bench lm-eval": "--models MODEL --tasks a",
    "bench quantization": "--model MODEL --count 1",
    "bench aup": "--models MODEL --count 1",
    "bench diffusion-schemas": "--models MODEL",
    "bench diffusion-batches": "--models MODEL --rounds 1 --requests 1",
    "bench parallelbench": "--model MODEL",
    "bench neighbour": "--model MODEL",
    "bench fleet": "--model MODEL",
    "train drafter": "--model MODEL --out OUT --steps 1",
    "train distil": "--method cd4lm --model MODEL --out OUT --steps 1",
    "train filter": "--model MODEL --out OUT --prompts 10 --epochs 1",
    "train block-adapter": "--model MODEL --out OUT --steps 1 --mask 1",
    "train nested": "--model MODEL --out OUT --steps 1",
    "train draft-model": "--model MODEL --out OUT --steps 1 --answers 2",
    "train scaling": "--model MODEL --out OUT --answers 2",
    "train autodeco": "--model MODEL --out OUT --count 2",
    "train cj-grpo": "--model MODEL --out OUT --steps 1",
    "train depth --recipe layerskip": "--model MODEL --out OUT --answers 2",
    "train adadec": "--model MODEL --data PAIRS",
    "train depth --recipe skipdecode": "--model MODEL --out OUT --steps 1 --answers 2",
    "train depth --recipe specbound": "--model MODEL --out OUT --steps 1 --answers 2",
    "train future-masks": "--model MODEL --out OUT --steps 1 --answers 2",
    "train hidden-transfer": "--model MODEL --out OUT --steps 1 --answers 2",
    "train acceptance-head": "--model MODEL --draft tiny-autoregressive --out OUT --steps 1",
    "train judge": "--model MODEL --draft tiny-autoregressive --out OUT --questions 4",
    "train masks": "--model MODEL --out OUT --steps 1 --answers 2 --mask 1",
    "train prompts": "--model MODEL --out OUT --steps 1 --answers 2",
    "train depth --recipe tide": "--model MODEL --out OUT --answers 2",
    "train depth --recipe m2r2": "--model MODEL --out OUT --answers 2 --steps 1",
    "train depth --recipe first-router": "--model MODEL --out OUT --answers 2 --steps 1",
    "train depth --recipe ceed": "--model MODEL --out OUT --answers 2 --steps 1",
    "train depth --recipe first-router-adapter": "--model MODEL --routers TEXT --out OUT --steps 1",
    "train depth --recipe duo-llm-mlps": "--model MODEL --out OUT --answers 2 --steps 1",
    "train depth --recipe duo-llm": "--model MODEL --out OUT --answers 2 --steps 1",
    "train depth --recipe specee": "--model MODEL --out OUT --answers 2",
    "bench depth": "--model MODEL --limit 1",
    "bench draft-priors": "--model MODEL --prompts 1",
    "cluster plan": "MODEL --trace TRACE --slo ttft=1,tpot=1",
    "train regression": "--model MODEL --data NUMBERS --out OUT",
    "train trees": "--model MODEL --out OUT --steps 1 --answers 2 --fork a --child b",
    "train rewriter": "--model MODEL --prompts TEXT --out OUT --steps 1",
    "train dglm": "--model MODEL --encoder MODEL --data TEXT --out OUT --steps 1",
    "train interleaved": "--model MODEL --data CHUNKS --out OUT --steps 1 --end-of-read a"
    " --end-of-write b",
}
#: Commands that start processes, each of which imports the package: tested with one model.
SLOW = {"bench compare", "bench footprint"}
#: Commands whose model is the name of one to download, or of one on another server.
NAMED = {"pull", "bench serving"}


def parameters(command: Any, name: str = "") -> Iterator[tuple[str, set[str]]]:
    """The names of all commands of the command line, and of the parameters of each."""
    if hasattr(command, "commands"):
        for part, one in command.commands.items():
            part = f"--recipe {part}" if isinstance(command, RecipeGroup) else part
            yield from parameters(one, f"{name} {part}".strip())
    elif name.startswith("bench "):
        module, _, function = BENCHES[name.removeprefix("bench ")].target.partition(":")
        function = getattr(importlib.import_module(module), function)
        yield name, set(inspect.signature(function).parameters)
    else:
        yield name, {one.name for one in command.params}


def test_all_commands_with_a_model_are_tested() -> None:
    pytest.importorskip("torch")  # of which modules of benchmarks have parts
    commands = dict(parameters(typer.main.get_command(main.app)))
    with_model = {name for name, found in commands.items() if found & {"model", "models"}}
    assert with_model - NAMED == {name.removesuffix("-draft") for name in COMMANDS}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("models")

    def folder(name: str, **changes: Any) -> Path:
        path = write_folder(base / name, expert_tensors(), **EXPERT_CONFIG)
        (path / "config.json").write_text(json.dumps({**EXPERT_CONFIG, **changes}))
        (path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
        return path

    found = [folder("m1", num_attention_heads=0), folder("m2", num_hidden_layers=2**40)]
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


@pytest.mark.one_in(4)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_malformed_model_is_one_line(
    command: str,
    models: list[Path],
    tmp_path: Path,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if command.startswith("train"):
        pytest.importorskip("torch")
    if command == "bench lm-eval":
        pytest.importorskip("lm_eval")
    monkeypatch.setattr(logs, "write_json_lines", lambda: None)  # it changes loggers for good
    if command == "bench compare":  # with itself
        monkeypatch.setattr(compare, "git", lambda *arguments, **options: str(repository))
        monkeypatch.setattr(compare, "checkout", lambda ref, root: nullcontext(root))
    (tmp_path / "schemas").mkdir()
    row = {"id": "a", "schema": {}, "tests": []}
    (tmp_path / "schemas" / "one.jsonl").write_text(json.dumps(row))
    names = {"OUT": str(tmp_path / "out.gguf"), "SCHEMAS": str(tmp_path / "schemas")}
    for name, content in (
        ("TEXT", "a text " * 100),
        (
            "TRACE",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.0,3,4\n"
            "2024-05-10 00:00:01.0,3,4\n",
        ),
        ("PAIRS", json.dumps({"prompt": "a", "canonical_solution": "b"})),
        ("NUMBERS", json.dumps({"prompt": "a", "number": 1})),
        ("CHUNKS", json.dumps({"prompt": "a", "chunks": [["b", "c"]]})),
    ):
        (tmp_path / name).write_text(content)
        names[name] = str(tmp_path / name)
    chosen = {"generate": models, **dict.fromkeys(SLOW, models[:1])}
    for model in chosen.get(command, [models[0], *models[3:6]]):
        names["MODEL"] = str(model)
        arguments = [names.get(one, one) for one in COMMANDS[command].split()]
        with pytest.raises(SystemExit) as ended:
            main.run([*command.removesuffix("-draft").split(), *arguments])
        *progress, last = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2 and last.startswith("anydecode: "), (model, last)
        assert not any("Traceback" in line for line in progress)
        assert model.name in last, last
