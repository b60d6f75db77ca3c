"""The engine: batches, chunks, model runners, preemption, cancellation, faults, streaming."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import numpy as np
import pytest

from anydecode import Regex
from anydecode.api.llm import LLM
from anydecode.certification.checks import PROMPTS, scripted_llm
from anydecode.certification.denoising import bidirectional, dense
from anydecode.decoders.autoregressive import Autoregressive
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.canvas_spans import canvas_span, score_canvas
from anydecode.decoders.speculative.auto import Auto
from anydecode.decoders.speculative.prompt_lookup import prompt_lookup
from anydecode.engine.costs import EngineCostModel
from anydecode.engine.model_runner import ModelRunner
from anydecode.engine.plan import Plan
from anydecode.errors import InvalidRequestError, OutOfMemoryError, UnsupportedCombinationError
from anydecode.kernels.interface import Output, OutputSpec, Rows
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.scripted import EOS, ByteTokenizer, ScriptedModel
from anydecode.sampling.noise import Noise
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.cost import default_table
from anydecode.scoring.score import Cancel, Decoding, ScoreRequest, Submit, Wait
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.span import MultiStepSpan
from anydecode.scoring.state import StateKey
from anydecode.scoring.tree import TokenTree

OPTIONS = {"max_tokens": 40, "temperature": 0.7, "seed": 4, "ignore_eos": True}


def alone(prompts=PROMPTS, **options) -> list[list[int]]:
    with scripted_llm() as llm:
        return [llm.generate(prompt, **{**OPTIONS, **options}).tokens for prompt in prompts]


@pytest.mark.parametrize("row_budget", [1, 3, 7, 512])
def test_chunked_prefill_does_not_change_the_output(row_budget: int) -> None:
    with scripted_llm(row_budget=row_budget, prefix_cache=False) as llm:
        batch = llm.generate(list(PROMPTS), **OPTIONS)
        llm.engine.check_integrity()
    assert [one.tokens for one in batch] == alone()


class _SamplingModel(ScriptedModel):
    """Samples within its passes, with the noise of `late` positions later."""

    late = 0
    made = 0

    def run(self, rows, cache, output_spec):
        output = super().run(rows, cache, output_spec)
        for spec in output_spec.samples:
            noise = Noise(spec.seed, spec.stream)
            sampler = Sampler(1 / spec.inverse_temperature if spec.inverse_temperature else 0.0)
            logits = output.logits[spec.row]
            output.sampled.append(sampler.sample(logits, noise, spec.position + self.late))
        self.made += len(output.sampled)
        return output


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("decoder", ["autoregressive", "auto", "token-recycling", "multi-step"])
def test_samples_of_the_backend_equal_samples_of_the_engine(decoder, temperature) -> None:
    options = {**OPTIONS, "temperature": temperature, "seed": 3, "decoder": decoder}
    expected = alone(**options)
    model = _SamplingModel(seed=1)
    with LLM(model, tokenizer=ByteTokenizer(), row_budget=7) as llm:
        assert [g.tokens for g in llm.generate(PROMPTS, **options)] == expected
        assert model.made > 40
        model.late = 1
        wrong = [g.tokens for g in llm.generate(PROMPTS, **options)]
    assert (wrong == expected) == (temperature == 0)  # greedy decoding uses no noise


@pytest.mark.one_in(5)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("decoder", ["autoregressive", "auto", "token-recycling", "prompt-lookup"])
@pytest.mark.parametrize("pattern", ["[^a]{60}", "[ab]{60}", "(ab|[^ab]{2,9}b){20,60}"])
def test_samples_of_the_backend_are_used_if_the_constraint_allows_them(
    decoder, temperature, pattern
) -> None:
    options = {**OPTIONS, "temperature": temperature, "decoder": decoder}
    options |= {"constraint": Regex(pattern), "seed": 3}
    expected = alone(**options)
    model = _SamplingModel(seed=1)
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        assert [g.tokens for g in llm.generate(PROMPTS, **options)] == expected
        assert model.made > 40
        model.late = 1
        wrong = [g.tokens for g in llm.generate(PROMPTS, **options)]
    # If the constraint allows few tokens, few samples of the backend are valid.
    assert (wrong == expected) == (temperature == 0 or pattern == "[ab]{60}")


class _MultiStepModel(_SamplingModel):
    """Runs further steps, with the noise `skipped` positions too late."""

    skipped = 0
    passes = 0
    together = 0

    def run(self, rows, cache, output_spec):
        output = super().run(rows, cache, output_spec)
        if not output_spec.step_limits:
            return output
        self.passes += 1
        self.together = max(self.together, len(output_spec.samples))
        last = output_spec.logits[[spec.row for spec in output_spec.samples]]
        steps = [[token] for token in output.sampled]
        ends = output_spec.end_tokens
        limit = min(output_spec.step_limits)
        while len(steps[0]) < limit and not ends & {one[-1] for one in steps}:
            count = len(steps[0])
            positions = rows.positions[last] + np.int32(count + self.skipped)
            tables = [rows.tables[table] for table in rows.table[last]]
            slots = [table[at : at + 1] for table, at in zip(tables, positions, strict=True)]
            row = Rows(
                np.array([one[-1] for one in steps], np.int32), positions, np.concatenate(slots),
                rows.tables, rows.table[last], positions + 1, rows.tails, positions * 0,
                positions * 0, rows.start[last], rows.stop[last],
            )  # fmt: skip
            specs = [
                spec._replace(position=spec.position + count, row=index)
                for index, spec in enumerate(output_spec.samples)
            ]
            next_spec = OutputSpec(np.arange(len(last), dtype=np.int32), {}, specs)
            output = _SamplingModel.run(self, row, cache, next_spec)
            for one, token in zip(steps, output.sampled, strict=True):
                one.append(token)
        sampled = [one[0] for one in steps]
        return Output(output.logits, output.hidden, sampled, len(steps[0]), steps)


def run_multi_step(
    model: _MultiStepModel, prompt: Any = "a prompt", positions=None, **options
) -> list[list[int]]:
    options = {**OPTIONS, "decoder": "multi-step", **options}
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=positions) as llm:
        answers = llm.generate(prompt, **options)
        llm.engine.check_integrity()
    answers = answers if isinstance(answers, list) else [answers]
    assert all(one.stats.passes <= one.stats.num_tokens + 1 for one in answers)
    return [one.tokens for one in answers]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_multi_step_passes_do_not_change_the_output(temperature: float) -> None:
    expected = alone(["a prompt"], temperature=temperature)
    model = _MultiStepModel(seed=1)
    assert run_multi_step(model, temperature=temperature) == expected
    assert 3 < model.passes < 20
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        stats = llm.generate("a prompt", **{**OPTIONS, "decoder": "multi-step"}).stats
    assert stats.passes == 40 and stats.rows == 39 + len("a prompt")
    model.skipped = 1
    with pytest.raises(RuntimeError, match="stored nothing"):
        run_multi_step(model, temperature=temperature)


@pytest.mark.parametrize("decoder", ["multi-step", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_sequences_share_multi_step_passes(decoder: str, temperature: float) -> None:
    expected = alone(PROMPTS, temperature=temperature)
    model = _MultiStepModel(seed=1)
    model.cost_table = default_table(0.001)
    options = {"temperature": temperature, "decoder": decoder}
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        answers = llm.generate(PROMPTS, **{**OPTIONS, **options})
        assert [one.tokens for one in answers] == expected
        llm.engine.check_integrity()
    assert model.together > 1 and model.passes > 1
    model.skipped = 1
    with (
        LLM(model, tokenizer=ByteTokenizer()) as llm,
        pytest.raises(RuntimeError, match="stored nothing|broadcast together"),
    ):
        llm.generate(PROMPTS, **{**OPTIONS, **options})


def test_sequences_that_share_multi_step_passes_reserve_slots_for_them_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each reserves as many slots as the pass may have steps."""
    rooms: list[set[int]] = []
    allow = ModelRunner._allow_multi_step

    def allowing(self: ModelRunner, plan: Plan) -> None:
        allow(self, plan)
        found = {span.reserved for _, span, _ in plan.scheduled if isinstance(span, MultiStepSpan)}
        rooms.append(found)
        assert not plan.multi_step or found == {max(plan.output_spec.step_limits) - 1}

    monkeypatch.setattr(ModelRunner, "_allow_multi_step", allowing)
    assert run_multi_step(_MultiStepModel(seed=1), PROMPTS) == alone(PROMPTS)
    assert max(map(len, rooms)) == 1 and max(max(found, default=0) for found in rooms) > 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_auto_uses_multi_step_passes_without_repetition(temperature) -> None:
    expected = alone(["a prompt"], temperature=temperature, max_tokens=80)
    model = _MultiStepModel(seed=1)
    model.cost_table = default_table(0.001)
    assert run_multi_step(model, temperature=temperature, max_tokens=80, decoder="auto") == expected
    assert 3 < model.passes < 40


