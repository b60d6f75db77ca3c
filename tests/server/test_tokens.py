"""Tokenising, log-probabilities of prompts, text between a prompt and a suffix, and second
prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tokenizers

pytest.importorskip("fastapi")

from anydecode import LLM  # noqa: E402
from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.certification.oracles.constrained.self_infill import filling_llm  # noqa: E402
from anydecode.decoders.constrained.self_infill import SelfInfill  # noqa: E402
from anydecode.models.scripted import FillInTokenizer, ScriptedModel  # noqa: E402
from anydecode.models.tokenizers import HFTokenizer  # noqa: E402
from server_client import CHAT, COMPLETIONS, FILL_IN, Client, served  # noqa: E402


def posted(client: Client, path: str, **fields: Any) -> tuple[int, Any]:
    answer = client.http.post(path, json=fields)
    return answer.status_code, answer.json()


def test_a_prompt_is_tokenised_and_back(client: Client, llm: LLM) -> None:
    status, found = posted(client, "/tokenize", prompt="abä", return_token_strs=True)
    assert status == 200
    assert found["tokens"] == llm.tokenizer.encode("abä") and found["count"] == 4
    assert found["max_model_len"] == llm.max_length
    assert found["token_strs"] == [llm.tokenizer.token_text(token) for token in found["tokens"]]
    assert posted(client, "/detokenize", tokens=found["tokens"]) == (200, {"prompt": "abä"})


def test_a_conversation_is_tokenised_as_the_engine_sees_it(client: Client) -> None:
    messages = [{"role": "user", "content": "hello"}]
    found = posted(client, "/tokenize", messages=messages)[1]
    text = posted(client, "/detokenize", tokens=found["tokens"])[1]["prompt"]
    assert text == "user: hello\nassistant: "
    assert found["count"] == client.ask(CHAT, "hello")["usage"]["prompt_tokens"]
    bare = posted(client, "/tokenize", messages=messages, add_generation_prompt=False)[1]
    assert posted(client, "/detokenize", tokens=bare["tokens"])[1] == {"prompt": "user: hello\n"}


def test_the_tokenizer_is_described(client: Client, llm: LLM) -> None:
    assert client.http.get("/tokenizer_info").json() == {
        "tokenizer_class": "ByteTokenizer",
        "model_max_length": llm.max_length,
        "eos_token": llm.tokenizer.token_text(min(llm.tokenizer.eos_ids)),
        "chat_template": llm.tokenizer.chat_template,
    }
    words = tokenizers.models.WordLevel({"a": 0, "<s>": 1, "</s>": 2, "<end>": 3, "<pad>": 4}, "a")
    names = {"bos_token": "<s>", "eos_token": "<end>", "pad_token": "<pad>"}
    tokenizer = HFTokenizer(
        tokenizers.Tokenizer(words), eos_ids=[2, 3], bos_id=1, templates="{{ messages }}",
        special_texts=names,
    )  # fmt: skip
    with LLM(ScriptedModel(lambda path: None), tokenizer=tokenizer) as other:
        with served(other, api_keys=("key",)) as keyed:
            assert keyed.http.get("/tokenizer_info").status_code == 401
            keyed.http.headers["authorization"] = "Bearer key"
            found = keyed.http.get("/tokenizer_info", params={"model": "scripted"}).json()
            unknown = keyed.http.get("/tokenizer_info", params={"model": "other"})
    assert unknown.status_code == 404
    described = {"tokenizer_class": "HFTokenizer", "chat_template": "{{ messages }}"}
    assert found == {**described, **names, "model_max_length": other.max_length}


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user"}]}, "either prompt or messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/detokenize", {"tokens": [0, 100_000]}, "token 100000 is not one of the model's"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_invalid_fields_are_refused(
    client: Client, path: str, fields: dict[str, Any], message: str
) -> None:
    status, answer = posted(client, path, **fields)
    assert status == 400 and message in answer["error"]["message"]


def test_an_unknown_model_is_not_tokenised_for(client: Client) -> None:
    assert posted(client, "/tokenize", prompt="a", model="other")[0] == 404
    assert posted(client, "/detokenize", tokens=[1], model="other")[0] == 404


def test_tokenising_needs_a_key(llm: LLM) -> None:
    with served(llm, api_keys=("secret",)) as client:
        assert posted(client, "/tokenize", prompt="a")[0] == 401
        assert posted(client, "/detokenize", tokens=[97])[0] == 401
        client.http.headers["authorization"] = "Bearer secret"
        assert posted(client, "/tokenize", prompt="a")[0] == 200


@pytest.mark.parametrize("n", [1, 2])
def test_prompt_logprobs_are_those_of_scoring(client: Client, llm: LLM, n: int) -> None:
    prompt = "the cat sat"
    answer = client.ask(COMPLETIONS, prompt=prompt, prompt_logprobs=2, n=n, seed=1)
    expected = llm.score(prompt[0], prompt[1:]).logprobs
    for choice in answer["choices"]:
        first, *entries = choice["prompt_logprobs"]
        assert first is None and len(entries) == len(expected)
        for letter, entry, value in zip(prompt[1:], entries, expected, strict=True):
            assert entry[str(ord(letter))]["logprob"] == value
            assert entry[str(ord(letter))]["decoded_token"] == letter
            ranked = {one["rank"]: one["logprob"] for one in entry.values() if one["rank"]}
            assert sorted(ranked) == [1, 2] and ranked[1] >= ranked[2]
            assert ranked[1] == max(one["logprob"] for one in entry.values())


def test_prompt_logprobs_of_a_conversation(client: Client) -> None:
    answer = client.ask(CHAT, "hello", prompt_logprobs=0)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in answer["prompt_logprobs"][1:])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_prompt_logprobs_are_not_streamed(client: Client, path: str) -> None:
    error = client.refused(path, prompt_logprobs=1, stream=True)
    assert "cannot be streamed" in error["message"] and error["param"] == "prompt_logprobs"


def test_a_gap_is_filled_as_in_process() -> None:
    seen: list[tuple[int, ...]] = []
    with filling_llm(seen) as llm, served(llm) as client:
        expected = llm.generate("def f(x):", max_tokens=8, decoder=SelfInfill(suffix="return x"))
        answer = client.ask(
            COMPLETIONS, prompt="def f(x):", suffix="return x", max_tokens=8, temperature=0
        )
        [choice] = answer["choices"]
        assert choice["text"] == expected.text and choice["finish_reason"] == "stop"
        assert choice["text"] == "m"
        assert (259, *b"def f(x):", 260, *b"return x", 261) in seen
        assert answer["usage"]["prompt_tokens"] == len("def f(x):return x") + 3
        fields = {"prompt": "def f(x):", "suffix": "return x", "max_tokens": 8, "temperature": 0}
        parts = [chunk["choices"][0]["text"] for chunk in client.chunks(COMPLETIONS, **fields)]
        assert "".join(parts) == expected.text
        assert "echo and suffix" in client.refused(COMPLETIONS, suffix="x", echo=True)["message"]


def test_a_gap_is_filled_in_mistrals_form() -> None:
    with scripted_llm(fills_in=True) as llm, served(llm) as client:
        fields = {"prompt": "def f(x):", "suffix": "return x", "max_tokens": 8}
        for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 3}):
            direct = client.ask(COMPLETIONS, **fields, **options)
            sent = {"random_seed" if name == "seed" else name: one for name, one in options.items()}
            status, answer = posted(client, FILL_IN, **fields, **sent)
            assert status == 200 and answer["object"] == "chat.completion"
            [choice] = answer["choices"]
            text, reason = (direct["choices"][0][name] for name in ("text", "finish_reason"))
            assert choice["message"] == {"role": "assistant", "content": text}
            assert choice["finish_reason"] == reason
            counts = [one["usage"]["total_tokens"] for one in (answer, direct)]
            assert counts[0] == counts[1]
            chunks = client.chunks(FILL_IN, **fields, **sent)
            assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            assert "".join(delta["content"] for delta in deltas) == text


@pytest.mark.parametrize(
    "fields", [{"seed": None, "random_seed": 3}, {"random_seed": None, "seed": 3}]
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, FILL_IN])
def test_a_name_of_a_field_that_is_null_is_left_out(path: str, fields: dict[str, Any]) -> None:
    with scripted_llm(fills_in=True) as llm, served(llm) as client:
        first, second, other = (
            client.ask(path, **sent, temperature=1.0)["choices"]
            for sent in (fields, {"seed": 3}, {"seed": 4})
        )
        assert first == second != other


def test_the_log_probabilities_of_a_gap_are_those_of_a_chat() -> None:
    fields = {"prompt": "def f(x):", "suffix": "return x", "max_tokens": 8, "logprobs": 2}
    fields |= {"seed": 3, "temperature": 1.0}
    with scripted_llm(fills_in=True) as llm, served(llm) as client:
        direct = client.ask(COMPLETIONS, **fields)["choices"][0]["logprobs"]
        choice = client.ask(FILL_IN, **fields)["choices"][0]
        entries = choice["logprobs"]["content"]
        assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
        values = [entry["logprob"] for entry in entries]
        assert values and values == direct["token_logprobs"][: len(values)]
        for entry, tops in zip(entries, direct["top_logprobs"], strict=False):
            assert len(entry["top_logprobs"]) == 2
            assert {one["logprob"] for one in entry["top_logprobs"]} <= {*tops.values()}
        chunks = client.single_chunks(llm, FILL_IN, **fields)
        parts = [chunk["choices"][0]["logprobs"]["content"] for chunk in chunks]
        assert sum(parts, []) == entries and len(parts) > 2
        assert client.ask(FILL_IN, **{**fields, "logprobs": None})["choices"][0]["logprobs"] is None


def test_the_limit_of_a_gap_is_the_context_length() -> None:
    def without_end(path: tuple[int, ...]) -> np.ndarray:
        return np.eye(FillInTokenizer.vocab_size)[ord("m")] * 20.0

    model = ScriptedModel(without_end, FillInTokenizer.vocab_size, max_positions=64)
    with LLM(model, tokenizer=FillInTokenizer()) as llm, served(llm) as client:
        answer = posted(client, FILL_IN, prompt="ab", suffix="c", temperature=0)[1]
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 64


@pytest.mark.parametrize("path", [COMPLETIONS, FILL_IN])
def test_a_suffix_needs_a_model_that_fills_gaps(client: Client, llm: LLM, path: str) -> None:
    fields = {"prompt": "the cat", "max_tokens": 3, "temperature": 0}
    status, answer = posted(client, path, suffix="the end", **fields)
    assert status == 400 and answer["error"]["param"] == "suffix"
    assert "fill-in-the-middle model" in answer["error"]["message"]
    for suffix in ("", None):
        [choice] = posted(client, path, suffix=suffix, **fields)[1]["choices"]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert text == llm.generate("the cat", max_tokens=3).text


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_negative_prompt_guides_as_in_process(client: Client, llm: LLM, path: str) -> None:
    prompt = "the cat sat" if path == COMPLETIONS else "user: the cat sat\nassistant: "
    options: dict[str, Any] = {"guidance_scale": 4.0, "negative_prompt": "a dog", "seed": 3}
    expected = llm.generate(prompt, max_tokens=8, temperature=1.0, **options).text
    answer = client.ask(path, "the cat sat", max_tokens=8, **options)["choices"][0]
    assert (answer["text"] if path == COMPLETIONS else answer["message"]["content"]) == expected
    options["negative_prompt"] = "a cow"
    assert llm.generate(prompt, max_tokens=8, temperature=1.0, **options).text != expected


def test_a_negative_prompt_needs_guidance(client: Client) -> None:
    error = client.refused(COMPLETIONS, negative_prompt="a dog")
    assert "negative_prompt has no effect without guidance" in error["message"]
