"""What methods of two models trade: passes of the large one, and how likely it finds the texts.

python examples/two_model_curve.py smollm2-135m-instruct self:layers=27 ead:threshold=1 foreal
"""

from __future__ import annotations

import sys

from anydecode import LLM
from anydecode.tasks.prompts import spread


def curve(
    llm: LLM, decoders: list[str], num_prompts: int = 6, tokens: int = 48
) -> dict[str, tuple[float, float]]:
    """Passes of the target per token, and the mean log-probability of a token under the target in
    nats, of each decoder at temperature 0."""
    prompts = [one.text for one in spread(num_prompts)]
    points = {}
    for decoder in decoders:
        answers = llm.generate(
            prompts, decoder=decoder, temperature=0, max_tokens=tokens, ignore_eos=True
        )
        count = sum(len(one.tokens) for one in answers)
        passes = sum(one.stats.passes for one in answers)
        pairs = [(prompt, one.tokens) for prompt, one in zip(prompts, answers, strict=True)]
        total = sum(likelihood.total for likelihood in llm.scores(pairs))
        points[decoder] = passes / count, total / count
    return points


if __name__ == "__main__":
    default = ["smollm2-135m-instruct", "self:layers=27", "ead:threshold=1", "foreal"]
    model, draft, *decoders = sys.argv[1:] or default
    with LLM(model, draft=draft) as llm:
        for name, (passes, log_probability) in curve(llm, decoders).items():
            print(
                f"{name:20} {passes:5.2f} passes per token, log-probability {log_probability:6.2f}"
            )
