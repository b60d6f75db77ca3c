"""A decoding method of one's own, in a dozen lines.

It guesses that a token is followed by what followed it last time, and scores the guess in the same
pass. Install this folder (`pip install ./examples`) and the engine finds the
method through its entry point:

    anydecode generate --decoder echo --prompt "one two one two one"
    anydecode certify echo_decoder:Echo
"""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.speculative.acceptance import TokenExact
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree


@register(Card("echo", "speculative", paper="an example", exactness="token-exact"))
class Echo(Decoder):
    """Drafts what followed the last token when it was last said."""

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            text = sequence.all_tokens
            guesses = [b for a, b in zip(text, text[1:], strict=False) if a == text[-1]][-1:]
            tree = TokenTree.chain(guesses)
            scores = yield sequence.verify(tree)
            verdict = TokenExact().walk(tree, scores)
            sequence.accept(verdict.path, verdict.tokens, scores)
