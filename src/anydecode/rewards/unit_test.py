"""A reward that runs the text as a program, with tests behind it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

from anydecode.errors import InvalidRequestError, one_line
from anydecode.rewards import sandbox
from anydecode.rewards.reward import Reward, SampledText

_FENCE = "```"


class UnitTest(Reward):
    """1 if the program in the text, followed by the tests, runs to its end without an exception;
    else 0. See `sandbox.run_python` for what the limits are and what they are not.

    The program is the first fenced block of the text, or all of it if there is none.

    Args:
        file: A file with the tests, such as lines of `assert`.
        tests: The tests themselves, instead of a file.
        limit: Seconds of each program.
        megabytes: Memory of each program.
        continues: Whether the text continues the prompt, which is then a part of the program.
    """

    bounds = (0.0, 1.0)

    def __init__(
        self,
        file: str | Path = "",
        tests: str = "",
        limit: float = 5.0,
        megabytes: int = 512,
        continues: bool = False,
    ) -> None:
        sandbox.check_supported()
        if bool(file) == bool(tests):
            raise InvalidRequestError("reward 'unit-test' needs one of file and tests")
        if not (0 < limit <= 3600 and 64 <= megabytes <= 1 << 20):
            raise InvalidRequestError(
                "reward 'unit-test' needs a limit up to 3600 seconds and at least 64 megabytes, not"
                f" {limit} and {megabytes}"
            )
        if file:
            try:
                tests = Path(file).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise InvalidRequestError(
                    f"reward 'unit-test': {one_line(str(file), 120)} cannot be read:"
                    f" {one_line(error)}"
                ) from None
        self.tests = tests
        self.limit = limit
        self.memory = megabytes << 20
        self.continues = continues
        self.seconds = limit + 30.0  # starting a process on a busy machine takes long

    def values(self, prompt: str, texts: Seq[SampledText]) -> list[float]:
        return [float(self._passes(prompt, one.text)) for one in texts]

    def _passes(self, prompt: str, text: str) -> bool:
        program = prompt + text if self.continues else program_of(text)
        source = f"{program}\n{self.tests}\n"
        return sandbox.run_python(source, self.limit, self.memory).passed


def program_of(text: str) -> str:
    """The first fenced block of `text`, without its language; all of `text` if it has none."""
    _, fence, rest = text.partition(_FENCE)
    if not fence:
        return text
    _, newline, body = rest.partition("\n")
    return (body if newline else rest).partition(_FENCE)[0]
