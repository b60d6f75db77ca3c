"""Drafters that read the target's states, in multi-step bursts: the text is that without drafts,
and the drafts are those of the drafter outside bursts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.certification.tiny import eagle3_checkpoint, eagle_checkpoint, with_drafter
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.acceptance import TokenExact
from anydecode.decoders.framework.draft_candidates import draft_token
from anydecode.decoders.framework.speculation import verify_tree
from anydecode.decoders.speculative.auto import MAX_BURST_TOKENS
from anydecode.decoders.speculative.draft_model import draft_chain
from anydecode.decoders.speculative.draft_sources import DraftRecord, LearnedDrafts, ModelSource
from anydecode.kernels.drafting import BoundDrafts
from anydecode.kernels.interface import MAX_MATCH, NUM_BINS, BurstDrafter, BurstDrafts, CopyText
from anydecode.kernels.library import load_library
from anydecode.kernels.native import NativeExecutor
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import load_network
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import Network
from anydecode.models.opening import open_model
from anydecode.models.self_drafts import open_draft
from anydecode.sampling import sampler
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import DRAFT, TARGET, Sequence
from anydecode.scoring.tree import TokenTree
from bursts import Burst, Chain, recorded, scored_by_rule
from draft_folders import drafter_folder, target_folder

pytestmark = pytest.mark.skipif(load_library() is None, reason="needs the native kernels")

PROMPTS = ["a lazy dog runs", "one two three", "zq"]
OPTIONS: dict[str, Any] = {"seed": 3, "max_tokens": 100, "ignore_eos": True}
DRAFTERS = pytest.mark.parametrize("drafter", [eagle3_checkpoint, eagle_checkpoint])
TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 0.7])
#: Seconds of a pass, much longer than one of the tiny drafter.
PASS_SECONDS = 7e-3


def llm_with(drafter: Any, row_cost: float = 0.01, **options: Any) -> LLM:
    llm = with_drafter(drafter, **options)
    llm.cost_model = FixedCosts(lambda rows, _: PASS_SECONDS * (1 + row_cost * rows))
    return llm


@pytest.fixture
def _fixed_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are expected to save time, however long they really take, so that every state is
    read."""
    record = DraftRecord(3.0, 1.5, 3e-4, 1e-4)
    monkeypatch.setattr(ModelSource, "expected", lambda self, seconds: replace(record))


def _keep_row(rows: list[np.ndarray], sampler: Any, row: np.ndarray, token: int) -> bool:
    rows.append(row.copy())
    return True


class Chains(Decoder):
    """Decodes token by token, and drafts a chain before each of them."""

    requirements = Requirements(runners=(DRAFT,), reads_states=True)

    def __init__(self) -> None:
        self.chains: dict[int, Chain] = {}
        self.siblings: dict[int, tuple[int, float]] = {}  # what would be sampled without the first

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            if sequence.can_draft():
                sequence.align(DRAFT)
                probabilities: list[float] = []
                tokens = yield from draft_chain(sequence, [], 8, probabilities=probabilities)
                self.chains[sequence.length] = tokens, probabilities
                sequence.align(DRAFT)
                rows: list[np.ndarray] = []
                keep = partial(_keep_row, rows)
                yield from draft_chain(sequence, [], 1, should_stop=keep)
                row = rows[0]
                weights = np.exp(row - row.max())
                row[tokens[0]] = -np.inf
                sampler = sequence.sampler.fork()
                sibling = draft_token(sequence, sampler, row, sequence.length)
                assert sibling is not None
                self.siblings[sequence.length] = sibling, weights[sibling] / weights.sum()
            yield from verify_tree(sequence, TokenTree(), TokenExact())


class LikelyTokens(Decoder):
    """Decodes token by token, and asks the drafter for its most probable token before each."""

    requirements = Chains.requirements

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            if sequence.can_draft():
                sequence.align(DRAFT)
                distributions: list[np.ndarray] = []
                yield from draft_chain(sequence, [], 1, distributions=distributions)
                self.tokens[sequence.length] = int(distributions[0].argmax())
            yield from verify_tree(sequence, TokenTree(), TokenExact())


