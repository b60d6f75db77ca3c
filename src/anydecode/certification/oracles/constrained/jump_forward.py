"""Oracle test of jump-forward (SGLang, arXiv:2312.07104): the tokens that a constraint forces, and
one pass per choice."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.constraints.drafts import pruned
from anydecode.constraints.languages import Regex
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring.tree import TokenTree


@oracle_test("jump-forward")
def jump_forward() -> Iterator[Check]:
    """`key=(x|y);end`: "key=" is forced, then there is a choice, then ";end" and the end of
    text."""
    constraint = Regex("key=(x|y);end")
    state = constraint.start(ByteTokenizer(), 259)
    forced = state.forced_tokens()
    yield Check("drafts the forced tokens", bytes(forced) == b"key=", repr(bytes(forced)))
    tree = pruned(forced, TokenTree.merge([list(b"x;e"), list(b"z"), list(b"y!")]), state)
    draft = bytes(tree.tokens)
    yield Check("removes forbidden tokens from a draft", draft == b"key=x;ey", repr(draft))
    with LLM(ScriptedModel(seed=2), tokenizer=ByteTokenizer(), cache_positions=512) as llm:
        plain = llm.generate("?", constraint=constraint, decoder="autoregressive")
        fast = llm.generate("?", constraint=constraint, decoder="jump-forward")
        free = Regex("key=[a-z]{3};(end|more)")
        sampled: list[list[str]] = [
            [
                str(
                    llm.generate(
                        "?", constraint=free, decoder=decoder, temperature=0.8, seed=n
                    ).text
                )
                for n in range(20)
            ]
            for decoder in ("autoregressive", "jump-forward")
        ]
    yield Check("equal to plain decoding", fast.tokens == plain.tokens, fast.text)
    different = len(set(sampled[0]))
    is_equal = sampled[0] == sampled[1] and different > 10
    yield Check("equal to plain decoding, T=0.8", is_equal, f"{different} different texts of 20")
    # One pass verifies "key=" and samples x or y, one verifies ";end" and the end of text.
    passes = (plain.stats.passes, fast.stats.passes)
    yield Check("one pass per choice", passes == (10, 2), f"passes {passes}")
