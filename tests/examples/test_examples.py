"""The files in examples/ run from outside the package and do what they say."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.certify import certify_one
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.models.transformer import Transformer
from anydecode.server.running import LiveServer
from anydecode.server.settings import Settings
from registries import modules_of
from tiny_models import chain, hf_model, logits

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = "the cat sat on the mat and the cat sat on"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the metadata of an installed examples/, its entry points included."""
    project = tomllib.loads((EXAMPLES / "pyproject.toml").read_text())["project"]
    folder = tmp_path_factory.mktemp("installed")
    info = folder / "anydecode_examples-0.1.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: anydecode-examples\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    info.joinpath("entry_points.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, installed: Path) -> Iterator[Any]:
    """Imports an example. What it registers is forgotten after the test."""
    monkeypatch.syspath_prepend(installed)
    monkeypatch.syspath_prepend(EXAMPLES)
    with modules_of(EXAMPLES):
        yield importlib.import_module


def scripted(**options: Any) -> LLM:
    return LLM(ScriptedModel(seed=1), tokenizer=ByteTokenizer(), cache_positions=4096, **options)


def test_every_method_of_the_examples_is_found_by_its_key(installed: Path) -> None:
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(EXAMPLES), str(installed)])
    done = subprocess.run(
        [sys.executable, "-m", "anydecode", "methods", "--json"],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {card["key"] for card in json.loads(done.stdout)}
    project = tomllib.loads((EXAMPLES / "pyproject.toml").read_text())
    assert set(project["project"]["entry-points"]["anydecode.decoders"]) <= found
    modules = set(project["tool"]["setuptools"]["py-modules"])
    assert modules == {path.stem for path in EXAMPLES.glob("*.py")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("echo_decoder", "Echo"),
        ("bigram_drafter", "bigram"),
        ("bigram_oracle", "bigram"),
        ("no_echo", "no_echo"),
        ("apart_unmasking", "apart"),
    ],
)
def test_a_method_has_a_certificate(example: Any, module: str, name: str) -> None:
    example(module)
    certificate = certify_one(f"{module}:{name}")
    assert certificate.passed, certificate
    assert certificate.exactness == getattr(sys.modules[module], name).card.exactness


@pytest.mark.slow
def test_the_oracle_test_of_another_package_runs_and_can_fail(
    example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = example("bigram_oracle")
    names = [check.name for check in certify_one("bigram_oracle:bigram").checks]
    assert "drafts" in names
    monkeypatch.setattr(module, "expected_drafts", lambda text, size: [])
    assert not certify_one("bigram_oracle:bigram").passed


def test_the_drafter_saves_passes(example: Any) -> None:
    example("bigram_drafter")
    cycle = {(token,): {token + 1 if token < 103 else 97: 5.0} for token in range(97, 104)}
    with LLM(ScriptedModel(cycle), tokenizer=ByteTokenizer(), cache_positions=4096) as llm:
        plain = llm.generate("a", decoder="autoregressive", max_tokens=60, ignore_eos=True)
        drafted = llm.generate("a", decoder="bigram:size=3", max_tokens=60, ignore_eos=True)
    assert drafted.tokens == plain.tokens
    assert plain.stats.passes == 60
    assert drafted.stats.passes < 30


def repeats(tokens: list[int]) -> int:
    return sum(a == b for a, b in zip(tokens, tokens[1:], strict=False))


def test_the_logits_processor_is_applied_along_drafts(example: Any) -> None:
    example("no_echo")
    script = {(): {97: 2.0, 98: 1.5, 99: 1.0}}
    with LLM(ScriptedModel(script), tokenizer=ByteTokenizer(), cache_positions=4096) as llm:
        options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
        plain = llm.generate("x", decoder="autoregressive", **options)
        changed = llm.generate("x", decoder="autoregressive", sampler="no-echo", **options)
        drafted = llm.generate("x", decoder="prompt-lookup", sampler="no-echo", **options)
    assert repeats(plain.tokens) == 39
    assert repeats(changed.tokens) == 0
    assert drafted.tokens == changed.tokens and drafted.stats.passes < changed.stats.passes


def test_samples_do_not_share_the_state_of_a_logits_processor(example: Any) -> None:
    processor = example("no_echo").NoEcho(5.0)
    with scripted() as llm:
        options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "logits_processors": [processor]}
        both = llm.generate(PROMPT, n=2, max_tokens=20, **options).samples
        again = llm.generate(PROMPT, n=2, max_tokens=20, **options).samples
    assert processor.last is None
    assert [one.tokens for one in both] == [one.tokens for one in again]


def test_a_value_that_is_no_logits_processor_is_refused() -> None:
    with scripted() as llm, pytest.raises(InvalidRequestError, match="logits_processors must be"):
        llm.generate("a", logits_processors=[len])