def drafted(bursts: list[Burst]) -> list[list[int]]:
    """The drafts of the drafter."""
    return [
        draft
        for burst in bursts
        for draft, source in zip(burst.drafts.drafts, burst.drafts.sources, strict=True)
        if source == len(burst.texts) and draft
    ]


def scored(bursts: list[Burst]) -> list[tuple[list[int], int | None]]:
    """The drafts of bursts with their siblings."""
    return [
        one for burst in bursts
        for one in zip(burst.drafts.drafts, burst.drafts.siblings, strict=True)
    ]  # fmt: skip


def with_rule(
    bursts: list[Burst], outside: Chains, chains: dict[int, Chain] | None = None
) -> list[tuple[list[int], int | None]]:
    """The drafts of bursts and their siblings by their rule, with the chains and siblings of
    `outside`, or with other chains."""
    chains = outside.chains if chains is None else chains
    return [one for burst in bursts for one in scored_by_rule(burst, chains, outside.siblings)]


@pytest.mark.usefixtures("_fixed_records")
@TEMPERATURES
@DRAFTERS
def test_the_text_is_that_without_drafts_and_the_drafts_those_outside_bursts(
    drafter: Callable[..., Any], temperature: float
) -> None:
    options = {**OPTIONS, "temperature": temperature}
    every: list[Burst] = []
    with llm_with(drafter) as llm, recorded(llm) as bursts:
        for prompt in PROMPTS:
            outside = Chains()
            plain = llm.generate(prompt, decoder=outside, **options)
            assert not bursts
            answer = llm.generate(prompt, decoder="auto", trace=True, **options)
            assert answer.tokens == plain.tokens
            drafts = scored(bursts)
            assert drafts == with_rule(bursts, outside)
            late = {length: outside.chains.get(length + 1, ([], [])) for length in outside.chains}
            assert drafts != with_rule(bursts, outside, late)
            assert_counts(answer)
            every += bursts
            bursts.clear()
        llm.engine.check_integrity()
    assert len(drafted(every)) > 40 and max(map(len, drafted(every))) > 1


def accepted_siblings(bursts: list[Burst]) -> list[tuple[int, int]]:
    """Of each accepted sibling after which the burst goes on, the number of drafts beside it, and
    its position among the tokens of the burst."""
    found = []
    for burst in bursts:
        first = 0
        for draft, sibling in zip(burst.drafts.drafts, burst.drafts.siblings, strict=True):
            left = burst.tokens[first:]
            kept = count_equal(draft, left)
            if not kept and count_equal([sibling], left):
                found.append((len(draft), first))
                kept = 1
            first += 1 + kept
    return found


@pytest.mark.usefixtures("_fixed_records")
@TEMPERATURES
@DRAFTERS
def test_accepted_siblings_keep_the_text_if_their_keys_move(
    drafter: Callable[..., Any], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**OPTIONS, "temperature": temperature, "max_tokens": 200}
    siblings = np.full(NUM_BINS, 0.3)
    monkeypatch.setattr(LearnedDrafts, "sibling_chances", lambda self: siblings)
    with llm_with(drafter) as llm, recorded(llm) as bursts:
        plain = [llm.generate(one, decoder="autoregressive", **options).tokens for one in PROMPTS]
        answers = [llm.generate(one, decoder="auto", trace=True, **options) for one in PROMPTS]
        assert [answer.tokens for answer in answers] == plain
        for answer in answers:
            assert_counts(answer)
        # Beside a draft, whose slot the sibling takes; later steps read it.
        assert len([1 for num_drafts, _ in accepted_siblings(bursts) if num_drafts]) > 5
        llm.engine.check_integrity()
        further = [[*llm.encode(one), *tokens] for one, tokens in zip(PROMPTS, plain, strict=True)]
        cached = [llm.generate(one, decoder="autoregressive", **options) for one in further]
        llm.clear()
        fresh = [llm.generate(one, decoder="autoregressive", **options) for one in further]
        assert [one.tokens for one in cached] == [one.tokens for one in fresh]
        assert all(one.stats.num_cached_tokens > 100 for one in cached)
        llm.clear()
        monkeypatch.setattr(SequenceCache, "reorder", lambda self, start, slots: None)
        wrong = [llm.generate(one, decoder="auto", **options).tokens for one in PROMPTS]
    assert wrong != plain


