"""LlamaIndex: `llama-index-llms-openai-like`."""

from typing import Any

import pytest

openai_like = pytest.importorskip("llama_index.llms.openai_like")

from llama_index.core.llms import ChatMessage  # noqa: E402
from llama_index.core.tools import FunctionTool  # noqa: E402

from anydecode import LLM  # noqa: E402
from client_shapes import Booking, City, Trip  # noqa: E402

MODEL = "smollm2-135m-instruct"
ASK = [ChatMessage(role="user", content="Name a city.")]
MESSAGES = [{"role": "user", "content": "Name a city."}]


def language_model(url: str, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "is_chat_model": True,
        "is_function_calling_model": True,
        "context_window": 8192,
        "temperature": 0,
        "max_tokens": 150,
        "max_retries": 0,
    }
    return openai_like.OpenAILike(
        model=MODEL, api_base=url, api_key="none", **{**settings, **options}
    )


async def test_chat_and_its_streams_are_the_engine(url: str, llm: LLM) -> None:
    model = language_model(url, max_tokens=12)
    alone = llm.chat(MESSAGES, max_tokens=12).text
    assert model.chat(ASK).message.content == alone
    assert "".join(chunk.delta or "" for chunk in model.stream_chat(ASK)) == alone
    assert (await model.achat(ASK)).message.content == alone
    stream = await model.astream_chat(ASK)
    assert "".join([chunk.delta or "" async for chunk in stream]) == alone
    plain = language_model(url, max_tokens=6, is_chat_model=False)
    assert plain.complete("The sky is").text == llm.generate("The sky is", max_tokens=6).text


@pytest.mark.parametrize("shape", [City, Trip, Booking])
@pytest.mark.parametrize("native", [False, True])
def test_structured_output(url: str, native: bool, shape: type[Any]) -> None:
    model = language_model(url, should_use_structured_outputs=native)
    assert isinstance(model.as_structured_llm(shape).chat(ASK).raw, shape)


def test_tools_are_called_and_their_results_answered(url: str) -> None:
    def visit(city: City, days: int) -> str:
        """Visit a city."""
        return "done"

    model = language_model(url)
    tool = FunctionTool.from_defaults(visit)
    answer = model.chat_with_tools([tool], user_msg="Visit Rome.", tool_required=True)
    calls = model.get_tool_calls_from_response(answer)
    assert calls and {call.tool_name for call in calls} == {"visit"}
    City.model_validate(calls[0].tool_kwargs["city"])
    results = [
        ChatMessage(role="tool", content="done", additional_kwargs={"tool_call_id": call.tool_id})
        for call in calls
    ]
    after = model.chat([*ASK, answer.message, *results], max_tokens=8)
    assert after.message.content
