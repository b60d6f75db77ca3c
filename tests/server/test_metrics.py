"""What a server counts: tokens, passes and times, for known generations and over HTTP."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from anydecode.api.generation import Generation, Stats
from anydecode.certification.checks import scripted_llm
from anydecode.models.scripted import ScriptedModel
from anydecode.server.metrics import Metrics
from server_client import COMPLETIONS, events, served
from waiting import wait_for


def generation(**stats: Any) -> Generation:
    known = {"passes": 4, "num_tokens": 9, "num_prompt_tokens": 5, "seconds": 3.0}
    known["time_to_first_token"] = 1.0
    return Generation("", [], "stop", 0, Stats(**{**known, **stats}), "autoregressive")


def test_recorded_generations_match_a_hand_computation() -> None:
    with scripted_llm() as llm:
        metrics = Metrics(lambda: {"tiny": llm})
        metrics.record([generation(), generation(num_tokens=1, seconds=1.5), generation(passes=0)])

    def value(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"anydecode_{name}")

    assert value("time_to_first_token_seconds_sum") == 3.0
    assert value("request_seconds_sum") == 7.5
    # 2 seconds for the 8 tokens after the first, twice; one token alone has no time between tokens
    assert value("time_per_output_token_seconds_count") == 2
    assert value("time_per_output_token_seconds_sum") == pytest.approx(0.5)
    assert value("tokens_per_pass_count") == 2  # nothing ran for the last one
    assert value("tokens_per_pass_sum") == pytest.approx(9 / 4 + 1 / 4)


def test_tokens_per_pass_of_a_drafter() -> None:
    fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    fields["decoder"] = "prompt-lookup"
    with scripted_llm() as llm, served(llm) as client:
        answer = client.ask(COMPLETIONS, **fields, logit_bias={"122": 100})
        metrics = client.metrics()
        tokens_per_pass = llm.generate("abc", **fields, logit_bias={122: 100}).stats.tokens_per_pass
    assert tokens_per_pass > 1.5
    assert answer["anydecode"]["tokens_per_pass"] == pytest.approx(tokens_per_pass)
    assert metrics["anydecode_tokens_per_pass_count"] == 1
    assert metrics["anydecode_tokens_per_pass_sum"] == pytest.approx(tokens_per_pass)
    assert metrics['anydecode_tokens_per_pass_bucket{le="1.5"}'] == 0


def test_the_draft_model_is_named() -> None:
    fields: dict[str, Any] = {"max_tokens": 2, "temperature": 0}
    with scripted_llm() as llm:
        draft = ScriptedModel(seed=1)
        draft.name = "small"
        llm.add_runner("draft", draft)
        with served(llm) as client:
            for decoder, names in (("speculative-sampling", ["small"]), ("prompt-lookup", [])):
                answer = client.ask(COMPLETIONS, **fields, decoder=decoder)
                assert answer["anydecode"]["draft_models"] == names
            assert client.metrics()['anydecode_runner_info{name="small",runner="draft"}'] == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3},
        {"n": 3, "temperature": 0},
        {"n": 2, "best_of": 4},
        {"n": 4, "first_finish": 1},
        {"prompt": ["abc", "de"], "n": 2},
    ],
)
def test_tokens_are_counted_as_in_usage(fields: dict[str, Any]) -> None:
    """Rejects counts of the returned texts alone, and of the prompt with each of its texts."""
    with scripted_llm() as llm, served(llm) as client:
        usage = client.ask(COMPLETIONS, max_tokens=9, **{"temperature": 1, **fields})["usage"]
        metrics = client.metrics()
    assert metrics["anydecode_prompt_tokens_total"] == usage["prompt_tokens"]
    assert metrics["anydecode_generation_tokens_total"] == usage["completion_tokens"]


def test_tokens_of_a_client_that_disconnects_are_counted() -> None:
    fields = {"prompt": "abc", "max_tokens": 1000, "ignore_eos": True, "seed": 0, "stream": True}
    fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    with scripted_llm() as llm, served(llm) as client:
        with client.http.stream("POST", COMPLETIONS, json=fields) as answer:
            with closing(events(answer.iter_lines())) as chunks:
                usages = [chunk["usage"] for chunk, _ in zip(chunks, range(5), strict=False)]
        wait_for(lambda: client.metrics()["anydecode_cancelled_requests_total"] == 1)
        wait_for(lambda: client.http.get("/live").json()["running"] == 0)
        metrics, live = client.metrics(), client.http.get("/live").json()
    assert metrics["anydecode_prompt_tokens_total"] == 3
    seen, counted = usages[-1]["completion_tokens"], metrics["anydecode_generation_tokens_total"]
    assert 0 < seen <= counted <= live["num_tokens"] < 1000
