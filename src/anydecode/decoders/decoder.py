"""The base class of every decoding method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from anydecode.catalogue import Card
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


@dataclass(frozen=True)
class Requirements:
    """What a decoder needs of the models and does with a request. A decoder around another one has
    the requirements of that one.

    Args:
        runners: The model runners that the method scores with, besides "target".
        optional_runners: The model runners that the method scores with where there are some that
            fit (`Sequence.optional_runners`).
        every_draft: Whether the method scores with every draft model that there is
            (`Sequence.draft_runners`), any number of them, each of which must fit.
        causal: Whether the method needs a causal model (True), a bidirectional one (False), or any
            (None).
        draft_causal: Whether the draft model must be causal (True) or a diffusion model (False).
        reads_states: Whether the draft model may be one that reads the target's states (EAGLE): the
            method drafts after the target's passes, one token of a path per pass, and asks
            `Sequence.can_draft` first.
        finds_draft: Whether the draft model may be a module of the target's own checkpoint (multi-
            token prediction), which is opened if there is no other draft model.
        drafts_blocks: Whether the draft model must be one that drafts a block per pass (DFlash,
            PARD).
        drafts_trigrams: Whether the draft model may be one of Chimera, which reads trigrams.
        drafts_exit: Whether the draft model must be an early exit of the target, whose first layers
            the target runs itself (EESD, Kangaroo).
        reads_exit_routers: Whether the method needs exit routers of the target (TIDE, DYNAMAX).
        reads_exit_predictors: Whether it needs exit predictors of the target (SpecEE).
        reads_layer_routers: Whether it needs layer routers of the target (FiRST).
        reads_accelerators: Whether it needs accelerators of the target (M2R2).
        reads_future_masks: Whether it needs trained mask tokens of the target (mtp-future).
        reads_sentence_diffusion: Whether it needs a diffusion model of sentence embeddings that was
            trained for the target, and as the draft model its encoder (DGLM).
        reads_hidden_transfer: Whether it needs trained maps of the target's states
            (hidden-transfer).
        reads_judge: Whether it needs a trained judge of the target's states (judge).
        can_translate_vocab: Whether the draft model may have a vocabulary other than the target's.
        reads_weights: Whether the method reads the weights of the model's layers, so that it needs
            a transformer.
        can_sample: Whether the method samples from the request's sampler; False if it ignores the
            sampler.
        takes_embeddings: Whether a part of the prompt may be given as embeddings.
        attention_only: The runners whose models must not have recurrent layers: the method removes
            or changes positions of their caches, or lets rows see later ones.
        takes_prediction: Whether the method drafts from the request's prediction of the answer.
        generates: Whether the method generates text, which an encoder cannot.
        max_texts: The most texts that the method finds for one prompt, if it does not sample them
            one by one: all come from one search, which leaves them in `sequence.state[RANKED]`. A
            method that always generates the same text has 1. None: any number.
        forks_text: Whether the method continues the text in several ways and reads the text of
            each, so that no decoder around it can check the text and go back.
        samples_in_turn: Whether the samples of a request run one after another, because each
            learns from those before it.
    """

    runners: tuple[str, ...] = ()
    optional_runners: tuple[str, ...] = ()
    every_draft: bool = False
    causal: bool | None = True
    draft_causal: bool = True
    reads_states: bool = False
    finds_draft: bool = False
    drafts_blocks: bool = False
    drafts_trigrams: bool = False
    drafts_exit: bool = False
    reads_exit_routers: bool = False
    reads_exit_predictors: bool = False
    reads_layer_routers: bool = False
    reads_accelerators: bool = False
    reads_future_masks: bool = False
    reads_sentence_diffusion: bool = False
    reads_hidden_transfer: bool = False
    reads_judge: bool = False
    can_translate_vocab: bool = False
    reads_weights: bool = False
    can_sample: bool = True
    takes_embeddings: bool = False
    attention_only: tuple[str, ...] = ()
    takes_prediction: bool = False
    generates: bool = True
    max_texts: int | None = None
    forks_text: bool = False
    samples_in_turn: bool = False


class Decoder(ABC):
    """A decoding method: yields score requests and emits tokens.

    One decoder instance serves many sequences at a time. State that belongs to one sequence is kept
    in the local variables of `decode`, or in `sequence.state` (by a `StateKey` of the
    method's own) if it must survive a restart. The engine may close `decode` at any yield and call
    it again.
    """

    #: Set by `catalogue.register` and `catalogue.build`; a decoder outside the catalogue has none.
    card: Card
    requirements: Requirements = Requirements()
    #: The decoder whose text an exact method reproduces: plain decoding for its kind of model.
    plain: str = "autoregressive"

    @property
    def exactness(self) -> str:
        """The guarantee of this object: its card's, or that of its acceptance rule if the card is
        token-exact. A decoder without a card is taken for token-exact."""
        card: Card | None = getattr(self, "card", None)
        if card is not None and card.exactness != "token-exact":
            return card.exactness
        rule: str = getattr(getattr(self, "acceptance", None), "exactness", "token-exact")
        return rule

    @abstractmethod
    def decode(self, sequence: Sequence) -> Decoding:
        """Yield score requests and emit tokens until `sequence.finished`."""

    @property
    def num_bytes(self) -> int:
        """The estimated memory of what was learned from earlier requests, in bytes."""
        return 0

    def prepare(self, sequence: Sequence) -> None:
        """Check the request and set up the sequence; called once, when the request is created.

        May add companion prompts or replace the sampler, and read `sequence.model()`. Caches are
        opened later, when the request runs.

        Raises:
            UnsupportedCombinationError: The method does not work with an option of the request.
        """
