"""Operation of a server: host names, access to metrics, telemetry, the container image."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")

from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.errors import InvalidRequestError  # noqa: E402
from anydecode.server import telemetry  # noqa: E402
from anydecode.server.admission import host_name, is_loopback  # noqa: E402
from anydecode.server.app import create_app  # noqa: E402
from anydecode.server.running import LiveServer  # noqa: E402
from anydecode.server.settings import Settings  # noqa: E402
from waiting import wait_for  # noqa: E402

ROOT = Path(__file__).parents[2]
PLAIN = {"decoder": "autoregressive", "temperature": 0, "ignore_eos": True}
ASK = {"prompt": "abcabc", "max_tokens": 5, **PLAIN}


@pytest.fixture
def llm() -> Iterator[Any]:
    with scripted_llm() as llm:
        yield llm


@pytest.mark.parametrize(
    ("host", "allowed", "requested", "status"),
    [
        ("127.0.0.1", (), "127.0.0.1:8000", 200),
        ("127.0.0.1", (), "localhost", 200),
        ("::1", (), "[::1]:80", 200),
        ("127.0.0.1", (), "attacker.example", 403),
        ("127.0.0.1", (), "127.0.0.1.attacker.example", 403),
        ("127.0.0.1", (), "192.168.1.7", 403),
        ("127.0.0.1", ("models.example",), "Models.example:443", 200),
        ("127.0.0.1", ("*",), "attacker.example", 200),
        ("0.0.0.0", (), "any.example", 200),
        ("0.0.0.0", ("models.example",), "any.example", 403),
        ("0.0.0.0", ("models.example",), "localhost", 403),
    ],
)
def test_host_names_are_checked(
    llm: Any, host: str, allowed: tuple[str, ...], requested: str, status: int
) -> None:
    app = create_app(llm, Settings(host=host, allowed_hosts=allowed))
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    import asyncio

    for path in ("/", "/v1/models", "/live"):
        scope = {
            "type": "http", "method": "GET", "path": path, "query_string": b"", "scheme": "http",
            "headers": [(b"host", requested.encode())], "server": ("a", 80), "http_version": "1",
        }  # fmt: skip
        asyncio.run(app(scope, receive, send))
    statuses = [message["status"] for message in sent if "status" in message]
    assert statuses == [status] * 3
    if status == 403:
        assert json.loads(sent[1]["body"])["error"]["code"] == "host_not_allowed"


def test_loopback_names_are_recognised() -> None:
    assert [host_name(name) for name in ("A.b:1", "[::1]", "[::1]:9", "x.")] == [
        "a.b", "::1", "::1", "x",
    ]  # fmt: skip
    assert all(map(is_loopback, ("127.9.9.9", "::1", "localhost", "a.localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "localhost.example", "")))


@pytest.mark.parametrize("open_metrics", [False, True])
def test_metrics_need_an_api_key_if_configured(llm: Any, open_metrics: bool) -> None:
    settings = Settings(port=0, api_keys=("one",), open_metrics=open_metrics)
    with LiveServer(llm, settings) as server:
        with httpx.Client(base_url=server.url, trust_env=False) as http:
            for path in ("/metrics", "/live"):
                assert http.get(path).status_code == (200 if open_metrics else 401)
                key = {"authorization": "Bearer one"}
                assert http.get(path, headers=key).status_code == 200
            assert [http.get(path).status_code for path in ("/", "/health")] == [200, 200]


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """Without what the run of the tests has frozen (`pytest_collection`)."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("unfrozen")
def test_later_collections_leave_out_the_objects_of_the_server(llm: Any) -> None:
    """Each would block all threads for as long as it looks at them."""
    with LiveServer(llm, Settings(port=0)):
        assert wait_for(gc.get_freeze_count) > 10_000
    assert not gc.get_freeze_count()