@pytest.mark.usefixtures("_fixed_records")
@DRAFTERS
@pytest.mark.slow
def test_drafts_with_the_noise_of_samples_are_right_more_often_than_likely_ones(
    drafter: Callable[..., Any],
) -> None:
    options = {**OPTIONS, "temperature": 1.0, "max_tokens": 300}
    num_drafts = num_right = num_likely = 0
    with llm_with(drafter) as llm, recorded(llm) as bursts:
        for prompt in PROMPTS:
            likely = LikelyTokens()
            plain = llm.generate(prompt, decoder=likely, **options)
            assert llm.generate(prompt, decoder="auto", **options).tokens == plain.tokens
            for burst in bursts:
                length, first = len(burst.texts[0].tokens), 0
                given = burst.drafts
                for draft, sibling, source in zip(
                    given.drafts, given.siblings, given.sources, strict=True
                ):
                    left = burst.tokens[first:]
                    if draft and source == len(burst.texts):
                        num_drafts += 1
                        num_right += draft[0] == left[0]
                        num_likely += likely.tokens[length + first] == left[0]
                    first += 1 + (count_equal(draft, left) or count_equal([sibling], left))
            bursts.clear()
    assert num_drafts > 100 and num_right > 1.05 * num_likely


def count_equal(draft: list[Any], tokens: list[int]) -> int:
    """How many tokens of a draft are kept, where at least one more follows."""
    count = 0
    while count < min(len(draft), len(tokens) - 1) and draft[count] == tokens[count]:
        count += 1
    return count


def assert_counts(answer: Any) -> None:
    """Asserts that passes and rows are those of the steps in a trace."""
    steps, stats = answer.trace, answer.stats
    assert stats.num_tokens == len(steps) + sum(len(step["accepted"]) for step in steps)
    num_scored = stats.num_prompt_tokens - stats.num_cached_tokens + len(steps) - 1
    assert stats.rows == num_scored + sum(len(step["drafted"]) for step in steps)
    assert stats.passes == len(steps)
    sources = [source for step in steps for source in step["sources"] or ()]
    assert sources.count("model") > 5


@pytest.mark.usefixtures("_fixed_records")
@TEMPERATURES
@pytest.mark.parametrize("dtype", ["int4", "int8", "bfloat16"])
def test_packed_weights_keep_the_text(tmp_path: Path, dtype: str, temperature: float) -> None:
    model = target_folder(tmp_path / "model")
    checkpoint = eagle3_checkpoint(load_network(load_checkpoint(model)))
    folder = drafter_folder(tmp_path / "drafter", checkpoint, "model.safetensors")
    options = {**OPTIONS, "temperature": temperature}
    with LLM(model, draft=folder, dtype=dtype) as llm, recorded(llm) as bursts:
        llm.cost_model = FixedCosts(lambda rows, _: PASS_SECONDS * (1 + 0.01 * rows))
        outside = Chains()
        plain = llm.generate([5, 6, 7], decoder=outside, **options)
        assert llm.generate([5, 6, 7], decoder="auto", **options).tokens == plain.tokens
        assert scored(bursts) == with_rule(bursts, outside) and drafted(bursts)
        llm.engine.check_integrity()


@pytest.mark.parametrize(
    "options",
    [{"cache_positions": 150}, {"row_budget": 5}, {"prefix_cache": False}],
    ids=["full", "chunked", "uncached"],
)
@TEMPERATURES
def test_text_alone_again_and_in_company(options: dict[str, Any], temperature: float) -> None:
    request = {**OPTIONS, "max_tokens": 40, "temperature": temperature}
    with llm_with(eagle3_checkpoint, **options) as llm, recorded(llm) as bursts:
        expected = [llm.generate(p, decoder="autoregressive", **request).tokens for p in PROMPTS]
        for _ in range(2):
            for prompt, tokens in zip(PROMPTS, expected, strict=True):
                assert llm.generate(prompt, decoder="auto", **request).tokens == tokens
        together = llm.generate(PROMPTS, decoder="auto", **request)
        llm.engine.check_integrity()
    assert [one.tokens for one in together] == expected
    assert drafted(bursts)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9, 64, 65, 66])
