"""Proof that a sampling rule is what its card says, for any rule of the catalogue alike.

An *oracle* writes the rule down once more, from the whole text and with nothing kept between
tokens. The certificate holds the engine's distribution against it row by row and, by a chi-square
test over every text there is, what the engine draws; then every decoder must say under the rule
what plain decoding says under it: alone, in a batch, with restarts, under a constraint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from anydecode.decoders.decoder import Decoder
from anydecode.engine.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.evaluation.certify import PROMPTS, Check, _equal, _Restarts
from anydecode.evaluation.chi_square import Alternating, Script, Text, fit, table
from anydecode.kernels.interface import OutputSpec, Rows
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.sampling.preset import SamplerPreset
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

VOCABULARY, LENGTH, SAMPLES = 6, 3, 300
PROMPT = [1, 0, 3, 1]
#: How far a probability may lie from the oracle's; rows are float32.
TOLERANCE = 2e-6

#: Decoders that must say under a rule what plain decoding says under it.
EXACT = ("following", "prompt-lookup", "token-recycling", "lookahead", "parallel-draft",
         "layer-draft")  # fmt: skip


class Toy(ScriptedModel):
    """A scripted model with what rules may look at: embeddings, and states of a size."""

    def __init__(self, script: Script | None = None, vocab_size: int = 259, **options: Any) -> None:
        super().__init__(script, vocab_size, **options)
        drawn = np.random.default_rng(3).normal(size=(vocab_size, 8))
        self.embeddings = drawn.astype(np.float32)

    def embed(self, tokens: np.ndarray) -> torch.Tensor:
        """float32 `[len(tokens), 8]`, pseudo-random."""
        return torch.from_numpy(self.embeddings[tokens])

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Numbers between -1 and 1 that have forgotten how large they were."""
        return torch.sin(0.01 * hidden.double()).float()


@dataclass(eq=False)
class World:
    """What an oracle may ask about a text; everything is recomputed from the first token."""

    model: Any
    prompt: list[int]
    temperature: float = 1.0
    _known: dict[Text, tuple[np.ndarray, dict[int, torch.Tensor]]] = field(default_factory=dict)

    def logits(self, said: Text) -> np.ndarray:
        """float64 `[vocab_size]` after the prompt and `said`."""
        return self._row(said)[0]

    def early(self, said: Text, layer: int) -> np.ndarray:
        """The same from the state after `layer` layers."""
        early: np.ndarray = self.model.head(self._row(said)[1][layer]).numpy()[0].astype(np.float64)
        return early

    def state(self, said: Text) -> np.ndarray:
        """float64 `[hidden_size]`: what the head sees after the last layer."""
        last = self._row(said)[1][self.model.spec.num_layers]
        state: np.ndarray = self.model.normed(last)[0].numpy().astype(np.float64)
        return state

    def _row(self, said: Text) -> tuple[np.ndarray, dict[int, torch.Tensor]]:
        if said not in self._known:
            tokens = np.array([*self.prompt, *said], np.int32)
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
            hidden = {layer: states.clone() for layer, states in output.hidden.items()}
            self._known[said] = output.logits[0].numpy().astype(np.float64), hidden
        return self._known[said]


#: From a world, what has been said and the rule's parameters to probabilities `[vocab_size]`.
Oracle = Callable[..., Any]
_oracles: dict[str, tuple[Oracle, tuple[Mapping[str, Any], ...]]] = {}


def oracle(key: str, *settings: Mapping[str, Any]) -> Callable[[Oracle], Oracle]:
    """Function decorator: `oracle(world, said, **setting)` is the rule `key` written down once
    more; it is held against the engine under each of `settings`."""

    def enter(written: Oracle) -> Oracle:
        _oracles[key] = written, settings
        return written

    return enter


def softmax(scores: np.ndarray) -> np.ndarray:
    """float64, where -inf counts as nothing."""
    weights = np.exp(np.asarray(scores, np.float64) - np.max(scores))
    p: np.ndarray = weights / weights.sum()
    return p


def sampler_claim(key: str, make: Callable[..., SamplerPreset]) -> Iterator[Check]:
    """Everything that is claimed of every sampling rule. A rule without an oracle is only tried
    with other decoders, as strangers' rules are."""
    if key not in _oracles:
        if ":" not in key:
            yield Check("oracle", False, "no oracle is registered")
        yield from exactness_claim(make())
        return
    written, settings = _oracles[key]
    for setting in settings:
        sampler = make(**setting)
        named = ", ".join(f"{name}={value}" for name, value in setting.items())
        for temperature in (1.0, 0.7):
            if temperature != 1.0 and not _takes(sampler, temperature):
                continue
            world = World(_target(), PROMPT, temperature)
            exact = partial(written, world, **setting)
            where = f"T={temperature}" + (f", {named}" if len(named) < 60 else "")
            yield rows_check(sampler, exact, temperature, f"rows equal the oracle's, {where}")
        world = World(_target(), PROMPT)
        expected = enumerated(partial(written, world, **setting), LENGTH)
        drawing = ("autoregressive", "rejection-sampling")
        for decoder in drawing if setting is settings[0] else drawing[:1]:
            with small_llm() as llm:
                answer = llm.generate(
                    PROMPT, decoder=decoder, sampler=sampler, n=SAMPLES, seed=17,
                    temperature=1.0, max_tokens=LENGTH,
                )  # fmt: skip
            found = fit([tuple(sample.tokens) for sample in answer.samples], expected)
            yield Check(f"{decoder} draws from the oracle", found.passed, str(found))
    yield from exactness_claim(make(**settings[0]))


