"""An inference engine for many decoding methods of language models.

Importing the package is fast: public names are imported from their modules on first use.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from anydecode.errors import (
    AnydecodeError,
    CheckpointError,
    ConstraintError,
    EngineStoppedError,
    InvalidRequestError,
    MissingPackageError,
    ModelNotFoundError,
    OutOfMemoryError,
    RewardError,
    UnsupportedCombinationError,
)
from anydecode.version import __version__

if TYPE_CHECKING:
    from anydecode.api.attribute import Attribute
    from anydecode.api.embedding import RankedDocument
    from anydecode.api.first_finish import FirstFinish
    from anydecode.api.generation import Generation, Stats, StreamChunk
    from anydecode.api.llm import LLM
    from anydecode.api.options import GenerateOptions, Prompt
    from anydecode.api.rollout_queue import Rollout, RolloutQueue, RolloutSegment
    from anydecode.api.scoring import Likelihood
    from anydecode.api.similarity import Similarity
    from anydecode.catalogue import Card, register
    from anydecode.constraints.constraint import Constraint, ConstraintReport, ConstraintState
    from anydecode.constraints.json.json_schema import JsonSchema
    from anydecode.constraints.languages import Choice, Grammar, Regex
    from anydecode.constraints.predicate import Predicate
    from anydecode.decoders.decoder import Decoder
    from anydecode.decoders.diffusion.blocks import BlockPolicy
    from anydecode.decoders.diffusion.caches import CachePolicy
    from anydecode.decoders.diffusion.canvas import Canvas
    from anydecode.decoders.diffusion.denoiser import Denoiser
    from anydecode.decoders.diffusion.predictions import Predictions
    from anydecode.decoders.diffusion.rankings import Ranking
    from anydecode.decoders.diffusion.stops import StopRule
    from anydecode.decoders.diffusion.unmasking import UnmaskPolicy
    from anydecode.decoders.framework.acceptance import Acceptance, AcceptanceResult, TokenExact
    from anydecode.decoders.framework.rejection import RejectionSampling
    from anydecode.decoders.framework.speculation import (
        DraftBudget,
        Drafter,
        DraftSession,
        Proposal,
        SpeculationRound,
        Speculative,
        TextDraftSession,
    )
    from anydecode.engine.schedule import DecodesFirst, RowBudget, Schedule, ScheduledSpan
    from anydecode.models.families.family import Family
    from anydecode.models.interface import Model
    from anydecode.models.spec import ModelSpec
    from anydecode.models.tokenizer import Tokenizer
    from anydecode.rewards.reward import Reward, SampledText
    from anydecode.sampling.candidates import Candidates, Distribution
    from anydecode.sampling.logprobs import TokenLogprobs
    from anydecode.sampling.params import SamplingParams
    from anydecode.sampling.preset import SamplerPreset
    from anydecode.sampling.processor import LogitsCombiner, LogitsProcessor
    from anydecode.sampling.sampler import Sampler
    from anydecode.scoring.media import Media
    from anydecode.scoring.prompt_embeds import PromptEmbeds
    from anydecode.scoring.score import (
        Call,
        Cancel,
        Decoding,
        ScoreRequest,
        Scores,
        Submit,
        Ticket,
        Wait,
    )
    from anydecode.scoring.sequence import TARGET, Sequence
    from anydecode.scoring.state import StateKey
    from anydecode.scoring.tree import ROOT, TokenTree

__all__ = [
    "Acceptance",
    "AcceptanceResult",
    "AnydecodeError",
    "Attribute",
    "BlockPolicy",
    "CachePolicy",
    "Call",
    "Cancel",
    "Candidates",
    "Canvas",
    "Card",
    "CheckpointError",
    "Choice",
    "Constraint",
    "ConstraintError",
    "ConstraintReport",
    "ConstraintState",
    "Decoder",
    "DecodesFirst",
    "Decoding",
    "Denoiser",
    "Distribution",
    "DraftBudget",
    "Drafter",
    "DraftSession",
    "EngineStoppedError",
    "Family",
    "FirstFinish",
    "GenerateOptions",
    "Generation",
    "Grammar",
    "InvalidRequestError",
    "JsonSchema",
    "Likelihood",
    "LLM",
    "LogitsCombiner",
    "LogitsProcessor",
    "Media",
    "MissingPackageError",
    "Model",
    "ModelNotFoundError",
    "ModelSpec",
    "OutOfMemoryError",
    "Predicate",
    "Predictions",
    "Prompt",
    "PromptEmbeds",
    "Proposal",
    "RankedDocument",
    "Ranking",
    "Regex",
    "register",
    "RejectionSampling",
    "Reward",
    "RewardError",
    "Rollout",
    "RolloutQueue",
    "RolloutSegment",
    "ROOT",
    "RowBudget",
    "SampledText",
    "Sampler",
    "SamplerPreset",
    "SamplingParams",
    "Schedule",
    "ScheduledSpan",
    "ScoreRequest",
    "Scores",
    "Sequence",
    "Similarity",
    "SpeculationRound",
    "Speculative",
    "StateKey",
    "Stats",
    "StopRule",
    "StreamChunk",
    "Submit",
    "TARGET",
    "TextDraftSession",
    "Ticket",
    "TokenExact",
    "Tokenizer",
    "TokenLogprobs",
    "TokenTree",
    "UnmaskPolicy",
    "UnsupportedCombinationError",
    "Wait",
    "__version__",
]

#: The module of each name that is imported on first use.
_MODULES = {
    "FirstFinish": "anydecode.api.first_finish",
    "Generation": "anydecode.api.generation",
    "Stats": "anydecode.api.generation",
    "StreamChunk": "anydecode.api.generation",
    "LLM": "anydecode.api.llm",
    "GenerateOptions": "anydecode.api.options",
    "Prompt": "anydecode.api.options",
    "Likelihood": "anydecode.api.scoring",
    "Similarity": "anydecode.api.similarity",
    "Card": "anydecode.catalogue",
    "register": "anydecode.catalogue",
    "Constraint": "anydecode.constraints.constraint",
    "ConstraintReport": "anydecode.constraints.constraint",
    "ConstraintState": "anydecode.constraints.constraint",
    "JsonSchema": "anydecode.constraints.json.json_schema",
    "Choice": "anydecode.constraints.languages",
    "Grammar": "anydecode.constraints.languages",
    "Regex": "anydecode.constraints.languages",
    "Predicate": "anydecode.constraints.predicate",
    "Decoder": "anydecode.decoders.decoder",
    "BlockPolicy": "anydecode.decoders.diffusion.blocks",
    "CachePolicy": "anydecode.decoders.diffusion.caches",
    "Canvas": "anydecode.decoders.diffusion.canvas",
    "Denoiser": "anydecode.decoders.diffusion.denoiser",
    "Predictions": "anydecode.decoders.diffusion.predictions",
    "Ranking": "anydecode.decoders.diffusion.rankings",
    "StopRule": "anydecode.decoders.diffusion.stops",
    "UnmaskPolicy": "anydecode.decoders.diffusion.unmasking",
    "Acceptance": "anydecode.decoders.framework.acceptance",
    "AcceptanceResult": "anydecode.decoders.framework.acceptance",
    "TokenExact": "anydecode.decoders.framework.acceptance",
    "RejectionSampling": "anydecode.decoders.framework.rejection",
    "DraftBudget": "anydecode.decoders.framework.speculation",
    "Drafter": "anydecode.decoders.framework.speculation",
    "DraftSession": "anydecode.decoders.framework.speculation",
    "Proposal": "anydecode.decoders.framework.speculation",
    "SpeculationRound": "anydecode.decoders.framework.speculation",
    "Speculative": "anydecode.decoders.framework.speculation",
    "TextDraftSession": "anydecode.decoders.framework.speculation",
    "DecodesFirst": "anydecode.engine.schedule",
    "Rollout": "anydecode.api.rollout_queue",
    "RolloutQueue": "anydecode.api.rollout_queue",
    "RolloutSegment": "anydecode.api.rollout_queue",
    "RowBudget": "anydecode.engine.schedule",
    "Schedule": "anydecode.engine.schedule",
    "ScheduledSpan": "anydecode.engine.schedule",
    "Family": "anydecode.models.families.family",
    "Model": "anydecode.models.interface",
    "ModelSpec": "anydecode.models.spec",
    "Tokenizer": "anydecode.models.tokenizer",
    "Reward": "anydecode.rewards.reward",
    "SampledText": "anydecode.rewards.reward",
    "Candidates": "anydecode.sampling.candidates",
    "Distribution": "anydecode.sampling.candidates",
    "TokenLogprobs": "anydecode.sampling.logprobs",
    "SamplingParams": "anydecode.sampling.params",
    "SamplerPreset": "anydecode.sampling.preset",
    "LogitsCombiner": "anydecode.sampling.processor",
    "LogitsProcessor": "anydecode.sampling.processor",
    "Sampler": "anydecode.sampling.sampler",
    "Media": "anydecode.scoring.media",
    "PromptEmbeds": "anydecode.scoring.prompt_embeds",
    "Attribute": "anydecode.api.attribute",
    "RankedDocument": "anydecode.api.embedding",
    "Call": "anydecode.scoring.score",
    "Cancel": "anydecode.scoring.score",
    "Decoding": "anydecode.scoring.score",
    "ScoreRequest": "anydecode.scoring.score",
    "Scores": "anydecode.scoring.score",
    "Submit": "anydecode.scoring.score",
    "Ticket": "anydecode.scoring.score",
    "Wait": "anydecode.scoring.score",
    "TARGET": "anydecode.scoring.sequence",
    "Sequence": "anydecode.scoring.sequence",
    "StateKey": "anydecode.scoring.state",
    "ROOT": "anydecode.scoring.tree",
    "TokenTree": "anydecode.scoring.tree",
}

logging.getLogger("anydecode").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