@pytest.mark.usefixtures("unfrozen")
def test_what_the_application_has_frozen_stays_frozen(llm: Any) -> None:
    gc.freeze()
    with LiveServer(llm, Settings(port=0)):
        pass
    assert gc.get_freeze_count() > 10_000


def test_requests_are_recorded_as_spans(llm: Any) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = create_app(llm, Settings(name="m"), telemetry.Telemetry(provider, "m"))

    async def ask() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            caller = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
            await http.post("/v1/completions", json=ASK, headers={"traceparent": caller})
            await http.post("/v1/completions", json={"prompt": "a", "n": 0})

    import asyncio

    asyncio.run(ask())
    first, decode, request_span, refused = exporter.get_finished_spans()
    assert [one.name for one in (first, decode, request_span)] == [
        "first token", "decode", "text_completion m",
    ]  # fmt: skip
    assert request_span.parent.trace_id == int(
        "ab" * 16, 16
    ) and request_span.parent.span_id == int("cd" * 8, 16)
    assert first.parent.span_id == decode.parent.span_id == request_span.context.span_id
    assert request_span.start_time == first.start_time <= first.end_time == decode.start_time
    assert decode.end_time == request_span.end_time
    attributes = dict(request_span.attributes)
    assert (
        attributes["gen_ai.usage.input_tokens"] == 6
        and attributes["gen_ai.usage.output_tokens"] == 5
    )
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert (attributes["http.response.status_code"], attributes["anydecode.passes"]) == (200, 5)
    assert refused.attributes["http.response.status_code"] == 400
    assert not any("abcabc" in str(value) for value in attributes.values())


def test_the_environment_configures_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(telemetry.os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    assert telemetry.from_environment("m") is None
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert telemetry.from_environment("m") is None
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "nobody")
    with pytest.raises(InvalidRequestError, match="nobody"):
        telemetry.from_environment("m")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(InvalidRequestError, match="not installed: pip install"):
        telemetry.from_environment("m")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert telemetry.from_environment("m") is None


