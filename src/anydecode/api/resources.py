"""What all requests to one model share."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from anydecode.decoders.decoder import Requirements
from anydecode.engine.engine import Engine
from anydecode.errors import UnsupportedCombinationError
from anydecode.memory.pool import KVPool
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.interface import Model
from anydecode.models.spec import CHIMERA, EARLY_EXIT, FALCON, PARALLELSPEC
from anydecode.models.tokenizer import Tokenizer
from anydecode.sampling.top_w import Geometry
from anydecode.scoring.cost import CostModel
from anydecode.scoring.draft_policy import OWN_DRAFTS, DraftPolicy
from anydecode.scoring.draft_states import DraftStates
from anydecode.scoring.sequence import DRAFT, FURTHER_DRAFTS, TARGET

#: The decoders of drafters of blocks by architecture; those of the others: dflash.
BLOCK_DECODERS = {FALCON: "falcon", PARALLELSPEC: "parallelspec"}


@dataclass(frozen=True)
class Resources:
    """The models with their memory, and the tokenizers, that requests use.

    Args:
        engine: Runs the models; each of its runners has a model and the key-value cache of it.
        tokenizers: Tokenizers by runner name: "target", "draft" and those of further draft models
            that have their own.
        cost_model: Costs of passes and the load of the engine.
        draft_policy: How much all requests together may draft.
        prefix_cache: Whether requests may reuse the cached prefixes of earlier ones.
    """

    engine: Engine
    tokenizers: Mapping[str, Tokenizer]
    cost_model: CostModel
    draft_policy: DraftPolicy = OWN_DRAFTS
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        self.engine.runners[TARGET].cost_model = self.cost_model

    @property
    def model(self) -> Model:
        """The target model."""
        return self.engine.runners[TARGET].pool.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return self.tokenizers[TARGET]

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a sequence, prompt included."""
        return min(self.model.spec.max_positions, self.engine.runners[TARGET].pool.num_slots)

    @cached_property
    def _other_vocabularies(self) -> frozenset[str]:
        """The runners whose token ids stand for other bytes than the target's, as far as both have
        them; about 512 are compared."""
        target = self.tokenizer
        return frozenset(
            runner
            for runner, draft in self.tokenizers.items()
            if draft is not target
            and any(
                target.token_bytes(token) != draft.token_bytes(token)
                for count in [min(target.vocab_size, draft.vocab_size)]
                for token in range(0, count, max(1, count // 512))
            )
        )

    def shares_vocabulary(self, runner: str) -> bool:
        """Whether the tokens of the draft model of `runner` are the target's."""
        return runner not in self._other_vocabularies

    def _lacks_tokens(self, runner: str) -> bool:
        """Whether the draft model of `runner` lacks tokens that texts of the target may have. The
        heads of both may have more rows."""
        size = self.engine.runners[runner].model.spec.vocab_size
        return size < self.model.spec.vocab_size and size < self.tokenizer.vocab_size

    def check_generates(self) -> None:
        """Check that the target can generate text.

        Raises:
            UnsupportedCombinationError: It is an encoder.
        """
        if self.model.spec.is_encoder:
            raise UnsupportedCombinationError(
                "the model is an encoder, which cannot generate text: use it for"
                " embeddings or reranking"
            )

    def check_decoder(self, name: str, needs: Requirements) -> None:
        """Check that the models meet the requirements of the decoder `name`.

        Raises:
            UnsupportedCombinationError: They do not.
        """
        if needs.generates:
            self.check_generates()
        if needs.causal is not None and needs.causal != self.model.spec.causal:
            kind = "causal" if needs.causal else "diffusion (bidirectional)"
            raise UnsupportedCombinationError(f"decoder {name!r} needs a {kind} model")
        runners = (*needs.runners, *self.draft_runners(needs))
        for runner in runners:
            if runner not in self.engine.runners:
                raise UnsupportedCombinationError(
                    f"decoder {name!r} needs a {runner} model: give one ({runner}=, --{runner})"
                )
            spec = self.engine.runners[runner].model.spec
            if spec.causal != needs.draft_causal:
                kind = "causal" if needs.draft_causal else "diffusion (bidirectional)"
                raise UnsupportedCombinationError(f"decoder {name!r} needs a {kind} {runner} model")
            if needs.drafts_blocks and spec.block is None:
                raise UnsupportedCombinationError(
                    f"decoder {name!r} needs a {runner} model that drafts blocks (DFlash, DSpark,"
                    " P-EAGLE, Falcon, PARD)"
                )
            if needs.drafts_exit and spec.architecture != EARLY_EXIT:
                raise UnsupportedCombinationError(
                    f"decoder {name!r} needs a {runner} model that is an early exit of the model,"
                    " as `anydecode train drafter --recipe early-exit` trains"
                )
            if spec.drafts_blocks_only and not needs.drafts_blocks:
                other = BLOCK_DECODERS.get(spec.architecture, "dflash")
                raise UnsupportedCombinationError(
                    f"decoder {name!r} needs a {runner} model that drafts one token per pass; the"
                    f" one given drafts blocks from the target's states: use decoder {other!r}"
                )
            if spec.architecture == CHIMERA and not needs.drafts_trigrams:
                raise UnsupportedCombinationError(
                    f"decoder {name!r} needs a {runner} model that reads one token per row; the"
                    " one given reads trigrams: use decoder 'chimera'"
                )
            if spec.states is not None and not needs.reads_states:
                raise UnsupportedCombinationError(
                    f"decoder {name!r} needs a {runner} model that is a whole language model; the"
                    " one in use drafts from the target's states: give another (draft=, --draft) or"
                    " use decoder 'eagle' or 'auto'"
                )
        further = self.draft_runners(needs) if DRAFT in needs.attention_only else ()
        for runner in {*needs.attention_only, *further} & self.engine.runners.keys():
            spec = self.engine.runners[runner].model.spec
            has_states = any(shape.state_shape for shape in spec.recurrences.values())
            if spec.recurrences and (spec.causal or has_states):
                raise UnsupportedCombinationError(
                    f"decoder {name!r} edits the {runner} model's key-value cache, which a model"
                    " with recurrent layers, or with entries of several positions, does not allow"
                )
        if not needs.can_translate_vocab and not all(map(self.shares_vocabulary, runners)):
            raise UnsupportedCombinationError(
                f"decoder {name!r} needs a draft model with the target's vocabulary; with another"
                " one 'omnidraft' translates drafts, and 'anchored:unit=byte' works on bytes"
            )
        for runner in () if needs.can_translate_vocab else runners:
            if self._lacks_tokens(runner):
                size = self.engine.runners[runner].model.spec.vocab_size
                count = min(self.tokenizer.vocab_size, self.model.spec.vocab_size)
                raise UnsupportedCombinationError(
                    f"decoder {name!r} needs a {runner} model with the target's vocabulary: it has"
                    f" {size} tokens, the target {count}"
                )

    @cached_property
    def geometry(self) -> Geometry:
        """The target's token embeddings with their statistics, for top-w sampling.

        Raises:
            UnsupportedCombinationError: If the model's embeddings cannot be read.
        """
        embed = getattr(self.model, "embed", None)
        if embed is None:
            raise UnsupportedCombinationError("top_w needs a model whose embeddings can be read")
        return Geometry.of(embed(np.arange(self.model.spec.vocab_size)))

    def optional_runners(self, needs: Requirements) -> tuple[str, ...]:
        """The optional runners of a decoder that are there and whose models it can use."""
        return tuple(runner for runner in needs.optional_runners if self._fits(runner, needs))

    def _fits(self, runner: str, needs: Requirements) -> bool:
        if runner not in self.engine.runners:
            return False
        spec = self.engine.runners[runner].model.spec
        return (
            spec.causal == needs.draft_causal
            and (spec.states is None or needs.reads_states)
            and (needs.drafts_blocks or not spec.drafts_blocks_only)
            and (spec.architecture != CHIMERA or needs.drafts_trigrams)
            and (
                needs.can_translate_vocab
                or (not self._lacks_tokens(runner) and self.shares_vocabulary(runner))
            )
        )

    def draft_models(self, needs: Requirements) -> list[str]:
        """The names of the draft models that a decoder can draft with, each once."""
        names = [self.engine.runners[runner].model.name for runner in self._runners(needs)]
        return list(dict.fromkeys(names))

    def _runners(self, needs: Requirements) -> tuple[str, ...]:
        """All runners of a decoder besides the target's."""
        return (*needs.runners, *self.optional_runners(needs), *self.draft_runners(needs))

    def draft_runners(self, needs: Requirements) -> tuple[str, ...]:
        """The runners of all draft models, without their further modules, if a decoder uses every
        one; else none."""
        if not needs.every_draft:
            return ()
        others = (TARGET, *FURTHER_DRAFTS)
        return tuple(runner for runner in self.engine.runners if runner not in others)

    def draft_states(self, needs: Requirements) -> dict[str, DraftStates]:
        """New states of one sequence for those draft models of a decoder, by runner, that read
        their target's states."""
        states = {}
        for runner in self._runners(needs):
            drafter: Any = self.engine.runners[runner].model
            if drafter.spec.states is not None:
                target: Any = self.model
                depth = target.spec.num_layers
                states[runner] = DraftStates(
                    drafter.spec.states, drafter, depth, target.normed, target.norm_size
                )
                states[runner].chains = drafter.chains(target)
        return states

    def pool_of(self, runner_name: str) -> KVPool:
        """The cache memory of a runner."""
        return self.engine.runners[runner_name].pool

    def open_kv_cache(
        self, runner_name: str, tokens: list[int], namespace: Hashable
    ) -> SequenceCache:
        """A new sequence cache that begins with the longest cached prefix of `tokens` (without the
        last token, which must be scored)."""
        runner = self.engine.runners[runner_name]
        kv_cache = SequenceCache(runner.pool)
        if self.prefix_cache and runner.model.spec.causal:
            slots = runner.prefixes.match(tokens[:-1], namespace, loads_later=True)
            kv_cache.attach_prefix(slots, tokens[: len(slots)])
            kv_cache.num_cached = len(slots)
        return kv_cache
