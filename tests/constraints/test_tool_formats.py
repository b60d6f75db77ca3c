"""The tool-call formats of model families: what is rendered is allowed, and is parsed back."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest

pytest.importorskip("llguidance")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from tokenizers import AddedToken, Tokenizer, decoders  # noqa: E402
from tokenizers.models import BPE  # noqa: E402
from tokenizers.pre_tokenizers import ByteLevel  # noqa: E402

from anydecode.constraints.json.json_schema import JsonSchema  # noqa: E402
from anydecode.constraints.tools.families import TOOL_FORMATS  # noqa: E402
from anydecode.constraints.tools.formats import JsonCalls  # noqa: E402
from anydecode.constraints.tools.stream import TextStream  # noqa: E402
from anydecode.constraints.tools.tool_calls import ToolCalls, parse_answer  # noqa: E402
from anydecode.models.scripted import ByteTokenizer  # noqa: E402
from anydecode.models.tokenizer import TOOL_TAGS  # noqa: E402
from anydecode.models.tokenizers import HFTokenizer  # noqa: E402
from anydecode.server.parsers import tool_format  # noqa: E402
from tool_format_kinds import FORMATS  # noqa: E402

TOKENIZER = ByteTokenizer()
#: The arguments of two tools. References, unions and free values are among them.
SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "town": {"type": "string"},
            "zip": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "unit": {"enum": ["degree C", "degree F"]},
            "days": {"type": "integer"},
            "share": {"type": "number"},
            "now": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "place": {"$ref": "#/$defs/Place"},
            "more": {"type": "object"},
        },
        "required": ["town"],
        "$defs": {
            "Place": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "inner": {"$ref": "#/$defs/Place"}},
                "required": ["x"],
            }
        },
    },
    "stop": {"type": "object", "properties": {}},
}
TAGS = ("<escape>", '<|"|>', "</parameter>", "</arg_value>", "</｜DSML｜parameter>")
#: Formats that have one call per answer.
SINGLE = ("gpt-oss", "gigachat")
NAMES = st.text("abcxyz_", min_size=1, max_size=4)
TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"), max_size=12
).filter(lambda text: text != "null" and not any(tag in text for tag in TAGS))
NUMBERS = st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False, width=32)
VALUES = st.recursive(
    TEXTS | NUMBERS | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
PLACES = st.builds(
    lambda x, inner: {"x": x, **({} if inner is None else {"inner": {"x": inner}})},
    NUMBERS,
    NUMBERS | st.none(),
)
WEATHER = st.fixed_dictionaries(
    {"town": TEXTS},
    optional={
        "zip": TEXTS | st.none(),
        "unit": st.sampled_from(["degree C", "degree F"]),
        "days": st.integers(-99, 99),
        "share": NUMBERS,
        "now": st.booleans(),
        "tags": st.lists(TEXTS, max_size=3),
        "place": PLACES,
        "more": st.dictionaries(NAMES, VALUES, max_size=3),
    },
)
CALLS = st.lists(
    st.tuples(st.just("get_weather"), WEATHER) | st.just(("stop", {})), min_size=1, max_size=3
)
#: Text that models write in front of calls; it starts none in any format.
BEFORE = "Let me <b>look</b> [it] up.\n"


def for_format(format_name: str, calls: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """`calls` with arguments in the order of the schema, in which they are generated; only one
    under a format that has one call per answer."""
    names = SCHEMAS["get_weather"]["properties"]
    ordered = [
        (tool, {name: arguments[name] for name in names if name in arguments})
        for tool, arguments in calls
    ]
    return ordered[:1] if format_name in SINGLE else ordered


def parsed(format_name: str, parts: list[str]) -> tuple[str, list[tuple[str, Any]], int]:
    """Content, calls and number of complete calls of a text that arrives in `parts`."""
    stream = TextStream()
    steps = TOOL_FORMATS[format_name].parse(stream, SCHEMAS)
    content, calls, num_complete = "", [], 0
    for position, part in enumerate(parts):
        for kind, value in stream.run(steps, part, final=position == len(parts) - 1):
            if kind == "content":
                content += value
            elif kind == "call":
                calls.append((value, ""))
            elif kind == "arguments":
                calls[-1] = (calls[-1][0], calls[-1][1] + value)
            else:
                num_complete += 1
    return content, [(name, json.loads(text)) for name, text in calls], num_complete


#: Options of `JsonSchema`: fixed white space, and no limits that a schema does not have.
EXACT: dict[str, Any] = {"whitespace": None, "max_string": 0, "extra_properties": True}


@cache
def constraint(format_name: str, is_required: bool) -> ToolCalls:
    schemas = {name: JsonSchema(schema, **EXACT) for name, schema in SCHEMAS.items()}
    return ToolCalls(schemas, TOOL_FORMATS[format_name], is_required=is_required)


def accepts(format_name: str, text: str, *, is_required: bool) -> bool:
    state = constraint(format_name, is_required).start(TOKENIZER, TOKENIZER.vocab_size)
    for byte in text.encode():
        if not state.allows(byte):
            return False
        state.advance(byte)
    return state.can_stop


@pytest.mark.parametrize("format_name", FORMATS)
@settings(max_examples=20, deadline=None)
@given(calls=CALLS, has_text=st.booleans(), first=st.integers(1, 8))
def test_rendered_calls_are_parsed_from_any_split(
    format_name: str, calls: list[tuple[str, Any]], has_text: bool, first: int
) -> None:
    calls = for_format(format_name, calls)
    before = BEFORE * has_text
    text = before + TOOL_FORMATS[format_name].render(calls, SCHEMAS)
    splits = [[text], list(text), *([text[:at], text[at:]] for at in range(first, len(text), 8))]
    for parts in splits:
        content, found, num_complete = parsed(format_name, parts)
        assert (content.strip(), found) == (before.strip(), calls)
        assert num_complete == len(calls)


@pytest.mark.parametrize("format_name", FORMATS)
@settings(max_examples=10, deadline=None)
@given(calls=CALLS)
def test_rendered_calls_are_allowed(format_name: str, calls: list[tuple[str, Any]]) -> None:
    calls = for_format(format_name, calls)
    text = TOOL_FORMATS[format_name].render(calls, SCHEMAS)
    assert accepts(format_name, text, is_required=True)
    assert accepts(format_name, BEFORE + text, is_required=False)
    assert accepts(format_name, BEFORE, is_required=False)
    assert not accepts(format_name, BEFORE, is_required=True)
    assert not accepts(format_name, text.replace(calls[0][0], "unknown"), is_required=True)


@pytest.mark.parametrize(
    ("format_name", "text", "call"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": "}"}, "name": "f"}</tool_call>', {"a": "}"}),
        ("llama3", '{"name": "f", "parameters": {"a": 1}}', {"a": 1}),
        ("llama4", "[f(a=True, b=[None, {\"k\": -1.5}])]", {"a": True, "b": [None, {"k": -1.5}]}),
        ("mistral-args", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', {"a": 1}),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:12"
         '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
         {"a": 1}),
        ("deepseek-v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f"
         '\n```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', {"a": 1}),
        ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=a>\n[1,\n2]\n</parameter>\n"
         "</function>\n</tool_call>", {"a": [1, 2]}),
        ("functiongemma", "<start_function_call>call:f{a:[1,{b:<escape>}<escape>}]}"
         "<end_function_call>", {"a": [1, {"b": "}"}]}),
        ("glm-4.7", "<tool_call>f<arg_key>a</arg_key><arg_value>[1, 2]</arg_value></tool_call>",
         {"a": [1, 2]}),
        ("phi", '<|tool_call|>{"name": "f", "arguments": {"a": 1}}<|/tool_call|>', {"a": 1}),
        ("llama4-json", '<|python_start|><|python_end|>{"name": "f", "parameters": {"a": 1}}',
         {"a": 1}),
        ("minimax-m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">[1,\n2]'
         "</parameter>\n</invoke>\n</minimax:tool_call>", {"a": [1, 2]}),
        ("deepseek-v3.2", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
         '<｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter>\n'
         '<｜DSML｜parameter name="b" string="false">1</｜DSML｜parameter>\n'
         "</｜DSML｜invoke>\n</｜DSML｜function_calls>", {"a": "1", "b": 1}),
        ("deepseek-v4", '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n'
         "</｜DSML｜tool_calls>", {}),
        ("command", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f",'
         ' "parameters": {"a": 1}}\n]<|END_ACTION|>', {"a": 1}),
        ("command", '<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": 1}}]<|END_ACTION|>',
         {"a": 1}),
        ("apriel", '\n<tool_calls>[{"name": "f", "arguments": {"a": 1}, "id": "x"}]</tool_calls>',
         {"a": 1}),
        ("apertus", '<|tools_prefix|>[{"f": {"a": {"b": 1}}}]<|tools_suffix|>', {"a": {"b": 1}}),
        ("gigachat", '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": '
         '{"a": 1}}<|message_sep|>\n\n', {"a": 1}),
        ("functionary-v3.1", '<function=f>{"a": "</"}</function>', {"a": "</"}),
        ("solar", "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>f<|tool_call:args|>"
         '{"a": 1}<|tool_call:end|>', {"a": 1}),
        ("solar", "<|content|>So.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>"
         '<|tool_call:name|>f<|tool_call:args|>{"a": 1}<|tool_call:end|>', {"a": 1}),
        ("gigachat-3.5", '\n\n<｜GCML｜tool_calls>\n<｜GCML｜invoke name="f">\n'
         '<｜GCML｜parameter name="a" string="false">1</｜GCML｜parameter>\n</｜GCML｜invoke>\n'
         "</｜GCML｜tool_calls><|message_sep|>\n\n", {"a": 1}),
        ("command-r", 'Action: ```json\n[\n    {\n        "tool_name": "f",\n'
         '        "parameters": {\n            "a": 1\n        }\n    }\n]```', {"a": 1}),
        ("command-r", 'Action: ```json\n[{"tool_name": "f", "parameters": {"a": 1}}]\n```',
         {"a": 1}),
        ("gpt-oss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary"
         ' to=functions.f <|constrain|>json<|message|>{"a": 1}', {"a": 1}),
        ("gpt-oss", "<|channel|>analysis<|message|>hm to=functions.g<|end|><|start|>assistant"
         ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', {"a": 1}),
        ("gpt-oss", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', {"a": 1}),
        ("gpt-oss", '<|channel|>commentary to=functions.f<|message|>{"a": 1}', {"a": 1}),
    ],
)  # fmt: skip
def test_calls_that_models_write(format_name: str, text: str, call: Any) -> None:
    assert parsed(format_name, list(text))[1] == [("f", call)]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('stop\n{}', ""),
        ('>>>stop\n{}', ""),
        ('>>>all\nSo.>>>stop\n{}', "So."),
        ('all\n>>> 1\n>>>stop\n{}', ">>> 1\n"),
        ('all\nSo.\n>>>all\nSo.\n>>>stop\n{}', "So.\nSo.\n"),
    ],
)  # fmt: skip
def test_the_first_part_of_functionary_may_begin_in_the_prompt(text: str, content: str) -> None:
    """Calls and texts to everyone; `>>>` may also be a part of a text."""
    for parts in ([text], list(text)):
        assert parsed("functionary-v3.2", parts) == (content, [("stop", {})], 1)
    is_call = not content
    assert accepts("functionary-v3.2", text, is_required=True) is is_call
    two = '>>>get_weather\n{"town": "Oslo"}'
    assert accepts("functionary-v3.2", text + two, is_required=True) is is_call
    for allowed in ("all\nSo.", ">>>all\nSo.", "So.", "stop it"):
        assert accepts("functionary-v3.2", allowed, is_required=False)
        assert not accepts("functionary-v3.2", allowed, is_required=True)
        for parts in ([allowed], list(allowed)):
            found = parsed("functionary-v3.2", parts)
            assert found == (allowed.removeprefix(">>>").removeprefix("all\n"), [], 0)
    assert not accepts("functionary-v3.2", "stop\nit", is_required=False)


def test_the_kind_of_a_value_is_written_before_it() -> None:
    """DeepSeek-V3.2: a string as it is, or JSON, also under a schema that allows both."""
    call_format = TOOL_FORMATS["deepseek-v3.2"]
    either = {"anyOf": [{"type": "string", "minLength": 2}, {"type": "integer"}]}
    nothing = {"enum": ["a", None]}
    schema = {"type": "object", "properties": {"x": either, "y": nothing}, "required": ["x", "y"]}
    constraint = ToolCalls({"f": JsonSchema(schema, **EXACT)}, call_format, is_required=True)
    for x, y in (("ab", "a"), (7, None)):
        text = call_format.render([("f", {"x": x, "y": y})], {"f": schema})
        assert f'string="{"true" if x == "ab" else "false"}">{x}<' in text
        assert _is_valid(constraint, text)
    for wrong in ('x" string="true">a<', 'x" string="false">1.5<', 'y" string="true">null<'):
        name, _, _ = wrong.partition('"')
        start = text.index(f'name="{name}"') + len('name="')
        end = text.index("<", start)
        assert not _is_valid(constraint, text[:start] + wrong[:-1] + text[end:]), wrong


def _is_valid(constraint: ToolCalls, text: str) -> bool:
    """Whether the mask and the validation allow `text`."""
    state = constraint.start(TOKENIZER, TOKENIZER.vocab_size)
    validator = constraint.incremental_validator(TOKENIZER)
    for byte in text.encode():
        if not state.allows(byte):
            return False
        state.advance(byte)
        if validator is not None and validator.push(byte) is not None:
            return False
    return state.can_stop and (validator is None or validator.end() is None)


@pytest.mark.parametrize("format_name", TOOL_FORMATS)
def test_arguments_are_written_in_one_way(format_name: str) -> None:
    value = {"town": "Oslo", "more": {"a": "b", "c": [1, "d"]}}
    text = TOOL_FORMATS[format_name].render([("get_weather", value)], SCHEMAS)
    for parts in ([text], list(text)):
        stream = TextStream()
        steps = TOOL_FORMATS[format_name].parse(stream, SCHEMAS)
        events = [event for part in parts for event in stream.run(steps, part)]
        arguments = "".join(text for kind, text in events if kind == "arguments")
        assert arguments == json.dumps(value)


@pytest.mark.parametrize("format_name", ["llama3", "llama4-json"])
def test_calls_without_a_text_between_them_are_separate_calls(format_name: str) -> None:
    calls = [("get_weather", {"town": "Oslo"}), ("stop", {})]
    text = "".join(json.dumps({"name": name, "parameters": value}) for name, value in calls)
    assert parsed(format_name, list(text)) == ("", calls, 2)


@pytest.mark.parametrize("format_name", TOOL_FORMATS)
def test_a_cut_call_gives_the_arguments_so_far(format_name: str) -> None:
    calls = [("get_weather", {"town": "Oslo", "days": 3})]
    text = TOOL_FORMATS[format_name].render(calls, SCHEMAS)
    stream = TextStream()
    steps = TOOL_FORMATS[format_name].parse(stream, SCHEMAS)
    cut = text[: text.index("slo")]
    events = list(stream.run(steps, cut, final=True))
    assert events[0] == ("call", "get_weather")
    arguments = "".join(value for _, value in events[1:])
    assert arguments == '{"town": "O' and ("end", "") not in events


@pytest.mark.parametrize("format_name", TOOL_FORMATS)
@pytest.mark.parametrize("is_required", [False, True])
def test_no_part_of_a_cut_call_is_content(format_name: str, is_required: bool) -> None:
    """Wherever it is cut, in one part or letter by letter; its name is there if it is complete."""
    call_format = TOOL_FORMATS[format_name]
    text = call_format.render([("get_weather", {"town": "Oslo", "days": 3}), ("stop", {})], SCHEMAS)
    before = "" if is_required else "so "
    first = 1 if is_required else 2  # the first character of a tag may be text
    if format_name in ("phi-functools", "command-r") and not is_required:
        first = len(call_format.trigger)  # which begins with a word
    end_of_name = text.index("get_weather") + len("get_weather")
    for end in range(first, len(text)):
        for parts in ([before + text[:end]], list(before + text[:end])):
            stream = TextStream()
            steps = parse_answer(
                stream, call_format, SCHEMAS, has_answer=False, is_required=is_required
            )
            events = []
            for position, part in enumerate(parts):
                is_last = position == len(parts) - 1
                events += stream.run(steps, part, final=is_last, is_cut=is_last)
            content = "".join(value for kind, value in events if kind == "content")
            assert content.rstrip() == before.rstrip()
            names = [value for kind, value in events if kind == "call"]
            assert names[:1] == (["get_weather"] if end > end_of_name else names[:1])
            assert names in ([], ["get_weather"], ["get_weather", "stop"])
            assert bool(names) <= (end >= end_of_name)


@pytest.mark.parametrize(
    "format_name", [name for name, one in TOOL_FORMATS.items() if isinstance(one, JsonCalls)]
)
def test_an_opening_text_without_a_call_is_content(format_name: str) -> None:
    trigger = TOOL_FORMATS[format_name].trigger
    assert parsed(format_name, ["so ", trigger, " and"])[0] == f"so {trigger} and"


@pytest.mark.parametrize("is_cut", [False, True])
def test_the_start_of_a_tag_is_text_unless_the_answer_was_cut(is_cut: bool) -> None:
    for format_name, text, expected in (
        ("hermes", "see <tool_", "see "),
        ("hermes", "1 <", "1 <"),
        ("kimi", "<|tool_calls_sec\ufffd", ""),
        ("phi-functools", "a func", "a func"),
    ):
        stream = TextStream()
        steps = TOOL_FORMATS[format_name].parse(stream, SCHEMAS)
        events = stream.run(steps, text, final=True, is_cut=is_cut)
        assert "".join(value for _, value in events) == (expected if is_cut else text)


@pytest.mark.parametrize(
    "format_name",
    [
        "glm",
        "glm-4.7",
        "seed",
        "qwen3-coder",
        "functiongemma",
        "gemma4",
        "minimax-m2",
        "deepseek-v3.2",
    ],
)
def test_no_part_of_a_closing_tag_is_in_the_arguments(format_name: str) -> None:
    call_format = TOOL_FORMATS[format_name]
    text = call_format.render([("get_weather", {"town": "Oslo"})], SCHEMAS)
    for end in range(text.index("Oslo") + len("Oslo") + 2, len(text)):
        stream = TextStream()
        steps = call_format.parse(stream, SCHEMAS)
        events = list(stream.run(steps, text[:end], final=True, is_cut=True))
        arguments = "".join(value for kind, value in events if kind == "arguments")
        assert arguments in ('{"town": "Oslo', '{"town": "Oslo"', '{"town": "Oslo"}')


def test_a_name_that_may_be_longer_is_not_given() -> None:
    for names, found in (({"get"}, ["get"]), ({"get", "get_all"}, []), ({"set"}, [])):
        stream = TextStream()
        steps = TOOL_FORMATS["llama4"].parse(stream, dict.fromkeys(names, {}))
        assert [value for _, value in stream.run(steps, "[get", final=True)] == found


BY_ROLE = (
    ' to=functions.get_weather<|channel|>commentary json<|message|>{"town": "Oslo", "days": 3}'
)


def test_reasoning_and_answers_of_harmony() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    for parts in ([text], list(text)):
        stream = TextStream()
        steps = TOOL_FORMATS["gpt-oss"].parse(stream, {})
        texts = {"reasoning": "", "content": ""}
        for position, part in enumerate(parts):
            for kind, value in stream.run(steps, part, final=position == len(parts) - 1):
                texts[kind] += value
        assert texts == {"reasoning": "Hm.", "content": "Hi"}
    for parts in ([BY_ROLE], list(BY_ROLE)):
        stream = TextStream()
        steps = TOOL_FORMATS["gpt-oss"].parse(stream, {})  # no tools: a call is text
        events = [event for part in parts for event in stream.run(steps, part)]
        assert {kind for kind, _ in events} == {"content"}
    final = "<|channel|>final<|message|>Hi"
    call = TOOL_FORMATS["gpt-oss"].render([("stop", {})])
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert accepts("gpt-oss", thought + call, is_required=True)
    assert accepts("gpt-oss", final, is_required=False)
    assert not accepts("gpt-oss", final + call, is_required=True)


@pytest.mark.parametrize(
    "before", ["", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"]
)
def test_harmony_may_name_the_function_behind_the_role(before: str) -> None:
    """As the published chat template writes earlier calls."""
    text = before + BY_ROLE
    for is_required in (False, True):
        assert accepts("gpt-oss", text, is_required=is_required)
        assert not accepts("gpt-oss", text.replace("get_weather", "other"), is_required=is_required)
        assert not accepts("gpt-oss", text.replace("3", '"3"'), is_required=is_required)
    call = text.index(" to=functions.")
    for end in range(call + 2, len(text)):
        stream = TextStream()
        steps = TOOL_FORMATS["gpt-oss"].parse(stream, SCHEMAS)
        events = list(stream.run(steps, text[:end], final=True, is_cut=True))
        assert "content" not in [kind for kind, _ in events]
        names = [name for kind, name in events if kind == "call"]
        assert names == (["get_weather"] if end > text.index("_weather") + 8 else names[:1])


@pytest.mark.parametrize(
    ("format_name", "text"),
    [
        (
            "seed",
            "<seed:tool_call>\n<function=get_weather>\n<parameter=town>Oslo</parameter>\n"
            "</function>\n</seed:tool_call>",
        ),
        (
            "minimax-m2",
            '<minimax:tool_call>\n<invoke name="get_weather">\n'
            '<parameter name="town">Oslo</parameter>\n</invoke>\n</minimax:tool_call>',
        ),
        (
            "qwen3-coder",
            "<tool_call>\n<function=get_weather>\n<parameter=town>\nOslo\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        (
            "glm-4.7",
            "<tool_call>get_weather<arg_key>town</arg_key><arg_value>Oslo</arg_value></tool_call>",
        ),
    ],
)
def test_calls_in_tags_are_written_as_in_the_published_templates(
    format_name: str, text: str
) -> None:
    assert TOOL_FORMATS[format_name].render([("get_weather", {"town": "Oslo"})], SCHEMAS) == text


#: Parts of the chat templates of published models.
TEMPLATES = {
    "gpt-oss": '"functions." + name + "<|channel|>commentary " + "json<|message|>" <|call|>',
    "functiongemma": "<start_function_call>call:",
    "gemma4": "<|tool_call>call:{{ name }}",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>",
    "deepseek-v3": "<｜tool▁calls▁begin｜>function<｜tool▁sep｜>\n```json",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "seed": "<seed:tool_call>\n<function=example_function_name>\n<parameter=example>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="tool-name-1">',
    "deepseek-v3.2": '"｜DSML｜" <{{ dsml_token }}function_calls> message.tool_calls %}',
    "deepseek-v4": "dsml_token = '｜DSML｜' '<' + dsml_token + 'tool_calls>",
    "command": '<|START_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "',
    "apriel": "within <tool_call></tool_call> <tool_calls>[{name}] [BEGIN FINAL RESPONSE]",
    "apertus": "{%- set tool_calls_token = '<|tools_prefix|>' -%}",
    "gigachat-3.5": "['function call'] message_sep=\"<|message_sep|>\" '<｜GCML｜tool_calls>",
    "solar": '"<|tool_calls|>" "<|tool_call:begin|>" "<|tool_call:name|>" "<|tool_call:args|>"',
    "command-r": "Write \\'Action:\\' followed by a json-formatted list of actions that",
    "functionary-v3.2": "{{ '>>>all\\n' + content }} {{ '>>>' + tool_call['function']['name']",
    "gigachat": "'role': 'function call', message_sep=\"<|message_sep|>\\n\\n\"",
    "functionary-v3.1": '<function=example_function_name>{"example_name": "value"}</function>',
    "qwen3-coder": "<tool_call>\n<function=example_function_name>\n<parameter=example>",
    "glm-4.7": "<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
    "glm": "<tool_call>{name}\n<arg_key>",
    "mistral-args": "[TOOL_CALLS]{name}[ARGS]",
    "mistral": "[TOOL_CALLS] [",
    "phi-functools": "generated in a single JSON list formatted as functools[{",
    "phi": "<|tool|>{tools}<|/tool|>",
    "granite": "<|start_of_role|>assistant ... <|tool_call|>",
    "nemotron": "<TOOLCALL>[{name}]</TOOLCALL>",
    "lfm2": "<|im_start|>system\nList of tools: [",
    "llama4": "[func_name1(params_name1=params_value1, params_name2=params_value2...)]",
    "llama4-json": '<|header_start|>user Respond in the format {"name": function name, "parameters',
    "llama3": 'Respond in the format {"name": function name, "parameters": dictionary}',
    "hermes": "<tools></tools> <tool_call>",
}


@pytest.mark.parametrize("format_name", TOOL_FORMATS)
def test_the_chat_template_selects_the_format(format_name: str) -> None:
    assert tool_format("auto", TEMPLATES[format_name]) is TOOL_FORMATS[format_name]
    assert tool_format(format_name, None) is TOOL_FORMATS[format_name]
    assert tool_format("auto", "{{ messages }}") is TOOL_FORMATS["hermes"]


@pytest.mark.parametrize("format_name", TOOL_FORMATS)
def test_tags_are_text_although_checkpoints_mark_them_as_special(format_name: str) -> None:
    text = TOOL_FORMATS[format_name].render([("stop", {})])
    tags = re.findall(r"<[|｜][^|｜<>]+[|｜]>|<\|\w+>|<\w+\|>|\[[A-Z_]+\]", text)
    backend = Tokenizer(BPE(unk_token="?", vocab={"?": 0}, merges=[]))
    backend.add_special_tokens([AddedToken(tag, special=True) for tag in [*tags, "<|other|>"]])
    tokenizer = HFTokenizer(backend)
    for tag in tags:
        assert tag in TOOL_TAGS
        token = backend.token_to_id(tag)
        assert tokenizer.token_bytes(token).decode() == tag and not tokenizer.is_special(token)
    assert tokenizer.is_special(backend.token_to_id("<|other|>"))


def test_messages_of_gpt_oss_can_end_beside_tools() -> None:
    """Though `<|end|>` is a special token of the checkpoint, as it is in others."""
    alphabet = sorted(ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tags = ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")
    backend.add_special_tokens([AddedToken(tag, special=True) for tag in tags])
    end = backend.token_to_id("<|end|>")
    tokenizer = HFTokenizer(backend, eos_ids=[backend.token_to_id("<|return|>")])
    call_format = TOOL_FORMATS["gpt-oss"]
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for is_required in (False, True):
        calls = ToolCalls({"f": JsonSchema({})}, call_format, is_required=is_required)
        state = calls.start(tokenizer, tokenizer.vocab_size)
        text = thought + call_format.render([("f", {})])
        tokens = tokenizer.encode(text, special=False)
        assert end in tokens
        for token in tokens:
            assert state.allows(token)
            state.advance(token)
        assert b"".join(map(tokenizer.token_bytes, tokens)).decode() == text
    assert HFTokenizer(backend, eos_ids=[end]).is_special(end)