def test_missing_opentelemetry_is_a_one_line_error() -> None:
    program = (
        "import sys; sys.modules['opentelemetry.sdk.resources'] = None;"
        "import anydecode.api.llm, anydecode.certification.checks as c, anydecode;"
        "anydecode.api.llm.LLM = lambda name, **o: c.scripted_llm();"
        "from anydecode.cli.main import run; run(['serve', 'scripted', '--port', '0'])"
    )
    environment = {**telemetry.os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert len(done.stderr.strip().splitlines()) == 1 and "OpenTelemetry" in done.stderr


def lint(text: str) -> list[str]:
    """Problems of a Dockerfile, by the hadolint rules that apply to it."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.M)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    steps = [line.split(None, 1) for line in lines if line.strip()]
    problems, stages, user = [], set(), "root"
    for word, rest in steps:
        if word != word.upper():
            problems.append(f"{word}: instructions are upper case")
        if word == "FROM":
            image, *name = rest.split()
            if image not in stages and (":" not in image or image.endswith(":latest")):
                problems.append(f"DL3006: {image} has no version")
            stages |= set(name[1:])
            user = "root"
        elif word == "RUN":
            if "apt-get install" in rest:
                for needed in ("--no-install-recommends", "-y", "rm -rf /var/lib/apt/lists"):
                    if needed not in rest.replace("--yes", "-y"):
                        problems.append(f"DL3015, DL3014, DL3009: apt-get without {needed}")
            if "pip install" in rest and "--no-cache-dir" not in rest:
                problems.append("DL3042: pip with a cache")
            if re.search(r"\b(sudo|apt|cd|ssh|top)\s", rest.replace("apt-get", "")):
                problems.append(f"DL3003, DL3004, DL3027: {rest}")
            if "|" in rest.replace("||", "") and "pipefail" not in rest:
                problems.append("DL4006: a pipe without pipefail")
        elif word == "ADD":
            problems.append("DL3020: ADD in place of COPY")
        elif word in ("CMD", "ENTRYPOINT") and not isinstance(_json(rest), list):
            problems.append(f"DL3025: {word} is no JSON list")
        elif word == "WORKDIR" and not rest.startswith("/"):
            problems.append("DL3000: WORKDIR is not absolute")
        elif word == "USER":
            user = rest
    return problems + (["DL3002: the last user is root"] if user == "root" else [])


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def test_the_dockerfile_passes_the_linter() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert not lint(text)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    for needed in (
        *("src", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE"),
        *("requirements.lock", "requirements-build.lock"),
    ):
        assert f"!{needed}" in ignored and (ROOT / needed).exists()


def test_the_image_is_built_of_pinned_parts() -> None:
    """A base by its digest, packages by their hashes, and none of the distribution's."""
    text = (ROOT / "Dockerfile").read_text()
    bases = re.findall(r"^FROM (\S+)(?: AS (\w+))?$", text, re.M)
    stages = {name for _, name in bases}
    outside = [image for image, _ in bases if image not in stages]
    assert len(outside) == 1 and re.fullmatch(r"python:3\.12-\S+@sha256:[0-9a-f]{64}", outside[0])
    installs = re.findall(r"/bin/pip install (.*)", text)
    assert len(installs) == 3
    for options in installs:
        assert "--require-hashes -r requirements" in options or "--no-deps" in options
    assert "apt" not in re.sub(r"^#.*$", "", text, flags=re.M)


def test_the_linter_finds_dockerfile_errors() -> None:
    text = "from debian\nRUN apt-get install gcc\nRUN pip install x | tee y\nADD a b\nCMD x\n"
    codes = " ".join(lint(text.replace("from", "FROM")))
    for code in ("DL3006", "DL3009", "DL3042", "DL4006", "DL3020", "DL3025", "DL3002"):
        assert code in codes
    assert "upper case" in " ".join(lint(text))


def test_service_options_over_http(llm: Any) -> None:
    body = {"prompt": "abcabc", "n": 4, "seed": 5, "max_tokens": 300, "temperature": 1.0}
    all_samples = llm.generate(**{**body, "prompt": "abcabc"}).samples
    shortest = min(
        (s for s in all_samples if s.finish_reason == "stop"), key=lambda s: len(s.tokens)
    )
    with LiveServer(llm, Settings(port=0)) as server:
        with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:

            def post(**more: Any) -> Any:
                return http.post("/v1/completions", json={**body, **more})

            first = post(first_finish=1).json()
            assert [choice["text"] for choice in first["choices"]] == [shortest.text]
            assert post(first_finish=1, stream=True).status_code == 400
            assert post(first_finish=9).status_code == 400
            part = post(segment=6, n=2, logprobs=1).json()
            resumed = post(resume=part["anydecode"]["resume"], segment=5, logprobs=1).json()
            chat = {"messages": [{"role": "user", "content": "x"}], "segment": 4, "seed": 5}
            segment = http.post("/v1/chat/completions", json=chat).json()
            whole = llm.generate("abcabc", n=2, seed=5, max_tokens=11, temperature=1.0)
            assert [c["text"] for c in resumed["choices"]] == [s.text for s in whole.samples]
            assert len(resumed["choices"][0]["logprobs"]["tokens"]) == 5
            assert segment["choices"][0]["finish_reason"] == "length"
            assert len(segment["anydecode"]["resume"]["samples"][0]["tokens"]) == 4
            for number, tokens in ((0, [999999]), (1 << 20, []), (0, [1] * 300), (0, None)):
                samples = [] if tokens is None else [{"number": number, "tokens": tokens}]
                refused = post(resume={"seed": 5, "samples": samples})
                assert refused.status_code == 400 and "resume" in refused.text, refused.text
            format = {"type": "json_object"}
            assert post(segment=3, response_format=format).status_code == 400