@pytest.mark.parametrize("pass_seconds", [0.05, 0.1, 0.4])
@pytest.mark.parametrize("call_seconds", [None, 1e-6, 0.02])
def test_auto_uses_multi_step_passes_where_calls_take_long(
    call_seconds: float | None, pass_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls are saved if they take more than learning from their logits saves. This backend does
    not draft in bursts, so they are not measured."""
    monkeypatch.setattr(EngineCostModel, "record", lambda *_: None)
    decoder, model = Auto(), _MultiStepModel(seed=1)
    if call_seconds is not None:
        decoder.call_seconds, decoder.num_calls = call_seconds, 1
    model.cost_table = default_table(pass_seconds)
    counts, run = [], model.run

    def counted(rows, cache, output_spec):  # type: ignore[no-untyped-def]
        counts.append(max(output_spec.step_limits, default=1))
        return run(rows, cache, output_spec)

    monkeypatch.setattr(model, "run", counted)
    expected = alone(["a prompt"], max_tokens=40)
    assert run_multi_step(model, max_tokens=40, decoder=decoder) == expected
    assert (max(counts) > 1) == (call_seconds == 0.02)


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 8, 9, 17])
def test_multi_step_passes_respect_max_tokens(max_tokens: int) -> None:
    [expected] = alone(["a prompt"])
    assert run_multi_step(_MultiStepModel(seed=1), max_tokens=max_tokens) == [expected[:max_tokens]]


def test_multi_step_passes_stop_at_end_tokens() -> None:
    [expected] = alone(["a prompt"])
    end = expected[20]
    stops = {"stop_tokens": [end]}
    assert run_multi_step(_MultiStepModel(seed=1), **stops) == alone(["a prompt"], **stops)
    text = {"stop": [ByteTokenizer().decode([end])]}
    model = _MultiStepModel(seed=1)
    assert run_multi_step(model, **text) == alone(["a prompt"], **text)
    assert not model.passes  # with stop strings, every token is checked


def test_no_multi_step_passes_with_waiting_requests_or_needed_logits() -> None:
    model = _MultiStepModel(seed=1)
    found = run_multi_step(model, max_tokens=12, logprobs=1)
    assert found == alone(["a prompt"], max_tokens=12) and not model.passes
    with LLM(model, tokenizer=ByteTokenizer(), row_budget=len(PROMPTS) - 1) as llm:
        options = {**OPTIONS, "max_tokens": 12, "decoder": "multi-step"}
        assert [one.tokens for one in llm.generate(PROMPTS, **options)] == alone(max_tokens=12)
    assert not model.together


def test_multi_step_passes_can_fill_the_cache() -> None:
    for positions in range(len("a prompt") + 40, len("a prompt") + 44):
        assert run_multi_step(_MultiStepModel(seed=1), positions=positions) == alone(["a prompt"])


@pytest.mark.parametrize("decoder", ["autoregressive", "prompt-lookup", "multi-step", "layerskip"])
def test_preemption_does_not_change_the_output(decoder: str) -> None:
    model = ScriptedModel(seed=1)
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=110) as llm:
        batch = llm.generate(list(PROMPTS), decoder=decoder, **OPTIONS)
        assert llm.engine.num_preemptions > 0
        llm.engine.check_integrity()
    assert [one.tokens for one in batch] == alone()


@pytest.mark.parametrize(
    ("decoder", "positions"),
    [("eqspec-exspec", 60), ("omnidraft", 60), ("fixed-tree", 60), ("opt-tree", 90)],
)
def test_jobs_do_not_preempt_each_other_for_ever(decoder: str, positions: int) -> None:
    """Each fits alone, but no two of them do. Without an order among them, each job that needs room
    preempts the others before they generate a token."""
    models = {"draft": ScriptedModel(seed=2), "cache_positions": positions}
    options = {"decoder": decoder, "max_tokens": 20, "temperature": 0.7}
    prompts = {seed: f"a prompt that is long{seed}" for seed in (0, 2)}
    with LLM(ScriptedModel(seed=1), tokenizer=ByteTokenizer(), **models) as llm:
        expected = [
            llm.generate(prompt, seed=seed, **options).tokens for seed, prompt in prompts.items()
        ]
    num_steps = 0
    with LLM(ScriptedModel(seed=1), tokenizer=ByteTokenizer(), **models) as llm:
        requests = [
            llm.request(prompt, seed=seed, **options)
            for seed, prompt in [*prompts.items(), *prompts.items()]
        ]
        for request in requests:
            llm.start(request)

        def are_done() -> bool:
            nonlocal num_steps
            num_steps += 1
            assert num_steps < 2000
            return all(request.done for request in requests)

        llm.driver.advance(are_done)
        llm.engine.check_integrity()
        answers = [request.generation().samples[0].tokens for request in requests]
    assert answers == expected * 2


def test_a_sequence_too_large_for_the_cache_ends_with_an_error() -> None:
    with LLM(ScriptedModel(seed=1), tokenizer=ByteTokenizer(), cache_positions=30) as llm:
        assert llm.max_length == 30
        with pytest.raises(InvalidRequestError, match="maximum context length"):
            llm.generate("x" * 30)
        with pytest.raises(OutOfMemoryError, match="too few"):
            llm.generate("x" * 20, decoder=_WideTree())
        assert llm.generate("ab", max_tokens=3, ignore_eos=True).finish_reason == "length"


class _WideTree(Decoder):
    """Requests a tree that does not fit into a small cache."""

    def decode(self, sequence: Sequence) -> Decoding:
        yield sequence.verify(TokenTree([1] * 40, [-1] * 40))


def test_a_prefix_is_shared_between_requests() -> None:
    prompt = "this prompt is long enough to fill several blocks of sixteen tokens"
    with scripted_llm() as llm:
        first = llm.generate(prompt, **OPTIONS)
        rows = llm.engine.runners["target"].num_rows
        again = llm.generate(prompt, **OPTIONS)
        assert llm.engine.runners["target"].num_rows - rows < rows
        assert again.tokens == first.tokens
        assert llm.engine.runners["target"].prefixes.num_hits >= 48
        llm.clear()
        assert llm.engine.runners["target"].pool.num_used == 0


def test_namespaces_do_not_share_prefixes() -> None:
    prompt = "this prompt is long enough to fill several blocks of sixteen tokens"
    with scripted_llm() as llm:
        llm.generate(prompt, namespace="a", **OPTIONS)
        hits = llm.engine.runners["target"].prefixes.num_hits
        llm.generate(prompt, namespace="b", **OPTIONS)
        assert llm.engine.runners["target"].prefixes.num_hits == hits


def test_samples_differ_and_are_reproducible() -> None:
    with scripted_llm() as llm:
        out = llm.generate("the cat", n=4, **OPTIONS)
        again = llm.generate("the cat", n=2, decoder="prompt-lookup", **OPTIONS)
    texts = [tuple(sample.tokens) for sample in out.samples]
    assert len(set(texts)) == 4
    assert [sample.tokens for sample in again.samples] == [list(text) for text in texts[:2]]


def test_a_fault_in_one_decoder_ends_only_its_request() -> None:
    class Faulty(Decoder):
        def decode(self, sequence: Sequence) -> Decoding:
            yield sequence.score()
            raise ZeroDivisionError

    with scripted_llm() as llm:
        requests = [llm.request("abc", decoder=d, **OPTIONS) for d in (Faulty(), Autoregressive())]
        for request in requests:
            llm.start(request, background=False)
        llm.driver.advance(lambda: all(request.done for request in requests))
        assert requests[1].generation().tokens == alone(["abc"])[0]
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            requests[0].generation()
        llm.engine.check_integrity()


def test_a_fault_in_the_model_ends_the_requests_of_that_pass() -> None:
    class Broken(ScriptedModel):
        left = 5

        def run(self, *args):
            self.left -= 1
            if self.left == 0:
                raise FloatingPointError
            return super().run(*args)

    with LLM(Broken(seed=1), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(RuntimeError, match="FloatingPointError"):
            llm.generate("abc", **OPTIONS)
        assert llm.generate("abc", **OPTIONS).tokens == alone(["abc"])[0]


def one_position(sequence: Sequence, position: int, *, keep: bool = False) -> ScoreRequest:
    """A score request for token 1 at `position` of a canvas."""
    positions = np.array([position])
    span = canvas_span(sequence.kv_cache(), positions, np.array([1]), positions + 1, keep=keep)
    return score_canvas(sequence, "target", [span], 1, positions, 0)


class Probing(Decoder):
    """Autoregressive decoding that also scores a canvas and a tree that it discards."""

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            yield one_position(sequence, sequence.kv_cache().length)
            scores = yield sequence.verify(TokenTree([1, 2, 3], [-1, -1, 0]))
            sequence.accept([], [scores.sampled[0]], scores)


def break_pass(llm: LLM, number: int, error: type[BaseException] = FloatingPointError) -> None:
    """The model raises `error` in pass `number`, once."""
    model = llm.engine.runners["target"].model
    run, passes = model.run, itertools.count(1)

    def broken(*args):
        if next(passes) == number:
            raise error
        return run(*args)

    model.run = broken


def run_broken(llm: LLM, decoder: str | Decoder, number: int) -> list[list[int] | None]:
    """Tokens of four generations, two at a time; None for those that the broken pass ended."""
    break_pass(llm, number)
    requests = [llm.request(prompt, decoder=decoder, **OPTIONS) for prompt in SHORT]
    for request in requests:
        llm.start(request, background=False)
    while not all(request.done for request in requests):
        llm.engine.step()
        llm.engine.check_integrity()
    return [None if request.jobs[0].error else request.generation().tokens for request in requests]


SHORT = [[5, 6, 7], [5, 6], [7, 5, 6, 7, 5], [6]]
KINDS = [
    (lambda: scripted_llm(prefix_cache=False, max_running=2), Probing()),
    (lambda: scripted_llm(prefix_cache=False, max_running=2), "prompt-lookup"),
    (lambda: bidirectional(dense(), max_running=2), "llada:block=8"),
    (lambda: bidirectional(dense(), max_running=2), "fast-dllm:block=8,cache=dual"),
]


@pytest.mark.one_in(3)  # each kind and each number
@pytest.mark.parametrize(("open_llm", "decoder"), KINDS)
@pytest.mark.parametrize("number", [1, 2, 7, 8])
def test_a_failed_pass_leaks_no_slots(open_llm, decoder, number: int) -> None:
    with open_llm() as llm:
        want = [llm.generate(prompt, decoder=decoder, **OPTIONS).tokens for prompt in SHORT]
    with open_llm() as llm:
        found = run_broken(llm, decoder, number)
        assert llm.engine.runners["target"].pool.num_used == 0
    assert found[:2] == [None, None]
    assert found[2:] == want[2:]


def test_a_leaked_slot_is_detected(monkeypatch) -> None:
    monkeypatch.setattr(SequenceCache, "release", lambda kv_cache: kv_cache.truncate(0))
    with scripted_llm(prefix_cache=False, max_running=2) as llm:
        with pytest.raises(AssertionError, match="reference counts"):
            run_broken(llm, Probing(), 1)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit])
def test_jobs_of_an_interrupted_pass_do_not_continue(failure: type[BaseException]) -> None:
    """Planned rows have not run: another stream with rows in the pass must not continue as if they
    had."""
    with scripted_llm(prefix_cache=False) as llm:
        streams = [llm.stream(prompt, **OPTIONS) for prompt in ("abc", "the cat")]
        for stream in streams:
            next(stream)
        break_pass(llm, 1, failure)
        with pytest.raises(failure):
            list(streams[0])
        with pytest.raises(RuntimeError, match=failure.__name__):
            list(streams[1])
        assert llm.engine.runners["target"].pool.num_used == 0
        assert llm.generate("abc", **OPTIONS).tokens == alone(["abc"])[0]


def test_leaving_a_stream_frees_its_memory() -> None:
    with scripted_llm(prefix_cache=False) as llm:
        for chunk in llm.stream("abc", **OPTIONS):
            assert chunk.text
            break
        assert not llm.engine.running
        assert llm.engine.runners["target"].pool.num_used == 0


def test_streamed_chunks_make_the_text() -> None:
    with scripted_llm() as llm:
        for decoder in ("autoregressive", "speculative-sampling"):
            chunks = list(llm.stream("the cat sat", decoder=decoder, stop=["\x00"], **OPTIONS))
            assert "".join(map(str, chunks)) == chunks[-1].generation.text
            whole = llm.generate("the cat sat", stop=["\x00"], **OPTIONS)
            assert chunks[-1].generation.text == whole.text


def test_stop_inside_accepted_draft_tokens() -> None:
    words = b"abcabcabcabc"

    def script(seen: tuple[int, ...]):
        import numpy as np

        logits = np.zeros(257)
        logits[words[(len(seen)) % len(words)]] = 9.0
        return logits

    for decoder in ("autoregressive", "prompt-lookup"):
        with LLM(ScriptedModel(script, vocab_size=257), tokenizer=ByteTokenizer()) as llm:
            out = llm.generate("abcabcabc", decoder=decoder, stop=["cab"], max_tokens=30)
        assert (out.text, out.finish_reason) == ("ab", "stop")
        assert bytes(out.tokens) == b"abcab"


def test_end_of_text_ends() -> None:
    def script(seen: tuple[int, ...]):
        import numpy as np

        logits = np.zeros(257)
        logits[EOS if len(seen) > 5 else 65] = 9.0
        return logits

    with LLM(ScriptedModel(script, vocab_size=257), tokenizer=ByteTokenizer()) as llm:
        out = llm.generate("abc", max_tokens=30)
        assert (out.text, out.finish_reason, out.tokens[-1]) == ("AAA", "stop", EOS)
        assert len(llm.generate("abc", max_tokens=30, ignore_eos=True).tokens) == 30


def test_threads_share_one_engine() -> None:
    found: dict[int, list[int]] = {}
    with scripted_llm() as llm:

        def work(i: int) -> None:
            found[i] = llm.generate(PROMPTS[i], **OPTIONS).tokens

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert [found[i] for i in range(len(PROMPTS))] == alone()


def test_async_requests_share_passes_and_can_be_cancelled() -> None:
    async def main(llm: LLM) -> None:
        outs = await llm.agenerate(list(PROMPTS), **OPTIONS)
        assert [out.tokens for out in outs] == alone()
        stream = llm.astream("abc", **OPTIONS)
        async for chunk in stream:
            assert chunk.text
            break
        await stream.aclose()
        text = "".join([chunk.text async for chunk in llm.astream("abc", **OPTIONS)])
        assert text == llm.generate("abc", **OPTIONS).text

    with scripted_llm() as llm:
        asyncio.run(main(llm))
        assert not llm.engine.running


def test_submit_wait_cancel() -> None:
    seen = []

    class Racing(Decoder):
        requirements = Requirements(runners=("draft",))

        def decode(self, sequence: Sequence) -> Decoding:
            target = yield Submit(sequence.score())
            small = yield Submit(sequence.score(sequence.unscored("draft"), runner="draft"))
            first = yield Wait([target, small])
            second = yield Wait([t for t in (target, small) if t is not first])
            assert {id(first), id(second)} == {id(target), id(small)}
            assert second.scores is not None
            token = target.scores.sampled[-1]
            dropped = yield Submit(sequence.score([1, 2, 3]))
            yield Cancel(dropped)
            assert dropped.cancelled
            sequence.emit([token])
            seen.append(token)

    with scripted_llm() as llm:
        out = llm.generate("abc", decoder=Racing(), max_tokens=1)
        assert out.tokens == seen == llm.generate("abc", max_tokens=1).tokens
        llm.engine.check_integrity()


def test_a_request_cancelled_during_its_pass_leaks_nothing() -> None:
    class Slow:
        def seconds(self, runner, plan) -> float:
            return 5.0 if runner.name == "target" else 1.0

    class Cancelling(Decoder):
        requirements = Requirements(runners=("draft",))

        def decode(self, sequence: Sequence) -> Decoding:
            late = yield Submit(sequence.score(rows="all"))
            yield sequence.score(sequence.unscored("draft"), runner="draft")
            assert late.scores is None
            yield Cancel(late)
            scores = yield sequence.score([7], runner="draft")
            sequence.emit([scores.sampled[-1]])

    with scripted_llm(row_budget=8) as llm:
        llm.engine.clock = Slow()
        llm.generate("abcdefgh" * 4, decoder=Cancelling(), max_tokens=1)
        while llm.engine.has_work:
            llm.engine.step()
        assert all(not runner.waiting for runner in llm.engine.runners.values())
        llm.engine.check_integrity()


def test_overwritten_positions_are_not_shared() -> None:
    prompt = "a prompt that fills two blocks of sixteen tokens"

    class Overwriting(Decoder):
        requirements = Requirements(runners=("draft",))

        def decode(self, sequence: Sequence) -> Decoding:
            yield sequence.score(sequence.prompt[:8])  # the prompt is shared after this, if whole
            yield sequence.score(sequence.prompt[8:])
            yield Submit(one_position(sequence, 15, keep=True))
            yield sequence.score(sequence.unscored("draft"), runner="draft")
            sequence.emit([2])

    class Slow:
        def seconds(self, runner, plan) -> float:
            return 5.0 if runner.name == "target" and plan.num_rows == 1 else 1.0

    with scripted_llm() as llm:
        llm.engine.clock = Slow()
        runner = llm.engine.runners["target"]
        llm.generate(prompt, decoder=Overwriting(), max_tokens=1)
        assert llm.engine.has_work  # the overwriting pass is in flight
        while llm.engine.has_work:
            llm.engine.step()
        assert runner.prefixes.num_slots == 0
        llm.engine.check_integrity()


def test_positions_truncated_during_a_pass_are_not_stored() -> None:
    """Rows of a pass are not stored in a cache that was truncated during the pass."""

    class Truncating(Decoder):
        requirements = Requirements(runners=("draft",))

        def decode(self, sequence: Sequence) -> Decoding:
            yield sequence.score()
            late = yield Submit(sequence.score([1] * 16))
            yield sequence.score(sequence.unscored("draft"), runner="draft")
            yield Cancel(late)
            sequence.truncate(sequence.length - 1)
            while not sequence.finished:
                scores = yield sequence.score()
                sequence.emit([scores.sampled[-1]])
                known = sequence.all_tokens[: sequence.kv_cache().length]
                assert sequence.kv_cache().tokens == known

    class Slow:
        def seconds(self, runner, plan) -> float:
            return 5.0 if plan.num_rows == 16 else 1.0

    with scripted_llm() as llm:
        llm.engine.clock = Slow()
        assert llm.generate("abc", decoder=Truncating(), **OPTIONS).tokens == alone(["abc"])[0]
        llm.engine.check_integrity()


def test_waiting_without_requests_is_an_error() -> None:
    class Waiting(Decoder):
        def decode(self, sequence: Sequence) -> Decoding:
            yield Wait([])

    with (
        scripted_llm() as llm,
        pytest.raises(RuntimeError, match="has no running request"),
    ):
        llm.generate("abc", decoder=Waiting())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder": "no-such"}, "no decoding method"),
        ({"decoder": "prompt-lookup:size"}, "name=value"),
        ({"decoder": "prompt-lookup:sise=3"}, "sise"),
        ({"colour": 1}, "no option is called colour; the fields of `SamplingParams` are options"),
        ({"temprature": 1}, "no option is called temprature; did you mean temperature"),
        (
            {"negative_promt": "x"},
            "no option is called negative_promt; did you mean negative_prompt",
        ),
        ({"temperature": -1}, "temperature"),
        ({"adapter": "x"}, "no adapter"),
        ({"decoder": "llada"}, "diffusion"),
    ],
)
def test_bad_requests_are_refused_in_one_line(options: dict, message: str) -> None:
    with scripted_llm() as llm:
        with pytest.raises(InvalidRequestError, match=message) as caught:
            llm.generate("abc", **options)
        assert "\n" not in str(caught.value)


def test_bad_prompts_are_refused() -> None:
    with scripted_llm() as llm:
        for prompt, message in (
            ("", "empty"),
            ([], "empty"),
            ([5, 999], "vocabulary"),
            (
                [1, "5"],
                "token id 1 and '5'; pass a text, a list of token ids, or a list of prompts",
            ),
            ([[1], 5], r"token id 5 and \[1\]; pass"),
            (5, "the prompt is 5; it must be a text or a list of token ids"),
            ({"text": "x"}, "the prompt is {'text': 'x'}; it must be"),
        ):
            with pytest.raises(InvalidRequestError, match=message) as caught:
                llm.generate(prompt)
            assert "\n" not in str(caught.value)
            with pytest.raises(InvalidRequestError, match=message):
                asyncio.run(llm.agenerate(prompt))
    with LLM(ScriptedModel(), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(UnsupportedCombinationError, match="draft"):
            llm.generate("abc", decoder="speculative-sampling")


def test_a_batch_of_token_lists() -> None:
    with scripted_llm() as llm:
        outs = llm.generate(["ab", [97, 98]], **OPTIONS)
        assert outs[0].tokens == outs[1].tokens
        assert llm.generate([97, 98], **OPTIONS).tokens == outs[0].tokens


def test_logprobs_are_those_of_the_raw_logits() -> None:
    import numpy as np

    model = ScriptedModel(seed=1)
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        for decoder in ("autoregressive", "prompt-lookup", "multi-step"):
            out = llm.generate("the cat the cat", decoder=decoder, logprobs=3, **OPTIONS)
            seen = list(b"the cat the cat")
            for token, entry in zip(out.tokens, out.logprobs, strict=True):
                row = model.script(tuple(seen)).astype(np.float32).astype(np.float64)
                expected = row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
                assert entry.token == token
                assert entry.logprob == pytest.approx(expected, abs=1e-4)
                assert len(entry.top) == 3
                seen.append(token)


def test_score_is_the_sum_of_logprobs() -> None:
    with scripted_llm() as llm:
        likelihood = llm.score("the cat", " sat on the mat " * 10)
        assert len(likelihood.tokens) == 160
        assert likelihood.total == pytest.approx(sum(likelihood.logprobs))
        greedy = llm.generate("the cat", max_tokens=5, ignore_eos=True)
        assert llm.scores([([*b"the cat"], greedy.tokens)])[0].greedy
        assert not likelihood.greedy


@pytest.mark.parametrize("options", [
    {"decoder": "autoregressive"},
    {"decoder": "prompt-lookup", "temperature": 0.0},
    {"decoder": "beam"},
    {"decoder": "speculative-sampling", "n": 3},
    {"guidance_scale": 1.5, "negative_prompt": "no"},
    {"constraint": Regex("[a-z]{40}")},
    {"max_tokens": 0},
])  # fmt: skip
def test_prompt_logprobs_do_not_change_the_output_and_compute_every_row(
    options: dict[str, Any],
) -> None:
    prompt = "a prompt of some blocks, so that the cache has them. " * 3
    options = {**OPTIONS, **options}
    with scripted_llm() as llm:
        plain = llm.generate(prompt, **options)
        alone = llm.score(prompt[:1], prompt[1:])
        found = llm.generate(prompt, prompt_logprobs=2, **options)
        llm.engine.check_integrity()
    assert [one.tokens for one in found.samples] == [one.tokens for one in plain.samples]
    assert found.finish_reason == plain.finish_reason
    first, *rest = found.prompt_logprobs
    assert first is None and plain.prompt_logprobs is None
    assert [one.token for one in rest] == list(prompt[1:].encode())
    assert [one.logprob for one in rest] == alone.logprobs
    assert {len(one.top) for one in rest} == {2}
    assert found.stats.num_cached_tokens == 0


def test_prompt_logprobs_equal_those_of_decoding() -> None:
    with LLM("tiny-autoregressive", threads=1) as llm:
        start = llm.encode("The cat sat")
        generated = llm.generate(start, logprobs=3, **{**OPTIONS, "max_tokens": 150})
        whole = [*start, *generated.tokens]
        for prompt in (whole, [*whole, start[0]]):  # the second finds the first in the cache
            scored = llm.generate(prompt, max_tokens=0, prompt_logprobs=3)
            assert scored.prompt_logprobs[len(start) : len(whole)] == generated.logprobs
            assert (scored.tokens, scored.text, scored.finish_reason) == ([], "", "length")


def test_prompt_logprobs_survive_preemption() -> None:
    prompts = [letter * 150 for letter in "abcd"]
    with scripted_llm() as llm:
        alone = [llm.score(prompt[:1], prompt[1:]).logprobs for prompt in prompts]
    with LLM(ScriptedModel(seed=1), tokenizer=ByteTokenizer(), cache_positions=512) as llm:
        found = llm.generate(prompts, prompt_logprobs=0, **{**OPTIONS, "max_tokens": 60})
        assert llm.engine.num_preemptions > 0
    for one, expected in zip(found, alone, strict=True):
        assert [note.logprob for note in one.prompt_logprobs[1:]] == expected


@pytest.mark.slow
def test_prompt_logprobs_need_a_prompt_that_is_scored() -> None:
    with scripted_llm() as llm:
        one = llm.generate("a", max_tokens=0, prompt_logprobs=1)
        assert one.prompt_logprobs == [None]
        whole = "a" * llm.max_length
        found = llm.generate(whole, max_tokens=0, prompt_logprobs=0).prompt_logprobs
        assert len(found) == len(whole)
        with pytest.raises(InvalidRequestError, match="one must be left"):
            llm.generate(whole, max_tokens=1)
        with pytest.raises(UnsupportedCombinationError, match="first_finish"):
            llm.generate("ab", n=2, first_finish=1, prompt_logprobs=1, temperature=1.0)
    with scripted_llm(causal=False) as llm:
        with pytest.raises(
            UnsupportedCombinationError, match="prompt_logprobs .* need a causal model"
        ):
            llm.generate("ab", prompt_logprobs=1)


@pytest.mark.parametrize("decoder", ["autoregressive", "auto", "beam", "speculative-sampling"])
def test_cached_tokens_are_the_rows_that_were_not_computed(decoder: str) -> None:
    prompt = "a prompt of some blocks, so that the cache has them. " * 3
    with scripted_llm() as llm:
        first = llm.generate(prompt, decoder=decoder, max_tokens=1)
        again = llm.generate(prompt + "!", decoder=decoder, max_tokens=1)
        other = llm.generate(prompt, decoder=decoder, max_tokens=1, namespace="another")
    assert first.stats.num_cached_tokens == other.stats.num_cached_tokens == 0
    assert again.stats.num_cached_tokens == len(prompt) // 16 * 16
    assert first.stats.rows - again.stats.rows == again.stats.num_cached_tokens - 1


def test_a_restart_does_not_count_its_own_prompt_as_cached() -> None:
    prompts = [letter * 150 for letter in "abcd"]
    with LLM(ScriptedModel(seed=1), tokenizer=ByteTokenizer(), cache_positions=512) as llm:
        found = llm.generate(prompts, **{**OPTIONS, "max_tokens": 60})
        assert llm.engine.num_preemptions > 0
    assert [one.stats.num_cached_tokens for one in found] == [0, 0, 0, 0]


def test_speculation_saves_passes() -> None:
    with scripted_llm() as llm:
        plain = llm.generate("aaaa bbbb aaaa bbbb", decoder="autoregressive", **OPTIONS)
        drafted = llm.generate("aaaa bbbb aaaa bbbb", decoder="speculative-sampling", **OPTIONS)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.passes < 0.7 * plain.stats.passes


def test_trace_has_each_round() -> None:
    with scripted_llm() as llm:
        out = llm.generate("aaaa bbbb aaaa", decoder=prompt_lookup(), trace=True, **OPTIONS)
    generated = [token for record in out.trace for token in record["tokens"]]
    assert generated[: len(out.tokens)] == out.tokens


def test_state_is_kept_across_restarts_by_owner_and_not_shared_with_forks() -> None:
    mine: StateKey[int] = StateKey("mine", "count")
    other: StateKey[int] = StateKey("another", "count")

    class Counting(Decoder):
        def decode(self, sequence: Sequence) -> Decoding:
            while not sequence.finished:
                sequence.state[mine] = sequence.state.get(mine, 0) + 1
                scores = yield sequence.score()
                sequence.emit([scores.sampled[-1]])

    with scripted_llm() as llm:
        request = llm.request("abc", decoder=Counting(), max_tokens=20, ignore_eos=True)
        sequence = request.jobs[0].sequence
        llm.start(request, background=False)
        for _ in range(5):
            llm.engine.step()
        llm.engine.preempt(request.jobs[0])
        llm.driver.advance(lambda: request.done)
        assert sequence.state[mine] == 21  # once more for the restart
        assert other not in sequence.state and sequence.state.get(other) is None
        assert sequence.state.setdefault(other, 3) == sequence.state[other] == 3
        branch = sequence.fork()
        assert mine not in branch.state
        assert branch.tokenizers is sequence.tokenizers and "target" in branch.tokenizers
        assert branch.cost_model is sequence.cost_model
        expected = llm.generate("abc", decoder="autoregressive", max_tokens=20, ignore_eos=True)
        assert request.generation().tokens == expected.tokens


def test_a_preempted_job_starts_again_before_those_that_never_ran() -> None:
    with scripted_llm(max_running=2) as llm:
        engine = llm.engine
        jobs = [llm.request(prompt, max_tokens=4).jobs[0] for prompt in ("a", "b", "c")]
        for job in jobs:
            engine.submit(job)
        engine.step()
        assert engine.running == jobs[:2]
        engine.preempt(jobs[1])
        assert list(engine.waiting) == jobs[1:]
        while engine.has_work:
            engine.step()
    assert engine.num_preemptions == 1 and all(len(job.sequence.tokens) == 4 for job in jobs)
