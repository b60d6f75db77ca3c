"""DSPy, which describes the answer in the prompt: the server enforces it by an option of the LM."""

from __future__ import annotations

from typing import Any, Literal

import pytest

dspy = pytest.importorskip("dspy")
pydantic = pytest.importorskip("pydantic")

from anydecode import LLM  # noqa: E402
from client_shapes import Trip  # noqa: E402

MODEL = "smollm2-135m-instruct"


class Plan(dspy.Signature):
    """Plan a trip."""

    wish: str = dspy.InputField()
    trip: Trip = dspy.OutputField()
    mood: Literal["good", "bad"] = dspy.OutputField()


class Answer(pydantic.BaseModel):
    """The outputs of `Plan`."""

    model_config = pydantic.ConfigDict(extra="forbid")
    trip: Trip
    mood: Literal["good", "bad"]


def language_model(url: str, **options: Any) -> Any:
    settings = {"temperature": 0, "max_tokens": 200, "cache": False, "num_retries": 0}
    return dspy.LM(f"openai/{MODEL}", api_base=url, api_key="none", **{**settings, **options})


def test_text_is_the_engine(url: str, llm: LLM) -> None:
    messages = [{"role": "user", "content": "Name a city."}]
    (text,) = language_model(url, max_tokens=12)("Name a city.")
    assert text == llm.chat(messages, max_tokens=12).text


async def test_a_typed_signature_is_answered(url: str) -> None:
    constraint = {"structured_outputs": {"json": Answer.model_json_schema()}}
    model = language_model(url, extra_body=constraint)
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        for answer in (dspy.Predict(Plan)(wish="Rome"), await dspy.Predict(Plan).acall(wish="")):
            assert isinstance(answer.trip, Trip) and answer.mood in ("good", "bad")


def test_embeddings(url: str, llm: LLM) -> None:
    embedder = dspy.Embedder(f"openai/{MODEL}", api_base=url, api_key="none", caching=False)
    assert list(embedder("a cat")) == pytest.approx(llm.embed("a cat"), abs=1e-4)
