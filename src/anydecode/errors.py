"""Exceptions for users. The command line prints their message as one line and exits with code 2."""

from __future__ import annotations

import reprlib


def one_line(text: object, max_length: int = 300) -> str:
    """A text, or an error's message, on one line of at most `max_length` characters."""
    line = " ".join(str(text)[: 2 * max_length].split())
    return line if len(line) <= max_length else f"{line[: max_length - 3]}..."


def quoted(value: object) -> str:
    """A value as Python writes it, on one line, shortened."""
    try:
        return one_line(reprlib.repr(value))
    except ValueError:  # more digits than Python writes
        return "an integer of thousands of digits"


class AnydecodeError(Exception):
    """Base class of all errors that a user can cause and fix."""


class ModelNotFoundError(AnydecodeError):
    """There is no model of this name, or it is not on this machine."""


class CheckpointError(AnydecodeError):
    """A checkpoint is truncated, corrupt, unsafe, incomplete or of an unsupported kind.

    Messages may quote a file, so they are cut to one line of at most 1000 characters.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message, 1000))


class InvalidRequestError(AnydecodeError, ValueError):
    """A prompt or parameter is invalid, or two parameters contradict each other."""


class UnsupportedCombinationError(InvalidRequestError):
    """The model, decoder and options of a request cannot be combined."""


class ContextLengthError(InvalidRequestError):
    """The prompt does not fit into the model's context."""


class AdapterNotFoundError(InvalidRequestError):
    """No adapter of this name is loaded."""


class MissingPackageError(InvalidRequestError):
    """An optional package is not installed.

    Args:
        what: The feature that needs it.
        package: Name of the package.
        install: The argument of `pip install`.
    """

    def __init__(self, what: str, package: str, install: str) -> None:
        super().__init__(f"{what} needs {package}, which is not installed: pip install {install}")
        self.package = package
        self.install = install


class OutOfMemoryError(AnydecodeError):
    """The key-value cache is too small for a single sequence of this length."""


class EngineStoppedError(AnydecodeError):
    """The engine stopped after an internal error. Create a new `LLM`, or restart the server."""


class FleetError(AnydecodeError):
    """A process of a fleet of workers cannot be reached, or the workers could not give an answer.
    The request may succeed later."""


class ConstraintError(AnydecodeError, ValueError):
    """A constraint is invalid, unsupported, unsatisfiable, or could not be met."""


class RewardError(AnydecodeError, ValueError):
    """A reward failed, took too long, or returned something else than one finite number per
    text."""
