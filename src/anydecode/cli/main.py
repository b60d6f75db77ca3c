"""The command line: registers all commands and turns errors, Ctrl-C and closed pipes into exit
codes.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from functools import cache
from typing import Annotated, Any, NoReturn

import typer

from anydecode.cli import (
    bench,
    certify,
    chat,
    cluster,
    doctor,
    export_drafter,
    generate,
    methods,
    pull,
    quantize,
    score,
    serve,
    train,
)
from anydecode.cli.command_list import CommandListGroup
from anydecode.errors import AnydecodeError
from anydecode.version import __version__

USAGE_ERROR, FAILURE, INTERRUPTED = 2, 1, 130

app = typer.Typer(
    name="anydecode",
    cls=CommandListGroup,
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for name, function in (
    ("generate", generate.generate),
    ("chat", chat.chat),
    ("serve", serve.serve),
    ("pull", pull.pull_model),
    ("methods", methods.methods),
    ("certify", certify.certify_methods),
    ("score", score.score),
    ("quantize", quantize.quantize),
    ("export-drafter", export_drafter.export_drafter),
    ("doctor", doctor.doctor),
):
    app.command(name)(function)
app.add_typer(bench.app, name="bench")
app.add_typer(train.app, name="train")
app.add_typer(cluster.app, name="cluster")

#: The exceptions that typer raises for wrong usage; their base class is not public.
_USAGE_ERRORS: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"anydecode {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version)
    ] = False,
) -> None:
    """One engine for every way of decoding a language model.

    Example: anydecode generate --prompt "Once upon a time" --max-tokens 64

    All commands accept --debug, which shows the traceback of an error.
    """


@cache
def _command() -> Any:
    """All commands; to build them takes 0.1 s."""
    return typer.main.get_command(app)


def run(arguments: list[str] | None = None) -> NoReturn:
    """Run the `anydecode` command line. Exit codes: 0; 1 for a failure; 2 for an error the user can
    fix; 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if not debug:
        warnings.formatwarning = _one_line_warning
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr: names of files may be no text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _exit_code(_command()(arguments, prog_name="anydecode", standalone_mode=False))
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
        code = FAILURE
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except _USAGE_ERRORS as error:
        error.show()
        code = USAGE_ERROR
    except (AnydecodeError, OSError) as error:
        if debug:
            raise
        code = _print_error(_one_line(error), USAGE_ERROR)
    except Exception as error:
        if debug:
            raise
        if missing := _missing_package(error):
            code = _print_error(missing, USAGE_ERROR)
        else:
            name = type(error).__name__
            message = f"unexpected {name}: {_one_line(error)} (use --debug for the traceback)"
            code = _print_error(message, FAILURE)
    raise SystemExit(code)


def _missing_package(error: Exception) -> str:
    """A line that says what to install; empty if no package of others is missing."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    from anydecode.cli.doctor import EXTRAS

    package = error.name.partition(".")[0]
    if package == "anydecode":
        return ""
    extra = next((name for name, one in EXTRAS.items() if package in one.packages), None)
    install = package if extra is None else f"'anydecode[{extra}]'"
    return f"this command needs {package}, which is not installed: pip install {install}"


def _exit_code(result: object) -> int:
    """The exit code of a command's result: `typer.Exit` returns its code, other commands return
    None.
    """
    return result if isinstance(result, int) else 0


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _one_line_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """A warning on one line, without its source location."""
    return f"anydecode: {message}\n"


def _print_error(message: str, code: int) -> int:
    print(f"anydecode: {message}", file=sys.stderr)
    return code


def _silence_stdout() -> None:
    """Redirect stdout to the null device, so that the interpreter's last flush to a closed pipe
    raises no error."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, sys.stdout.fileno())
