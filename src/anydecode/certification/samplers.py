"""Tests of sampling rules against oracles, the same for every rule of the catalogue.

An *oracle* is an independent implementation of the rule that recomputes everything from the whole
text and keeps no state between tokens. The certificate compares the engine's distributions with the
oracle's row by row, and the engine's samples with it by a chi-square test over all possible texts.
It also checks that every exact decoder generates the tokens of plain decoding under the rule:
alone, in a batch, with restarts, and under a constraint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import PROMPTS, Check, Restarts, equal_tokens
from anydecode.certification.chi_square import Alternating, Script, Text, bigram_logits, fit
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError
from anydecode.kernels.interface import OutputSpec, Rows
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.sampling.preset import SamplerPreset
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

VOCABULARY, LENGTH, SAMPLES = 6, 3, 300
PROMPT = [1, 0, 3, 1]
#: Deviation of the logits. Default builds are also compared on a wide one, where mild truncations
#: have an effect.
SPREAD = 1.6
SPREADS = SPREAD, 6.0
#: Maximum difference between a probability and the oracle's; rows are float32.
TOLERANCE = 2e-6

#: Decoders that must generate the tokens of plain decoding under every rule.
EXACT = ("multi-step", "prompt-lookup", "token-recycling", "lookahead", "pearl",
         "layerskip")  # fmt: skip


class ToyModel(ScriptedModel):
    """A scripted model with what some rules read: embeddings, and hidden states that depend on the
    layer."""

    def __init__(self, script: Script | None = None, vocab_size: int = 259, **options: Any) -> None:
        super().__init__(script, vocab_size, **options)
        drawn = np.random.default_rng(3).normal(size=(vocab_size, self.spec.hidden_size))
        self.embeddings = drawn.astype(np.float32)

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """float32 `[len(tokens), hidden_size]`, pseudo-random."""
        return self.embeddings[tokens]

    def tokens_of(self, inputs: np.ndarray) -> np.ndarray:
        """The tokens with the nearest embeddings."""
        distances = np.square(inputs[:, None] - self.embeddings).sum(-1)
        return distances.argmin(1).astype(np.int32)

    def normed(self, hidden: np.ndarray) -> np.ndarray:
        """Hidden states mapped to numbers between -1 and 1."""
        return np.sin(0.01 * hidden.astype(np.float64)).astype(np.float32)


@dataclass(eq=False)
class OracleContext:
    """What an oracle reads of a text; everything is recomputed from the first token."""

    model: Any
    prompt: list[int]
    temperature: float = 1.0
    _computed: dict[Text, tuple[np.ndarray, dict[int, np.ndarray]]] = field(default_factory=dict)

    def logits(self, tokens: Text) -> np.ndarray:
        """float64 `[vocab_size]` after the prompt and `tokens`."""
        return self._row(tokens)[0]

    def early(self, tokens: Text, layer: int) -> np.ndarray:
        """float64 `[vocab_size]`, computed from the hidden state after `layer` layers."""
        early: np.ndarray = self.model.head(self._row(tokens)[1][layer])[0].astype(np.float64)
        return early

    def state(self, tokens: Text) -> np.ndarray:
        """float64 `[hidden_size]`: the normalized hidden state after the last layer."""
        last = self._row(tokens)[1][self.model.spec.num_layers]
        state: np.ndarray = self.model.normed(last)[0].astype(np.float64)
        return state

    def _row(self, text: Text) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        if text not in self._computed:
            tokens = np.array([*self.prompt, *text], np.int32)
            positions, zeros = np.arange(len(tokens), dtype=np.int32), np.zeros_like(tokens)
            depth = self.model.spec.num_layers
            rows = Rows(
                tokens=tokens,
                positions=positions,
                slots=positions,
                tables=[positions],
                table=zeros,
                prefix=positions + 1,
                tails=zeros[:0],
                tail_start=zeros,
                tail_length=zeros,
                start=zeros,
                stop=zeros + depth,
            )
            last = positions[-1:]
            output_spec = OutputSpec(last, dict.fromkeys(range(depth + 1), last))
            output = self.model.run(rows, self.model.new_cache(len(tokens)), output_spec)
            hidden = {layer: states.copy() for layer, states in output.hidden.items()}
            self._computed[text] = output.logits[0].astype(np.float64), hidden
        return self._computed[text]


#: Maps an `OracleContext`, the generated tokens and the rule's parameters to probabilities
#: `[vocab_size]`.
Oracle = Callable[..., Any]
#: The registered oracles by rule, with the settings under which they are compared.
ORACLES: dict[str, tuple[Oracle, tuple[Mapping[str, Any], ...]]] = {}


def oracle(key: str, *settings: Mapping[str, Any]) -> Callable[[Oracle], Oracle]:
    """Function decorator: registers `oracle(context, tokens, **setting)` as the independent
    implementation of rule `key`. It is compared with the engine under each of `settings`.

    The setting {} is the default build: the oracle's defaults are those of the rule's publication
    or card, and not read from the catalogue.
    """

    def register(implementation: Oracle) -> Oracle:
        ORACLES[key] = implementation, settings
        return implementation

    return register


def softmax(scores: np.ndarray) -> np.ndarray:
    """float64; -inf gives probability 0."""
    weights = np.exp(np.asarray(scores, np.float64) - np.max(scores))
    p: np.ndarray = weights / weights.sum()
    return p


def sampler_claim(
    key: str, make: Callable[..., SamplerPreset], needs_oracle: bool = True
) -> Iterator[Check]:
    """Checks of one sampling rule. A rule without an oracle, such as one of another package, is
    only tested together with other decoders."""
    if key not in ORACLES:
        if needs_oracle:
            yield Check("oracle", False, "no oracle is registered")
        yield from exactness_claim(make())
        return
    implementation, settings = ORACLES[key]
    for setting in settings:
        sampler = make(**setting)
        parameters = ", ".join(f"{name}={value}" for name, value in setting.items())
        for temperature, spread in product((1.0, 0.7), (SPREAD,) if setting else SPREADS):
            if temperature != 1.0 and not _accepts(sampler, temperature=temperature):
                continue
            context = OracleContext(target_model(spread), PROMPT, temperature)
            exact = partial(implementation, context, **setting)
            where = f"T={temperature}" + (f", {parameters}" if len(parameters) < 60 else "")
            where += "" if setting else f", default build, logits of deviation {spread}"
            name = f"rows equal the oracle's, {where}"
            yield rows_check(sampler, exact, temperature, name, spread)
        context = OracleContext(target_model(), PROMPT)
        expected = enumerated(partial(implementation, context, **setting), LENGTH)
        decoders = ("autoregressive", "speculative-sampling:acceptance=rejection")
        for decoder in decoders if setting is settings[0] else decoders[:1]:
            with small_llm() as llm:
                # A rule that always chooses the same token gives one text.
                n = SAMPLES if _accepts(sampler, n=2) else 1
                answer = llm.generate(
                    PROMPT, decoder=decoder, sampler=sampler, n=n, seed=17,
                    temperature=1.0, max_tokens=LENGTH,
                )  # fmt: skip
            result = fit([tuple(sample.tokens) for sample in answer.samples], expected)
            yield Check(f"{decoder} samples follow the oracle", result.passed, str(result))
    yield from exactness_claim(make(**settings[0]))


def small_llm(spread: float = SPREAD) -> LLM:
    """A scripted target, and a draft model that is often wrong."""
    draft = ScriptedModel(bigram_logits(VOCABULARY, 5), VOCABULARY)
    return LLM(target_model(spread), tokenizer=ByteTokenizer(), draft=draft, cache_positions=8192)


def target_model(spread: float = SPREAD) -> ToyModel:
    """The target of `small_llm`."""
    return ToyModel(bigram_logits(VOCABULARY, 4, spread=spread), VOCABULARY)


def _accepts(sampler: SamplerPreset, **options: Any) -> bool:
    """Whether the rule accepts these options of a request."""
    try:
        with small_llm() as llm:
            llm.request(PROMPT, sampler=sampler, **options)
    except InvalidRequestError:
        return False
    return True


class _ForcedTokens(Decoder):
    """Emits given tokens, and records the distribution of each."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.rows: list[np.ndarray] = []

    def decode(self, sequence: Sequence) -> Decoding:
        for token in self.text:
            scores = yield sequence.score()
            self.rows.append(scores.distribution(-1).dense(VOCABULARY))
            sequence.emit([token])


