"""Oracle test of omnidraft (OmniDraft, arXiv:2507.02659): runs of draft tokens become target tokens
once the target has generated one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.rounds import VOCABULARY, Logits, TracedRound, rounds
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.omnidraft import OmniDrafter
from anydecode.errors import UnsupportedCombinationError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel


class PairTokenizer(ByteTokenizer):
    """A byte tokenizer with the lowest bit of each byte flipped, and a token for each of three
    pairs."""

    vocab_size = VOCABULARY + 3
    pairs = (b"ab", b"ca", b"bd")

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        data, tokens = text.encode(), []
        while data:
            pair = data[:2]
            is_pair = pair in self.pairs
            tokens.append(VOCABULARY + self.pairs.index(pair) if is_pair else data[0] ^ 1)
            data = data[2 if is_pair else 1 :]
        return tokens

    def token_bytes(self, token: int) -> bytes:
        if token >= VOCABULARY:
            return self.pairs[token - VOCABULARY]
        return bytes([token ^ 1]) if token < 256 else b""

    def is_special(self, token: int) -> bool:
        return 256 <= token < VOCABULARY


def _reciting_logits(tokens: list[int], size: int) -> Logits:
    def logits(seen: tuple[int, ...]) -> np.ndarray:
        row = np.zeros(size, np.float32)
        row[tokens[len(seen) % len(tokens)]] = 30.0
        return row

    return logits


@oracle_test("omnidraft")
def omnidraft() -> Iterator[Check]:
    """Runs of draft tokens become target tokens once the target has generated one; the text is
    unchanged."""
    ours, text = PairTokenizer(), "abcabd\u00e9 ca" * 12
    target = ScriptedModel(
        _reciting_logits(ours.encode(text), ours.vocab_size), vocab_size=ours.vocab_size
    )
    draft = ScriptedModel(_reciting_logits(list(text.encode()), VOCABULARY), vocab_size=VOCABULARY)
    draft.tokenizer = ByteTokenizer()  # type: ignore[attr-defined]
    with LLM(target, tokenizer=ours, draft=draft, cache_positions=4096) as llm:
        prompt = ours.encode("abcabd")
        trace = rounds(llm, "omnidraft:size=6", prompt, 50)
        method = llm.decoder("omnidraft:size=6")
        assert isinstance(method, Speculative) and isinstance(method.drafter, OmniDrafter)
        runs = method.drafter.translation.runs
        yield Check("the text is the target's", _text(ours, trace) in text)
        yield Check("drafts equal the oracle", _translated(ours, trace, text.encode()) == 0)
        yield Check(
            "translations are learned",
            runs == {tuple(p): VOCABULARY + i for i, p in enumerate(PairTokenizer.pairs)},
            f"{runs}",
        )
        last = trace[-2]
        missed = [one for one in trace if one.tokens and one.tokens[0] != one.generated[0]]
        yield Check("unknown translations are rejected", 0 < len(missed) <= 3, f"{len(missed)}")
        yield Check("a known translation is accepted", len(last.accepted) == len(last.tokens) > 2)
        yield Check("drafts are whole target tokens", any(t >= VOCABULARY for t in last.tokens))
        try:
            llm.generate("abc", decoder="speculative-sampling")
            refused = ""
        except UnsupportedCombinationError as error:
            refused = str(error)
        yield Check(
            "methods that cannot translate the vocabulary are refused",
            "omnidraft" in refused,
            refused,
        )


def _translated(ours: PairTokenizer, trace: list[TracedRound], recited: bytes) -> int:
    """The number of rounds whose drafts are not the next six bytes of `recited`, with pairs
    generated before as one token; no drafts where a character is incomplete."""
    wrong, generated = 0, set()
    for one in trace:
        seen = b"".join(map(ours.token_bytes, one.text))
        ahead = [recited[(len(seen) + i) % len(recited)] for i in range(6)]
        expected: list[int] = []
        while ahead:
            pair = bytes(ahead[:2])
            size = 2 if pair in generated else 1
            expected += ours.encode(pair.decode()) if size == 2 else [ahead[0] ^ 1]
            ahead = ahead[size:]
        whole = seen.decode(errors="ignore").encode() == seen
        wrong += one.tokens != (expected if whole else [])
        generated |= {ours.token_bytes(token) for token in one.generated if token >= VOCABULARY}
    return wrong


def _text(tokenizer: ByteTokenizer, trace: list[TracedRound]) -> str:
    return tokenizer.decode([token for one in trace for token in one.generated][:40])