def small_llm() -> LLM:
    """The toy of the oracles, with a drafter that is often wrong."""
    draft = ScriptedModel(table(VOCABULARY, 5), VOCABULARY)
    return LLM(_target(), tokenizer=ByteTokenizer(), draft=draft, cache_positions=8192)


def _target() -> Toy:
    return Toy(table(VOCABULARY, 4, spread=1.6), VOCABULARY)


def _takes(sampler: SamplerPreset, temperature: float) -> bool:
    """Whether the rule leaves the temperature to the request."""
    try:
        with small_llm() as llm:
            llm.request(PROMPT, sampler=sampler, temperature=temperature)
    except InvalidRequestError:
        return False
    return True


class _Forced(Decoder):
    """Says a given text, and keeps the distribution of each of its tokens."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.rows: list[np.ndarray] = []

    def decode(self, sequence: Sequence) -> Decoding:
        for token in self.text:
            scores = yield sequence.score()
            self.rows.append(scores.distribution(-1).dense(VOCABULARY))
            sequence.emit([token])


def rows_check(
    sampler: SamplerPreset, exact: Callable[[Text], np.ndarray], temperature: float, name: str
) -> Check:
    """The engine's distributions along texts drawn at random, against `exact` of what was said."""
    worst, count = 0.0, 0
    drawn = np.random.default_rng(8).integers(VOCABULARY, size=(8, 8))
    with small_llm() as llm:
        for text in (tuple(int(token) for token in line) for line in drawn):
            forced = _Forced(text)
            options = {"temperature": temperature, "max_tokens": len(text), "seed": 1}
            llm.generate(PROMPT, decoder=forced, sampler=sampler, **options)
            for position, row in enumerate(forced.rows):
                worst = max(worst, float(np.abs(row - exact(text[:position])).max()))
                count += 1
    return Check(name, worst <= TOLERANCE and count > 0, f"{count} rows, at most {worst:.1g} off")


def enumerated(exact: Callable[[Text], np.ndarray], length: int) -> dict[Text, float]:
    """The probability of every text of that length."""
    texts: dict[Text, float] = {(): 1.0}
    for _ in range(length):
        texts = {
            (*text, token): chance * float(p)
            for text, chance in texts.items()
            for token, p in enumerate(exact(text))
            if p > 0
        }
    return texts


def exactness_claim(sampler: SamplerPreset) -> Iterator[Check]:
    """Every exact decoder says under the rule what plain decoding says under it."""
    cool = 0.5 if _takes(sampler, 0.5) else 1.0
    for temperature in (cool,) if sampler.needs_temperature else (0.0, cool):
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
                    found = llm.generate(prompts, decoder=decoder, **options)
                except InvalidRequestError as error:
                    line = "\n" not in str(error) and bool(str(error))
                    yield Check(f"{decoder} is refused, T={temperature}", line, str(error))
                    continue
                yield _equal(f"{decoder}, T={temperature}", [one.tokens for one in found], plain)
                passes[decoder] = sum(one.stats.passes for one in found)
            saved = min(passes.values()) < sum(map(len, plain))
            yield Check(f"drafts are accepted, T={temperature}", saved, f"passes {passes}")
        with _llm() as llm, _Restarts(llm.engine, seed=3):
            found = llm.generate(prompts, decoder="prompt-lookup", **options)
            tokens = [one.tokens for one in found]
            yield _equal(f"restarted at random yields, T={temperature}", tokens, plain)
            llm.engine.check_integrity()
        yield from _in_company(prompts, options)


def _in_company(prompts: list[str], options: dict[str, Any]) -> Iterator[Check]:
    """With a constraint, penalties and log-probabilities."""
    more = {**options, "presence_penalty": 0.4, "logprobs": 2, "processed_logprobs": True}
    with _llm() as llm:
        first, second = (
            llm.generate(prompts, decoder=decoder, constraint=Alternating(259), **more)
            for decoder in ("autoregressive", "token-recycling")
        )
    temperature = options["temperature"]
    name = f"drafts under a grammar and penalties, T={temperature}"
    yield _equal(name, [one.tokens for one in second], [one.tokens for one in first])
    same = [one.logprobs for one in first] == [one.logprobs for one in second]
    finite = all(np.isfinite(one.logprob) for answer in first for one in answer.logprobs)
    yield Check(f"log-probabilities are the same, T={temperature}", same and finite)


def _llm() -> LLM:
    return LLM(
        Toy(seed=1),
        tokenizer=ByteTokenizer(),
        draft=ScriptedModel(seed=1, noise=0.5),
        cache_positions=4096,
    )