def rows_check(
    sampler: SamplerPreset,
    exact: Callable[[Text], np.ndarray],
    temperature: float,
    name: str,
    spread: float = SPREAD,
) -> Check:
    """Compares the engine's distributions along random texts with those of `exact`."""
    largest, count = 0.0, 0
    texts = np.random.default_rng(8).integers(VOCABULARY, size=(8, 8))
    texts[4:] %= 2  # these repeat longer n-grams
    with small_llm(spread) as llm:
        for text in (tuple(int(token) for token in line) for line in texts):
            decoder = _ForcedTokens(text)
            options: dict[str, Any] = {
                "temperature": temperature,
                "max_tokens": len(text),
                "seed": 1,
            }
            llm.generate(PROMPT, decoder=decoder, sampler=sampler, **options)
            for position, row in enumerate(decoder.rows):
                largest = max(largest, float(np.abs(row - exact(text[:position])).max()))
                count += 1
    return Check(
        name, largest <= TOLERANCE and count > 0, f"{count} rows, largest difference {largest:.1g}"
    )


def enumerated(exact: Callable[[Text], np.ndarray], length: int) -> dict[Text, float]:
    """The probability of every text of `length` tokens."""
    texts: dict[Text, float] = {(): 1.0}
    for _ in range(length):
        texts = {
            (*text, token): probability * float(p)
            for text, probability in texts.items()
            for token, p in enumerate(exact(text))
            if p > 0
        }
    return texts


