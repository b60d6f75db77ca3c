"""P-Aligner (Song et al., "P-Aligner: Enabling Pre-Alignment of Language Models via Principled
Instruction Synthesis", arXiv:2508.04626).

The instruction is rewritten before it is answered. A tree search finds which principles, one after
the other, lead to instructions with better answers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.branches import emit_from
from anydecode.decoders.framework.rollouts import MAX_ROLLOUTS, Rollout, Rollouts
from anydecode.decoders.framework.valuing import Valuing
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.rewards import registry
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import ActionResult, DecoderAction, Decoding
from anydecode.scoring.sequence import DRAFT, TARGET, Sequence
from anydecode.scoring.state import StateKey

#: The principles by which an instruction is rewritten.
RULES = (
    "ask for an answer that does no harm",
    "ask for an answer that is complete and useful",
    "ask for an answer that is honest about what is not known",
    "if it is about code, ask for correct code with an explanation",
    "if it is about mathematics, ask for every step of the solution",
)
#: What the rewriting model reads.
REQUEST = (
    "Rewrite the instruction in one line, without changing what it is about: {rule}.\n"
    "Instruction: {text}\nRewritten instruction:"
)
#: What a trained rewriter reads.
TRAINED_REQUEST = "Instruction: {text}\nRewritten instruction:"
#: A line that begins a definition, or a block that is marked as code.
_DEFINITION = re.compile(
    r"^[ \t]*(```|~~~|#include\b|((async )?def|function|func|fn) \w+ *\(|class \w+.*[:{]$)",
    re.MULTILINE,
)
#: A line of code: the end of a statement, a comment, a tag, an import, an assignment or a call.
_STATEMENT = re.compile(
    r"\s*(.*[;{}]|(//|/\*|\*/).*|</?\w[^>]*>.*|import [\w.]+( as \w+)?|from [\w.]+ import .+"
    r"|(if|elif|else|for|while|with|try|except|return|print)\b.*[:)]"
    r"|[\w.\[\]]+(, [\w.\[\]]+)* [-+*/]?= .+|\w[\w.]*\(.*\))\s*"
)
#: The weight of the exploration.
EXPLORATION = 1.0
#: Number of random streams of a sample.
_STREAMS = 4095


@dataclass(eq=False)
class Node:
    """An instruction.

    Attributes:
        text: The instruction.
        value: The mean reward of its own answers.
        visits: How many iterations ended at it or below it.
        children: Rewritten instructions, by the number of the rule.
    """

    text: str
    value: float = 0.0
    visits: int = 0
    children: dict[int, Node] = field(default_factory=dict)

    @property
    def quality(self) -> float:
        """The mean of its own value and of the qualities of its children."""
        parts = [self.value, *(child.quality for child in self.children.values())]
        return sum(parts) / len(parts)

    def nodes(self) -> Iterator[Node]:
        """This node and all below."""
        yield self
        for child in self.children.values():
            yield from child.nodes()


@dataclass
class SearchState:
    """What a restart needs. Changed at the end of an iteration only.

    Attributes:
        root: The instruction as it was given, whose own value is found last.
        num_iterations: The number of finished iterations.
        chosen: The instruction that is answered; None while the search runs.
    """

    root: Node
    num_iterations: int = 0
    chosen: str | None = None


_STATE: StateKey[SearchState] = StateKey("p-aligner", "search")


@register(
    Card(
        "p-aligner",
        "alignment",
        paper="P-Aligner: Enabling Pre-Alignment of Language Models via Principled Instruction"
        " Synthesis (arXiv:2508.04626)",
        exactness="lossy",
        summary="Rewrites the instruction by principles that a tree search with a reward chooses,"
        " then answers it.",
        works_with=("constraints", "penalties", "samplers", "batches", "logprobs", "adapters"),
        deviations=(
            "the search runs for every request, unless `trained`; the paper's runs before, and its"
            " instructions train the model that rewrites at once",
            "the default reward is the geometric mean of the probabilities of the answer's tokens;"
            " the paper's is a trained reward model, which is given as a function",
            "the wording of the five principles and of the request to rewrite is not the paper's",
            "an instruction is one line of at most as many tokens as the answer; if the rewriting"
            " model writes an empty one, the instruction stays as it is",
            "a prompt of a chat is refused: only its instruction may be rewritten",
            "a prompt with a definition or a marked block counts as code, and one of whose lines at"
            " least half look like statements",
        ),
        remote={
            "iterations": Range(0, 20),
            "samples": Range(1, 4),
            "reward": registry.RewardName(),
        },
    )
)
class PAligner(Decoder):
    """Answers the best of several rewritten instructions.

    Every iteration goes down the tree from the given instruction, among the children of a node to
    that with the largest `quality + sqrt(ln(visits of the node) / visits of the child)`, to the
    first node that has not been rewritten by all principles. It is rewritten greedily by one of the
    others, drawn at random, and the value of the new instruction is the mean reward of `samples`
    answers to it, as answers to the instruction as it was given. At the end that is valued too, and
    the instruction with the best value is answered, with the request's sampler; of equal ones the
    given one, whose answer is that of plain decoding.

    A prompt that is JSON, or in which there is code, stays as it is: its answer is that of plain
    decoding.

    The draft model, if there is one, rewrites. One that `anydecode train rewriter` has trained on
    such searches rewrites at once (`trained`), without a search or a reward.

    Args:
        iterations: How many instructions are tried; 0: it is rewritten once, by all principles.
        samples: How many answers to each are sampled, at temperature 1.
        reward: The name of a reward, a function `(prompt, texts) -> values`, or a `Reward`.
        trained: Whether the draft model is a trained rewriter.
    """

    def __init__(
        self,
        iterations: int = 10,
        samples: int = 3,
        reward: registry.RewardChoice = "confidence",
        trained: bool = False,
    ) -> None:
        if iterations < 0 or samples < 1 or (iterations + 1) * samples > MAX_ROLLOUTS:
            raise InvalidRequestError(
                "p-aligner needs iterations of at least 0, samples of at least 1 and at most"
                f" {MAX_ROLLOUTS} answers, not {iterations} and {samples}"
            )
        self.iterations = iterations
        self.samples = samples
        self.trained = trained
        self.valuing = Valuing(registry.build(reward))
        self.requirements = Requirements(optional_runners=(DRAFT,), forks_text=True)

    @property
    def num_bytes(self) -> int:
        return self.valuing.num_bytes

    def prepare(self, sequence: Sequence) -> None:
        if sequence.companion_prompts:
            raise UnsupportedCombinationError("p-aligner does not work with a second prompt")
        if self.trained and DRAFT not in sequence.optional_runners:
            raise UnsupportedCombinationError(
                "p-aligner:trained=true needs a trained rewriter with the model's vocabulary as the"
                " draft model: `anydecode train rewriter` trains one"
            )
        tokenizer = sequence.tokenizers[TARGET]
        _, rest = _split(sequence)
        if not rest or any(map(tokenizer.is_special, rest)):
            raise UnsupportedCombinationError(
                "p-aligner rewrites a prompt without special tokens, of one instruction: use"
                " generate, not chat"
            )

    def decode(self, sequence: Sequence) -> Decoding:
        if _STATE not in sequence.state:
            _, rest = _split(sequence)
            text = sequence.tokenizers[TARGET].decode(rest)
            chosen = text if has_code(text) else None
            sequence.state[_STATE] = SearchState(Node(text), chosen=chosen)
        state = sequence.state[_STATE]
        while state.chosen is None:
            yield from self._search(sequence, state)
        branch = _asked(sequence, _with_text(sequence, state.chosen))
        branch.tokens = list(sequence.tokens)
        yield from emit_from(branch, sequence)
        branch.release()

    def _search(
        self, sequence: Sequence, state: SearchState
    ) -> Generator[DecoderAction, ActionResult, None]:
        """One iteration; the last one chooses."""
        root, number = state.root, state.num_iterations
        if self.trained or not self.iterations:
            request = TRAINED_REQUEST if self.trained else REQUEST
            request = request.format(rule=", and ".join(RULES), text=root.text)
            state.chosen = yield from _rewritten(sequence, root.text, request)
            return
        if number == self.iterations:
            root.value = yield from self._value(sequence, root.text, number)
            state.chosen = max(root.nodes(), key=lambda node: node.value).text
            return
        path = self.selected(root)
        unused = [rule for rule in range(len(RULES)) if rule not in path[-1].children]
        coin = sequence.noise.with_purpose("coin").coin(number)
        rule = unused[int(coin * len(unused))]
        request = REQUEST.format(rule=RULES[rule], text=path[-1].text)
        text = yield from _rewritten(sequence, path[-1].text, request)
        child = Node(text)
        child.value = yield from self._value(sequence, text, number)
        path[-1].children[rule] = child
        for node in (*path, child):
            node.visits += 1
        state.num_iterations += 1

    @staticmethod
    def selected(root: Node) -> list[Node]:
        """The nodes from the root to the one that is rewritten."""
        path = [root]
        while len(path[-1].children) == len(RULES):
            total = math.log(path[-1].visits)
            path.append(
                max(
                    path[-1].children.values(),
                    key=lambda one: one.quality + EXPLORATION * math.sqrt(total / one.visits),
                )
            )
        return path

    def _value(
        self, sequence: Sequence, text: str, number: int
    ) -> Generator[DecoderAction, ActionResult, float]:
        """The mean reward of sampled answers to `text`."""
        branch = _asked(sequence, _with_text(sequence, text))
        noise = sequence.noise.with_purpose("search")
        first = number * self.samples
        group = Rollouts(
            branch,
            [Rollout(noise.forked(1 + (first + i) % _STREAMS)) for i in range(self.samples)],
            sums_logprobs=self.valuing.reward.reads_logprobs,
            temperature=1.0,
        )
        yield from group.extend(lambda number: False)
        values = yield from self.valuing.values(sequence, group.texts())
        group.release()
        branch.release()
        return float(np.mean(values))


def has_code(text: str) -> bool:
    """Whether a text is a JSON object or array, defines something in a programming language, has a
    block that is marked as code, or consists of statements for at least half of its lines."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            json.loads(text)
            return True
        except (ValueError, RecursionError):
            pass
    lines = [line for line in text.splitlines() if line.strip()]
    statements = [line for line in lines if _STATEMENT.fullmatch(line)]
    return _DEFINITION.search(text) is not None or 0 < len(lines) <= 2 * len(statements)


