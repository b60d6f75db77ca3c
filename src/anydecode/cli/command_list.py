"""The list of commands in the help of a group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typer.core import TyperGroup

_MAX_LENGTH = 200  # of the first sentence of a command's help, in characters


def command_rows(commands: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The name of each command, and the first sentence of its help."""
    return [(name, one.get_short_help_str(_MAX_LENGTH)) for name, one in commands.items()]


class CommandListGroup(TyperGroup):
    """A group whose help has the first sentence of each command; typer cuts it at the end of a
    line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(command_rows(self.commands))
