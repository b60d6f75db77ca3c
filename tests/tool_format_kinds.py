"""The tool-call formats for tests: one of every kind of parser, and all."""

from __future__ import annotations

import pytest

from anydecode.constraints.tools.families import TOOL_FORMATS

KINDS = ("gpt-oss", "gemma4", "kimi", "deepseek-v4", "glm", "command", "llama3", "hermes", "lfm2")
#: All formats: those that are not of `KINDS` are slow.
FORMATS = [
    pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in TOOL_FORMATS
]