def searched(sequence: Sequence) -> Node:
    """The given instruction, with the tree of a finished search."""
    return sequence.state[_STATE].root


def _split(sequence: Sequence) -> tuple[list[int], list[int]]:
    """The special tokens at the beginning of the prompt, and the others."""
    tokenizer, prompt = sequence.tokenizers[TARGET], sequence.prompt
    count = next((i for i, one in enumerate(prompt) if not tokenizer.is_special(one)), len(prompt))
    return prompt[:count], prompt[count:]


def _with_text(sequence: Sequence, text: str) -> list[int]:
    """The prompt with another instruction."""
    start, rest = _split(sequence)
    tokenizer = sequence.tokenizers[TARGET]
    if text == tokenizer.decode(rest):
        return sequence.prompt
    return [*start, *tokenizer.encode(text, special=False)]


def _asked(sequence: Sequence, prompt: list[int], runner: str = TARGET) -> Sequence:
    """A branch with another prompt and no tokens."""
    branch = sequence.fork()
    branch.prompt, branch.tokens = prompt, []
    branch.compute_logprobs = None
    branch.align(runner)
    return branch


def _rewritten(
    sequence: Sequence, text: str, request: str
) -> Generator[DecoderAction, ActionResult, str]:
    """What the rewriting model writes for a request; the instruction `text` if that is nothing."""
    runner = DRAFT if DRAFT in sequence.optional_runners else TARGET
    tokenizer = sequence.tokenizers[runner]
    prompt = tokenizer.encode(request)
    branch = _asked(sequence, prompt, runner)
    branch.sampler = Sampler(0.0)
    group = Rollouts(branch, [Rollout(sequence.noise)], runner=runner)
    yield from group.extend(lambda number: "\n" in group.text(0).lstrip())
    found = group.text(0).lstrip().partition("\n")[0].strip()
    group.release()
    branch.release()
    return found or text