def exactness_claim(sampler: SamplerPreset) -> Iterator[Check]:
    """Checks that every exact decoder generates the tokens of plain decoding under the rule."""
    low = 0.5 if _accepts(sampler, temperature=0.5) else 1.0
    for temperature in (low,) if sampler.needs_temperature else (0.0, low):
        options: dict[str, Any] = {"max_tokens": 32, "temperature": temperature, "seed": 11}
        options |= {"ignore_eos": True, "sampler": sampler}
        prompts = list(PROMPTS[:3])
        with _llm() as llm:
            plain = [
                llm.generate(prompt, decoder="autoregressive", **options).tokens
                for prompt in prompts
            ]
            passes = {}
            for decoder in EXACT:
                try:
                    answers = llm.generate(prompts, decoder=decoder, **options)
                except InvalidRequestError as error:
                    line = "\n" not in str(error) and bool(str(error))
                    yield Check(f"{decoder} is refused, T={temperature}", line, str(error))
                    continue
                yield equal_tokens(
                    f"{decoder}, T={temperature}", [one.tokens for one in answers], plain
                )
                passes[decoder] = sum(one.stats.passes for one in answers)
            is_faster = min(passes.values()) < sum(map(len, plain))
            yield Check(f"drafts are accepted, T={temperature}", is_faster, f"passes {passes}")
        with _llm() as llm, Restarts(llm.engine, seed=3):
            answers = llm.generate(prompts, decoder="prompt-lookup", **options)
            tokens = [one.tokens for one in answers]
            yield equal_tokens(f"restarted at random yields, T={temperature}", tokens, plain)
            llm.engine.check_integrity()
        yield from _with_other_options(prompts, options)


def _with_other_options(prompts: list[str], options: dict[str, Any]) -> Iterator[Check]:
    """Checks of the rule together with a constraint, penalties and log-probabilities."""
    more = {**options, "presence_penalty": 0.4, "logprobs": 2, "processed_logprobs": True}
    with _llm() as llm:
        first, second = (
            llm.generate(prompts, decoder=decoder, constraint=Alternating(259), **more)
            for decoder in ("autoregressive", "token-recycling")
        )
    temperature = options["temperature"]
    name = f"drafts under a grammar and penalties, T={temperature}"
    yield equal_tokens(name, [one.tokens for one in second], [one.tokens for one in first])
    are_equal = [one.logprobs for one in first] == [one.logprobs for one in second]
    entries = [one for answer in first for one in answer.logprobs or [None]]
    are_finite = all(one is not None and np.isfinite(one.logprob) for one in entries)
    yield Check(f"log-probabilities are the same, T={temperature}", are_equal and are_finite)


def _llm() -> LLM:
    return LLM(
        ToyModel(seed=1),
        tokenizer=ByteTokenizer(),
        draft=ScriptedModel(seed=1, noise=0.5),
        cache_positions=4096,
    )
