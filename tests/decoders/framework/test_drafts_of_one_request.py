"""Where the text depends on what is drafted, it depends on its own request alone: not on others, on
earlier ones, on cached prefixes or on a restart."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.api.llm import LLM
from anydecode.certification.checks import Restarts
from anydecode.certification.tiny import tiny_model
from anydecode.decoders.framework import speculation
from anydecode.models.scripted import ByteTokenizer
from anydecode.scoring import sequence, sequence_data
from anydecode.scoring.sequence import Sequence
from random_worlds import world

BEGIN = "abc abd abc abd abc the quick brown fox jumps over the lazy dog "
PROMPTS = [BEGIN + "abc abd", BEGIN + "the quick", "zqzqzqzq", BEGIN + "abc abd abc abd"]
#: Methods that learn from earlier texts under token-exact acceptance.
LEARNERS = [
    "stand",
    "token-recycling",
    "suffix",
    "aded",
    "taps:drafters=suffix+stand",
    "stree",
    "smartspec:drafter=suffix",
    "online-sd:batch=1",
    "omnidraft",
    "specdec++",
    "swift:window=4",
]
WORLDS = {"swift:window=4": "layers"}
#: Methods whose drafters read the target's states, with the worlds of these drafters.
READERS = {
    "eagle": "eagle",
    "eagle3": "eagle",
    "dflash": "dflash",
    "peagle": "parallelspec",
    "longspec": "longspec",
    "mtp": "mtp",
    "hydra": "hydra",
    "medusa": "medusa",
    "chimera": "chimera",
    "two drafters": "taps:drafters=eagle",
}
RULES = ["rejection", "typical", "top-m"]
#: The same for tests, of which the first one is always run.
TESTED_RULES = [RULES[0], *(pytest.param(rule, marks=pytest.mark.slow) for rule in RULES[1:])]


def opened(name: str, **options: Any) -> LLM:
    """An engine of a world; "layers" has a model of more layers."""
    if name == "layers":
        return LLM(tiny_model(layers=6, residual=0.15), tokenizer=ByteTokenizer(), **options)
    return world(name).open(**options)


def with_rule(decoder: str, rule: str) -> str:
    return f"{decoder}{',' if ':' in decoder else ':'}acceptance={rule}"


def answers(llm: LLM, prompts: list[str], decoder: str, **options: Any) -> list[list[int]]:
    shared = {"max_tokens": 24, "temperature": 0.8, "seed": 5, "ignore_eos": True}
    found = llm.generate(prompts, decoder=decoder, **{**shared, **options})
    return [one.tokens for one in found]


def answers_alone(name: str, decoder: str) -> list[list[int]]:
    """The text of each prompt on an engine of its own."""
    found = []
    for prompt in PROMPTS:
        with opened(name, prefix_cache=False) as llm:
            found += answers(llm, [prompt], decoder)
    return found


def assert_texts_of_one_request(name: str, decoder: str) -> None:
    """Asserts that texts in company, after others and beside a cached prefix are those alone."""
    expected = answers_alone(name, decoder)
    with opened(name) as llm:
        answers(llm, PROMPTS[:1], "autoregressive")  # only the target has this prefix
        assert answers(llm, PROMPTS[:1], decoder) == expected[:1]
        for _ in range(2):
            assert answers(llm, PROMPTS, decoder) == expected
        assert answers(llm, PROMPTS[3:], decoder) == expected[3:]


@pytest.mark.parametrize("rule", TESTED_RULES)
@pytest.mark.parametrize("decoder", LEARNERS)
def test_a_request_learns_from_itself(decoder: str, rule: str) -> None:
    assert_texts_of_one_request(WORLDS.get(decoder, "tiny repeats"), with_rule(decoder, rule))


@pytest.mark.parametrize(
    "decoder", [key for key in LEARNERS if key not in ("omnidraft", "specdec++", "stree")]
)
def test_a_memory_of_all_requests_is_noticed(decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong twin: all requests share what a drafter learns."""
    monkeypatch.setattr(speculation, "deepcopy", lambda drafter: drafter)
    with pytest.raises(AssertionError):
        for rule in RULES:
            assert_texts_of_one_request(
                WORLDS.get(decoder, "tiny repeats"), with_rule(decoder, rule)
            )


@pytest.mark.parametrize("rule", TESTED_RULES)
@pytest.mark.parametrize("name", READERS)
def test_a_drafter_reads_the_same_states_whatever_is_cached(name: str, rule: str) -> None:
    assert_texts_of_one_request(name, with_rule(READERS[name], rule))


def test_other_states_behind_a_cached_prefix_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong twin: the target begins with all that is cached, as under token-exact acceptance."""
    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(Sequence, "repeats_drafts", never, raising=False)
    monkeypatch.setattr(sequence_data, "MAX_COMPUTED_AGAIN", 0)
    with pytest.raises(AssertionError):
        for rule in RULES:
            assert_texts_of_one_request("eagle", with_rule("eagle", rule))


def texts(name: str, decoder: str, share: float) -> list[list[int]]:
    """The text of each prompt, with preemptions before a share of the engine's steps."""
    found = []
    for number, prompt in enumerate(PROMPTS[:2]):
        with opened(name) as llm, Restarts(llm.engine, number, share):
            found += answers(llm, [prompt], decoder)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("max_states", [2048, 24])
@pytest.mark.parametrize("name", READERS)
def test_a_restart_leaves_the_text_as_it_is(
    name: str, max_states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the prompt has more positions than a drafter gets states of."""
    for module in (sequence, sequence_data):
        monkeypatch.setattr(module, "MAX_STATES", max_states)
    decoder = with_rule(READERS[name], "rejection")
    assert texts(name, decoder, 0.3) == texts(name, decoder, 0.0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        # These are not computed again, but the target's states are: the first round drafts.
        ("eagle", {"prompt_logprobs": 0}),
        ("longspec", {"prompt_logprobs": 0}),
        ("mtp", {"guidance_scale": 1.5}),  # with a second prompt, which has no states
    ],
)
def test_a_restart_at_any_step_leaves_the_text_as_it_is(name: str, options: Any) -> None:
    def result(step: int) -> Any:
        """The tokens and log-probabilities with a preemption before a step."""
        decoder = with_rule(READERS[name], "top-m")
        with opened(name) as llm:
            request = llm.request(PROMPTS[0], decoder=decoder, max_tokens=8, **options)
            llm.start(request, background=False)
            for number in range(100):
                if number == step and not request.done:
                    llm.engine.preempt(request.jobs[0])
                llm.engine.step()
            found = request.generation()
            return found.tokens, [one and one.logprob for one in found.prompt_logprobs or ()]

    plain = result(100)
    assert len(plain[0]) == 8
    assert [result(step) for step in range(1, 10)] == [plain] * 9
