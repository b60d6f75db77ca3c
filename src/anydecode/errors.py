"""Exceptions in the user's words. The command line prints their message as one line and exits 2."""

from __future__ import annotations


class AnydecodeError(Exception):
    """Anything a user can cause and mend."""


class ModelNotFoundError(AnydecodeError):
    """No model goes by this name, or it is not on this machine."""


class CheckpointError(AnydecodeError):
    """A checkpoint is truncated, corrupt, unsafe, incomplete or of an unsupported kind."""


class InvalidRequestError(AnydecodeError, ValueError):
    """A prompt or parameter that cannot be served, or two that contradict each other."""


class UnsupportedCombinationError(InvalidRequestError):
    """Parts that cannot work together."""


class MissingPackageError(InvalidRequestError):
    """An optional package is not installed. `install` is what to give to `pip install`."""

    def __init__(self, what: str, package: str, install: str) -> None:
        super().__init__(f"{what} needs {package}, which is not installed: pip install {install}")
        self.package = package
        self.install = install


class OutOfMemoryError(AnydecodeError):
    """The cache cannot hold even one sequence of this size."""


class EngineStoppedError(AnydecodeError):
    """A fault of the engine itself ended it; only a new `LLM`, or a new server process, goes on."""


class ConstraintError(AnydecodeError, ValueError):
    """A constraint that is invalid, unsupported, unsatisfiable, or could not be met."""
