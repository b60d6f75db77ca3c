"""The tasks: seeded generators of prompts with reference answers, and their checks.

Lists consist of names, as in ParallelBench (arXiv:2510.04767). A task with one right answer is
*determined*. `shuffle`, the `-random` tasks and `latin` have many right answers, and tokens that
are committed in one pass may belong to different ones."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from random import Random

from anydecode.errors import InvalidRequestError
from anydecode.tasks import checks

NAMES = (
    "Ada Ben Carl Dora Emma Finn Gina Hugo Iris Jack Kara Leo Mia Nina Omar Paul "
    "Quinn Rosa Sam Tess Uma Vera Will Xena Yara Zoe Anton Bella Cora David Elsa Frida"
).split()
_CITIES = "Athens Berlin Cairo Delhi Geneva Lima Madrid Oslo Paris Rome Tokyo Vienna".split()
_JOBS = "baker clerk doctor farmer judge nurse pilot singer teacher writer".split()
_VARIABLES = "a b n x y count index item price size total value".split()
_FUNCTIONS = "area combine compute cost find join measure mix scale update".split()

#: Lengths of lists. Each list task is trained on all of them except its held-out one.
LENGTHS = (3, 4, 5, 6, 7, 8, 9)


@dataclass(frozen=True)
class Example:
    """One question. `answer` is a right answer, the only one for determined tasks; `items` and
    `word` are the parts of the question that the checks need."""

    task: str
    length: int
    prompt: str
    answer: str
    items: tuple[str, ...] = ()
    word: str = ""

    @property
    def is_held_out(self) -> bool:
        """Whether training must not use it: one prompt in ten, by its hash, and all of the held-out
        length."""
        is_length = self.length == TASKS[self.task].held_out
        return is_length or zlib.crc32(self.prompt.encode()) % 10 == 0

    def is_right(self, text: str) -> bool:
        """Whether `text` is a right answer, up to surrounding white space."""
        return TASKS[self.task].check(self, text)

    def is_strictly_right(self, text: str) -> bool:
        """Whether `text` is a right answer with exact white space: one space before every word (the
        first is optional), none at the end."""
        exact = self.answer if TASKS[self.task].is_determined else " ".join(text.split())
        return self.is_right(text) and text.removeprefix(" ") == exact.strip()


@dataclass(frozen=True)
class Task:
    """The generator and the check of a task. `sizes` are its trained lengths, if not `LENGTHS`;
    `held_out` is the list length that only other tasks are trained on."""

    make: Callable[[Random, int], Example]
    check: Callable[[Example, str], bool]
    is_determined: bool = True
    sizes: tuple[int, ...] = ()
    held_out: int | None = None


def make_example(task: str, length: int, random: Random) -> Example:
    """Generate one example of `task` with `length` items (or fields, or terms)."""
    return TASKS[task].make(random, length)


def examples(
    task: str, count: int, *, seed: int = 0, length: int | None = None, held_out: bool = True
) -> Iterator[Example]:
    """Generate examples of one task.

    Args:
        task: Name of the task.
        count: Number of examples.
        seed: Seed; equal seeds give equal examples.
        length: Length of all examples; None for random trained lengths.
        held_out: Whether the examples are from the held-out split or from the training split. A
            held-out length is only in the held-out split.

    Raises:
        InvalidRequestError: If the task or the length does not exist.
    """
    if task not in TASKS:
        raise InvalidRequestError(f"unknown task {task!r}; choose from {', '.join(TASKS)}")
    random, sizes = Random(f"{seed}/{task}/{length}/{held_out}"), lengths(task)
    if length is not None and not 1 <= length <= 20:
        raise InvalidRequestError(f"the length is {length}; it must be from 1 to 20")
    if length is not None and length == TASKS[task].held_out and not held_out:
        raise InvalidRequestError(
            f"length {length} of task {task} is held out, so it has no training examples"
        )
    while count > 0:
        example = make_example(task, length or random.choice(sizes), random)
        if example.is_held_out == held_out:
            count -= 1
            yield example


def lengths(task: str) -> tuple[int, ...]:
    """The lengths that `task` is trained on."""
    spec = TASKS[task]
    return spec.sizes or tuple(length for length in LENGTHS if length != spec.held_out)


def _over_list(
    task: str, change: Callable[[Random, list[str]], list[str]]
) -> Callable[[Random, int], Example]:
    def make(random: Random, length: int) -> Example:
        items = random.sample(NAMES, length)
        return _list_example(task, f"{task} ", items, change(random, items))

    return make


def _list_example(
    task: str, instruction: str, items: list[str], answer: list[str], word: str = ""
) -> Example:
    prompt = f"{instruction}{' '.join(items)}:"
    return Example(task, len(items), prompt, f" {' '.join(answer)}", tuple(items), word)


def _shuffled(random: Random, items: list[str]) -> list[str]:
    shuffled = list(items)
    while shuffled == items:
        random.shuffle(shuffled)
    return shuffled


def _insert(random: Random, length: int, *, named: bool) -> Example:
    *items, new = random.sample(NAMES, length + 1)
    index = random.randrange(length + 1)
    task, where = ("insert-index", f" at {index + 1}") if named else ("insert-random", "")
    answer = [*items[:index], new, *items[index:]]
    return _list_example(task, f"insert {new}{where} in ", items, answer, new)


def _remove(random: Random, length: int, *, named: bool) -> Example:
    items, index = random.sample(NAMES, length), random.randrange(length)
    task, what = ("remove-index", index + 1) if named else ("remove-random", "one")
    return _list_example(task, f"remove {what} from ", items, items[:index] + items[index + 1 :])


def _replace(random: Random, length: int, *, named: bool) -> Example:
    *items, new = random.sample(NAMES, length + 1)
    index = random.randrange(length)
    task, what = ("replace-index", index + 1) if named else ("replace-random", "one")
    answer = [*items[:index], new, *items[index + 1 :]]
    return _list_example(task, f"replace {what} with {new} in ", items, answer, new)


def _cumulative_sum(random: Random, length: int) -> Example:
    terms = [random.randint(1, 4) for _ in range(length)]
    sums = [*accumulate(terms)]
    return _list_example("cumulative-sum", "cumsum ", [*map(str, terms)], [*map(str, sums)])


def _arithmetic(random: Random, length: int) -> Example:
    first, second = random.randint(0, 19), random.randint(0, 19)
    if random.random() < 0.5:
        return Example("arithmetic", length, f"{first}+{second}=", str(first + second))
    first, second = max(first, second), min(first, second)
    return Example("arithmetic", length, f"{first}-{second}=", str(first - second))


def _chain(random: Random, length: int) -> Example:
    terms = [random.randint(1, 4) for _ in range(length)]
    total, steps = terms[0], ""
    for term in terms[1:]:
        steps += f" {total}+{term}={total + term}"
        total += term
    return Example("chain", length, f"chain {'+'.join(map(str, terms))}:", steps)


def _latin(random: Random, length: int) -> Example:
    """The rows below a given first row: of a cyclic or a Klein square with permuted rows, columns
    and symbols."""
    base = random.choice((_CYCLIC, _KLEIN))
    columns = random.sample(range(4), 4)
    rows = [[base[row][column] for column in columns] for row in random.sample(range(4), 4)]
    symbols = random.sample("123456789", 4)
    first, *lower = ("".join(symbols[cell] for cell in row) for row in rows)
    return Example("latin", length, f"latin {first}:", f" {' '.join(lower)}", tuple(first))


_CYCLIC = [[(row + column) % 4 for column in range(4)] for row in range(4)]
_KLEIN = [[row ^ column for column in range(4)] for row in range(4)]


def _json(random: Random, length: int) -> Example:
    values = {
        "name": f'"{random.choice(NAMES)}"',
        "age": str(random.randint(1, 99)),
        "city": f'"{random.choice(_CITIES)}"',
        "job": f'"{random.choice(_JOBS)}"',
        "id": str(random.randint(100, 999)),
        "active": random.choice(("true", "false")),
    }
    keys = random.sample(sorted(values), length)
    text = " ".join(f"{key} {values[key]}".replace('"', "") for key in keys)
    record = ", ".join(f'"{key}": {values[key]}' for key in keys)
    return Example("json", length, f"json {text}:", " {" + record + "}")


def _python(random: Random, length: int) -> Example:
    one, two, three = random.sample(_VARIABLES, 3)
    name, number = random.choice(_FUNCTIONS), random.randint(2, 99)
    sign, word = random.choice((("+", "plus"), ("-", "minus"), ("*", "times")))
    text, line = random.choice(
        (
            (f"set {one} to {two} {word} {number}", f"{one} = {two} {sign} {number}"),
            (f"if {one} over {number} return {two}", f"if {one} > {number}: return {two}"),
            (f"while {one} under {number} add {two}", f"while {one} < {number}: {one} += {two}"),
            (
                f"list {one} {word} {number} for {one} in {two}",
                f"[{one} {sign} {number} for {one} in {two}]",
            ),
            (
                f"function {name} of {one} {two} is {one} {word} {two}",
                f"def {name}({one}, {two}): return {one} {sign} {two}",
            ),
            (f"print {name} of {one} {two} {three}", f"print({name}({one}, {two}, {three}))"),
        )
    )
    return Example("python", length, f"python {text}:", f" {line}")


_many = partial(Task, is_determined=False)

TASKS: dict[str, Task] = {
    "copy": Task(_over_list("copy", lambda _, items: items), checks.is_same_text, held_out=7),
    "reverse": Task(
        _over_list("reverse", lambda _, items: items[::-1]), checks.is_same_text, held_out=9
    ),
    "sort": Task(
        _over_list("sort", lambda _, items: sorted(items)), checks.is_same_text, held_out=7
    ),
    "shuffle": _many(_over_list("shuffle", _shuffled), checks.is_shuffle, held_out=7),
    "insert-index": Task(partial(_insert, named=True), checks.is_same_text, held_out=9),
    "insert-random": _many(partial(_insert, named=False), checks.is_insertion, held_out=7),
    "remove-index": Task(partial(_remove, named=True), checks.is_same_text, held_out=7),
    "remove-random": _many(partial(_remove, named=False), checks.is_removal, held_out=9),
    "replace-index": Task(partial(_replace, named=True), checks.is_same_text, held_out=9),
    "replace-random": _many(partial(_replace, named=False), checks.is_replacement, held_out=7),
    "cumulative-sum": Task(_cumulative_sum, checks.is_same_text, held_out=7),
    "arithmetic": Task(_arithmetic, checks.is_same_text, sizes=(2,)),
    "chain": Task(_chain, checks.is_same_text, sizes=(3, 4, 5)),
    "latin": _many(_latin, checks.is_latin_square, sizes=(4,)),
    "json": Task(_json, checks.is_same_record, sizes=(2, 3)),
    "python": Task(_python, checks.is_same_code, sizes=(1,)),
}
