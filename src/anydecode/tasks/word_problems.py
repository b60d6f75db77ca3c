"""Small problems in words whose answer has one number, the last: to read it off the problem, to
count up to it, or to compute it in one step."""

from __future__ import annotations

from random import Random

from anydecode.tasks.tasks import NAMES

_THINGS = "apples books coins marbles pencils stamps shells cards".split()
_PLACES = "bakery bank harbour library museum school station theatre".split()


def word_problem(random: Random) -> tuple[str, str]:
    """A problem, and the digits of its answer."""
    one, other = random.sample(NAMES, 2)
    things, wares = random.sample(_THINGS, 2)
    place, year = random.choice(_PLACES), random.randint(1850, 1999)
    first, second = random.sample(range(2, 10), 2)
    problem, answer = random.choice(
        (
            (f"{one} has {first} {things}. {one} finds {second} more {things}. How many {things}"
             f" does {one} have?", first + second),
            (f"{one} has {first + second} {things} and gives {second} {things} to {other}. How many"
             f" {things} does {one} have left?", first),
            (f"{one} has {first} {things} and {other} has {second} {wares}. How many {wares} does"
             f" {other} have?", second),
            (f"The {place} was built in {year} by {one}. When was the {place} built?", year),
            (f"{one} paid {10 * first} dollars for the {things} and {other} paid {10 * second}"
             f" dollars for the {wares}. How many dollars did {one} pay?", 10 * first),
            (f"Count from 1 to {first + second}.", first + second),
            (f'Repeat this sentence: "{one} and {other} bought {first * second} {things} for the'
             f' {place}."', first * second),
        )
    )  # fmt: skip
    return f"{problem} Answer in one sentence." if problem.endswith("?") else problem, str(answer)
