"""A decoding method outside the package, in a dozen lines.

It drafts the token that followed the last token at its previous occurrence, and verifies the draft
in the same pass. Install this folder (`pip install ./examples`), and the engine finds the method
through its entry point:

    anydecode generate --decoder echo --prompt "one two one two one"
    anydecode certify echo_decoder:Echo
"""

from __future__ import annotations

from anydecode import Card, Decoder, Decoding, Sequence, TokenExact, TokenTree, register


@register(Card("echo", "speculative", paper="an example", exactness="token-exact"))
class Echo(Decoder):
    """Drafts the token that followed the previous occurrence of the last token."""

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            tokens = sequence.all_tokens
            drafts = [b for a, b in zip(tokens, tokens[1:], strict=False) if a == tokens[-1]][-1:]
            tree = TokenTree.chain(drafts)
            scores = yield sequence.verify(tree)
            result = TokenExact().walk(tree, scores)
            sequence.accept(result.path, result.tokens, scores)
