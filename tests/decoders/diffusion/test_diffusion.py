"""The denoising loop: attention of rows, order of commits, caches, batches and restarts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anydecode import LLM, Regex
from anydecode.certification.checks import Restarts
from anydecode.certification.denoising import (
    StepState,
    bidirectional,
    dense,
    digests,
    ending,
    naive,
    random_model,
    softmax,
    steps,
)
from anydecode.decoders.diffusion.approximate_caches import (
    DualCachePolicy,
    PrefixCachePolicy,
    RecentCachePolicy,
)
from anydecode.decoders.diffusion.blocks import BlockPolicy, FixedBlocks, SlidingWindow, WholeCanvas
from anydecode.decoders.diffusion.caches import (
    BlockCausalCache,
    CachePolicy,
    CausalCache,
    NoCache,
)
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.learn2pd import PredictedEnd
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import RANKINGS, ranking
from anydecode.decoders.diffusion.stops import EndOfText, StopRule
from anydecode.decoders.diffusion.unmasking import (
    FactorUnmasking,
    ThresholdUnmasking,
    TimeGrid,
    TopKUnmasking,
    UnmaskPolicy,
)
from anydecode.errors import ConstraintError, InvalidRequestError, UnsupportedCombinationError
from anydecode.models.scripted import EOS, MASK, ByteTokenizer, ScriptedModel
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

PROMPT = [5, 6, 7]


def llm_of(script: Any = None, *, shift: int = 0, causal: bool = False, stale: bool = False) -> LLM:
    if stale:
        return random_model()
    if causal:
        model = ScriptedModel(script or dense())
        return LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096)
    return bidirectional(script or dense(), shift=shift)


def oracle(
    script: Any,
    length: int,
    block: int,
    count: int,
    *,
    score: str = "confidence",
    cache: str = "none",
    prompt: list[int] = PROMPT,
) -> tuple[list[int], int]:
    """Greedy denoising without the engine: the text, and how many rows are computed."""
    canvas = prompt + [MASK] * length
    first, rows = len(prompt), 0
    for start in range(first, first + length, block):
        stop = min(start + block, first + length)
        frozen = list(canvas)
        opens_block = True
        while MASK in canvas[start:stop]:
            seen = list(canvas)
            if cache == "dual" and not opens_block:
                seen = frozen[:start] + canvas[start:stop] + frozen[stop:]
            if cache == "prefix" and not opens_block:
                seen = frozen[:start] + canvas[start:]
            if cache == "block":
                seen = canvas[:stop]
            rows += {"none": len(canvas), "block": 0}.get(
                cache,
                len(canvas) if opens_block else (stop if cache == "dual" else len(canvas)) - start,
            )
            masks = [i for i in range(start, stop) if canvas[i] == MASK]
            predicted = {i: softmax(script((*seen, i))) for i in masks}

            def rank(i: int, predicted: dict[int, np.ndarray] = predicted) -> float:
                p = np.sort(predicted[i])[::-1]
                if score == "margin":
                    return p[0] - p[1]
                if score == "entropy":
                    return float(np.sum(p[p > 0] * np.log(p[p > 0])))
                return -i if score == "leftmost" else p[0]

            for i in sorted(masks, key=lambda i: (-rank(i), i))[:count]:
                canvas[i] = int(predicted[i].argmax())
            opens_block = False
    return canvas[first:], rows


def generate(llm: LLM, decoder: Any, length: int = 12, **options: Any) -> Any:
    options = {"ignore_eos": True, "max_tokens": length, **options}
    return llm.generate(options.pop("prompt", PROMPT), decoder=decoder, **options)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(
    ("name", "policy"),
    [("none", NoCache), ("prefix", PrefixCachePolicy), ("dual", DualCachePolicy)],
)
def test_cache_policies_give_the_text_and_rows_of_the_oracle(
    name: str, policy: type[CachePolicy], shift: int
) -> None:
    with llm_of(shift=shift) as llm:
        found = generate(llm, Denoiser(FixedBlocks(5), unmask=TopKUnmasking(), cache=policy()))
        expected, rows = oracle(dense(), 12, 5, 1, cache=name)
        assert found.tokens == expected
        slices = 0 if name == "none" else 9
        assert found.stats.rows == rows + shift * slices
        assert found.stats.passes == 12
        llm.engine.check_integrity()


@pytest.mark.parametrize("score", ["confidence", "margin", "entropy", "leftmost"])
@pytest.mark.parametrize("block", [4, 12])
def test_rankings_give_the_text_of_the_oracle(score: str, block: int) -> None:
    with llm_of() as llm:
        decoder = Denoiser(FixedBlocks(block), ranking(score), TopKUnmasking(block // 2))
        assert generate(llm, decoder).tokens == oracle(dense(), 12, block, 2, score=score)[0]


def test_random_ranks_depend_on_the_seed_only() -> None:
    with llm_of() as llm:
        decoder = Denoiser(WholeCanvas(), ranking("random"))
        texts = [generate(llm, decoder, seed=seed).tokens for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("size", [1, 3, 4])
def test_cached_blocks_of_a_block_causal_model_are_exact(size: int) -> None:
    """Cached blocks give the text of full passes with block-causal attention, in fewer rows."""
    texts, rows = [], []
    for cache in (BlockCausalCache(), NoCache()):
        with llm_of() as llm:
            llm.model.spec = replace(llm.model.spec, block_size=size)
            found = generate(
                llm, Denoiser(FixedBlocks(), unmask=TopKUnmasking(), cache=cache), length=10
            )
            texts.append(found.tokens)
            rows.append(found.stats.rows)
    assert texts[0] == texts[1]
    assert rows[0] < rows[1]


def test_block_causal_rows_see_their_block_and_earlier_blocks() -> None:
    """A prompt of 3 tokens and blocks of 4: the first block has one mask."""
    script, prompt, canvas = dense(), [5, 6, 7], [5, 6, 7] + [MASK] * 9
    for start in range(0, 12, 4):
        while MASK in canvas[start : start + 4]:
            masks = [i for i in range(start, start + 4) if canvas[i] == MASK]
            found = {i: softmax(script((*canvas[: start + 4], i))) for i in masks}
            best = max(masks, key=lambda i: (found[i].max(), -i))
            canvas[best] = int(found[best].argmax())
    with llm_of() as llm:
        decoder = Denoiser(FixedBlocks(), unmask=TopKUnmasking(), cache=BlockCausalCache(4))
        found = generate(llm, decoder, length=9, prompt=prompt)
    assert found.tokens == canvas[3:]
    assert found.stats.passes == 9  # a block is cached in the first pass of the next one
    assert found.stats.rows == 9 * 4 + 2 * 4


def test_causal_windows_put_unmasked_tokens_first() -> None:
    """Every mask sees the prompt, the unmasked tokens of the window, then the masks before it."""
    script = dense()
    canvas, num_cached, rows = PROMPT + [MASK] * 8, 0, 0
    while MASK in canvas:
        first = canvas.index(MASK)
        window = range(first, min(first + 4, len(canvas)))
        order = [i for i in window if canvas[i] != MASK] + [i for i in window if canvas[i] == MASK]
        rows += first - num_cached + len(order)
        num_cached = first
        found = {}
        for index, i in enumerate(order):
            seen = (*canvas[:first], *(canvas[j] for j in order[: index + 1]))
            logits = np.roll(script(seen), i - len(seen) + 1)  # as the scripted model shifts a row
            found[i] = softmax(logits)
        masks = [i for i in window if canvas[i] == MASK]
        confident = [i for i in masks if found[i].max() >= 0.6]
        for i in confident or [max(masks, key=lambda i: (found[i].max(), -i))]:
            canvas[i] = int(found[i].argmax())
    with llm_of(causal=True) as llm:
        found = generate(
            llm,
            Denoiser(SlidingWindow(4), unmask=ThresholdUnmasking(0.6), cache=CausalCache()),
            length=8,
        )
    assert found.tokens == canvas[3:]
    assert found.stats.rows == rows


COMPOSITIONS: dict[str, tuple[Callable[[], Denoiser], dict[str, Any]]] = {
    "none": (lambda: Denoiser(FixedBlocks(5), unmask=ThresholdUnmasking(0.3)), {}),
    "dual": (
        lambda: Denoiser(FixedBlocks(5), unmask=TopKUnmasking(3), cache=DualCachePolicy()),
        {},
    ),
    "prefix": (
        lambda: Denoiser(FixedBlocks(7), unmask=FactorUnmasking(1.5), cache=PrefixCachePolicy()),
        {},
    ),
    "grid": (lambda: Denoiser(WholeCanvas(), ranking("entropy"), TimeGrid(6), tempered=True), {}),
    "block": (
        lambda: Denoiser(FixedBlocks(), unmask=ThresholdUnmasking(0.3), cache=BlockCausalCache(4)),
        {},
    ),
    "canvases": (
        lambda: Denoiser(
            FixedBlocks(4), unmask=TopKUnmasking(2), cache=DualCachePolicy(), length=8
        ),
        {},
    ),
    "causal": (
        lambda: Denoiser(SlidingWindow(6), unmask=ThresholdUnmasking(0.3), cache=CausalCache()),
        {"causal": True},
    ),
}
COMPOSITIONS["recent"] = (
    lambda: Denoiser(SlidingWindow(6), unmask=ThresholdUnmasking(0.3), cache=RecentCachePolicy(2)),
    {"stale": True},
)
COMPOSITIONS["stale"] = COMPOSITIONS["dual"][0], {"stale": True}
COMPOSITIONS["stale prefix"] = COMPOSITIONS["prefix"][0], {"stale": True}
PROMPTS = [[1, 2], [3], [4, 5, 6, 7, 8, 9], [2, 2, 2]]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_batches_and_restarts_do_not_change_the_text(name: str, temperature: float) -> None:
    make, options = COMPOSITIONS[name]
    sampling = {"temperature": temperature, "seed": 3, "top_p": 0.95}
    with llm_of(**options) as llm:
        alone = [generate(llm, make(), 18, prompt=p, **sampling).tokens for p in PROMPTS]
    with llm_of(**options) as llm:
        together = generate(llm, make(), 18, prompt=PROMPTS, **sampling)
        assert [found.tokens for found in together] == alone
    for seed in range(3):
        with llm_of(**options) as llm, Restarts(llm.engine, seed=seed):
            restarted = generate(llm, make(), 18, prompt=PROMPTS, **sampling)
            assert [found.tokens for found in restarted] == alone
            llm.engine.check_integrity()


def test_a_restart_with_rows_of_a_later_canvas_changes_the_text() -> None:
    """Negative control: after a restart the cache is computed from the current canvas."""

    class RowsOfLaterCanvas(DualCachePolicy):
        def begin(self, canvas: Canvas, kv_cache: Any) -> None:
            if canvas.cached_rows:
                positions, _, visible = canvas.cached_rows[-1]
                canvas.cached_rows = [(positions, canvas.tokens[positions], visible)]
            super().begin(canvas, kv_cache)

    texts = []
    for restarts in (False, True):
        with random_model() as llm:
            decoder = Denoiser(FixedBlocks(9), cache=RowsOfLaterCanvas())
            with Restarts(llm.engine, seed=1) if restarts else llm:
                texts.append(
                    [answer.tokens for answer in generate(llm, decoder, 18, prompt=PROMPTS)]
                )
    assert texts[0] != texts[1]


def test_committed_tokens_never_change_and_the_mask_is_never_generated() -> None:
    for name, (make, options) in COMPOSITIONS.items():
        with llm_of(**options) as llm:
            found = generate(llm, make(), 18, temperature=1.0, seed=8, trace=True)
        assert MASK not in found.tokens, name
        previous: list[int] = []
        for record in found.trace:
            for old, new in zip(previous, record["canvas"], strict=False):
                assert old in (-1, new)
            previous = record["canvas"]
        assert found.tokens == previous[: len(found.tokens)]
        emitted = [token for record in found.trace for token in record["tokens"]]
        assert emitted[: len(found.tokens)] == found.tokens
        meter = found.trace[-1]["meter"]
        assert sum(meter["passes"].values()) == found.stats.passes
        assert meter["rows"] == found.stats.rows


class UnmaskNothing(UnmaskPolicy):
    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        return np.zeros(len(positions), bool)


@pytest.mark.parametrize(
    "unmask",
    [
        ThresholdUnmasking(2.0),
        TopKUnmasking(),
        UnmaskNothing(),
        ThresholdUnmasking(0.0, max_masks=1),
    ],
)
def test_policies_that_choose_nothing_unmask_one_token_per_step(unmask: UnmaskPolicy) -> None:
    with llm_of() as llm:
        assert (
            generate(llm, Denoiser(FixedBlocks(4), unmask=unmask)).tokens
            == oracle(dense(), 12, 4, 1)[0]
        )


def test_infilling_keeps_the_text_between_the_masks() -> None:
    text = [1, 2, MASK, MASK, 9, 8, MASK, 7]
    with llm_of() as llm:
        found = generate(
            llm, Denoiser(WholeCanvas(), cache=DualCachePolicy()), prompt=text, length=32
        )
        assert len(found.tokens) == 6
        assert found.finish_reason == "stop"
        assert [found.tokens[i] for i in (2, 3, 5)] == [9, 8, 7]
        with Restarts(llm.engine, seed=2):
            again = generate(
                llm, Denoiser(WholeCanvas(), cache=DualCachePolicy()), prompt=text, length=32
            )
        assert again.tokens == found.tokens
        with pytest.raises(InvalidRequestError, match="has 6 tokens from the first mask on"):
            generate(llm, Denoiser(), prompt=text, length=5)
    with llm_of(shift=1) as llm, pytest.raises(InvalidRequestError, match="first position"):
        generate(llm, Denoiser(), prompt=[MASK, 3])


class FixedPrior(Denoiser):
    def begin(self, sequence: Sequence, canvas: Canvas) -> None:
        super().begin(sequence, canvas)
        canvas.fix(len(PROMPT) + 1, 42)


def test_priors_keep_their_positions() -> None:
    with llm_of() as llm:
        assert generate(llm, FixedPrior(WholeCanvas(), unmask=TopKUnmasking(3))).tokens[1] == 42


def test_the_prefix_before_the_first_mask_is_streamed() -> None:
    with llm_of() as llm:
        chunks = list(
            llm.stream(PROMPT, decoder=Denoiser(FixedBlocks(4)), max_tokens=16, ignore_eos=True)
        )
    assert len(chunks) > 4


def test_an_end_of_text_ends_the_answer() -> None:
    def ends(path: tuple[int, ...]) -> np.ndarray:
        row = dense()(path)
        row[EOS] = 40.0 if path[-1] == 8 else -30.0
        return row

    with llm_of(ends) as llm:
        plain = generate(llm, Denoiser(WholeCanvas()), length=20, ignore_eos=False)
        cut = generate(llm, Denoiser(WholeCanvas(), stop=EndOfText()), length=20, ignore_eos=False)
        cached = generate(
            llm,
            Denoiser(FixedBlocks(10), cache=DualCachePolicy(), stop=EndOfText()),
            20,
            ignore_eos=False,
        )
        llm.engine.check_integrity()
    for found in (plain, cut, cached):
        assert len(found.tokens) == 6 and found.tokens[-1] == EOS
        assert found.finish_reason == "stop"
    assert cut.stats.rows < plain.stats.rows


class StopAfterTwoSteps(StopRule):
    """Unmasks everything after two steps."""

    def extra_positions(self, canvas: Canvas) -> np.ndarray:
        return canvas.masks

    def fills_all(self, canvas: Canvas, predictions: Predictions) -> bool:
        return canvas.step == 2


def test_a_stop_rule_may_unmask_the_canvas() -> None:
    with llm_of() as llm:
        found = generate(llm, Denoiser(FixedBlocks(4), stop=StopAfterTwoSteps()))
    assert found.stats.passes == 3
    assert len(found.tokens) == 12


class Pairs(Denoiser):
    """Scores the canvas and a draft of it in one pass."""

    def step(self, sequence: Sequence, canvas: Canvas) -> Decoding:
        [predictions] = yield from self.forward(sequence, canvas)
        position, token = canvas.frontier, predictions.token(canvas.frontier)
        region = (position, len(canvas))
        pair = yield from self.forward(
            sequence, canvas, [canvas.tokens, canvas.copy_tokens([position], [token])], region
        )
        if canvas.block is None:
            canvas.open(*region)
        if position + 1 < len(canvas):
            found = [one.statistics(position + 1).best for one in pair]
            canvas.policy_state.setdefault("seen", []).append(found)
        self.commit(sequence, canvas, pair[0], np.array([position]))


@pytest.mark.parametrize("policy", [NoCache, DualCachePolicy, lambda: BlockCausalCache(16)])
def test_several_canvases_in_one_pass(policy: Callable[[], CachePolicy]) -> None:
    """Each row sees its own canvas and nothing of the other."""
    script = dense()
    with llm_of() as llm:
        decoder = Pairs(WholeCanvas(), cache=policy())
        seen: list[list[int]] = []
        old = decoder.commit

        def spy(sequence: Sequence, canvas: Canvas, *rest: Any) -> None:
            seen[:] = canvas.policy_state["seen"]
            old(sequence, canvas, *rest)

        decoder.commit = spy  # type: ignore[method-assign]
        found = generate(llm, decoder, length=13)
        llm.engine.check_integrity()
    text = PROMPT + [MASK] * 13
    for step, (plain, drafted) in enumerate(seen):
        position = len(PROMPT) + step
        assert plain == softmax(script((*text, position + 1))).argmax()
        text[position] = found.tokens[step]
        assert drafted == softmax(script((*text, position + 1))).argmax()


def test_stateful_samplers_are_applied_from_left_to_right() -> None:
    with llm_of() as llm:
        decoder = Denoiser(WholeCanvas(), unmask=ThresholdUnmasking(0.0))
        found = generate(llm, decoder, constraint=Regex("[ab]{3}x[0-9]{4}y"), ignore_eos=False)
        assert found.text[3] == "x" and found.text[8] == "y"
        assert found.constraint["complete"]
        penalised = generate(llm, decoder, no_repeat_ngram=1)
        assert len(set(penalised.tokens)) == len(penalised.tokens)
        with pytest.raises(ConstraintError, match="cannot satisfy the constraint any more"):
            generate(llm, decoder, prompt=[1, MASK, 65, MASK], constraint=Regex("[ab]{3}"))


def test_logprobs_are_those_of_the_step_that_committed() -> None:
    with llm_of() as llm:
        found = generate(llm, Denoiser(FixedBlocks(4), unmask=TopKUnmasking(2)), logprobs=1)
    assert len(found.logprobs) == 12 and all(note is not None for note in found.logprobs)


class ReplacedEmbeddings(Denoiser):
    """Feeds the embeddings of other tokens in place of the masks."""

    def embeddings(self, sequence: Sequence, canvas: Canvas, positions: np.ndarray) -> Any:
        rows = np.zeros((len(positions), 4), np.float32)
        tokens = np.where(canvas.tokens[positions] == MASK, 77, canvas.tokens[positions])
        rows[:, 0] = tokens
        return rows


def test_embeddings_replace_tokens() -> None:
    script = dense()
    seen = (*PROMPT, *[77] * 12)
    with llm_of() as llm:
        found = generate(
            llm, ReplacedEmbeddings(WholeCanvas(), ranking("leftmost"), TopKUnmasking(1))
        )
    assert found.tokens == [int(softmax(script((*seen, i))).argmax()) for i in range(3, 15)]


def test_a_denoiser_can_be_cancelled() -> None:
    with llm_of() as llm:
        stream = llm.stream(
            PROMPT, decoder=Denoiser(FixedBlocks(4), cache=DualCachePolicy()), max_tokens=40
        )
        next(stream)
        stream.close()
        llm.engine.check_integrity()
        assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("decoder", "options", "message"),
    [
        (lambda: Denoiser(FixedBlocks(30)), {}, "a block of 30 does not fit on a canvas of 12"),
        (lambda: Denoiser(length=13), {}, "a canvas of 13 is longer than the answer may be"),
        (lambda: "sdar:block=0", {}, "allowed are 1 to 65536"),
        (lambda: "llada:block=-1", {}, "block is -1; allowed are 0 to 65536"),
        (lambda: "llada:steps=0", {}, "steps is 0; allowed are 1 to 65536"),
        (lambda: "fast-dllm:cache=no", {}, "one of none, prefix, dual"),
        (lambda: Denoiser(mask=999), {}, "mask token 999 is not in the vocabulary of 259"),
        (lambda: Denoiser(), {"guidance_scale": 2.0}, "causal models only"),
        (lambda: Denoiser(cache=CausalCache()), {}, "needs a causal model"),
        (lambda: "autoregressive", {}, "needs a causal model"),
    ],
)
def test_bad_requests_raise_a_clear_error(decoder: Any, options: Any, message: str) -> None:
    with llm_of() as llm, pytest.raises(InvalidRequestError, match=message):
        generate(llm, decoder(), **options)


def test_a_missing_mask_token_raises_an_error() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.mask_id = None
    with LLM(ScriptedModel(causal=False), tokenizer=tokenizer) as llm:
        with pytest.raises(InvalidRequestError, match="name no mask token: open it with mask="):
            generate(llm, Denoiser())
        assert len(generate(llm, Denoiser(mask=MASK)).tokens) == 12


def test_stop_rules_that_need_all_masks_refuse_models_with_blocks() -> None:
    with bidirectional(dense(), block_size=4) as llm:
        with pytest.raises(UnsupportedCombinationError, match="one block at a time"):
            llm.generate([1, 2, 3], decoder="prophet", max_tokens=12)


@pytest.mark.parametrize("cache", [NoCache, BlockCausalCache])
def test_an_end_is_predicted_in_the_open_block_of_a_model_with_blocks(cache: Any) -> None:
    """Ends are likely in the second block, which begins at position 8, and in all later ones."""
    decoder = Denoiser(FixedBlocks(), cache=cache(), stop=PredictedEnd())
    with bidirectional(ending(), block_size=8) as llm:
        answer = llm.generate([5, 6, 7], decoder=decoder, max_tokens=37, trace=True)
    lengths = [len(entry["canvas"]) for entry in answer.trace or ()]
    assert lengths[:5] == [37] * 5 and len(lengths) > 5
    assert all(6 <= length <= 13 for length in lengths[5:])
    assert answer.finish_reason == "stop" and len(answer.tokens) == lengths[-1]


def test_a_causal_model_raises_an_error() -> None:
    with LLM(ScriptedModel(), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(UnsupportedCombinationError, match="needs a diffusion"):
            generate(llm, Denoiser())


def test_an_unknown_ranking_raises_an_error_with_all_names() -> None:
    with pytest.raises(InvalidRequestError, match=", ".join(RANKINGS)):
        ranking("luck")


def test_requests_that_do_not_fit_in_memory_together_are_preempted() -> None:
    """With memory for one canvas only, all requests finish with the same text."""
    prompts = [[i, i + 1] for i in range(6)]
    make = lambda: Denoiser(FixedBlocks(5), unmask=TopKUnmasking(2), cache=DualCachePolicy())  # noqa: E731
    with llm_of() as llm:
        alone = [generate(llm, make(), prompt=p).tokens for p in prompts]
    model = ScriptedModel(dense(), causal=False)
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=14) as llm:
        found = generate(llm, make(), prompt=prompts)
        assert llm.engine.num_preemptions
        assert [one.tokens for one in found] == alone


def block_policies() -> list[BlockPolicy]:
    return [WholeCanvas(), FixedBlocks(3), SlidingWindow(3)]


@pytest.mark.parametrize("blocks", block_policies(), ids=lambda one: type(one).__name__)
def test_every_block_policy_fills_the_canvas(blocks: BlockPolicy) -> None:
    rng = random.Random(1)
    with llm_of() as llm:
        for _ in range(4):
            count = rng.randrange(3, 20)
            assert len(generate(llm, Denoiser(blocks), length=count).tokens) == count


def test_a_block_size_other_than_the_models_raises_an_error() -> None:
    with llm_of() as llm:
        llm.model.spec = replace(llm.model.spec, block_size=4)
        with pytest.raises(InvalidRequestError, match="blocks have 4 positions; block=6"):
            generate(llm, Denoiser(FixedBlocks(6)))
        assert len(generate(llm, "sdar:block=6").tokens) == 12  # sets its own block size


def _remainder_last(m: StepState) -> list[int]:
    base, more = divmod(m.block_masks, 3)
    return m.order()[: base + (m.block_step >= 3 - more)]


def _without_the_best(m: StepState) -> list[int]:
    return [i for i in m.probabilities if m.confidence(i) >= 0.9] or [min(m.probabilities)]


def _from_the_end(m: StepState) -> list[int]:
    return sorted(m.probabilities)[-1:]


@pytest.mark.parametrize(
    ("decoder", "block", "wrong_rule", "options"),
    [
        ("llada:block=4,steps=3", 4, _remainder_last, {}),
        ("llada:block=12", 12, lambda m: m.order(lambda p: -p.max())[:1], {}),
        ("fast-dllm:block=12,cache=none", 12, _without_the_best, {}),
        ("dream:steps=4", 12, lambda m: m.order()[:3], {}),
        ("sdar:block=4,remasking=sequential", 4, _from_the_end, {"aligned": True}),
    ],
)
def test_a_wrong_rule_gives_another_text(
    decoder: str, block: int, wrong_rule: Any, options: dict[str, Any]
) -> None:
    """Negative controls: the oracles distinguish between rules."""
    script = dense(spread=6.0)
    with bidirectional(script) as llm:
        assert steps(llm, decoder, 12) != naive(script, 12, block, wrong_rule, **options)


def test_a_cache_that_is_never_refreshed_changes_the_text() -> None:
    """Negative control of the scripted model whose rows depend on the whole canvas."""

    class NeverRefreshed(DualCachePolicy):
        def refresh_span(
            self, canvas: Canvas, kv_cache: Any, region: Any, opens_block: bool
        ) -> Any:
            return super().refresh_span(
                canvas, kv_cache, region, opens_block and not canvas.cached_rows
            )

    found = []
    for policy in (DualCachePolicy, NeverRefreshed):
        with digests(dense()) as llm:
            found.append(generate(llm, Denoiser(FixedBlocks(4), cache=policy())).tokens)
    assert found[0] != found[1]
