"""Sampling options that a model's files recommend, and its end-of-text tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copyfile
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from anydecode import LLM
from anydecode.cli import main
from anydecode.constraints.languages import Regex
from anydecode.errors import CheckpointError, InvalidRequestError, UnsupportedCombinationError
from anydecode.models.loading import load_checkpoint

RECOMMENDED: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.05,
}
OPTIONS = {name: value for name, value in RECOMMENDED.items() if name != "do_sample"}
PROMPT = "a b c"


def folder_with(folder: Path, **config: Any) -> Path:
    """A folder of the tiny model with a `generation_config.json`."""
    folder.mkdir(exist_ok=True)
    for file in load_checkpoint("tiny-autoregressive").path.iterdir():
        copyfile(file, folder / file.name)
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with(tmp_path_factory.mktemp("recommended"), **RECOMMENDED)


@pytest.fixture(scope="module")
def recommended(folder: Path) -> Iterator[LLM]:
    with LLM(folder, generation_config="auto") as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with LLM(folder) as llm:
        yield llm


def test_defaults_give_the_text_of_the_same_options(plain: LLM, recommended: LLM) -> None:
    assert (plain.sampling_defaults, recommended.sampling_defaults) == ({}, OPTIONS)
    for given in ({}, {"temperature": 0.9}, {"top_p": 1.0, "repetition_penalty": 1.0}):
        with_defaults = recommended.generate(PROMPT, seed=5, max_tokens=12, **given)
        same = plain.generate(PROMPT, seed=5, max_tokens=12, **{**OPTIONS, **given})
        assert with_defaults.tokens == same.tokens
        assert with_defaults.tokens != plain.generate(PROMPT, max_tokens=12).tokens
    assert plain.request(PROMPT).params.temperature == 0


def test_rules_with_a_limit_of_their_own_replace_truncations(recommended: LLM) -> None:
    by_field = recommended.request(PROMPT, mirostat=2).params
    assert (by_field.temperature, by_field.top_k, by_field.top_p) == (0.6, 0, 1)
    by_key = recommended.request(PROMPT, decoder="mirostat").params
    assert (by_key.mirostat, by_key.top_k, by_key.repetition_penalty) == (2, 0, 1.05)


def test_a_preset_replaces_the_option_that_it_sets(recommended: LLM) -> None:
    params = recommended.request(PROMPT, sampler="min-p:p=0.5").params
    assert (params.min_p, params.top_k, params.temperature) == (0.5, 20, 1.0)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, {}),
        ({"temperature": None, "num_beams": 4}, {}),
        ({"top_k": -1, "min_p": 0.1}, {"top_k": 0, "min_p": 0.1}),
        ({"do_sample": False, "top_p": 0.5}, {"top_p": 0.5, "temperature": 0.0}),
        ({"temperature": 1e-6}, {"temperature": 0.0}),
    ],
)
def test_forms_of_the_options(
    tmp_path: Path, config: dict[str, Any], options: dict[str, float]
) -> None:
    with LLM(folder_with(tmp_path, **config), generation_config="auto") as llm:
        assert llm.sampling_defaults == options
        assert llm.generate(PROMPT, max_tokens=2, seed=1).tokens


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("repetition_penalty", True),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(tmp_path: Path, name: str, value: Any) -> None:
    folder = folder_with(tmp_path, **{name: value})
    with pytest.raises(CheckpointError, match=f"{name} must.*--generation-config none") as caught:
        LLM(folder, generation_config="auto")
    assert "\n" not in str(caught.value)
    with LLM(folder) as llm:
        assert llm.sampling_defaults == {}


def test_another_file_replaces_that_of_the_model(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text('{"temperature": 0.3}')
    for source in (file, str(file)):
        with LLM(folder, generation_config=source) as llm:
            assert llm.sampling_defaults == {"temperature": 0.3}
    with LLM("tiny-autoregressive", generation_config=folder) as llm:
        assert llm.sampling_defaults == OPTIONS
    with pytest.raises(InvalidRequestError, match="generation_config is 5; it must be"):
        LLM(folder, generation_config=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"no file .*nowhere.* auto or none"):
        LLM(folder, generation_config=tmp_path / "nowhere")


def test_an_error_about_a_recommended_option_says_where_it_comes_from(tmp_path: Path) -> None:
    """A method that cannot follow the recommendation fails: another text would not be the one that
    the model's authors recommend."""
    folder = folder_with(tmp_path, repetition_penalty=1.5)
    with LLM(folder, generation_config="auto") as llm:
        with pytest.raises(UnsupportedCombinationError) as caught:
            llm.generate("a", decoder="ceed", max_tokens=2)
        assert str(caught.value).endswith(
            "; the model's generation settings recommend repetition_penalty=1.5, which"
            " generation_config='none' (--generation-config none) leaves out"
        )
        assert llm.generate("a", decoder="ceed", max_tokens=2, repetition_penalty=1).tokens
        for options in ({"constraint": Regex("a")}, {"repetition_penalty": 1.5}):
            with pytest.raises(UnsupportedCombinationError) as caught:
                llm.generate("a", decoder="ceed", max_tokens=2, **options)
            assert "recommend" not in str(caught.value)


def test_every_end_of_text_token_ends_a_text(tmp_path: Path) -> None:
    with LLM("tiny-autoregressive") as llm:
        tokens = llm.generate(PROMPT, max_tokens=8, ignore_eos=True).tokens
    ends = [tokens[3], tokens[5]]
    with LLM(folder_with(tmp_path, eos_token_id=ends)) as llm:
        assert llm.tokenizer.eos_ids >= set(ends)
        found = llm.generate(PROMPT, max_tokens=8)
        first = min(tokens.index(end) for end in llm.tokenizer.eos_ids & set(tokens))
        assert (found.tokens, found.finish_reason) == (tokens[: first + 1], "stop")


def test_the_command_samples_as_the_model_recommends(
    folder: Path, recommended: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "--model", str(folder), "--prompt", PROMPT, "--max-tokens", "12"]
    with pytest.raises(SystemExit) as ended:
        main.run([*command, "--seed", "5", "--generation-config", "auto", "--json"])
    assert not ended.value.code
    text = json.loads(capsys.readouterr().out)["text"]
    assert text == recommended.generate(PROMPT, seed=5, max_tokens=12).text


def test_a_tokenizer_of_transformers_ends_texts_as_the_model_does(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, eos_token_id=[1, 300])
    given = SimpleNamespace(
        backend_tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")),
        eos_token_id=2,
        bos_token_id=None,
        mask_token_id=None,
        chat_template=None,
    )
    with LLM(folder, tokenizer=given) as llm:
        assert llm.tokenizer.eos_ids == {1, 2, 300}


def test_end_of_text_tokens_beyond_the_vocabulary_are_ignored(tmp_path: Path) -> None:
    with LLM(folder_with(tmp_path, eos_token_id=[1, 692, 693, 100000])) as llm:
        assert llm.tokenizer.eos_ids == {1, 692}
        assert len(llm.generate(PROMPT, max_tokens=6, min_tokens=6, temperature=1.0).tokens) == 6
        assert llm.generate(PROMPT, max_tokens=6, constraint=Regex("[a-z ]{3,9}")).text
