"""Oracle test of online-sd (Online Speculative Decoding, arXiv:2310.07177): the training examples,
their loss, and drafts that get better."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode import catalogue
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.reading_drafts import TARGET
from anydecode.certification.rounds import accepted, rounds, scripted
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_correction import Correction
from anydecode.decoders.speculative.online_sd import OnlineDrafter, RejectedDraft, cross_entropy


@oracle_test("online-sd")
def online() -> Iterator[Check]:
    """Training examples are the first rejected drafts; the loss is forward cross-entropy; drafts
    get better."""
    correction = Correction(2, 5, 2, 0.1)
    shares = np.array([0.75, 0.25])
    lesson = RejectedDraft(np.ones(2), np.zeros(5), np.array([1, 3]), shares)
    losses = correction.train(np.ones((1, 2)), np.zeros((1, 5)), cross_entropy([lesson]), 30)
    yield Check("the first loss is log 5", abs(losses[0] - np.log(5)) < 1e-6)
    entropy = -float((shares * np.log(shares)).sum())
    yield Check("the loss falls towards the entropy", entropy < losses[-1] < losses[0] - 0.5)

    def wrong(seen: tuple[int, ...]) -> np.ndarray:
        row: np.ndarray = TARGET(seen).copy()
        row[122] += 40.0
        return row

    with scripted(TARGET, wrong) as llm:
        decoder = llm.decoder("online-sd:batch=8,steps=12,rate=0.3")
        assert isinstance(decoder, Speculative) and isinstance(decoder.drafter, OnlineDrafter)
        taken: list[RejectedDraft] = []
        remember = decoder.drafter.add_example

        def take(example: RejectedDraft) -> None:
            taken.append(example)
            remember(example)

        decoder.drafter.add_example = take  # type: ignore[method-assign]
        before = rounds(llm, decoder, "abcabcabd", 24)
        chains = [[122] * 4 for _ in before]  # the draft model's tokens before training
        yield Check("the untrained draft model drafts first", [o.tokens for o in before] == chains)
        mistakes = [one for one in before if len(one.accepted) < len(one.tokens)]
        yield Check(
            "one training example per rejected draft",
            len(taken) == len(mistakes) > 8,
            f"{len(taken)}",
        )
        aligned = all(
            int(lesson.tokens[0])
            == int(TARGET((*one.text, *one.tokens[: len(one.accepted)])).argmax())
            for lesson, one in zip(taken, mistakes, strict=True)
        )
        yield Check("examples have the target's row of the same position", aligned)
        for _ in range(3):
            after = rounds(llm, decoder, "abcabcabd", 24)
        yield Check(
            "more drafts are accepted after training",
            accepted(after) > accepted(before),
            f"{accepted(before)} -> {accepted(after)}",
        )
        decoder.drafter.clear()
        again = rounds(llm, decoder, "abcabcabd", 24)
        yield Check("`clear` resets the correction", accepted(again) == accepted(before))
    yield Check("it is in the catalogue", "online-sd" in catalogue.entries())
