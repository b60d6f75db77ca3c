"""Training of drafters: the network equals the engine's oracle, the loss falls, runs resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from anydecode.certification.oracles.speculative.eagle import Cache, Drafting  # noqa: E402
from anydecode.certification.tiny import tiny_network  # noqa: E402
from anydecode.cli.main import run  # noqa: E402
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError  # noqa: E402
from anydecode.models.loading import load_checkpoint  # noqa: E402
from anydecode.training.drafter import (  # noqa: E402
    DrafterRecipe,
    DrafterRun,
    default_taps,
    save_eagle3,
    shape_of,
)
from anydecode.training.drafter_data import DrafterData  # noqa: E402
from anydecode.training.eagle3 import Eagle3, as_tensor  # noqa: E402
from anydecode.training.generated import without_loop  # noqa: E402
from gguf_models import SIZES, make_tensors, write_folder  # noqa: E402
from model_files import tokenizer_json  # noqa: E402

CONFIG = {"max_position_embeddings": 256, "rope_theta": 10000.0}


def test_unrolled_steps_equal_the_oracles_rows(tmp_path: Path) -> None:
    """Row t of step i: the drafter behind t + 1 rows of the target's states and i of its own."""
    network = tiny_network(layers=6)
    size, steps, length = network.spec.hidden_size, 3, 7
    vocabulary = [token for token in range(network.spec.vocab_size) if token % 3]
    torch.manual_seed(1)
    learner = Eagle3(
        shape_of(network),
        as_tensor(network.weights.embedding),
        as_tensor(network.weights.head)[vocabulary],
    )
    for parameter in learner.parameters():
        parameter.data = (parameter + 0.1 * torch.randn_like(parameter)).bfloat16().float()
    save_eagle3(tmp_path, learner, CONFIG, default_taps(6), vocabulary)
    drafting = Drafting(load_checkpoint(tmp_path), network)
    assert drafting.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 3, 3]
    random = np.random.default_rng(2)
    tokens = random.integers(0, network.spec.vocab_size, length).tolist()
    taps = random.standard_normal((length, 3, size)).astype(np.float32)
    with torch.no_grad():
        unrolled = learner(torch.tensor([tokens]), torch.from_numpy(taps).flatten(1)[None], steps)
        logits = [learner.head.bfloat16().float() @ states[0].T for states in unrolled]
    fused = [drafting.tensors["fc.weight"] @ row.reshape(-1) for row in taps]
    for row in range(length - 1):
        cache = Cache()
        for position in range(row + 1):
            found, state = drafting.row(cache, tokens[position + 1], fused[position], position + 1)
        for step in range(steps):
            if step:
                position = row + 1 + step
                if position >= length:
                    break
                found, state = drafting.row(cache, tokens[position], state, position)
            expected = found[vocabulary]
            assert np.allclose(logits[step][:, row].numpy(), expected, atol=2e-4)


RECIPE = DrafterRecipe(steps=30, texts=90, tokens=16, vocabulary=30, batch=8, rate=1e-2)
TEMPLATE = "{% for m in messages %}u{{ m['content'] }}\nb{% endfor %}"


@pytest.fixture(scope="module")
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
    settings = {"chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_run_trains_a_drafter_and_the_command_continues_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages: list[str] = []
    half = DrafterRun(model, tmp_path, replace(RECIPE, steps=15))
    half.run(lambda stage, done, detail: stages.append(stage))
    assert list(dict.fromkeys(stages)) == ["texts", "states", "training", "evaluation"]
    plot = tmp_path / "curve.svg"
    settings = "--steps 30 --texts 90 --tokens 16 --vocabulary 30 --batch 8 --rate 0.01"
    places = ["--model", str(model), "--out", str(tmp_path), "--plot", str(plot), "--json"]
    with pytest.raises(SystemExit) as ended:
        run(["train", "drafter", *settings.split(), *places])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(tmp_path / "drafter")
    assert found == {"path": found["path"], **json.loads((tmp_path / "log.json").read_text())}
    assert [entry["step"] for entry in found["history"] if "held_out" in entry] == [0, 15, 30]
    first, *_, last = [one["held_out"] for one in found["history"] if "held_out" in one]
    assert last[0] > first[0] + 0.05
    assert found["results"]["temperature 0.0"]["tokens_per_pass"] > 1.0
    assert "probability of acceptance" in plot.read_text()


def test_data_of_another_model_is_refused(tmp_path: Path) -> None:
    DrafterData(tmp_path, {"model": "a"}, (2, 3, 3), 64)
    with pytest.raises(InvalidRequestError, match="has data from"):
        DrafterData(tmp_path, {"model": "b"}, (2, 3, 3), 64)


def test_an_interrupted_line_of_texts_is_dropped(tmp_path: Path) -> None:
    line = json.dumps({"chunk": 4, "prompt": [1], "answer": [2, 3]})
    (tmp_path / "texts.jsonl").write_text(f"{line}\n{line[:9]}")
    data = DrafterData(tmp_path, {}, (2, 3, 3), 64)
    assert [text.tokens for text in data.texts] == [[1, 2, 3]]
    assert data.starts == [0, 3]


def test_the_vocabulary_is_the_most_frequent_tokens(tmp_path: Path) -> None:
    held_out = json.dumps({"chunk": 0, "prompt": [1], "answer": [9] * 9})
    line = json.dumps({"chunk": 0, "prompt": [1], "answer": [7, 7, 3, 3, 5]})
    (tmp_path / "texts.jsonl").write_text(f"{held_out}\n" * 64 + f"{line}\n")
    data = DrafterData(tmp_path, {}, (2, 3, 3), 64)
    assert data.vocabulary(2, 12) == [3, 7]
    assert data.vocabulary(5, 12) == [0, 1, 3, 5, 7]
    assert data.coverage([3, 9]) == 1.0


@pytest.mark.parametrize(
    ("tokens", "kept"), [([1, 2, 3], 3), ([1, 2, 3, 4] * 2 + [9], 9), ([1, 2, 3, 4] * 4, 4)]
)
def test_answers_end_where_they_repeat(tokens: list[int], kept: int) -> None:
    assert without_loop(tokens) == tokens[:kept]


def test_invalid_recipes_and_targets_are_refused() -> None:
    for values in ({"steps": None}, {"minutes": 1.0}, {"batch": 0}, {"texts": 64}):
        with pytest.raises(InvalidRequestError):
            replace(RECIPE, **values)
    with pytest.raises(UnsupportedCombinationError, match="at least 6"):
        default_taps(4)
    network = tiny_network(layers=6)
    network.spec = replace(network.spec, logit_scale=2.0)
    with pytest.raises(UnsupportedCombinationError, match="without factors"):
        shape_of(network)