def test_the_text_ends_where_it_should(max_tokens: int) -> None:
    options: dict[str, Any] = {"ignore_eos": True, "max_tokens": max_tokens}
    with llm_with(eagle3_checkpoint) as llm:
        for _ in range(2):
            plain = llm.generate(PROMPTS[0], decoder="autoregressive", **options)
            found = llm.generate(PROMPTS[0], decoder="auto", **options)
            assert found.tokens == plain.tokens and found.finish_reason == plain.finish_reason
            options["stop_tokens"] = [plain.tokens[len(plain.tokens) // 2]]
        llm.engine.check_integrity()


@pytest.mark.usefixtures("_fixed_records")
@TEMPERATURES
def test_of_a_long_prompt_only_the_end_is_read(temperature: float) -> None:
    options = {**OPTIONS, "temperature": temperature}
    prompt = " ".join(map(str, range(100, 160)))
    with llm_with(eagle3_checkpoint) as llm, recorded(llm) as bursts:
        plain = llm.generate(prompt, decoder="autoregressive", **options)
        assert len(prompt) > 2 * MAX_BURST_TOKENS
        llm.engine.runners[TARGET].prefixes.clear()
        assert llm.generate(prompt, decoder="auto", **options).tokens == plain.tokens
        llm.engine.check_integrity()
    assert bursts[0].drafter is not None
    assert len(bursts[0].drafter.tokens) == MAX_BURST_TOKENS
    assert drafted(bursts)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "rules",
    [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.95, "min_p": 0.01}],
    ids=str,
)
@pytest.mark.usefixtures("_fixed_records")
def test_truncated_samples_are_drawn_in_bursts(
    rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**OPTIONS, "temperature": 0.9, **rules}
    with llm_with(eagle3_checkpoint) as llm, recorded(llm) as bursts:
        for prompt in PROMPTS:
            with monkeypatch.context() as patch:
                patch.setattr(NativeExecutor, "truncates", False)
                patch.setattr(sampler, "sample_truncated", lambda *args: None)
                plain = llm.generate(prompt, decoder="auto", **options)
                assert not bursts
            free = {"temperature": 0.9, **OPTIONS}
            assert llm.generate(prompt, decoder="multi-step", **free).tokens != plain.tokens
            for decoder in ("multi-step", "autoregressive", "auto"):
                assert llm.generate(prompt, decoder=decoder, **options).tokens == plain.tokens
            in_bursts = sum(len(burst.tokens) for burst in bursts)
            assert len(plain.tokens) / 2 < in_bursts > 2 * len(bursts)
            bursts.clear()
        llm.engine.check_integrity()


@pytest.mark.usefixtures("_fixed_records")
def test_a_burst_ends_where_a_sample_is_left_to_the_sampler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Where the nucleus ends among very improbable tokens, rounding may decide which ones it has.
    options = {**OPTIONS, "temperature": 0.3, "top_p": 0.9999}
    with llm_with(eagle3_checkpoint) as llm, recorded(llm) as bursts:
        for prompt in PROMPTS:
            answer = llm.generate(prompt, decoder="auto", trace=True, **options)
            steps = answer.trace
            assert [token for step in steps for token in step["tokens"]] == answer.tokens
            assert answer.stats.passes == len(steps)
            assert llm.generate(prompt, decoder="multi-step", **options).tokens == answer.tokens
            with monkeypatch.context() as patch:
                patch.setattr(NativeExecutor, "truncates", False)
                patch.setattr(sampler, "sample_truncated", lambda *args: None)
                assert llm.generate(prompt, decoder="auto", **options).tokens == answer.tokens
        lengths = [len(burst.tokens) for burst in bursts]
        assert lengths.count(0) > 10 and lengths.count(1) > 1 and max(lengths) > 2
        llm.engine.check_integrity()


