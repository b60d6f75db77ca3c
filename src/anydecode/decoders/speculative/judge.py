"""Judge decoding: long drafts of a smaller model, of which a trained head keeps those that are
right though the target would not have sampled them (Bachmann et al., "Judge Decoding: Faster
Speculative Sampling Requires Going Beyond Model Alignment", arXiv:2501.19309).

The head learns from answers whose mistakes are marked, or from labels that a search finds, and
reads the target's state at a draft, or the draft model's too (Garipov et al., "AutoJudge: Judge
Decoding Without Manual Annotation", arXiv:2504.20039): `training/judge.py`.
"""

from __future__ import annotations

from pathlib import Path

from anydecode.catalogue import Card, Range, Words, register
from anydecode.decoders.framework.acceptance import Acceptance, TokenExact
from anydecode.decoders.framework.judging import JudgeAcceptance
from anydecode.decoders.framework.rejection import CHAIN_NOISE, RejectionSampling, acceptance_rule
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_model import ModelDrafter
from anydecode.errors import InvalidRequestError
from anydecode.models.judge import Judge


@register(
    Card(
        "judge",
        "speculative",
        paper="Judge Decoding (arXiv:2501.19309); AutoJudge (arXiv:2504.20039)",
        exactness="lossy",
        summary=(
            "A linear head on the last states at a draft accepts it beside the standard rule."
        ),
        needs=("draft model", "judge"),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "the standard rule is token-exact with shared noise; acceptance='rejection' is the"
            " papers'; " + CHAIN_NOISE,
            "the threshold is that of the head's file, which its training chooses on questions"
            " that it does not learn from; threshold=0.5 is a plain majority",
            "25 drafts per round, which is for targets much slower than their draft models",
            "tokens that the request forbids are never accepted",
            "in draft trees, the sibling with the judge's highest probability is taken",
            "anydecode train judge labels a draft by whether the target, continuing behind it,"
            " comes to its own result again, as AutoJudge does; --marked learns from answers as"
            " Judge Decoding does, whose answers are not published",
            "a logistic regression with equal weights of both kinds of labels",
            "the head reads the target's states only, as Judge Decoding's does; with --states both"
            " it reads the draft model's too, as AutoJudge's does by default, from one more pass of"
            " the draft model per round",
            "requests with adapters are refused, since the head has learned without them",
        ),
        remote={
            "size": Range(1, 64),
            "threshold": Range(0, 1),
            "acceptance": Words(("token-exact", "rejection")),
        },
    )
)
def judge(
    size: int = 25,
    threshold: float | None = None,
    head: str | Path | None = None,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """Judge decoding.

    Args:
        size: Number of drafts per round.
        threshold: Probability above which the judge accepts a draft, from 0 to 1; by default that
            of the head's file.
        head: The file of `anydecode train judge`; by default that of the model's folder,
            judge.safetensors.
        acceptance: The standard rule beside the judge, "token-exact" or "rejection".
    """
    standard = acceptance_rule(acceptance)
    if not isinstance(standard, TokenExact | RejectionSampling):
        raise InvalidRequestError(
            f"acceptance is {acceptance!r}; judge takes 'token-exact' or 'rejection'"
        )
    loaded = None if head is None else Judge.load(Path(head))
    rule = JudgeAcceptance(threshold, loaded, standard)
    return Speculative(ModelDrafter(rule), size, rule)
