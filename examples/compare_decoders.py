"""A benchmark of your own: decoders on your prompts, in turn, with the same texts required.

python examples/compare_decoders.py tiny-autoregressive autoregressive prompt-lookup auto
"""

from __future__ import annotations

import sys
from statistics import median

from anydecode import LLM

PROMPTS = ("copy Ada Ben Carl:", "reverse Rosa Leo:", "chain 3+1+2:")


def compare(llm: LLM, decoders: list[str], rounds: int = 3) -> dict[str, tuple[float, float]]:
    """The median tokens per second and the tokens per pass of each decoder.

    The decoders take turns, so that a slow moment of the machine hits all of them. Caches and
    learned drafts are dropped before every answer.
    """
    speeds: dict[str, list[float]] = {decoder: [] for decoder in decoders}
    per_pass: dict[str, list[float]] = {decoder: [] for decoder in decoders}
    for _ in range(rounds):
        for prompt in PROMPTS:
            texts = set()
            for decoder in decoders:
                llm.clear()
                answer = llm.generate(prompt, decoder=decoder, max_tokens=32)
                speeds[decoder].append(answer.stats.tokens_per_second)
                per_pass[decoder].append(answer.stats.tokens_per_pass)
                texts.add(answer.text)
            assert len(texts) == 1, f"the decoders disagree on {prompt!r}"
    return {name: (median(speeds[name]), median(per_pass[name])) for name in decoders}


if __name__ == "__main__":
    model, *decoders = sys.argv[1:] or ["tiny-autoregressive", "autoregressive", "prompt-lookup"]
    with LLM(model) as llm:
        llm.generate(PROMPTS[0], max_tokens=8)  # the first answer loads and measures
        for name, (speed, tokens) in compare(llm, decoders).items():
            print(f"{name:20} {speed:8.1f} tokens/s {tokens:6.2f} tokens per pass")