def test_a_pass_whose_sample_is_left_to_the_sampler_is_no_rejection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds: list[int] = []
    monkeypatch.setattr(ModelSource, "_record", lambda self, values, _: rounds.append(values[1]))
    learned = LearnedDrafts()
    source = ModelSource.__new__(ModelSource)
    source.learned = learned
    drafts = BurstDrafts([], np.array([1e-3, 2e-3]), 1.0, 0.0)
    drafts.drafts, drafts.sources, drafts.probabilities = [[5, 6]] * 2, [0, 0], [[0.95, 0.95]] * 2
    drafts.rows, drafts.siblings = [3, 3], [None, None]
    drafter = BurstDrafter.__new__(BurstDrafter)
    drafter.num_due, drafter.draft_seconds, drafter.num_drafted = 0, [1e-4] * 2, [2] * 2
    drafter.num_unread, drafter.siblings = [1, 1], [-1, -1]

    def taught(tokens: list[list[int]]) -> list[list[float]]:
        """The hits and the tries that passes with these tokens teach, at depths 0 and 1."""
        rates, kinds = learned.rates, [learned.kind(depth, 0.95) for depth in (0, 1)]
        before = [[rates.hits[kind], rates.tries[kind]] for kind in kinds]
        source.observe_burst(drafter, drafts, tokens)
        after = [[rates.hits[kind], rates.tries[kind]] for kind in kinds]
        return np.subtract(after, before).tolist()

    assert taught([[5, 7], [5]]) == [[2, 2], [0, 1]] and rounds == [1]
    assert taught([[5, 7], [5, 7]]) == [[2, 2], [0, 2]] and rounds == [1, 1, 1]
    assert taught([[7], []]) == [[0, 1], [0, 0]] and rounds == [1, 1, 1, 0]


def test_drafting_counts_where_a_copy_was_taken_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[Any] = []
    monkeypatch.setattr(ModelSource, "_record", lambda self, values, _: rounds.append(values))
    source = ModelSource.__new__(ModelSource)
    source.learned, source.num_undrafted = LearnedDrafts(), 0
    before = list(source.learned.rates.tries)
    text = CopyText(np.zeros(1, np.int32), 1, 0, 0, np.zeros(65))
    drafts = BurstDrafts([text], np.array([1e-3, 2e-3]), 1.0, 0.0)
    drafts.drafts, drafts.sources, drafts.probabilities = [[5, 6]] * 2, [0, 0], [[0.9, 0.9]] * 2
    drafts.rows, drafts.siblings = [3, 3], [None, None]
    drafter = BurstDrafter.__new__(BurstDrafter)
    drafter.num_due, drafter.draft_seconds, drafter.num_drafted = 0, [1e-4, 0.0], [3, 0]
    drafter.num_unread, drafter.siblings = [1, 0], [7, -1]
    source.observe_burst(drafter, drafts, [[5, 7], [5, 7]])
    assert rounds == [(2, 1, 1e-4, 3)]
    assert source.num_undrafted == source.learned.num_undrafted == 2
    assert source.learned.rates.tries == before


@pytest.mark.parametrize(("max_model_drafts", "is_read"), [(0, False), (8, True)])
def test_states_are_read_for_a_drafter_that_runs(max_model_drafts: int, is_read: bool) -> None:
    with llm_with(eagle3_checkpoint) as llm:
        run, layers = llm.model.run, []

        def running(rows: Any, cache: Any, spec: Any) -> Any:
            layers.extend(spec.hidden)
            return run(rows, cache, spec)

        llm.model.run = running  # type: ignore[method-assign]
        llm.generate(PROMPTS[0], decoder=f"auto:max_model_drafts={max_model_drafts}", **OPTIONS)
    assert bool(layers) == is_read


