"""Hidden transfer: pseudo states, predicted at an intermediate layer, run the layers above it
beside the tokens and predict the tokens behind them, in the pass that verifies.

Wu et al., "Parallel Decoding via Hidden Transfer for Lossless Large Language Model Acceleration",
arXiv:2404.12022.

Linear maps predict, from a token's state at a layer, the states of the tokens behind it
(`models/hidden_transfer.py`). A pseudo state sees the text, the candidates before it and the pseudo
states before it. Which candidates a pass verifies, and behind which of them it has pseudo states,
follows from the accuracies of their predictions, as in `ppd`.
"""

from __future__ import annotations

from pathlib import Path

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, acceptance_rule
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.ppd import MAX_SIZE, Accuracies, PlannedDrafter, by_rank
from anydecode.errors import UnsupportedCombinationError
from anydecode.models.exit_files import network_of
from anydecode.models.hidden_transfer import HiddenTransfer
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree


class TransferDrafter(PlannedDrafter):
    """Drafts from pseudo states.

    Args:
        size: Number of candidates and pseudo states, see `PlannedDrafter`.
        maps: The maps; None: those of the model's folder.
        rule: The acceptance rule.
    """

    requirements = Requirements(reads_hidden_transfer=True, attention_only=("target",))

    def __init__(self, size: int, maps: HiddenTransfer | None, rule: Acceptance) -> None:
        super().__init__(size, rule)
        self._maps = maps

    def prepare(self, sequence: Sequence) -> None:
        maps, model = self.maps(sequence), sequence.model()
        lacks = "layers to start from: hidden-transfer needs a transformer"
        maps.check(network_of(model, lacks))

    def maps(self, sequence: Sequence) -> HiddenTransfer:
        """The maps. Raises `UnsupportedCombinationError` if there are none."""
        model = sequence.model()
        found: HiddenTransfer | None = self._maps or getattr(model, "hidden_transfer", None)
        if found is None:
            raise UnsupportedCombinationError(
                "hidden-transfer needs trained maps of hidden states: `anydecode train"
                " hidden-transfer` makes them, and hidden-transfer:maps=FILE reads them"
            )
        return found

    def accuracies(self, sequence: Sequence) -> Accuracies:
        return by_rank(self.maps(sequence).accuracies)

    def add_mask(self, sequence: Sequence, tree: TokenTree, parent: int, number: int) -> int:
        node = tree.add(-1, parent)
        tree.route = self.maps(sequence)
        tree.embeddings[node] = tree.route.placeholder
        return node


@register(
    Card(
        "hidden-transfer",
        "speculative",
        paper="Wu et al. 2024, Hidden Transfer (arXiv:2404.12022)",
        exactness="token-exact",
        summary="States predicted at middle layers run the layers above and draft the next tree.",
        needs=("maps of hidden states",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "on CPUs only: on GPUs, states that enter at a layer are refused",
            "verified token-exactly; acceptance='rejection' and 'typical' are other rules",
            "candidates and pseudo states stand where the measured accuracies promise the most"
            " tokens, as in ppd; the paper has a fixed tree, each node with all pseudo states",
            "8 nodes by default, which is faster on processors; size=0 chooses the size by the"
            " measured costs of passes, in which a pseudo state counts as a row of all layers",
            "above temperature 0 candidates are ranked with the noise that the target will use",
            "by default, training transfers every state behind two thirds of the layers; the"
            " paper's layers are not known",
            "anydecode train hidden-transfer starts from a ridge regression of the states, and"
            " trains all maps together on the model's own answers, with groups of pseudo states"
            " behind many of their tokens",
            "the maps are those of the model without adapters; requests with an adapter run them on"
            " the adapted states, which costs accepted drafts",
        ),
        bounds={"size": Range(0, 64)},
        remote={"size": Range(0, 64), "acceptance": ACCEPTANCE_WORDS},
    )
)
def hidden_transfer(
    size: int = 8, maps: str | Path | None = None, acceptance: str | Acceptance = "token-exact"
) -> Speculative:
    """Hidden transfer.

    Args:
        size: Number of candidates and pseudo states of a pass; 0: by the measured costs of passes.
        maps: The file of `anydecode train hidden-transfer`; by default that of the model's folder,
            hidden_transfer.safetensors.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    loaded = None if maps is None else HiddenTransfer.load(Path(maps))
    return Speculative(TransferDrafter(size, loaded, rule), size or MAX_SIZE, rule)
