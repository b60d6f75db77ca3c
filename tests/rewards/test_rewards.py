"""Rewards that are computed from the text, and how they are named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from anydecode.errors import InvalidRequestError
from anydecode.rewards import registry
from anydecode.rewards.reward import FunctionReward, Reward, SampledText


def values(choice: registry.RewardChoice, *texts: str) -> list[float]:
    sampled = [SampledText(text, 4, -6.0, True) for text in texts]
    return list(registry.build(choice).values("prompt", sampled))


def test_values_of_the_ready_made_rewards() -> None:
    assert values("likelihood", "x") == [-1.5]
    assert values("length:min_words=2+max_words=4", "a", "a b", "a b c d", "a b c d e") == [
        0.5, 1.0, 1.0, 0.8,
    ]  # fmt: skip
    assert values("keywords:words=Cat dog", "a CAT", "concatenate", "dog cat", "") == [
        0.5, 0.5, 1.0, 0.0,
    ]  # fmt: skip
    assert values("keywords:words=007", "007", "7") == [1.0, 0.0]
    assert values(lambda prompt, texts: [len(prompt + text) for text in texts], "ab") == [8]


def test_a_reward_is_passed_through() -> None:
    reward = FunctionReward(lambda prompt, texts: [])
    assert registry.build(reward) is reward


@pytest.mark.parametrize(
    "choice, message",
    [
        ("nonsense", "no reward is called 'nonsense'; known: likelihood, confidence, length"),
        ("length:x=1", "reward 'length': got an unexpected keyword argument 'x'"),
        ("length:max_words", "'max_words' is not of the form name=value"),
        ("length:max_words=many", "max_words takes a number, not 'many'"),
        ("length:max_words=nan", "max_words takes a number, not 'nan'"),
        ("length:min_words=9+max_words=3", "needs 0 <= min_words <= max_words"),
        ("keywords", "missing a required argument: 'words'"),
        ("keywords:words= ", "needs words"),
        ("unit-test", "needs one of file and tests"),
        ("unit-test:file=/no/such/file", "cannot be read"),
        ("unit-test:tests=pass+megabytes=1.5", "megabytes takes a number, not '1.5'"),
        ("unit-test:tests=pass+limit=0", "needs a limit up to 3600 seconds"),
        (7, "reward is 7; pass a name, a Reward or a function"),
    ],
)
def test_other_names_and_parameters_are_refused_in_one_line(choice: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        registry.build(choice)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", sorted(registry.REWARDS))
def test_remote_parameters_are_parameters(name: str) -> None:
    reward: type[Reward] = registry.REWARDS[name]
    assert set(reward.remote or ()) <= set(registry.inspect.signature(reward).parameters)


def test_rewards_of_other_packages_are_entry_points(tmp_path: Path) -> None:
    info = tmp_path / "mine-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(
        "[anydecode.rewards]\nvowels = mine:make\nbroken = no_such_module:x\n"
    )
    (tmp_path / "mine.py").write_text(
        "def make(weight: float = 1.0):\n"
        "    return lambda prompt, texts: [weight * sum(map(text.count, 'aeiou'))"
        " for text in texts]\n"
    )
    program = (
        "from anydecode.errors import InvalidRequestError\n"
        "from anydecode.rewards import registry\n"
        "from anydecode.rewards.reward import SampledText\n"
        "text = SampledText('banana', 1, 0.0, True)\n"
        "print(registry.build('vowels:weight=2').values('', [text]))\n"
        "for act, name in ((registry.build, 'broken'), (registry.check_remote, 'vowels')):\n"
        "    try:\n"
        "        act(name)\n"
        "    except InvalidRequestError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "[6.0]",
        "reward 'broken' cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'",
        "reward 'vowels': only the server's own options may use that, not requests",
    ]
