"""The options of `LLM.generate` and its like: types, signatures, and one list of them."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from anydecode import LLM, FirstFinish, RolloutQueue
from anydecode.api.generation import StreamChunk
from anydecode.api.options import GenerateOptions
from anydecode.certification.checks import PROMPTS, scripted_llm
from anydecode.errors import InvalidRequestError, OutOfMemoryError, UnsupportedCombinationError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.sampling.options import SamplingOptions
from anydecode.sampling.params import SamplingParams
from server_models import TemplateTokenizer

METHODS = ("generate", "stream", "chat", "stream_chat")
ASYNC_METHODS = ("agenerate", "astream", "achat", "astream_chat")


def test_the_sampling_options_are_the_fields_of_sampling_params() -> None:
    declared, actual = get_type_hints(SamplingOptions), get_type_hints(SamplingParams)
    assert list(declared) == [field.name for field in fields(SamplingParams)]
    wider = {"stop": str | Sequence[str], "banned_words": Sequence[str | Sequence[int]]}
    assert declared == {**actual, **wider}


def test_the_options_are_the_parameters_of_a_request() -> None:
    keywords = {
        name
        for name, parameter in inspect.signature(LLM.request).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert keywords == GenerateOptions.__optional_keys__
    # `Unpack` is imported for type checkers only; any generic class stands in for it.
    actual = inspect.get_annotations(LLM.request, eval_str=True, locals={"Unpack": list})
    declared = get_type_hints(GenerateOptions)
    own = keywords - SamplingOptions.__optional_keys__
    assert {name: actual[name] for name in own} == {name: declared[name] for name in own}


@pytest.mark.parametrize("name", [*METHODS, *ASYNC_METHODS, "request"])
def test_a_signature_lists_every_option_with_its_default(name: str) -> None:
    parameters = inspect.signature(getattr(LLM, name)).parameters
    shown = {one: parameters[one].default for one in GenerateOptions.__optional_keys__}
    defaults = SamplingParams()
    expected = {field.name: getattr(defaults, field.name) for field in fields(SamplingParams)}
    expected["temperature"] = 0.0
    others = {one: default for one, default in shown.items() if one not in expected}
    assert {one: shown[one] for one in expected} == expected
    assert others == {
        **dict.fromkeys(others), "sampler": (), "trace": False, "priority": 0
    }  # fmt: skip
    assert not any(one.kind is one.VAR_KEYWORD for one in parameters.values())


USE = """
from anydecode import LLM
from anydecode.api.options import GenerateOptions

async def use(llm: LLM, options: GenerateOptions) -> None:
    reveal_type(llm.generate("x"))  # 6
    reveal_type(llm.generate([1, 2], **options))  # 7
    reveal_type(llm.generate(["x", "y"], temperature=0.5))  # 8
    reveal_type(llm.generate([[1], "y"]))  # 9
    reveal_type(llm.chat([{"role": "user", "content": "x"}], top_k=3))  # 10
    reveal_type(await llm.agenerate(["x"]))  # 11
    reveal_type(llm.embed("x"))  # 12
    reveal_type(llm.embed(["x"]))  # 13
    reveal_type([chunk async for chunk in llm.astream("x")])  # 14
    llm.generate("x", temprature=0.5)  # 15
    llm.stream("x", temprature=0.5)  # 16
    llm.chat([], top_k="many")  # 17
    llm.generate([1, "5"])  # 18
    reveal_type(llm.chat([[{"role": "user", "content": "x"}]], top_k=3))  # 19
    reveal_type(await llm.achat([[{"role": "user", "content": "x"}]]))  # 20
