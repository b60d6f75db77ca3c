"""Trees for apar: answers that are split, the rows of a tree, and a model that learns to fork."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from anydecode import LLM
from anydecode.cli.main import run
from anydecode.errors import InvalidRequestError
from anydecode.models.loading import load_checkpoint
from anydecode.training.pair_run import PairRecipe, PairRun
from anydecode.training.trees import split_answer, tree_rows, tree_texts
from interrupted_runs import trained

LIST = (
    "Three tips:\n\n1. Eat well: fruits and leaves.\n2. Sleep: eight hours a night.\n"
    "3. Move: to the next town.\n\nGood luck!"
)
PARAGRAPHS = (
    "One is a first sentence. And more follows.\n\nTwo is a second sentence. And more.\n\n"
    "A paragraph of one sentence alone.\n\nThree is a third sentence. It ends here."
)
FORK, CHILD, END = 1000, 1001, 1002


def test_lists_are_split_at_their_titles() -> None:
    assert split_answer(LIST) == [
        ("Three tips:\n\n1. Eat well:", " fruits and leaves."),
        ("\n2. Sleep:", " eight hours a night."),
        ("\n3. Move:", " to the next town."),
        ("\n\nGood luck!", ""),
    ]


def test_paragraphs_are_split_behind_their_first_sentences() -> None:
    parts = split_answer(PARAGRAPHS)
    assert [detail for _, detail in parts] == ["And more follows.", "And more.", "It ends here."]
    assert "".join(head + detail for head, detail in parts) == PARAGRAPHS


@pytest.mark.parametrize(
    "text",
    ["One sentence.", LIST.replace("fruits and leaves.", "fruits"), LIST.split("\n3.")[0],
     LIST.replace("luck", "http"), PARAGRAPHS.replace("And more.", "Mr. May."),
     PARAGRAPHS.replace("One is a first sentence", "One is"), LIST.replace("Good", "`" * 3)],
    ids=str,
)  # fmt: skip
def test_other_answers_are_no_trees(text: str) -> None:
    assert split_answer(text) == []


def test_a_detail_sees_the_heads_up_to_its_own_and_no_other_detail() -> None:
    parts = [("a", "b"), ("c", "d"), ("e", "")]

    def encode(text: str) -> list[int]:
        return list(text.encode())

    a, b, c, d, e = b"abcde"
    main = [a, FORK, c, FORK, e]
    details = [([7, a, FORK, CHILD], [b, END]), ([7, a, FORK, c, FORK, CHILD], [d, END])]
    rows = tree_rows([7], parts, encode, (FORK, CHILD), END)
    assert rows == [([7], [*main, END]), *details]
    cut = tree_rows([7], parts[:2], encode, (FORK, CHILD), END, is_complete=False)
    assert cut == [([7], main[:-1]), details[0]]


def test_other_answers_stand_between_trees() -> None:
    answers = [*b"no tree", END], [*LIST.encode(), END], [*b"none", END], [*b"none", END]
    pairs = [([7], list(answer)) for answer in answers]
    given = (
        lambda tokens: bytes(tokens).decode(), lambda text: list(text.encode()), (FORK, CHILD),
        frozenset({END}),
    )  # fmt: skip
    assert [len(rows) for rows in tree_texts(pairs, *given)] == [4, 1]
    with pytest.raises(InvalidRequestError, match="none of 1 answers has a list"):
        tree_texts(pairs[:1], *given)


@pytest.mark.slow
def test_a_trained_model_forks(tmp_path: Path) -> None:
    """All texts are the same, which the adapter learns by heart."""
    checkpoint = load_checkpoint("tiny-autoregressive")
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None
    marks = tokenizer.encode("$&", special=False)
    prompt = tokenizer.encode("copy Ada Ben:")

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, special=False)

    parts = [(" Ada", " Leo Leo Leo"), (" Ben", " Sam Sam"), (" Uma", "")]
    rows = tree_rows(prompt, parts, encode, (marks[0], marks[1]), min(tokenizer.eos_ids))
    recipe = PairRecipe(steps=120, rate=1e-2)
    run = trained(PairRun(checkpoint, tmp_path, recipe, lambda: [rows] * 4, "tiny-autoregressive"))
    assert run.losses()[-1] < 0.2 * run.losses()[0]
    with LLM("tiny-autoregressive") as llm:
        llm.add_adapter("trees", tmp_path)
        found = llm.generate(
            "copy Ada Ben:", decoder="apar:fork=$,child=&", adapter="trees", max_tokens=30
        )
    assert found.text == " Ada Leo Leo Leo Ben Sam Sam Uma"
    assert found.stats.passes < len(found.tokens)


def test_the_command_refuses_answers_without_trees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(
            ["train", "trees", "--model", "tiny-autoregressive", "--answers", "4", "--steps", "2",
             "--fork", "$", "--child", "&", "--out", str(tmp_path), "--json"]
        )  # fmt: skip
    assert ended.value.code and "none of 4 answers" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
