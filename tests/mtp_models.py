"""Models with the modules of their checkpoints that predict further tokens."""

from __future__ import annotations

from anydecode import LLM
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.drafters import drafter_model
from anydecode.models.families import load_network
from anydecode.models.mtp import load_mtp
from anydecode.models.opening import choose_executor
from anydecode.models.scripted import ByteTokenizer
from anydecode.models.transformer import Transformer


def mtp_llm(checkpoint: Checkpoint) -> LLM:
    """The model of a checkpoint, with its module as the draft model."""
    network = load_network(checkpoint)
    target = Transformer(network, name="tiny", executor=choose_executor(None, 1))
    packer = getattr(target.executor, "packer", None)
    module = load_mtp(checkpoint, network)
    draft = drafter_model(module, name="mtp", executor=choose_executor(None, 1, packer=packer))
    return LLM(target, tokenizer=ByteTokenizer(), draft=draft, cache_positions=512)
