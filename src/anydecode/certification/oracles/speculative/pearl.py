"""Oracle test of pearl (arXiv:2408.11850): the drafts of the pre-verify and post-verify modes, and
that drafting and verification overlap."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.draft_chains import (
    DRAFT,
    PROMPTS,
    TARGET,
    chain_oracle,
    drafting_time,
    overlap,
    recorded_drafts,
)
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.certification.oracles.speculative.penalised_drafts import penalty_checks
from anydecode.certification.oracles.speculative.rejection_rules import rejection_checks
from anydecode.certification.rounds import VirtualClock, blurred, rounds, scripted
from anydecode.decoders.speculative.pearl import Pearl


@oracle_test("pearl")
def pearl() -> Iterator[Check]:
    """Pre-verify while no draft is pending, post-verify while all drafts were accepted; drafting
    and verification overlap; the draft length is the ratio of the pass times. Samples under the
    paper's rejection rule follow the target."""
    yield from penalty_checks("pearl")
    modes = set()
    for temperature in (0.0, 0.8):
        wrong = 0
        with scripted(TARGET, DRAFT) as llm:
            for prompt in PROMPTS:
                pending: list[int] = []
                for one in rounds(llm, "pearl:size=4", prompt, temperature=temperature):
                    wrong += one.tokens != pending
                    modes.add(bool(pending))
                    ahead = chain_oracle([*one.text, *pending], 4, temperature)
                    whole = one.generated == [*pending, ahead[0]]
                    pending = ahead[1:] if whole else []
        yield Check(f"T={temperature} equals the two-mode oracle", wrong == 0)
    yield Check("both modes occur", modes == {True, False})
    yield from overlap("pearl:size=4")
    yield from _sizes()
    yield from _post_verify()
    yield from drafting_time("pearl:size=4", in_turn=0, beside=4)
    yield from drafting_time("pearl:size=4,pre_verify=false", in_turn=4, beside=5)
    yield from _tested_ahead()
    yield from rejection_checks("pearl")


def _tested_ahead() -> Iterator[Check]:
    """Every round tests the first draft that was made meanwhile, even if it verifies none."""
    with scripted(TARGET, DRAFT) as llm:
        recorded, trace = recorded_drafts(llm, "pearl:size=4", PROMPTS[0])
    found = [count for count, _ in recorded]
    expected = [len(one.tokens) + 1 for one in trace]
    yield Check("drafts made ahead count as tested", found == expected and 1 in found, f"{found}")


def _sizes() -> Iterator[Check]:
    """On a virtual clock, by default as many tokens are drafted as the draft model makes in one
    pass of the target, whose costs are known; 4 before the draft model's were measured."""
    for target, draft, ratio in ((6.0, 1.0, 6), (2.0, 1.0, 2), (3.0, 2.0, 2), (1.0, 4.0, 1)):
        with scripted(TARGET, TARGET) as llm:
            llm.cost_model = FixedCosts(lambda rows, _: target)  # noqa: B023
            VirtualClock(llm, target=target, draft=draft)
            decoder = llm.decoder("pearl")
            assert isinstance(decoder, Pearl)
            decoder.clock = lambda: llm.engine.now  # noqa: B023
            trace = rounds(llm, decoder, PROMPTS[0])
        sizes = [len(one.tokens) for one in trace[1:-1]]  # the first is verified without drafts
        expected = [3, *[ratio - 1] * (len(sizes) - 1)]
        name = f"a target pass that takes {target / draft:g} times a draft pass"
        yield Check(f"{name}: {ratio} drafts per round", sizes == expected, f"{sizes}")


def _post_verify() -> Iterator[Check]:
    """If all drafts were accepted, the next round's draft is the one made in advance; otherwise new
    drafts are made first. Draft and target passes overlap, which saves time over drafting first."""
    near = blurred(TARGET, error=0.4)
    for temperature in (0.0, 0.8):
        wrong, ahead = 0, 0
        with scripted(TARGET, near) as llm:
            for prompt in PROMPTS:
                pending: list[int] = []
                for one in rounds(
                    llm, "pearl:size=4,pre_verify=false", prompt, temperature=temperature
                ):
                    ahead += bool(pending)
                    fresh = chain_oracle(one.text, 4, temperature, near)
                    wrong += one.tokens != (pending or fresh)
                    further = chain_oracle([*one.text, *one.tokens], 5, temperature, near)
                    whole = one.generated == [*one.tokens, further[0]]
                    pending = further[1:] if whole else []
        yield Check(f"post-verify alone: drafts at T={temperature} equal the oracle", wrong == 0)
        yield Check(
            f"post-verify alone: some drafts were made in advance at T={temperature}",
            ahead > 0,
            f"{ahead}",
        )
    yield from overlap("pearl:size=4,pre_verify=false")
