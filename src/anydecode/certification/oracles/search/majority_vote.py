"""Oracle test of majority-vote: the vote counted among plain samples, and the law of the winner by
enumeration of all outcomes of a vote."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.chi_square import Text, fit
from anydecode.decoders.search.majority_vote import MajorityVote
from anydecode.models.scripted import PieceTokenizer, ScriptedModel

#: Pieces that make numbers which are equal, though written in different ways, and a text without a
#: number. The token behind them ends a text.
PIECES = ("3", "3.0", "03", "12", "1,200", "1200.50", " no ", " so ")
PROMPT = [6, 7]


def voting_llm(probabilities: dict[str, float]) -> LLM:
    """A model whose texts are one piece each, with these probabilities."""
    end, tokenizer = len(PIECES), PieceTokenizer(*PIECES)

    def script(seen: tuple[int, ...]) -> np.ndarray:
        row = np.full(end + 1, -60.0)
        if len(seen) > len(PROMPT):
            row[end] = 0.0
        else:
            for piece, probability in probabilities.items():
                row[PIECES.index(piece)] = np.log(probability)
        return row

    model = ScriptedModel(script, vocab_size=end + 1)
    return LLM(model, tokenizer=tokenizer, cache_positions=4096)


def winner_law(probabilities: dict[str, float], n: int) -> dict[str, float]:
    """The law of the winner of `n` votes; ties go to the answer that comes first."""
    law = dict.fromkeys(probabilities, 0.0)
    for votes in product(probabilities, repeat=n):
        counts = {vote: votes.count(vote) for vote in votes}
        best = max(counts.values())
        winner = next(vote for vote in votes if counts[vote] == best)
        law[winner] += float(np.prod([probabilities[vote] for vote in votes]))
    return law


#: What each piece answers.
MEANING = {"3": "3", "3.0": "3", "03": "3", "12": "12", "1,200": "1200", "1200.50": "1200.5"}


@oracle_test("majority-vote")
def majority_vote() -> Iterator[Check]:
    """The votes of the plain samples with the same seed; and the law of the winner."""
    uneven = dict(zip(PIECES, (0.1, 0.12, 0.1, 0.2, 0.14, 0.1, 0.14, 0.1), strict=True))
    wrong = changed = 0
    with voting_llm(uneven) as llm:
        for seed in range(40):
            options: dict[str, Any] = {"n": 8, "temperature": 1.0, "seed": seed}
            plain = [
                one.text
                for one in llm.generate(PROMPT, decoder="autoregressive", **options).samples
            ]
            voted = llm.generate(PROMPT, decoder="majority-vote", **options).samples
            votes = [MEANING[text] for text in plain if text in MEANING]
            order = sorted(set(votes), key=lambda vote: (-votes.count(vote), votes.index(vote)))
            firsts = [next(t for t in plain if MEANING.get(t) == vote) for vote in order]
            shares = [votes.count(vote) / len(votes) for vote in order]
            wrong += [one.text for one in voted] != firsts
            wrong += [one.score for one in voted] != shares
            changed += firsts[0] != plain[0]
    detail = f"{wrong} of 40 wrong, {changed} changed"
    yield Check("the votes of the plain samples", wrong == 0 < changed, detail)
    law = {"3": 0.45, "12": 0.35, "1200.50": 0.2}
    with voting_llm(law) as llm:
        for n in (1, 3, 5, 8):
            decoder = "majority-vote" if n == 8 else f"majority-vote:n={n}"
            found = [
                (PIECES.index(llm.generate(PROMPT, decoder=decoder, temperature=1.0, seed=s).text),)
                for s in range(400)
            ]
            outcomes: dict[Text, float] = {
                (PIECES.index(one),): p for one, p in winner_law(law, n).items()
            }
            result = fit(found, outcomes)
            yield Check(f"law of the winner of {n}", result.passed, str(result))
    with voting_llm({" no ": 0.5, " so ": 0.5}) as llm:
        options = {"temperature": 1.0, "seed": 4}
        plain_text = llm.generate(PROMPT, decoder="autoregressive", **options).text
        kept = llm.generate(PROMPT, decoder="majority-vote", **options)
        yield Check("without an answer, the first text", kept.text == plain_text)
    weighted = MajorityVote(6, weights=lambda prompt, texts: [len(text) ** 4 for text in texts])
    with voting_llm(law) as llm:
        longest = 0
        for seed in range(20):
            options = {"temperature": 1.0, "seed": seed, "n": 6}
            plain = [
                one.text
                for one in llm.generate(PROMPT, decoder="autoregressive", **options).samples
            ]
            totals = {text: plain.count(text) * len(text) ** 4 for text in plain}
            got = llm.generate(PROMPT, decoder=weighted, temperature=1.0, seed=seed).text
            longest += got == max(plain, key=lambda text: totals[text])
        yield Check("weighted votes", longest == 20, f"{longest} of 20")


@measure("majority-vote", "accuracy lost against sampling", samples=300, margin=-0.1)
def majority_gain(samples: int) -> float:
    """The share of right answers of a model that is right more often than it gives any other
    answer, less that of the vote."""
    right = [0, 0]
    with voting_llm({"3": 0.6, "12": 0.25, "1200.50": 0.15}) as llm:
        for number, decoder in enumerate(("autoregressive", "majority-vote")):
            for seed in range(samples):
                answer = llm.generate(PROMPT, decoder=decoder, temperature=1.0, seed=seed)
                right[number] += answer.text == "3"
    return (right[0] - right[1]) / samples
