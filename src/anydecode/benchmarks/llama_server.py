"""llama.cpp's server as a baseline of `anydecode bench speculative`, in its speculative modes."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from anydecode.benchmarks.serving.baselines import started_server
from anydecode.errors import InvalidRequestError

#: Modes that need no second model.
NGRAM_TYPES = "ngram-simple,ngram-map-k,ngram-map-k4v,ngram-mod,ngram-cache"

#: Positions of the context, and seconds that an answer may take.
CONTEXT, ANSWER_TIMEOUT = 4096, 600.0


class LlamaServer:
    """A running llama-server, asked like a `baselines.Worker`.

    Args:
        engine: Name in the report.
        url: URL of the server, without a path.
        settings: Settings in the report.
        missing: Why it does not run, or None.
    """

    def __init__(self, engine: str, url: str, settings: str, missing: str | None = None) -> None:
        self.engine = engine
        self.missing = missing
        self.hello = {"settings": settings}
        self._url = url

    def ask(self, prompt: str, tokens: int, temperature: float, ends: bool) -> dict[str, Any]:
        """Answer a rendered prompt, with the text of special tokens read as such.

        Returns:
            Seconds to the first token (`first`) and to the last one (`total`), by the server's own
            clock, and the numbers of generated `tokens` and of `prompt_tokens`; or the reason why
            there are none (`missing`).
        """
        import httpx

        fields = {
            "prompt": prompt, "n_predict": tokens, "temperature": temperature, "seed": 1,
            "samplers": ["temperature"], "ignore_eos": not ends, "cache_prompt": False,
        }  # fmt: skip
        try:
            with httpx.Client(timeout=ANSWER_TIMEOUT, trust_env=False) as client:
                response = client.post(f"{self._url}/completion", json=fields).raise_for_status()
            timings = response.json()["timings"]
            first = timings["prompt_ms"] / 1000
            return {
                "first": first,
                "total": first + timings["predicted_ms"] / 1000,
                "tokens": timings["predicted_n"],
                "prompt_tokens": timings["prompt_n"],
            }
        except (httpx.HTTPError, ValueError, LookupError) as error:
            return {"missing": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def modes(types: str) -> list[tuple[str, str]]:
    """The modes of `--spec-types` as (type, file of the draft model or ""), after "none".

    Raises:
        InvalidRequestError: A mode has no type, or is given twice.
    """
    found = [("none", "")]
    for part in filter(None, (part.strip() for part in types.split(","))):
        kind, equals, file = (piece.strip() for piece in part.partition("="))
        if not kind or (equals and not file) or kind in dict(found):
            raise InvalidRequestError(
                f"--spec-types has {part!r}; give each mode once, as TYPE or TYPE=DRAFT.gguf"
            )
        found.append((kind, file))
    return found


def names(types: str) -> tuple[str, ...]:
    """The names in the report of a server without drafts and of each mode."""
    return ("llama-server", *(f"llama-server:{kind}" for kind, _ in modes(types)[1:]))


def start_llama_servers(
    program: str,
    types: str,
    model: str,
    threads: int,
    stack: ExitStack,
    log: Callable[[str], None],
) -> Sequence[LlamaServer]:
    """Start `program` on the file `model` without drafts and in each mode; `stack` stops them. A
    server that does not start is reported through `log` and has a reason in `missing`."""
    servers = []
    for name, (kind, file) in zip(names(types), modes(types), strict=True):
        options = [f"--spec-type {kind}"]
        if file:
            options.append(f"--spec-draft-model {shlex.quote(file)}")
        command = (
            f"{shlex.quote(program)} --model {shlex.quote(model)} --threads {threads}"
            f" --ctx-size {CONTEXT} --parallel 1 --port {{port}} {' '.join(options)}"
        )
        url, missing = "", None
        try:
            url = stack.enter_context(started_server(name, command)).removesuffix("/v1")
        except InvalidRequestError as error:
            missing = str(error)
        log(f"{name}: {missing or 'started'}")
        settings = ", ".join([f"{threads} threads", *options])
        servers.append(LlamaServer(name, url, settings, missing))
    return servers