@TEMPERATURES
def test_bursts_end_where_a_stop_string_may(temperature: float) -> None:
    options = {**OPTIONS, "temperature": temperature}
    with llm_with(eagle3_checkpoint) as llm, recorded(llm) as bursts:
        for prompt in PROMPTS:
            whole = llm.generate(prompt, decoder="autoregressive", **options)
            texts = [llm.tokenizer.decode(whole.tokens[:n]) for n in range(len(whole.tokens) + 1)]
            pieces = [piece for piece in texts[-1].split("\ufffd") if len(piece) > 2]
            stop = pieces[len(pieces) // 2][:3]  # completed by more than one token
            bursts.clear()
            answer = llm.generate(prompt, decoder="auto", stop=stop, **options)
            assert answer.finish_reason == "stop"
            expected = next(n for n, text in enumerate(texts) if stop in text)
            assert answer.tokens == whole.tokens[:expected]
            assert answer.text == texts[-1][: texts[-1].index(stop)]
            in_bursts = [token for burst in bursts for token in burst.tokens]
            assert in_bursts == answer.tokens[expected - len(in_bursts) :]
            assert len(in_bursts) > 2 * len(bursts)
        llm.engine.check_integrity()


def test_a_drafter_whose_drafts_are_wrong_is_left_out() -> None:
    def wrong(target: Network) -> Checkpoint:
        checkpoint = eagle3_checkpoint(target)
        checkpoint.tensors["lm_head.weight"] = checkpoint.tensors["lm_head.weight"][::-1].copy()
        return checkpoint

    with llm_with(wrong) as llm, recorded(llm) as bursts:
        options = {**OPTIONS, "max_tokens": 200}
        llm.generate(PROMPTS[0], decoder="auto", **options)
        bursts.clear()
        llm.generate(PROMPTS[1], decoder="auto", **options)
    drafters = [burst.drafts.drafter for burst in bursts if burst.drafts.drafter is not None]
    num_drafted = sum(sum(drafter.num_drafted) for drafter in drafters)
    assert num_drafted < 40  # of 200 tokens


def bound(**changes: Any) -> BoundDrafts:
    text = CopyText(np.zeros(12, np.int32), 4, 0, 0, np.zeros(MAX_MATCH + 1))
    drafter: Any = BurstDrafter(
        chains=None,
        layers=(1,),
        cache=None,  # type: ignore[arg-type]
        table=np.arange(8, dtype=np.int32),
        first=1,
        tokens=[1, 2, 3],
        states=np.zeros((3, 4), np.float32),
        chances=np.zeros((2, NUM_BINS)),
        mean_chances=np.zeros(2),
        rate=0.0,
        seconds=0.0,
        max_drafts=4,
    )
    drafts = BurstDrafts([text], np.ones(3), 1.0, 0.02, replace(drafter, **changes))
    return BoundDrafts([drafts], [4])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"states": np.zeros((3, 4))}, "float32 states"),
        ({"states": np.zeros((2, 4), np.float32)}, "float32 states"),
        ({"table": np.arange(7, dtype=np.int32)}, "no room"),
        ({"chances": np.zeros((2, 3))}, "every depth and probability"),
        ({"chances": np.zeros((2, NUM_BINS), np.float32)}, "every depth and probability"),
        ({"mean_chances": np.zeros(3)}, "every depth and probability"),
        ({"mean_chances": np.zeros(2, np.float32)}, "mean chances"),
        ({"sibling_chances": np.zeros(3)}, "sibling chances"),
        ({"sibling_chances": np.zeros(NUM_BINS, np.float32)}, "sibling chances"),
    ],
)
def test_arrays_that_the_kernels_would_read_outside_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        bound(**changes)


def test_a_drafter_of_a_quantised_model_is_held_in_four_bits(tmp_path: Path) -> None:
    model = target_folder(tmp_path / "model")
    checkpoint = eagle3_checkpoint(load_network(load_checkpoint(model)))
    folder = drafter_folder(tmp_path / "drafter", checkpoint, "model.safetensors")
    for dtype, expected in ((None, None), ("int8", "int4")):
        target = open_model(model, dtype=dtype)[0]
        drafter: Any = open_draft(folder, target)[0]
        assert drafter.dtype == expected
    assert drafter.network.weights.layers[0].value.weight.format == "Q4_0"
