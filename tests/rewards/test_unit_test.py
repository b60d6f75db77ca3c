"""The reward that runs the text as a program, and the limits of such a program."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from anydecode.errors import UnsupportedCombinationError
from anydecode.rewards import sandbox
from anydecode.rewards.reward import SampledText
from anydecode.rewards.unit_test import UnitTest, program_of

linux = pytest.mark.skipif(sys.platform != "linux", reason="limits of processes need Linux")
MEMORY = 512 << 20


@linux
@pytest.mark.parametrize(
    "source, reason",
    [
        ("assert 1 + 1 == 2", ""),
        ("assert 1 + 1 == 3", "AssertionError"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("import sys; sys.exit(0)", "ended itself"),
        ("import os; os._exit(0)", "ended itself"),
        ("while True: pass", "ran longer than 1 seconds"),
        ("x = [0] * (1 << 30)", "MemoryError"),
        ("open('x', 'w').write('a' * 100_000)", "OSError: [Errno 27] File too large"),
        ("import numpy", "ModuleNotFoundError: No module named 'numpy'"),
        ("import os; assert not os.environ.get('HOME') and not os.listdir('.')", ""),
    ],
)
def test_a_program_runs_within_its_limits(source: str, reason: str) -> None:
    outcome = sandbox.run_python(source, 1.0, MEMORY)
    assert outcome == sandbox.Outcome(not reason, reason)


@linux
def test_a_program_that_sleeps_is_killed_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_START_SECONDS", 0.5)
    source = (
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(99)'])"
    )
    assert sandbox.run_python(source, 0.5, MEMORY).reason == "ran longer than 0.5 seconds"


@linux
def test_texts_that_pass_the_tests_have_the_value_one(tmp_path: Path) -> None:
    tests = tmp_path / "tests.py"
    tests.write_text("assert add(2, 3) == 5\n")
    texts = [
        "def add(a, b):\n    return a + b",
        "def add(a, b):\n    return a * b",
        "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.",
        "I cannot.",
    ]
    sampled = [SampledText(text, 1, 0.0, True) for text in texts]
    assert UnitTest(file=tests).values("", sampled) == [1.0, 0.0, 1.0, 0.0]
    continued = UnitTest(tests="assert add(2, 3) == 5", continues=True)
    body = [SampledText("    return a + b", 1, 0.0, True)]
    assert continued.values("def add(a, b):\n", body) == [1.0]


def test_the_program_is_the_first_fenced_block() -> None:
    assert program_of("a\n```\nb\n```\n```\nc\n```") == "b\n"
    assert program_of("```py\nb") == "b"
    assert program_of("no fence") == "no fence"


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(UnsupportedCombinationError, match="this system is darwin"):
        UnitTest(tests="pass")
