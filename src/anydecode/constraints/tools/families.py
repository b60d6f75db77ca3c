"""The tool-call formats of model families, by name."""

from __future__ import annotations

from anydecode.constraints.tools.formats import JsonCalls, NamedCalls, ToolFormat
from anydecode.constraints.tools.harmony import HarmonyCalls
from anydecode.constraints.tools.literals import (
    EscapedCalls,
    EscapeSyntax,
    PythonicCalls,
    PythonSyntax,
)
from anydecode.constraints.tools.tagged import TaggedCalls

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
