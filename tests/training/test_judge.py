"""Labels of a judge equal those of a search over texts; a run learns from them, is resumed, and
tests the judge."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

pytest.importorskip("torch")

from anydecode.certification.oracles.speculative.judge import Read
from anydecode.certification.rounds import blurred, scripted, wordy
from anydecode.certification.tiny_judge import judged_model, judged_network
from anydecode.errors import InvalidRequestError
from anydecode.models.judge import Judge
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import Network
from anydecode.rewards import answers
from anydecode.tasks.word_problems import word_problem
from anydecode.training.block_adapter import open_llama
from anydecode.training.checkpoint import save_nested_llama, writable_tokenizer
from anydecode.training.generated import run_requests
from anydecode.training.judge import (
    PENALTIES,
    JudgeRecipe,
    JudgeRun,
    Labels,
    LabelSearch,
    MarkedAnswer,
    MarkedLabels,
    fit_judge,
    marked_labels,
    own_questions,
    probabilities,
    threshold_of,
)
from anydecode.training.nested import first_layers
from anydecode.training.pairs import read_marked
from interrupted_runs import trained
from train_commands import train_command

TARGET = wordy(spread=1.7)
DRAFT = blurred(TARGET, error=1.0)
#: A token that ends answers.
END = 100
RECIPE = JudgeRecipe(tokens=10, batch=8, precision=0.8, size=5)
QUESTIONS = [(f"{first}{second}c", "cab") for first in "abcdefgh" for second in "xyz"]


def ending(text: str) -> str | None:
    """The last of some letters."""
    return next((letter for letter in reversed(text) if letter in "abefh"), None)


def greedy(text: list[int], start: int, length: int) -> list[int]:
    """The target's greedy text of up to so many tokens that continues a text, whose answer begins
    at `start`."""
    text = list(text)
    while len(text) < length and END not in text[start:]:
        text.append(int(TARGET(tuple(text)).argmax()))
    return text


def search(prompt: list[int], max_tokens: int) -> tuple[list[int], list[int], list[bool]]:
    """The greedy answer, and the draft tokens and labels of the search, over whole texts."""
    length, start = len(prompt) + max_tokens, len(prompt)

    def result(text: list[int]) -> str | None:
        return ending("".join(map(chr, text[start:])))

    text = first = greedy(prompt, start, length)
    expected, place = result(text), start
    tokens, labels = list[int](), list[bool]()
    while expected is not None and place < len(text):
        token = int(DRAFT(tuple(text[:place])).argmax())
        if token != text[place]:
            other = greedy([*text[:place], token], start, length)
            tokens.append(token)
            labels.append(result(other) == expected)
            text = other if labels[-1] else text
        place += 1
    return first[start:], tokens, labels


def test_labels_equal_those_of_a_search_over_texts() -> None:
    num_right, num_wrong, num_ended = 0, 0, 0
    with scripted(TARGET, DRAFT) as llm:
        for prompt in ("abcabd", "the cab", "h", "a bad cab", "dab"):
            tokens = llm.encode(prompt)
            decoder = LabelSearch(ending, llm.tokenizer.decode, frozenset({END}), 14)
            answer = llm.generate(
                tokens, decoder=decoder, max_tokens=14, temperature=0.0, stop_tokens=[END]
            )
            first, drafts, labels = search(tokens, 14)
            assert answer.tokens == first[: len(answer.tokens)]
            assert [int(state[0]) for state in decoder.states] == drafts
            assert decoder.is_right == labels
            num_right += sum(labels)
            num_wrong += len(labels) - sum(labels)
            num_ended += first[-1] == END
            llm.engine.check_integrity()
    assert num_right > 5 and num_wrong > 5 and 0 < num_ended < 5


def test_questions_searched_together_have_the_labels_of_each_alone() -> None:
    with scripted(TARGET, DRAFT) as llm:

        def labels(prompts: list[str]) -> list[list[bool]]:
            decoders = [LabelSearch(ending, llm.tokenizer.decode, frozenset(), 8) for _ in prompts]
            requests = [
                llm.request(prompt, decoder=one, max_tokens=8, temperature=0.0, ignore_eos=True)
                for prompt, one in zip(prompts, decoders, strict=True)
            ]
            run_requests(llm, requests)
            return [one.is_right for one in decoders]

        prompts = ["abcabd", "the cab", "h"]
        assert labels(prompts) == [labels([prompt])[0] for prompt in prompts]


def state_of(network: Network, text: list[int]) -> np.ndarray:
    """The last state at the end of a text, from a forward pass position by position."""
    return Read(network).state(text)


def test_states_are_those_of_both_models_at_the_draft() -> None:
    target, draft = judged_network(), judged_network(2)
    with judged_model(prefix_cache=False) as llm:
        decoder = LabelSearch(ending, llm.tokenizer.decode, frozenset(), 10, "both")
        prompt = llm.encode("a bad cab")
        answer = llm.generate(prompt, decoder=decoder, max_tokens=10, temperature=0.0)
    assert len(decoder.states) > 2 and decoder.states[0].shape == (128,)
    reader = Read(draft)
    first = next(
        index
        for index, token in enumerate(answer.tokens)
        if int(reader.logits([*prompt, *answer.tokens[:index]]).argmax()) != token
    )
    before = [*prompt, *answer.tokens[:first]]
    text = [*before, int(reader.logits(before).argmax())]
    expected = np.concatenate([state_of(target, text), state_of(draft, text)])
    np.testing.assert_allclose(decoder.states[0], expected, atol=1e-4)


@pytest.mark.parametrize("states", ["target", "both"])
def test_marked_answers_are_labels_without_a_search(states: str) -> None:
    with judged_model(prefix_cache=False) as llm:
        prompt, answer = llm.encode("the cat"), llm.encode("bad cab")
        known = marked_labels(answer, [(1, 3)], llm.tokenizer.decode)
        assert known == [None, False, False, None, None, None, None]
        assert marked_labels(answer, [], llm.tokenizer.decode) == [True] * 7
        decoder = MarkedLabels(answer, known, states)
        llm.generate(prompt, decoder=decoder, max_tokens=7, temperature=0.0)
        llm.engine.check_integrity()
    assert decoder.is_right == [False, False]
    networks = [judged_network(), judged_network(2)][: 1 if states == "target" else 2]
    for end, state in zip((2, 3), decoder.states, strict=True):
        text = [*prompt, *answer[:end]]
        expected = np.concatenate([state_of(network, text) for network in networks])
        np.testing.assert_allclose(state, expected, atol=1e-4)


def test_a_run_learns_from_marked_answers_with_both_states(tmp_path: Path) -> None:
    questions = [
        MarkedAnswer(prompt, answer, ((0, 1),) if answer == "bad" else ())
        for prompt, _ in QUESTIONS[:12]
        for answer in ("bad", "cab", "feed")
    ]
    recipe = replace(RECIPE, states="both")
    with judged_model() as llm:
        run = trained(JudgeRun(llm, tmp_path, recipe, questions, ending))
        assert run.judge is not None and run.judge.draft_weights is not None
        assert [len(one.is_right) for one in run.labels[:3]] == [1, 3, 4]
        judge = Judge.load(run.path)
        judge.check_draft(llm.engine.runners["draft"].model.network)
        assert run.tested["labels"] == run.of_part("test").states.shape[0]


def test_files_of_marked_answers_are_read_and_bad_ones_refused(tmp_path: Path) -> None:
    file = tmp_path / "marked.jsonl"
    line = {"prompt": "1 + 1", "answer": "It is 3.", "mistakes": [[6, 7]]}
    file.write_text(json.dumps(line) + "\n" + json.dumps({**line, "mistakes": []}))
    assert read_marked(file) == [
        ("1 + 1", "It is 3.", ((6, 7),)),
        ("1 + 1", "It is 3.", ()),
    ]
    for wrong in ({"mistakes": [[3, 9]]}, {"mistakes": [[3, 3]]}, {"mistakes": 4}, {"answer": ""}):
        file.write_text(json.dumps({**line, **wrong}))
        with pytest.raises(InvalidRequestError, match="marked") as refusal:
            read_marked(file)
        assert "\n" not in str(refusal.value)


def test_questions_without_a_result_have_no_labels() -> None:
    with scripted(TARGET, DRAFT) as llm:
        decoder = LabelSearch(answers.last_number, llm.tokenizer.decode, frozenset(), 8)
        answer = llm.generate("abc", decoder=decoder, max_tokens=8, temperature=0.0)
    assert len(answer.tokens) == 8 and not decoder.is_right and not decoder.states


@pytest.mark.parametrize(
    ("precision", "threshold"), [(0.5, 0.1), (0.6, 0.1), (0.65, 0.3), (0.75, 0.8), (1.0, 0.8)]
)
def test_the_threshold_is_the_lowest_with_the_precision(precision: float, threshold: float) -> None:
    p = np.array([0.2, 0.4, 0.9, 0.7, 0.2])
    is_right = np.array([False, True, True, False, True])
    found = threshold_of(p, is_right, precision)
    assert found == pytest.approx(threshold)
    assert is_right[p > found].mean() >= precision


def test_without_the_precision_nothing_is_accepted() -> None:
    assert threshold_of(np.array([0.2, 0.9]), np.array([True, False]), 0.9) == 1.0


def test_a_judge_finds_what_labels_depend_on() -> None:
    random = np.random.default_rng(2)
    states = (3 + 5 * random.standard_normal((400, 6))).astype(np.float32)
    labels = Labels(states, states[:, 1] - states[:, 4] > 2)
    halves = [Labels(states[part], labels.is_right[part]) for part in (slice(200), slice(200, 400))]
    found = fit_judge(halves[0], halves[1], 0.97, "model")
    assert found is not None
    judge, fit = found
    accepted = probabilities(judge, labels) > judge.threshold
    assert labels.is_right[accepted].mean() > 0.95
    assert accepted[labels.is_right].mean() > 0.9
    assert 0 < fit.held_out < 0.2 and fit.labels == 200 and judge.fingerprint == "model"
    one_kind = Labels(states[:4], np.ones(4, bool))
    assert fit_judge(one_kind, halves[1], 0.97, "") is None
    assert fit_judge(halves[0], one_kind, 0.97, "") is None


def noisy_labels(seed: int, count: int) -> Labels:
    """Labels of which a fifth is wrong, and which few inputs tell apart."""
    random = np.random.default_rng(seed)
    states = (2 + random.standard_normal((count, 20))).astype(np.float32)
    is_right = states[:, 0] + random.normal(0, 1.0, count) > 1.0
    return Labels(states, is_right)


def test_both_kinds_of_labels_weigh_the_same() -> None:
    """The optimal bias then makes the mean probabilities of both kinds add up to 1."""
    labels = noisy_labels(1, 120)
    assert 0.6 < labels.is_right.mean() < 0.9
    found = fit_judge(labels, noisy_labels(2, 400), 0.9, "")
    assert found is not None
    p = probabilities(found[0], labels)
    assert p[labels.is_right].mean() + p[~labels.is_right].mean() == pytest.approx(1, abs=1e-4)


def test_held_out_labels_choose_penalty_and_threshold() -> None:
    labels, held_out = noisy_labels(1, 60), noisy_labels(2, 400)
    found = fit_judge(labels, held_out, 0.9, "")
    assert found is not None
    judge, fit = found
    # The smallest penalty fits the labels best, and others worse.
    assert fit.penalty > min(PENALTIES)
    p = probabilities(judge, held_out)
    assert judge.threshold == pytest.approx(threshold_of(p, held_out.is_right, 0.9))
    assert judge.threshold != pytest.approx(
        threshold_of(probabilities(judge, labels), labels.is_right, 0.9)
    )


def test_questions_are_held_out_for_the_choice_and_for_the_test(tmp_path: Path) -> None:
    with judged_model() as llm:
        run = trained(JudgeRun(llm, tmp_path, RECIPE, QUESTIONS, ending))
        parts = {"test": run.labels[:3], "choice": run.labels[3:6], "training": run.labels[6:]}
        for name, expected in parts.items():
            part = run.of_part(name)
            assert np.array_equal(part.states, np.concatenate([one.states for one in expected]))
        found = fit_judge(run.of_part("training"), run.of_part("choice"), 0.8, run.fingerprint)
        assert found is not None and run.judge is not None
        assert np.array_equal(found[0].weights, run.judge.weights)
        assert found[0].threshold == run.judge.threshold
        assert run.tested["labels"] == len(run.of_part("test").is_right)


def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    with judged_model() as llm:
        whole = trained(JudgeRun(llm, tmp_path / "whole", RECIPE, QUESTIONS, ending))
        with pytest.raises(KeyboardInterrupt):
            trained(JudgeRun(llm, tmp_path / "parts", RECIPE, QUESTIONS, ending), stop=2)
        resumed = JudgeRun(llm, tmp_path / "parts", RECIPE, QUESTIONS, ending)
        assert resumed.step == 2 and len(resumed.labels) == 16
        trained(resumed)
        for one, other in zip(whole.labels, resumed.labels, strict=True):
            assert np.array_equal(one.states, other.states)
            assert np.array_equal(one.is_right, other.is_right)
        log = json.loads((tmp_path / "whole" / "log.json").read_text())
        assert log["test"] == whole.tested == resumed.tested
        assert whole.tested["labels"] > 3 and whole.tested["standard"]["same"] == 1.0
        assert whole.tested["judge"]["tokens_per_pass"] >= 1
        assert 0 <= whole.tested["judge"]["right"] <= 1
        assert [entry["labels"] for entry in log["history"] if "held_out" in entry]
        judge = Judge.load(whole.path)
        judge.check(llm.model.network)  # type: ignore[attr-defined]
        with pytest.raises(InvalidRequestError, match="holds a run of another"):
            JudgeRun(llm, tmp_path / "whole", RECIPE, QUESTIONS[1:], ending)


def test_labels_of_one_kind_are_kept_and_refused(tmp_path: Path) -> None:
    with judged_model() as llm:
        run = JudgeRun(llm, tmp_path, RECIPE, QUESTIONS[:8], lambda text: "always")
        with pytest.raises(InvalidRequestError, match="labels of one kind only") as refusal:
            trained(run)
    assert "\n" not in str(refusal.value)
    assert (tmp_path / "state.pt").is_file() and not run.path.exists()


def test_bad_recipes_and_too_few_questions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="precision"):
        JudgeRecipe(precision=1.5)
    with pytest.raises(InvalidRequestError, match="target, both"):
        JudgeRecipe(states="draft")
    with scripted(TARGET, DRAFT) as llm, pytest.raises(Exception, match="needs a transformer"):
        JudgeRun(llm, tmp_path, RECIPE, QUESTIONS, ending)
    with judged_model() as llm, pytest.raises(InvalidRequestError, match="4 or more"):
        JudgeRun(llm, tmp_path, RECIPE, QUESTIONS[:3], ending)


def test_the_packages_problems_have_their_number_as_the_last() -> None:
    """In the problems that are read off or repeated it stands in the text."""
    questions = own_questions(300, seed=1)
    assert len({text for text, _ in questions}) == 300
    assert own_questions(20, seed=1) == questions[:20] != own_questions(20, seed=2)
    for text, answer in questions:
        assert answers.last_number(answer) == answer
        if text.startswith("Repeat"):
            assert answers.last_number(text) == answer
    assert word_problem(Random(3)) == word_problem(Random(3))


@pytest.mark.slow
def test_the_command_trains_draws_and_resumes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(answers.ANSWERS, "last-number", lambda text: text[:1])
    checkpoint = load_checkpoint(model)
    nested = first_layers(open_llama(checkpoint), 2)
    draft, data = tmp_path / "draft", tmp_path / "data.jsonl"
    save_nested_llama(draft, nested.state_dict(), nested.shape, writable_tokenizer(checkpoint))
    lines = [json.dumps({"prompt": text, "answer": "a"}) for text, _ in QUESTIONS]
    data.write_text("\n".join(lines))
    plot, out = tmp_path / "curve.svg", tmp_path / "out"
    paths = {"draft": draft, "data": data, "out": out}
    found = [
        train_command(capsys, "judge --tokens 8 --precision 0.6", model, **paths, **more)
        for more in ({"plot": plot}, {})
    ]
    assert found[0] == found[1] and found[0]["questions"] == 24
    assert plot.read_text().startswith("<?xml") and (out / "judge.safetensors").is_file()
    assert found[0]["test"]["standard"]["same"] == 1.0
