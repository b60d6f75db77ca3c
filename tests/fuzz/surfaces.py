"""What is fuzzed: of each surface its seeds, how they are changed, and what holds for any case.

A case is a byte string. Every surface accepts or refuses it with the documented error.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from safetensors.numpy import save

from anydecode import LLM
from anydecode.certification.tiny import tiny_llm
from anydecode.constraints.constraint import Constraint
from anydecode.constraints.languages import Grammar, Regex
from anydecode.constraints.structural_tag import StructuralTag
from anydecode.errors import AnydecodeError
from anydecode.models.chat import render, time_limit
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.server.app import create_app
from anydecode.server.settings import Settings
from fuzz.drafters import DECODERS, write_drafters
from fuzz.folders import FIRST, write_folders
from fuzz.gguf_files import gguf_files
from fuzz.mutations import Mutator, mutate_bytes, mutate_json, mutate_safetensors, named
from gguf_models import make_tensors, write_gguf
from model_files import expert_tensors, run_if_valid, tokenizer_json


class Surface(NamedTuple):
    """One kind of input.

    Attributes:
        seeds: Returns valid cases.
        open: Gives a function that runs a case; it raises for anything but an accepted case and a
            documented error.
        mutate: Changes a case.
        tokens: Parts that are inserted into cases.
        is_native: Whether the cases reach the kernels.
    """

    seeds: Callable[[], list[bytes]]
    open: Callable[[], AbstractContextManager[Callable[[bytes], None]]]
    mutate: Mutator
    tokens: Sequence[bytes] = ()
    is_native: bool = False


def _check_error(error: AnydecodeError) -> None:
    assert "\n" not in str(error) and 0 < len(str(error)) <= 1000, f"not one line: {error}"


# --- model files


@contextmanager
def _replaced(file: Path, content: bytes) -> Iterator[None]:
    """The file has `content` meanwhile; it may not exist before. It is not written in place: a
    mapped file must not change."""
    before = file.read_bytes() if file.exists() else None
    file.unlink(missing_ok=True)
    file.write_bytes(content)
    try:
        yield
    finally:
        file.unlink()
        if before is not None:
            file.write_bytes(before)


def _gguf_seeds() -> list[bytes]:
    seeds = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        for family, form in (
            ("llama", "Q4_0"), ("smollm3", "Q8_0"), ("gemma3", "F16"), ("phi3", "Q5_1"),
            ("qwen2", "Q4_1"),
        ):  # fmt: skip
            write_gguf(path, family, make_tensors(family), form)
            seeds.append(path.read_bytes())
    return [*seeds, *gguf_files().values()]


@contextmanager
def _gguf() -> Iterator[Callable[[bytes], None]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"

        def run(case: bytes) -> None:
            path.write_bytes(case)
            run_if_valid(path)

        yield run


def _folder_seeds() -> list[bytes]:
    """The files of all folders, each behind the folder's name and its own; those of the tokenizer
    once."""
    seeds = []
    with tempfile.TemporaryDirectory() as root:
        for name, folder in write_folders(Path(root)).items():
            for file in sorted(path for path in folder.rglob("*") if path.is_file()):
                has_own = not (folder / "tokenizer.json").exists()
                if name == FIRST or has_own or not file.name.startswith("tokenizer"):
                    head = f"{name}/{file.relative_to(folder)}\n"
                    seeds.append(head.encode() + file.read_bytes())
    normalizer = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}
    special = {"id": 26, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False,
               "normalized": False, "special": True}  # fmt: skip
    for change in (
        {"model": {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##",
                   "max_input_chars_per_word": 100, "vocab": {"a": 0, "##b": 1}}},
        {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0], ["b", -2.0]]}},
        {"normalizer": normalizer, "added_tokens": [special],
         "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": "Isolated",
                           "invert": False}},
    ):  # fmt: skip
        seeds.append(
            b"experts/tokenizer.json\n" + json.dumps({**tokenizer_json(), **change}).encode()
        )
    index = {"weight_map": dict.fromkeys(expert_tensors(), "model.safetensors")}
    seeds.append(b"experts/model.safetensors.index.json\n" + json.dumps(index).encode())
    seeds.append(b'experts/generation_config.json\n{"eos_token_id": [2, 3], "temperature": 0.6}')
    seeds.append(b"experts/chat_template.jinja\n{{ messages[0].content }}")
    return seeds


@contextmanager
def _folder() -> Iterator[Callable[[bytes], None]]:
    with tempfile.TemporaryDirectory() as root:
        folders = write_folders(Path(root))

        def run(case: bytes) -> None:
            name, _, content = case.partition(b"\n")
            folder, _, file_name = name.decode().partition("/")
            with _replaced(folders[folder] / file_name, content):
                run_if_valid(folders[folder])

        yield run


_ADAPTER_CONFIG = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_rslora": False, "bias": "none",
    "target_modules": ["q_proj", "down_proj"], "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"q_proj": 3}, "layers_to_transform": None, "fan_in_fan_out": False,
}  # fmt: skip


def _adapter_seeds() -> list[bytes]:
    generator, tensors = np.random.default_rng(0), {}
    hidden, inner = 64, 128
    for layer in range(2):
        for module, width, height in (("self_attn.q_proj", hidden, hidden),
                                      ("mlp.down_proj", inner, hidden)):  # fmt: skip
            stem = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{stem}.lora_A.weight"] = generator.standard_normal((2, width), np.float32)
            tensors[f"{stem}.lora_B.weight"] = generator.standard_normal((height, 2), np.float32)
    return [
        b"adapter_config.json\n" + json.dumps(_ADAPTER_CONFIG).encode(),
        b"adapter_model.safetensors\n" + save(tensors),
    ]


@contextmanager
def _adapters() -> Iterator[Callable[[bytes], None]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        for seed in _adapter_seeds():
            name, _, content = seed.partition(b"\n")
            (path / name.decode()).write_bytes(content)

        def run(case: bytes) -> None:
            name, _, content = case.partition(b"\n")
            with _replaced(path / name.decode(), content):
                try:
                    with tiny_llm() as llm:
                        llm.add_adapter("a", path)
                        llm.generate("abc", max_tokens=2, adapter="a")
                except AnydecodeError as error:
                    _check_error(error)

        yield run


def _drafter_seeds() -> list[bytes]:
    """The files of all drafters, each behind its layout and its name."""
    with tempfile.TemporaryDirectory() as root:
        return [
            f"{layout}/{file.name}\n".encode() + file.read_bytes()
            for layout, folder in write_drafters(Path(root))[1].items()
            for file in sorted(folder.iterdir())
        ]


@contextmanager
def _drafters() -> Iterator[Callable[[bytes], None]]:
    with tempfile.TemporaryDirectory() as root:
        model, folders = write_drafters(Path(root))

        def run(case: bytes) -> None:
            name, _, content = case.partition(b"\n")
            layout, _, file_name = name.decode().partition("/")
            with _replaced(folders[layout] / file_name, content):
                try:
                    with LLM(model, draft=folders[layout], threads=2) as llm:
                        llm.generate([5, 6, 7], max_tokens=3, decoder=DECODERS[layout])
                except AnydecodeError as error:
                    _check_error(error)

        yield run


# --- requests


class _App:
    """Sends bodies to the ASGI application and checks the answers."""

    def __init__(self, llm: LLM) -> None:
        self._logger = logging.getLogger("anydecode")
        self._level = self._logger.level
        self._logger.setLevel(logging.CRITICAL + 1)
        self._llm = llm
        settings = Settings(prepare_seconds=1.0, prepare_memory=1 << 28)
        transport = httpx.ASGITransport(create_app(llm, settings), raise_app_exceptions=False)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        self._logger.setLevel(self._level)
        self._loop.run_until_complete(self._http.aclose())
        self._loop.close()
        assert not self._llm.engine.has_work
        self._llm.engine.check_integrity()

    def post(self, path: str, body: bytes) -> dict[str, Any] | None:
        """The JSON object of an answer of status 200; None for other answers."""
        sent = self._http.post(path, content=body, headers={"content-type": "application/json"})
        answer = self._loop.run_until_complete(sent)
        assert self._llm.driver.error is None, "the engine has stopped"
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, (
            f"status {answer.status_code}: {answer.text[:300]}"
        )
        for fault in ("internal_error", "worker_ended"):
            assert fault not in answer.text, answer.text[:300]
        if answer.text.startswith(("data:", "event:")):
            return None
        value = json.loads(answer.content, parse_constant=_no_constant)
        if answer.status_code == 200:
            return dict(value)
        assert value["error"]["message"] and "\n" not in value["error"]["message"]
        return None


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} in an answer")


@contextmanager
def _app() -> Iterator[_App]:
    # A short context: otherwise a request for many tokens would take long, as it should.
    model = ScriptedModel(vocab_size=ByteTokenizer.vocab_size, seed=1)
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=256, max_running=4) as llm:
        llm.methods.max_learned_bytes = 16 << 20  # which would count as growth
        app = _App(llm)
        yield app
        app.close()


_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "pattern": "^x+$"}},
    "required": ["a"],
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True}}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA}}
_USER = {"role": "user", "content": [{"type": "text", "text": "a"}]}
_CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
_BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("completions", {"prompt": ["a", "b"], "n": 2, "best_of": 2, "stop": ["x"], "logprobs": 2,
                     "logit_bias": {"97": 1}, "max_tokens": 3, "echo": True, "seed": 1}),
    ("completions", {"prompt": [97, 98], "stream": True, "stream_options": {"include_usage": True},
                     "max_tokens": 2, "decoder": "prompt-lookup:size=3", "min_p": 0.1,
                     "sampler": "top-w", "repetition_penalty": 1.1, "banned_words": ["ab"]}),
    ("completions", {"prompt": "a", "max_tokens": 3, "seed": 1,
                     "resume": {"seed": 1, "samples": [{"number": 0, "tokens": [97]}]}}),
    ("completions", {"prompt": "a", "max_tokens": 4, "decoder": "beam:width=2", "temperature": 0}),
    ("chat/completions", {"messages": [{"role": "system", "content": "s"}, _USER,
                                       {"role": "assistant", "tool_calls": _CALLS},
                                       {"role": "tool", "tool_call_id": "1", "content": "2"}],
                          "tools": [_TOOL], "tool_choice": "auto", "max_tokens": 3,
                          "reasoning_effort": "low", "logprobs": True, "top_logprobs": 2}),
    ("chat/completions", {"messages": [_USER], "tools": [_TOOL], "max_tokens": 3, "stream": True,
                          "tool_choice": {"type": "function", "function": {"name": "f"}},
                          "parallel_tool_calls": False, "chat_template_kwargs": {"x": 1}}),
    ("chat/completions", {"messages": [_USER], "response_format": _FORMAT, "max_tokens": 9}),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
                   "instructions": "i", "max_output_tokens": 3, "reasoning": {"effort": "low"},
                   "text": {"format": {**_FORMAT, "schema": _SCHEMA, "name": "n"}}}),
    ("responses", {"input": [_USER,
                             {"type": "function_call", "call_id": "1", "name": "f",
                              "arguments": "{}"},
                             {"type": "function_call_output", "call_id": "1", "output": "2"}],
                   "tools": [{"type": "function", **_TOOL["function"]}], "max_output_tokens": 3,
                   "include": ["message.output_text.logprobs"], "truncation": "auto",
                   "stream": True}),
    ("embeddings", {"input": ["a", "b"], "encoding_format": "base64"}),
)  # fmt: skip


@contextmanager
def _bodies() -> Iterator[Callable[[bytes], None]]:
    with _app() as app:

        def run(case: bytes) -> None:
            name, _, body = case.partition(b"\n")
            app.post("/v1/" + name.decode(), body)

        yield run


_SCHEMAS: tuple[Any, ...] = (
    _SCHEMA,
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9},
     "minItems": 1, "maxItems": 4, "uniqueItems": True},
    {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 9}, {"const": {"a": [1, None]}}]},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {
        "type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}, "v": {"type": "null"}},
        "additionalProperties": False}}},
    {"allOf": [{"properties": {"a": {"type": "number", "multipleOf": 0.1}}},
               {"required": ["a"], "minProperties": 1, "maxProperties": 3}]},
    {"oneOf": [{"type": "boolean"}, {"enum": ["a", "b", 3]}], "not": {"const": "b"}},
    {"type": "object", "patternProperties": {"^x_": {"type": "integer"}},
     "propertyNames": {"pattern": "^[a-z_]{1,5}$"}, "additionalProperties": {"type": "string"},
     "dependentRequired": {"x_a": ["x_b"]}},
    {"type": "string", "format": "date-time"},
    {"prefixItems": [{"type": "string", "format": "uuid"}, {"type": ["null", "integer"]}],
     "items": False, "contains": {"type": "integer"}},
    {"if": {"type": "integer"}, "then": {"minimum": 3}, "else": {"maxLength": 3},
     "unevaluatedProperties": False},
)  # fmt: skip
_KEYWORDS = (
    *("type", "properties", "required", "additionalProperties", "patternProperties", "items"),
    *("propertyNames", "minProperties", "maxProperties", "minItems", "maxItems", "uniqueItems"),
    *("prefixItems", "contains", "minContains", "anyOf", "allOf", "oneOf", "not", "if", "then"),
    *("else", "enum", "const", "pattern", "format", "minLength", "maxLength", "minimum", "maximum"),
    *("exclusiveMinimum", "multipleOf", "$ref", "$defs", "definitions", "dependentSchemas"),
    *("dependentRequired", "unevaluatedItems", "$id", "$anchor", "$dynamicRef", "$schema"),
    *("object", "array", "string", "integer", "number", "null", "boolean", "uri", "ipv4", "email"),
    *("#", "#/$defs/tree", "#/properties/a", "http://a/b", "^(a+)+$", "(?=a)b", "[a-z]{1,60000}"),
    *('{"$ref": "#"}', '{"type": "object"}', '[{"$ref": "#"}, {"$ref": "#"}]', "true", "false"),
)


@contextmanager
def _schemas() -> Iterator[Callable[[bytes], None]]:
    with _app() as app:

        def run(case: bytes) -> None:
            start = b'{"prompt": "a", "max_tokens": 24, "response_format": {"type": "json_schema",'
            answer = app.post(
                "/v1/completions",
                start + b' "json_schema": {"name": "n", "schema": ' + case + b"}}}",
            )
            if answer is not None and answer["choices"][0]["finish_reason"] == "stop":
                json.loads(answer["choices"][0]["text"])

        yield run


_PATTERNS = (
    b"regex\n(a+)+b", b"regex\n[a-c]{2,40}(x|yz)?", b"regex\n\\d{3}-\\w+\\s*", b"regex\n(?i:abc)",
    b"regex\n\\p{L}+[^\\x00-\\x20]", b'lark\nstart: "a" b | b\nb: /[0-9]+/ ("," b)?',
    b'lark\nstart: item+\nitem: NAME "=" VALUE ";"\nNAME: /[a-z]+/\nVALUE: /[0-9]+/\n%ignore " "',
    b'lark\nstart: %json {"type": "object"}', b"lark\nstart: A~2..5\nA: /a/ & /[ab]/",
    b'gbnf\nroot ::= "a" b | [0-9]+ "x"\nb ::= "(" root ")" | b?',
    b'tag\n{"format": {"type": "tag", "begin": "<", "end": [">", "</a>"], "content": {"type": "or",'
    b' "elements": [{"type": "any_text", "excludes": ["b"], "max_chars": 9},'
    b' {"type": "regex", "pattern": "a/b+"}, {"type": "repeat", "min": 1, "max": 3, "content":'
    b' {"type": "const_string", "value": "ab"}}]}}}',
    b'tag\n{"format": {"type": "sequence", "elements": [{"type": "triggered_tags", "triggers":'
    b' ["<"], "excludes": ["x"], "stop_after_first": true, "tags": [{"type": "tag", "begin": "<a>",'
    b' "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": ""}]},'
    b' {"type": "const_string", "value": "|"}, {"type": "grammar", "grammar": "root ::= [ab]+"}]}}',
    b'tag\n{"structures": [{"begin": "<a>", "schema": {"enum": [1, "b"]}, "end": "</a>"}],'
    b' "triggers": ["<"]}',
    b'gbnf\nroot ::= item{2,9} ws\nitem ::= [^\\n"] | "\\u0041"\nws ::= [ \\t\\n]*',
)  # fmt: skip
_PATTERN_TOKENS = (
    *(b"*", b"+", b"?", b"{2,}", b"{1,60000}", b"{,9}", b"|", b"(", b")", b"(?:", b"(?=", b"(?<!"),
    *(b"[", b"]", b"[^", b"\\w", b"\\d", b"\\p{L}", b"\\1", b"\\x{10ffff}", b"^", b"$", b"."),
    *(b'"any_text"', b'"const_string"', b'"star"', b'"at_least_one": true', b"[]", b"{}", b"null"),
    *(b"&", b"~", b"(?i)", b"::=", b": ", b"\n", b'"', b"/", b"start", b"root", b"%ignore "),
    *(b"%json {}", b"%import common.INT", b"%regex {}", b"[suffix=\"a\"]", b"\xc3\xa9", b"\\"),
)  # fmt: skip


@contextmanager
def _patterns() -> Iterator[Callable[[bytes], None]]:
    tokenizer = ByteTokenizer()

    def run(case: bytes) -> None:
        kind, _, text = case.decode(errors="surrogateescape").partition("\n")
        try:
            constraint: Constraint
            if kind == "tag":
                constraint = StructuralTag(text)
            else:
                constraint = Regex(text) if kind == "regex" else Grammar(text, syntax=kind)
            state = constraint.start(tokenizer, tokenizer.vocab_size)
            for _ in range(6):
                if state.finished:
                    break
                state.advance(int(np.flatnonzero(state.mask())[0]))
        except AnydecodeError as error:
            _check_error(error)

    yield run


_TEMPLATES = (
    b"{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    b"{% if add_generation_prompt %}<|assistant|>{% endif %}",
    b"{%- set ns = namespace(n=0) -%}{% for m in messages if m.role == 'user' %}"
    b"{% set ns.n = ns.n + 1 %}{{ ns.n ~ ':' ~ m['content'] | trim }}{% endfor %}",
    b"{% macro f(x, y=2) %}{{ x * y }}{% endmacro %}{{ f('a') }}{{ messages | tojson(indent=2) }}",
    b"{% if tools %}{{ tools | map(attribute='name') | join(', ') }}{% else %}"
    b"{{ raise_exception('no tools') }}{% endif %}",
    b"{% generation %}{{ messages[-1].content.split('a')[0] | upper }}{% endgeneration %}"
    b"{% for i in range(3) %}{% if i == 1 %}{% break %}{% endif %}"
    b"{{ strftime_now('%Y') }}{% endfor %}",
)
_TEMPLATE_TOKENS = (
    *(b"{{ ", b" }}", b"{% ", b" %}", b"{# ", b" #}", b"{% endfor %}", b"{% endif %}", b"| ", b"("),
    *(b"{% for a in range(99999) %}", b"range(10**9)", b"'x' * 10**9", b"9**9**9", b"| center(99)"),
    *(b"| list", b"| sum", b"| tojson", b"| format", b"'%999999999d' % 1", b"| replace('', 'xx')"),
    *(b"| groupby(0)", b"| batch(0)", b"| slice(0)", b"| wordwrap(0)", b"| indent(99999999)"),
    *(b"| urlize", b"| xmlattr", b"| random", b"| map('upper')", b"| select('x')", b"lipsum(999)"),
    *(b".__class__", b".__init__.__globals__", b"['__class__']", b"| attr('__class__')", b"self"),
    *(b"cycler(1)", b"joiner()", b"dict(a=1)", b"namespace()", b"loop.index", b"caller()", b"not "),
    *(b"messages", b"[::-1]", b"is defined", b"{% set x = ", b"{% include 'a' %}"),
    *(b"{% call f() %}", b"{% filter upper %}", b"{% block a %}", b"{% raw %}"),
    *(b".format('{0.x}')", b"{% extends 'a' %}"),
)  # fmt: skip


@contextmanager
def _templates() -> Iterator[Callable[[bytes], None]]:
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]

    def run(case: bytes) -> None:
        try:
            with time_limit(1.0):
                render(case.decode(errors="surrogateescape"), messages, tools=[{"name": "f"}])
        except MemoryError:
            pass  # documented: the rendering takes more memory than there is
        except AnydecodeError as error:
            assert "\n" not in str(error)

    yield run


_JSON_OR_BYTES: dict[str, Mutator] = {
    "safetensors.index": mutate_json,
    ".safetensors": mutate_safetensors,
    ".json": mutate_json,
    "": mutate_bytes,
}
SURFACES = {
    "gguf": Surface(_gguf_seeds, _gguf, mutate_bytes, (b"gpt2", b"rwkv", b"llama", b"ssm_a"), True),
    "folders": Surface(_folder_seeds, _folder, named(_JSON_OR_BYTES), is_native=True),
    "adapters": Surface(_adapter_seeds, _adapters, named(_JSON_OR_BYTES), is_native=True),
    "drafters": Surface(_drafter_seeds, _drafters, named(_JSON_OR_BYTES), is_native=True),
    "bodies": Surface(
        lambda: [f"{name}\n{json.dumps(body)}".encode() for name, body in _BODIES],
        _bodies,
        named({"": mutate_json}),
        (b"auto", b"none", b"beam:width=9", b"top-w", b"\xff", b"1e400", b'{"type": "text"}'),
    ),
    "schemas": Surface(
        lambda: [json.dumps(schema).encode() for schema in _SCHEMAS],
        _schemas,
        mutate_json,
        tuple(word.encode() for word in _KEYWORDS),
    ),
    "patterns": Surface(lambda: list(_PATTERNS), _patterns, named({"": mutate_bytes}),
                        _PATTERN_TOKENS),
    "templates": Surface(lambda: list(_TEMPLATES), _templates, mutate_bytes, _TEMPLATE_TOKENS),
}  # fmt: skip