"""

CONFIG = """
[mypy]
strict = True
python_version = 3.10
follow_imports = silent
[mypy-numpy.*,torch.*,transformers.*]
follow_imports = skip
"""


@pytest.mark.slow
def test_types_of_results_and_of_options(tmp_path: Path) -> None:
    (tmp_path / "mypy.ini").write_text(CONFIG)
    (tmp_path / "use.py").write_text(USE)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-error-summary"]
    done = subprocess.run([*command, "use.py"], cwd=tmp_path, capture_output=True, text=True)
    revealed: dict[int, str] = {}
    errors: dict[int, str] = {}
    for line in done.stdout.splitlines():
        file, number, kind, message = line.split(":", 3)
        assert file == "use.py", done.stdout
        if "Revealed type is" in message:
            revealed[int(number)] = message.split('"')[1].replace("builtins.", "")
        elif kind.strip() == "error":
            errors.setdefault(int(number), message.strip())
    one = "anydecode.api.generation.Generation"
    assert revealed == {
        6: one,
        7: one,
        8: f"list[{one}]",
        9: f"list[{one}]",
        10: one,
        11: f"list[{one}]",
        12: "list[float]",
        13: "list[list[float]]",
        14: "list[anydecode.api.generation.StreamChunk]",
        19: f"list[{one}]",
        20: f"list[{one}]",
    }, done.stdout + done.stderr
    assert set(errors) == {15, 16, 17, 18}
    for number in (15, 16):
        assert 'Unexpected keyword argument "temprature"' in errors[number]
        assert 'did you mean "temperature"?' in errors[number]
    assert 'No overload variant of "chat" of "LLM" matches argument types' in errors[17]
    assert "List item 1 has incompatible type" in errors[18]


def test_every_method_refuses_an_unknown_option() -> None:
    match = "^no option is called temprature; did you mean temperature\\?$"
    with scripted_llm() as llm:
        for name in METHODS:
            prompt = [{"role": "user", "content": "x"}] if "chat" in name else "x"
            with pytest.raises(InvalidRequestError, match=match):
                getattr(llm, name)(prompt, temprature=1.0)


async def _first(chunks: AsyncIterator[StreamChunk]) -> StreamChunk:
    return await anext(chunks)


def test_sampling_params_behind_the_prompt_are_refused_with_what_to_write() -> None:
    """They stand there in vLLM."""
    params = SamplingParams(temperature=0.8)
    message = r"give every option by name, such as generate\(prompt, max_tokens=64, temperature="
    with scripted_llm() as llm:
        for call in (
            lambda: llm.generate("x", params),  # type: ignore[call-overload]
            lambda: llm.generate(["x", "y"], [params, params]),  # type: ignore[call-overload]
            lambda: llm.generate("x", sampling_params=params),  # type: ignore[call-overload]
            lambda: llm.chat([{"role": "user", "content": "x"}], params),  # type: ignore[call-overload]
            lambda: llm.stream("x", params),  # type: ignore[arg-type]
            lambda: llm.stream_chat([], params),  # type: ignore[arg-type]
            lambda: asyncio.run(llm.agenerate("x", params)),  # type: ignore[call-overload]
            lambda: asyncio.run(llm.achat([], params)),  # type: ignore[call-overload]
        ):
            with pytest.raises(InvalidRequestError, match=message):
                call()
        with pytest.raises(InvalidRequestError, match=message):
            asyncio.run(_first(llm.astream("x", params)))  # type: ignore[arg-type]
    assert "others" not in inspect.signature(LLM.generate).parameters


def test_conversations_of_a_batch_are_answered_as_each_alone_in_order() -> None:
    conversations = [
        [{"role": "user", "content": "the cat"}],
        [{"role": "system", "content": "a dog"}, {"role": "user", "content": "sat"}],
        [{"role": "user", "content": "on the mat"}],
    ]

    options: dict[str, Any] = {"max_tokens": 9, "temperature": 1.0, "seed": 3}

    async def together(llm: LLM) -> list[list[int]]:
        return [one.tokens for one in await llm.achat(conversations, **options)]

    with scripted_llm() as llm:
        alone = [llm.chat(one, **options).tokens for one in conversations]
        found = llm.chat(conversations, **options)
        assert [one.tokens for one in found] == alone == asyncio.run(together(llm))
        assert alone != alone[::-1]  # the wrong twin: answers in another order
        assert [one.tokens for one in llm.chat(conversations[:1], **options)] == alone[:1]
        joined = [message for one in conversations for message in one]
        assert llm.chat(joined, **options).tokens not in alone  # the wrong twin: one conversation


def test_streams_take_one_sample() -> None:
    async def main(llm: LLM) -> None:
        async for _ in llm.astream("x", n=2, temperature=1.0):
            pass

    with scripted_llm() as llm:
        with pytest.raises(InvalidRequestError, match="streaming allows only n=1"):
            llm.stream("x", n=2, temperature=1.0)
        with pytest.raises(InvalidRequestError, match="streaming allows only n=1"):
            asyncio.run(main(llm))


def test_asynchronous_forms_give_the_same_results() -> None:
    messages = [{"role": "user", "content": "the cat"}]
    pairs = [("the", " cat"), ("a", " dog")]

    async def main(llm: LLM) -> None:
        assert await llm.ascores(pairs) == llm.scores(pairs)
        assert await llm.ascore(*pairs[0]) == llm.score(*pairs[0])
        assert await llm.aembed(list(PROMPTS)) == llm.embed(list(PROMPTS))
        assert await llm.aembed(PROMPTS[0]) == llm.embed(PROMPTS[0])
        text = llm.chat(messages, max_tokens=9).text
        assert (await llm.achat(messages, max_tokens=9)).text == text
        chunks = [chunk async for chunk in llm.astream_chat(messages, max_tokens=9)]
        assert "".join(chunk.text for chunk in chunks) == text
        assert [str(chunk) for chunk in chunks] == [chunk.text for chunk in chunks]

    with scripted_llm() as llm:
        asyncio.run(main(llm))


def test_a_continuation_without_tokens_of_its_own_is_refused() -> None:
    with LLM("tiny-autoregressive", threads=1) as llm:
        assert len(llm.encode("cop")) > len(llm.encode("copy"))  # of which "y" is a part
        with pytest.raises(InvalidRequestError, match="'y' has no tokens of its own"):
            llm.score("cop", "y")
        assert len(llm.score("copy", " Ada").tokens) > 0
        with pytest.raises(InvalidRequestError, match="that are not empty"):
            llm.score("copy", "")
    with LLM("tiny-diffusion", threads=1) as llm:
        with pytest.raises(UnsupportedCombinationError, match="'score' needs a causal model"):
            llm.score("copy", " Ada")


def test_embeddings_are_unit_vectors_of_their_own_text() -> None:
    with LLM("tiny-autoregressive", threads=1) as llm:
        first, second = llm.embed(["for i in range", [5, 6, 7]])
        assert len(first) == llm.model.spec.hidden_size
        assert sum(value * value for value in first) == pytest.approx(1.0)
        assert llm.embed("for i in range") == first != second == llm.embed([5, 6, 7])
        with pytest.raises(InvalidRequestError, match="the prompt is empty"):
            llm.embed("")
        with pytest.raises(InvalidRequestError, match="no adapter is called 'x'"):
            llm.embed("a", adapter="x")


def test_a_text_is_no_conversation() -> None:
    message: Any = {"role": "user", "content": "x"}
    tokenizer = TemplateTokenizer("{{ messages[0].role }}:{{ messages[0].content }}")
    with LLM(ScriptedModel(seed=1), tokenizer=tokenizer) as llm:
        for given in ("hi", message, ["hi"], [[message], "hi"]):
            for name in ("chat", "stream_chat"):
                if name == "stream_chat" and isinstance(given, list) and given != ["hi"]:
                    continue  # which takes one conversation
                with pytest.raises(InvalidRequestError, match="is no conversation: pass a list"):
                    list(getattr(llm, name)(given, max_tokens=2))
        assert llm.chat([message], max_tokens=2).text
        first, second = llm.chat([[message], [message]], max_tokens=2)
        assert first.text == second.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder": 5}, "decoder is 5; it must be a key"),
        ({"decoder": LLM}, "decoder is .*; it must be a key"),
        ({"sampler": 5}, "sampler is 5; it must be"),
        ({"sampler": None}, "sampler is None; it must be"),
        (
            {"sampler": [5]},
            r"sampler\[0\] is 5; it must be a text or a SamplerPreset",
        ),
        ({"adapter": ["a"]}, r"adapter is \['a'\]; it must be a text or None"),
        ({"segment": "1"}, "segment is '1'; it must be an integer, a Segment or None"),
        ({"resume": [1]}, r"resume is \[1\]; it must be a dict or None"),
        ({"trace": "yes"}, "trace is 'yes'; it must be True or False"),
        (
            {"prompt_embeds": [None]},
            r"prompt_embeds\[0\] is None; it must be a PromptEmbeds or a Media",
        ),
        ({"priority": "x"}, "priority must be a number, not 'x'"),
        ({"priority": None}, "priority must be a number, not None"),
        ({"priority": float("nan")}, "priority must be a number, not nan"),
        ({"namespace": [1]}, "namespace is .*hashable"),
        ({"first_finish": "1", "n": 2}, "first_finish is '1'; it must be"),
        ({"first_finish": True, "n": 2}, "first_finish is True; it must be"),
        ({"prompt_embeds": 5}, "prompt_embeds is 5; it must be"),
        ({"prompt_embeds": np.zeros((2, 3))}, r"prompt_embeds\[0\] is .*; it must be"),
        ({"stop": "\ud800"}, "stop contains half of a surrogate pair"),
        ({"banned_strings": ["a", "\udfff"]}, "banned_strings contains half of a surrogate"),
        ({"decoder": "x" * 10000}, "no decoding method is called 'xxx"),
    ],
)
def test_options_of_wrong_kinds_are_refused_in_one_line(
    options: dict[str, Any], message: str
) -> None:
    with scripted_llm(schedule="priority") as llm:
        with pytest.raises(InvalidRequestError, match=message) as caught:
            llm.generate("abc", **options)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
        llm.engine.check_integrity()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.scores(None), "pairs is None; it must be a list of"),
        (lambda llm: llm.scores([("a",)]), r"pairs is \[\('a',\)\]; it must be a list of"),
        (lambda llm: llm.scores(["ab"]), r"pairs is \['ab'\]; it must be a list of"),
        (lambda llm: llm.score("a", None), "the continuation is None; it must be a text or"),
        (lambda llm: asyncio.run(llm.ascores(5)), "pairs is 5; it must be a list of"),
        (lambda llm: llm.add_adapter(None, "folder"), "name is None; it must be a text"),
        (lambda llm: llm.add_adapter("a", None), "path is None; it must be a text or a path"),
        (lambda llm: llm.remove_adapter(None), "name is None; it must be a text"),
        (lambda llm: llm.decoder("auto", [1]), r"namespace is \[1\]; it must be hashable"),
        (
            lambda llm: llm.chat([{"role": "user", "content": "a"}], template_variables=5),
            "template_variables is 5; it must be a dict or None",
        ),
        (
            lambda llm: llm.chat([{"role": "user", "content": "a"}], template_variables={5: 1}),
            "a key of template_variables is 5; it must be a text",
        ),
        (
            lambda llm: llm.chat([{"role": "user"}], template_variables={"messages": []}),
            "template_variables has messages",
        ),
        (lambda llm: FirstFinish("x"), "first is 'x'; it must be an integer"),
        (lambda llm: RolloutQueue(llm, segment=None), "segment is None; it must be an integer"),
        (lambda llm: RolloutQueue(llm).add("a", n="x"), "n is 'x'; it must be an integer"),
    ],
)
def test_arguments_of_wrong_kinds_are_refused_in_one_line(
    call: Callable[[LLM], Any], message: str
) -> None:
    with scripted_llm() as llm, pytest.raises(InvalidRequestError, match=f"^{message}"):
        call(llm)


def test_prompts_of_wrong_kinds_are_refused_in_one_line() -> None:
    with scripted_llm() as llm:
        for prompt in (b"abc", bytearray(b"abc"), None, 5, {65}):
            with pytest.raises(InvalidRequestError, match="a text or a list of token ids"):
                llm.generate(prompt)  # type: ignore[call-overload]
        for messages in (None, 5, "x", ["x"], [5], [[5]]):
            with pytest.raises(InvalidRequestError, match="no conversation"):
                llm.chat(messages)  # type: ignore[call-overload]


def test_a_cache_without_positions_is_refused() -> None:
    with pytest.raises(OutOfMemoryError, match="a cache of 0 positions"):
        LLM(ScriptedModel(), tokenizer=ByteTokenizer(), cache_positions=0)


def test_unknown_options_of_embeddings_are_refused() -> None:
    with scripted_llm() as llm:
        with pytest.raises(InvalidRequestError, match="called dimension; did you mean dimensions"):
            llm.embed("abc", dimension=8)  # type: ignore[call-overload]
        with pytest.raises(InvalidRequestError, match="called normalize; known: adapter, dim"):
            llm.embed("abc", normalize=True)  # type: ignore[call-overload]
        with pytest.raises(InvalidRequestError, match="called instruct; did you mean instruction"):
            llm.relevance("abc", ["d"], instruct="x")  # type: ignore[call-arg]
