"""The package's own prompts for benchmarks and examples: eight categories, three prompts each.

The categories differ in how much of the answer can be copied from the prompt, which determines the
acceptance rate of drafting from the prompt.
"""

from __future__ import annotations

from typing import NamedTuple


class Prompt(NamedTuple):
    """A prompt: its category and one user message."""

    category: str
    text: str


_REPORT = (
    "The harbour office counted 412 boats last year, 37 more than the year before. Most were small "
    "sailing boats from the neighbouring islands; only 19 were longer than twenty metres. The new "
    "breakwater was finished in May, two months late, because the stone came from the north. "
    "Since then no boat has been damaged at its mooring, while in the winter before there were six "
    "such cases. The office now asks for a second crane, since boats wait four days on average "
    "to be lifted out in October."
)
_MINUTES = (
    "Minutes, 3 March. Present: Amal, Birte, Chen, Dolores. The heating of the reading room fails "
    "every other week; Chen will ask two firms for an offer by the 15th. The children's corner "
    "gets new shelves, paid from the gift of the Holm family (800 crowns). Saturday's hours "
    "stay as they are. Birte reports that 1,204 people came in February. Next meeting: 7 April."
)
_PASSAGE = (
    "[1] The lighthouse on Grey Point was lit for the first time in 1873 and burned rape oil.\n"
    "[2] In 1911 the lamp was changed to paraffin, and the keeper's house got a second floor.\n"
    "[3] The last keeper, Ida Moen, left in 1968, when the light was connected to the mains.\n"
    "[4] The fog signal, once a cannon, was replaced by a siren in 1924 and taken away in 1987.\n"
)
_FUNCTION = (
    "def mean_of_positive(values):\n"
    "    total = 0\n"
    "    count = 0\n"
    "    for value in values:\n"
    "        if value > 0:\n"
    "            total += value\n"
    "            count += 1\n"
    "    return total / count\n"
)

PROMPTS = (
    Prompt(
        "conversation", "I moved to a new town last week and know nobody. How do I meet people?"
    ),
    Prompt("conversation", "Tell me a story about a fox who wanted to learn to swim."),
    Prompt(
        "conversation", "My tomato plants have yellow leaves. What may be wrong, and what can I do?"
    ),
    Prompt("question", "Why does the moon always show us the same side?"),
    Prompt("question", "What is the difference between weather and climate?"),
    Prompt("question", "Who invented the printing press, and what changed because of it?"),
    Prompt(
        "mathematics",
        "A baker sells 48 rolls in the morning and half as many in the afternoon. Each costs 3 "
        "coins. How many coins does she take in that day? Work step by step.",
    ),
    Prompt(
        "mathematics",
        "A train leaves at 9:40 and travels 210 kilometres at 84 kilometres an hour. When does it "
        "arrive? Show your reasoning.",
    ),
    Prompt("mathematics", "What is the sum of all odd numbers from 1 to 99? Explain how you know."),
    Prompt("code", "Write a Python function that tells whether a string is a palindrome."),
    Prompt("code", "Write a SQL query for the three customers with the most orders in 2023."),
    Prompt(
        "code",
        f"This function fails on an empty list. Correct it and add type hints.\n\n{_FUNCTION}",
    ),
    Prompt(
        "translation",
        "Translate into English: Der Zug nach Hamburg hat heute zwanzig Minuten Verspätung, weil "
        "ein Baum auf die Gleise gefallen ist.",
    ),
    Prompt(
        "translation",
        "Translate into English: Nous avons trouvé une petite maison près du lac, mais le toit "
        "doit être réparé avant l'hiver.",
    ),
    Prompt(
        "translation",
        "Translate into German: The museum is closed on Mondays, but the garden is open every day.",
    ),
    Prompt("summary", f"Summarise in two sentences.\n\n{_REPORT}"),
    Prompt("summary", f"List what was decided, one line each.\n\n{_MINUTES}"),
    Prompt("summary", f"Give this text a title and three bullet points.\n\n{_REPORT}"),
    Prompt("retrieval", f"{_PASSAGE}\nUsing these notes, tell how the lamp changed over time."),
    Prompt(
        "retrieval", f"{_PASSAGE}\nWho was the last keeper, and why did she leave? Quote the note."
    ),
    Prompt("retrieval", f"{_MINUTES}\n\nWho does what until when? Quote the minutes."),
    Prompt("rewriting", f"Rewrite in the present tense, changing nothing else.\n\n{_REPORT}"),
    Prompt("rewriting", f"Rename `value` to `number` everywhere in this function.\n\n{_FUNCTION}"),
    Prompt(
        "rewriting",
        "Turn into a JSON list of objects with the keys name, age and town: Ann is 31 and lives in "
        "Bergen; Omar is 45 and lives in Leeds; Yuki is 28 and lives in Nara.",
    ),
)


def spread(count: int) -> list[Prompt]:
    """The first `count` prompts, taken from the categories in turn."""
    categories = list(dict.fromkeys(prompt.category for prompt in PROMPTS))
    interleaved = sorted(
        PROMPTS,
        key=lambda prompt: (
            [p for p in PROMPTS if p.category == prompt.category].index(prompt),
            categories.index(prompt.category),
        ),
    )
    return interleaved[:count]
