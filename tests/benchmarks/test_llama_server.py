"""llama-server as a baseline: its modes, its clock and its failures, on a server that stands in."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("httpx")

from anydecode.benchmarks.llama_server import modes, names, start_llama_servers  # noqa: E402
from anydecode.errors import InvalidRequestError  # noqa: E402

#: Generates a token per 10 ms; with the mode ngram-mod one per 5 ms. It refuses the mode "other".
PROGRAM = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

option = lambda name: sys.argv[sys.argv.index(name) + 1]
kind = option("--spec-type")
if kind == "other":
    sys.exit("unknown speculative type: other")

class Handler(BaseHTTPRequestHandler):
    def reply(self, code, value):
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.reply(200, {{}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["prompt"] == "too long":
            return self.reply(400, {{}})
        assert asked["cache_prompt"] is False and asked["ignore_eos"] is False
        count, pace = asked["n_predict"], 5 if kind == "ngram-mod" else 10
        timings = {{"prompt_n": len(asked["prompt"]), "prompt_ms": 40,
                   "predicted_n": count, "predicted_ms": pace * (count - 1)}}
        self.reply(200, {{"content": "", "timings": timings}})

    def log_message(self, *arguments):
        pass

HTTPServer(("127.0.0.1", int(option("--port"))), Handler).serve_forever()
"""


@pytest.mark.slow
def test_every_mode_is_asked_and_timed_by_the_servers_own_clock(tmp_path: Path) -> None:
    program = tmp_path / "a llama-server"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    notes: list[str] = []
    with ExitStack() as stack:
        servers = start_llama_servers(
            str(program), "ngram-mod, other, draft-simple=small.gguf", "m.gguf", 3, stack,
            notes.append,
        )  # fmt: skip
        answers = [one.ask("abc", 11, 0.0, True) for one in servers if one.missing is None]
        refused = servers[0].ask("too long", 11, 0.0, True)
    assert [one.engine for one in servers] == list(names("ngram-mod,other,draft-simple=x"))
    assert "unknown speculative type" in str(servers[2].missing)
    assert servers[3].hello["settings"].endswith("draft-simple, --spec-draft-model small.gguf")
    assert [answer["total"] for answer in answers] == pytest.approx([0.14, 0.09, 0.14])
    assert all((a["first"], a["tokens"], a["prompt_tokens"]) == (0.04, 11, 3) for a in answers)
    assert "400" in refused["missing"]
    assert [note.partition(": ")[0] for note in notes] == [one.engine for one in servers]
    assert "missing" in servers[0].ask("abc", 11, 0.0, True)  # it was stopped


def test_modes_are_listed_after_the_server_without_drafts() -> None:
    assert modes("ngram-mod, draft-eagle3 = a/b.gguf") == [
        ("none", ""), ("ngram-mod", ""), ("draft-eagle3", "a/b.gguf"),
    ]  # fmt: skip
    assert names("") == ("llama-server",)


@pytest.mark.parametrize("types", ["ngram-mod,ngram-mod", "draft-simple=", "=x.gguf", "none"])
def test_bad_modes_are_refused(types: str) -> None:
    with pytest.raises(InvalidRequestError, match="--spec-types"):
        modes(types)
