"""The tool-call formats of model families, by name."""

from __future__ import annotations

from dataclasses import replace

from anydecode.constraints.tools.formats import JsonCalls, NamedCalls, ToolFormat
from anydecode.constraints.tools.harmony import HarmonyCalls
from anydecode.constraints.tools.literals import (
    EscapedCalls,
    EscapeSyntax,
    PythonicCalls,
    PythonSyntax,
)
from anydecode.constraints.tools.recipients import RecipientCalls
from anydecode.constraints.tools.tagged import TaggedCalls


def _dsml(block: str, mark: str = "｜DSML｜") -> TaggedCalls:
    """The format of DeepSeek since V3.2, with the calls in an element of the name `block`; `mark`
    is a part of every tag."""
    return TaggedCalls(
        f'\n<{mark}invoke name="',
        "",
        '">\n',
        f'<{mark}parameter name="',
        '" string="',
        f"</{mark}parameter>\n",
        f"</{mark}invoke>",
        block=(f"<{mark}{block}>", f"\n</{mark}{block}>"),
        kinds=('true">', 'false">'),
        markers=(mark, f"{block}>"),
    )


#: By name. The order is that of detection: the first format whose markers a template contains.
TOOL_FORMATS: dict[str, ToolFormat] = {
    "gpt-oss": HarmonyCalls(markers=("<|channel|>", "<|message|>")),
    "functiongemma": EscapedCalls(
        EscapeSyntax("<escape>"),
        "<start_function_call>",
        "<end_function_call>",
        markers=("<start_function_call>",),
    ),
    "gemma4": EscapedCalls(
        EscapeSyntax('<|"|>'), "<|tool_call>", "<tool_call|>", markers=("<|tool_call>",)
    ),
    "kimi": NamedCalls(
        "<|tool_call_begin|>functions.",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        opening="<|tool_calls_section_begin|>",
        closing="<|tool_calls_section_end|>",
        is_numbered=True,
        markers=("<|tool_calls_section_begin|>",),
    ),
    "deepseek-v3.2": _dsml("function_calls"),
    "deepseek-v4": _dsml("tool_calls"),
    "deepseek-v3": NamedCalls(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        opening="<｜tool▁calls▁begin｜>",
        closing="<｜tool▁calls▁end｜>",
        separator="\n",
        markers=("<｜tool▁calls▁begin｜>", "```json"),
    ),
    "deepseek-v3.1": NamedCalls(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        opening="<｜tool▁calls▁begin｜>",
        closing="<｜tool▁calls▁end｜>",
        markers=("<｜tool▁calls▁begin｜>",),
    ),
    "seed": TaggedCalls(
        "<seed:tool_call>",
        "\n<function=",
        ">\n",
        "<parameter=",
        ">",
        "</parameter>\n",
        "</function>\n</seed:tool_call>",
        markers=("<seed:tool_call>",),
    ),
    "minimax-m2": TaggedCalls(
        '\n<invoke name="',
        "",
        '">\n',
        '<parameter name="',
        '">',
        "</parameter>\n",
        "</invoke>",
        block=("<minimax:tool_call>", "\n</minimax:tool_call>"),
        markers=("<minimax:tool_call>",),
    ),
    "qwen3-coder": TaggedCalls(
        "<tool_call>",
        "\n<function=",
        ">\n",
        "<parameter=",
        ">\n",
        "\n</parameter>\n",
        "</function>\n</tool_call>",
        markers=("<function=", "<parameter="),
    ),
    "glm-4.7": TaggedCalls(
        "<tool_call>",
        "",
        "",
        "<arg_key>",
        "</arg_key><arg_value>",
        "</arg_value>",
        "</tool_call>",
        markers=("</arg_key><arg_value>",),
    ),
    "glm": TaggedCalls(
        "<tool_call>",
        "",
        "\n",
        "<arg_key>",
        "</arg_key>\n<arg_value>",
        "</arg_value>\n",
        "</tool_call>",
        markers=("<arg_key>",),
    ),
    "mistral-args": NamedCalls("[TOOL_CALLS]", "[ARGS]", markers=("[TOOL_CALLS]", "[ARGS]")),
    "mistral": JsonCalls("[TOOL_CALLS]", is_list=True, markers=("[TOOL_CALLS]",)),
    "command": JsonCalls(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        key="parameters",
        is_list=True,
        name_key="tool_name",
        id_key="tool_call_id",
        layout=("\n    ", "\n    ", "\n"),
        markers=("<|START_ACTION|>",),
        answer_tags=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "apriel": JsonCalls(
        "<tool_calls>",
        "</tool_calls>",
        is_list=True,
        markers=("<tool_calls>[", "[BEGIN FINAL RESPONSE]"),
        answer_tags=("[END FINAL RESPONSE]",),
    ),
    "apertus": NamedCalls(
        '{"',
        '": ',
        "}",
        opening="<|tools_prefix|>[",
        closing="]<|tools_suffix|>",
        separator=", ",
        markers=("<|tools_prefix|>",),
    ),
    "gigachat-3.5": replace(
        _dsml("tool_calls", "｜GCML｜"), answer_tags=("<|message_sep|>", "<|message_sep|>\n\n")
    ),
    "gigachat": JsonCalls(
        "<|message_sep|>\n\nfunction call<|role_sep|>\n",
        is_single=True,
        markers=("<|message_sep|>", "'function call'"),
        answer_tags=("<|message_sep|>", "<|message_sep|>\n\n"),
    ),
    "solar": NamedCalls(
        "<|tool_call:begin|>",
        "<|tool_call:args|>",
        "<|tool_call:end|>",
        opening="<|tool_calls|>",
        id_end="<|tool_call:name|>",
        markers=("<|tool_calls|>", "<|tool_call:begin|>"),
        answer_tags=("<|begin|>assistant", "<|content|>", "<|end|>"),
    ),
    "command-r": JsonCalls(
        "Action: ```json\n",
        "```",
        key="parameters",
        is_list=True,
        name_key="tool_name",
        layout=("\n    ", "\n    ", "\n"),
        object_layout=("\n        ", "\n        ", "\n    "),
        markers=("followed by a json-formatted list of actions",),
    ),
    "functionary-v3.2": RecipientCalls(markers=(">>>all",)),
    "functionary-v3.1": NamedCalls(
        "<function=",
        ">",
        "</function>",
        markers=("<function=example_function_name>{",),
    ),
    "phi-functools": JsonCalls("functools", is_list=True, markers=("functools[",)),
    "phi": JsonCalls(
        "<|tool_call|>", "<|/tool_call|>", is_list=True, markers=("<|tool|>", "<|/tool|>")
    ),
    "granite": JsonCalls(
        "<|tool_call|>", is_list=True, markers=("<|tool_call|>", "<|start_of_role|>")
    ),
    "nemotron": JsonCalls("<TOOLCALL>", "</TOOLCALL>", is_list=True, markers=("<TOOLCALL>",)),
    "lfm2": PythonicCalls(
        PythonSyntax(),
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        markers=("List of tools: ", "<|im_start|>"),
    ),
    "llama4": PythonicCalls(
        PythonSyntax(), "<|python_start|>", "<|python_end|>", markers=("[func_name1(",)
    ),
    "llama4-json": JsonCalls(
        "<|python_start|>",
        "<|python_end|>",
        key="parameters",
        is_optional=True,
        markers=("<|header_start|>", '{"name": function name'),
    ),
    "llama3": JsonCalls(
        "<|python_tag|>",
        key="parameters",
        is_optional=True,
        separator="; ",
        markers=('{"name": function name, "parameters"',),
    ),
    "hermes": JsonCalls("<tool_call>", "</tool_call>", markers=("<tool_call>",)),
}
