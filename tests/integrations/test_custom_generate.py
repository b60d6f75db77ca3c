"""A `custom_generate` folder of transformers as a decoder, compared with transformers' own call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tiny_models import hf_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from anydecode import LLM  # noqa: E402
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError  # noqa: E402
from anydecode.integrations.custom_generate import CustomGenerate  # noqa: E402
from anydecode.models.scripted import ByteTokenizer, ScriptedModel  # noqa: E402

PROMPT = [5, 9, 33, 5, 9, 33, 3, 17]
#: A decoding loop of its own: the second most probable token, or a sampled one.
LOOP = """
import torch


def generate(model, input_ids=None, max_new_tokens=None, do_sample=False, temperature=1.0,
             rank=1, **arguments):
    for _ in range(max_new_tokens):
        logits = model(input_ids).logits[:, -1].float()
        if do_sample:
            token = torch.multinomial(torch.softmax(logits / temperature, -1), 1)
        else:
            token = logits.topk(rank + 1).indices[:, -1:]
        input_ids = torch.cat((input_ids, token), dim=1)
    return input_ids
"""


@pytest.fixture(scope="module")
def model() -> Any:
    return hf_model("Llama", vocab_size=259)


@pytest.fixture
def llm(model: Any) -> Any:
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        yield llm


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    modules = str(tmp_path / "modules")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    return write(tmp_path / "method", LOOP)


def write(folder: Path, code: str) -> Path:
    (folder / "custom_generate").mkdir(parents=True, exist_ok=True)
    (folder / "custom_generate" / "generate.py").write_text(code)
    return folder


def test_the_tokens_equal_those_of_transformers(model: Any, llm: LLM, folder: Path) -> None:
    decoder = CustomGenerate(folder, trust_remote_code=True)
    found = llm.generate(PROMPT, max_tokens=12, ignore_eos=True, decoder=decoder)
    expected = model.generate(
        torch.tensor([PROMPT]),
        input_ids=torch.tensor([PROMPT]),
        max_new_tokens=12,
        custom_generate=str(folder),
        trust_remote_code=True,
    )
    assert found.tokens == expected[0, len(PROMPT) :].tolist()
    assert (found.finish_reason, found.decoder) == ("length", "CustomGenerate")
    plain = llm.generate(PROMPT, max_tokens=12, ignore_eos=True)
    assert found.tokens != plain.tokens  # another method
    greedy = CustomGenerate(folder, trust_remote_code=True, rank=0)
    same = llm.generate(PROMPT, max_tokens=12, ignore_eos=True, decoder=greedy)
    assert same.tokens == plain.tokens


def test_sampling_depends_on_seed_and_sample_alone(llm: LLM, folder: Path) -> None:
    decoder = CustomGenerate(folder, trust_remote_code=True)
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 1.5, "n": 2, "decoder": decoder}
    options["ignore_eos"] = True
    state = torch.get_rng_state()
    first = [sample.tokens for sample in llm.generate(PROMPT, seed=3, **options).samples]
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert [s.tokens for s in llm.generate(PROMPT, seed=3, **options).samples] == first
    assert first[0] != first[1]
    assert llm.generate(PROMPT, seed=4, **options).tokens != first[0]


def test_the_rules_of_the_request_end_the_text(llm: LLM, folder: Path) -> None:
    decoder = CustomGenerate(folder, trust_remote_code=True)
    whole = llm.generate(PROMPT, max_tokens=12, ignore_eos=True, decoder=decoder)
    found = llm.generate(
        PROMPT, max_tokens=12, ignore_eos=True, stop_tokens=[whole.tokens[4]], decoder=decoder
    )
    assert found.tokens == whole.tokens[: whole.tokens.index(whole.tokens[4]) + 1]
    assert found.finish_reason == "stop"
    chunks = list(llm.stream(PROMPT, max_tokens=12, ignore_eos=True, decoder=decoder))
    assert "".join(chunk.text for chunk in chunks) == whole.text


def test_a_function_may_end_early_and_return_an_output(llm: LLM, folder: Path) -> None:
    code = (
        "from transformers import GenerationMixin\n\n\n"
        "def generate(model, **arguments):\n"
        "    arguments['max_new_tokens'] = 3\n"
        "    return GenerationMixin.generate(\n"
        "        model, return_dict_in_generate=True, eos_token_id=-1, **arguments)\n"
    )
    decoder = CustomGenerate(write(folder, code), trust_remote_code=True)
    found = llm.generate(PROMPT, max_tokens=12, ignore_eos=True, decoder=decoder)
    plain = llm.generate(PROMPT, max_tokens=3, ignore_eos=True)
    assert (found.tokens, found.finish_reason) == (plain.tokens, "stop")


def test_code_is_not_loaded_without_trust(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    write(folder, f"open({str(marker)!r}, 'w').close()\n")
    for trust in ({}, {"trust_remote_code": False}, {"trust_remote_code": "yes"}):
        with pytest.raises(InvalidRequestError, match="trust_remote_code=True"):
            CustomGenerate(folder, **trust)  # type: ignore[arg-type]
    assert not marker.exists()
    with pytest.raises(InvalidRequestError, match="has no custom_generate/generate.py"):
        CustomGenerate("transformers-community/sink_cache", trust_remote_code=True)


def test_what_does_not_fit_is_refused(llm: LLM, folder: Path) -> None:
    decoder = CustomGenerate(folder, trust_remote_code=True)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"top_p": 0.5, "temperature": 1.0}, "temperature only"),
        ({"repetition_penalty": 1.2}, "temperature only"),
        ({"logprobs": 1}, "logprobs"),
        ({"banned_strings": ["a"]}, "banned_strings"),
        ({"segment": 4}, "token-exact decoder"),
    ]
    for options, message in refused:
        with pytest.raises(UnsupportedCombinationError, match=message):
            llm.generate(PROMPT, max_tokens=4, decoder=decoder, **options)
    with LLM(ScriptedModel(), tokenizer=ByteTokenizer()) as native:
        with pytest.raises(UnsupportedCombinationError, match="needs a model of transformers"):
            native.generate("ab", max_tokens=4, decoder=decoder)


def test_faults_of_a_folder_are_reported(llm: LLM, folder: Path) -> None:
    decoder = CustomGenerate(folder, trust_remote_code=True)
    write(folder, "def generate(model, **arguments):\n    return [1, 2]\n")
    with pytest.raises(InvalidRequestError, match="one row of token ids that begins with"):
        llm.generate(PROMPT, max_tokens=4, decoder=decoder)
    write(folder, "def generate(model, input_ids, **arguments):\n    return input_ids + 1\n")
    with pytest.raises(InvalidRequestError, match="one row of token ids that begins with"):
        llm.generate(PROMPT, max_tokens=4, decoder=decoder)
    write(folder, "def generate(model, **arguments):\n    raise KeyError('lost')\n")
    with pytest.raises(RuntimeError, match="lost"):
        llm.generate(PROMPT, max_tokens=4, decoder=decoder)
    (folder / "custom_generate" / "requirements.txt").write_text("no-such-package-here>=3\n")
    with pytest.raises(InvalidRequestError, match="no-such-package-here") as raised:
        llm.generate(PROMPT, max_tokens=4, decoder=decoder)
    assert "\n" not in str(raised.value)
    assert llm.generate(PROMPT, max_tokens=4, ignore_eos=True).stats.num_tokens == 4
