"""One command whose `--recipe NAME` says which of several trainings it is."""

from __future__ import annotations

from typing import Any, ClassVar

import typer
from typer.core import TyperGroup

from anydecode.cli.command_list import command_rows


class RecipeGroup(TyperGroup):
    """A group whose commands are recipes: `--recipe NAME`, anywhere among the options, chooses the
    command that takes them.

    Attributes:
        default_recipe: The recipe without `--recipe`.
    """

    default_recipe: ClassVar[str]

    def __init__(self, **attrs: Any) -> None:
        attrs |= {"options_metavar": "", "subcommand_metavar": "--recipe NAME [OPTIONS]"}
        super().__init__(**attrs)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        recipe, rest = _without_recipe(args)
        if recipe is None and "--help" not in rest:
            recipe = self.default_recipe
        if recipe is not None and recipe not in self.commands:
            wrong = f"--recipe {recipe} is none of" if recipe else "--recipe needs a name: one of"
            raise typer.BadParameter(f"{wrong} {', '.join(self.commands)}", ctx=ctx)
        parsed: list[str] = super().parse_args(ctx, rest if recipe is None else [recipe, *rest])
        return parsed

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return f"--recipe {name}", command, rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section(f"Recipes (without --recipe: {self.default_recipe})"):
            formatter.write_dl(command_rows(self.commands))
        with formatter.section("The options of a recipe"):
            formatter.write_text(f"{ctx.command_path} --recipe NAME --help")


def _without_recipe(args: list[str]) -> tuple[str | None, list[str]]:
    """The value of the last `--recipe`, and the other arguments."""
    recipe, rest, left = None, [], iter(args)
    for one in left:
        if one == "--recipe":
            recipe = next(left, "")
        elif one.startswith("--recipe="):
            recipe = one.partition("=")[2]
        else:
            rest.append(one)
    return recipe, rest