def test_the_constraint_holds_with_drafts(example: Any) -> None:
    lipogram = example("lipogram").Lipogram("e")
    with LLM("tiny-autoregressive") as llm:
        options: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 2}
        free = llm.generate("reverse Ada Ben Leo:", decoder="autoregressive", **options)
        answers = [
            llm.generate("reverse Ada Ben Leo:", decoder=decoder, constraint=lipogram, **options)
            for decoder in ("autoregressive", "prompt-lookup")
        ]
    assert "e" in free.text.lower()
    assert answers[0].tokens == answers[1].tokens and answers[0].tokens
    assert "e" not in answers[0].text.lower()


def test_the_schedule_starts_the_shortest_prompt_first(example: Any) -> None:
    example("shortest_first")
    order: list[int] = []
    with scripted(schedule="shortest-first:row_budget=16", max_running=1) as llm:
        requests = [llm.request("x" * length, max_tokens=4) for length in (30, 5, 12)]
        for request in requests:
            request.notify(
                lambda request=request: order.append(len(request.prompt)) if request.done else None
            )
            llm.start(request, background=False)
        while not all(request.done for request in requests):
            llm.engine.step()
    assert order == [5, 12, 30]


def test_the_unmasking_policy_never_fills_neighbours_together(example: Any) -> None:
    module = example("apart_unmasking")
    with LLM("tiny-diffusion") as llm:
        options: dict[str, Any] = {"max_tokens": 16, "trace": True}
        answer = llm.generate("copy Ada Ben Carl:", decoder="apart", **options)
        close = llm.generate("copy Ada Ben Carl:", decoder=module.apart(distance=0), **options)
    assert answer.text == close.text
    assert 2 <= smallest_distance(answer) and smallest_distance(close) == 1


def smallest_distance(answer: Any) -> int:
    """The smallest distance between positions filled in the same pass."""
    filled = [sorted(entry["filled"]) for entry in answer.trace]
    return min(b - a for one in filled for a, b in zip(one, one[1:], strict=False))


def test_a_family_of_another_package_opens(example: Any, tmp_path: Path) -> None:
    model = hf_model("Qwen3", head_dim=12, rope_parameters={"rope_type": "default"})
    folder = tmp_path / "normed"
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "normed_llama", "architectures": ["NormedLlamaForCausalLM"]}
    config.pop("rope_parameters", None)
    config.pop("layer_types", None)
    config["rope_theta"] = model.config.rope_parameters["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config))

    with LLM(str(folder), tokenizer=ByteTokenizer(), backend="torch") as llm:
        assert isinstance(llm.model, Transformer)
        tokens = [3, 1, 4, 1, 5, 9, 2, 6]
        got = logits(llm.model, chain(tokens))
    expected = model(pytest.importorskip("torch").tensor([tokens])).logits[0]
    np.testing.assert_allclose(got, expected.detach().numpy(), atol=1e-4)


def test_an_unknown_family_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-family"}))
    hf_model("Llama").save_pretrained(tmp_path / "weights")
    (tmp_path / "weights" / "model.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="'no-such-family'.* is not supported") as caught:
        LLM(str(tmp_path), tokenizer=ByteTokenizer())
    assert "\n" not in str(caught.value)


def test_the_client_talks_to_the_server(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    module, prompt = example("openai_client"), "copy Ada Ben Carl:"
    with LLM("tiny-autoregressive") as llm, LiveServer(llm, Settings(port=0)) as server:
        module.main(f"{server.url}/v1", prompt)
        options: dict[str, Any] = {"max_tokens": 16, "seed": 7, "temperature": 0.8}
        expected = llm.generate(prompt, **options).text
    assert expected.strip() and capsys.readouterr().out.count(expected) == 2


def test_the_benchmark_measures_every_decoder(example: Any) -> None:
    module = example("compare_decoders")
    with LLM("tiny-autoregressive") as llm:
        results = module.compare(llm, ["autoregressive", "prompt-lookup"], rounds=1)
    assert set(results) == {"autoregressive", "prompt-lookup"}
    assert all(speed > 0 for speed, _ in results.values())
    assert results["autoregressive"][1] == 1


def test_the_curve_of_two_models_goes_from_one_to_the_other(example: Any) -> None:
    module = example("two_model_curve")
    decoders = ["autoregressive", "ead:threshold=0", "ead:threshold=64"]
    with LLM("tiny-autoregressive", draft="self:layers=2") as llm:
        points = module.curve(llm, decoders, num_prompts=2, tokens=8)
    assert points["autoregressive"] == pytest.approx(points["ead:threshold=0"])
    assert points["autoregressive"][0] == 1 and points["ead:threshold=64"][0] < 0.5
    assert points["ead:threshold=64"][1] < points["autoregressive"][1]
