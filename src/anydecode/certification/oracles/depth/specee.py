"""Oracle test of SpecEE: texts and exits replayed by a forward pass whose caches have holes behind
the exits, with candidates of a forward pass of the draft model; the same for the paths of trees."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.depth.fewer_layers import (
    PROMPTS,
    Step,
    agreement_lost,
    text_checks,
)
from anydecode.certification.oracles.speculative.forward_pass import Forward
from anydecode.certification.oracles.transformer import rotate, softmax
from anydecode.certification.rounds import plain_token, rounds
from anydecode.certification.tiny import predicting_model
from anydecode.models.exit_predictors import ExitPredictors
from anydecode.models.network import Network

DEPTH, ALWAYS = 16, {5, 9, 12}
#: Nodes of the trees, and tokens of their texts.
SIZE, LENGTH = 3, 24


class HoleForward(Forward):
    """Adds positions that store nothing behind their exit."""

    def __init__(self, network: Network, predictors: ExitPredictors) -> None:
        super().__init__(network)
        self.predictors, self.length = predictors, 0
        self.exits_of_tokens: list[int] = []

    def step_predicted(self, token: int, drafted: np.ndarray | None) -> tuple[np.ndarray, int]:
        """Logits and number of layers; `drafted` are the draft model's logits, None in the
        prompt."""
        x, self.length, before = self._embedding(token), self.length + 1, np.zeros(4)
        checked, num_layers = self.checked(), DEPTH
        for layer in range(DEPTH):
            x = x + self._attention(x, layer)
            x = x + self._mlp(x, layer)
            if drafted is None or layer + 1 not in checked or layer + 1 == DEPTH:
                continue
            is_sure, before = self.is_sure(x, layer + 1, drafted, before)
            if is_sure:
                num_layers = layer + 1
                break
        if drafted is not None:
            self.exits_of_tokens.append(num_layers)
        return self._logits(x), num_layers

    def checked(self) -> set[int]:
        checked = set(ALWAYS)
        for recent in self.exits_of_tokens[-5:]:
            checked |= {recent - 2, recent, recent + 2}
        return checked

    def is_sure(
        self, x: np.ndarray, num_layers: int, drafted: np.ndarray, before: np.ndarray
    ) -> tuple[bool, np.ndarray]:
        """Whether the predictor and the head say that a token may leave, and the candidates'
        probabilities, which were `before`."""
        best = sorted(range(len(drafted)), key=lambda one: -drafted[one])[:4]
        logits = self._logits(x)
        p = softmax(logits[best])
        one = self.predictors.predictors[num_layers]
        inner = one.down @ np.concatenate([logits[best], p, p - before]) + one.down_bias
        score = one.up @ np.where(inner > 0, inner, 0) + one.up_bias
        return bool(score > 0 and logits.argmax() in best), p

    def _attention(self, x: np.ndarray, layer: int) -> np.ndarray:
        output, key, value = self.attend(x, layer, self.length - 1, [], [])
        self.keys[layer].append(key)
        self.values[layer].append(value)
        return output

    def attend(
        self,
        x: np.ndarray,
        layer: int,
        position: int,
        path_keys: list[np.ndarray],
        path_values: list[np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the layer's attention to the text, to a path behind it and to itself adds to x, and
        the key and value of x."""
        weights, spec = self.weights.layers[layer], self.spec.layers[layer]
        shape, rope = spec.attention, spec.rope
        assert shape and rope and weights.query and weights.key and weights.value
        y = self._normed(x, weights.attention_norm)
        projected = (one.weight.data @ y for one in (weights.query, weights.key, weights.value))
        q, k, v = (one.reshape(1, -1, shape.head_dim) for one in projected)
        key, value = rotate(k, [position], rope.frequencies)[0], v[0]
        keys = np.stack([*self.keys[layer], *path_keys, key])
        values = np.stack([*self.values[layer], *path_values, value])
        mixed = []
        for head, one in enumerate(rotate(q, [position], rope.frequencies)[0]):
            group = head * shape.num_kv_heads // shape.num_heads
            mixed.append(softmax(keys[:, group] @ one * shape.scale) @ values[:, group])
        assert weights.output is not None
        output: np.ndarray = weights.output.weight.data @ np.concatenate(mixed)
        return output, key, value


class TreeForward(HoleForward):
    """Adds the accepted path of a tree whose paths leave as a whole."""

    def step_tree(
        self, tokens: list[int], parents: list[int], drafted: list[np.ndarray]
    ) -> tuple[list[np.ndarray], list[int]]:
        """Logits and number of layers of each node; `tokens[0]` is the text's last token, the
        root."""
        count = len(tokens)
        above: list[list[int]] = []  # the nodes before each one, from the root down
        for node in range(count):
            above.append([*above[parents[node]], parents[node]] if node else [])
        paths = [[*above[n], n] for n in range(count) if n not in parents[1:]]
        states = [self._embedding(token) for token in tokens]
        before = [np.zeros(4)] * count
        self.node_keys: list[list[np.ndarray]] = [[] for _ in tokens]
        self.node_values: list[list[np.ndarray]] = [[] for _ in tokens]
        num_layers, checked = [DEPTH] * count, self.checked()
        for layer in range(DEPTH):
            running = sorted({node for path in paths for node in path})
            for node in running:
                keys = [self.node_keys[one][layer] for one in above[node]]
                values = [self.node_values[one][layer] for one in above[node]]
                position = self.length + len(above[node])
                added, key, value = self.attend(states[node], layer, position, keys, values)
                self.node_keys[node].append(key)
                self.node_values[node].append(value)
                x = states[node] + added
                states[node] = x + self._mlp(x, layer)
            if layer + 1 not in checked or layer + 1 == DEPTH:
                continue
            sure = set()
            for node in running:
                result = self.is_sure(states[node], layer + 1, drafted[node], before[node])
                before[node] = result[1]
                sure |= {node} if result[0] else set()
            paths = [path for path in paths if set(path) - sure]
            for node in running:
                if not any(node in path for path in paths):
                    num_layers[node] = layer + 1
        return [self._logits(x) for x in states], num_layers

    def keep(self, nodes: list[int]) -> None:
        """Makes the nodes of the last tree positions of the text."""
        for node in nodes:
            for layer in range(len(self.node_keys[node])):
                self.keys[layer].append(self.node_keys[node][layer])
                self.values[layer].append(self.node_values[node][layer])
            self.exits_of_tokens.append(len(self.node_keys[node]))
        self.length += len(nodes)


class DraftRows:
    """The draft model's logits behind any text."""

    def __init__(self, network: Network) -> None:
        self.forward, self.read = Forward(network), list[int]()
        self.rows: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, text: tuple[int, ...]) -> np.ndarray:
        if text in self.rows:
            return self.rows[text]
        common = 0
        while self.read[common : common + 1] == [text[common]] and common < len(text) - 1:
            common += 1
        for kept in (*self.forward.keys, *self.forward.values):
            del kept[common:]
        for token in text[common:]:
            row = self.forward.step(token)
        self.read, self.rows[text] = list(text), row
        return row


def drafted_tree(draft: DraftRows, text: tuple[int, ...], size: int) -> set[tuple[int, ...]]:
    """The `size` paths of the largest probability by the draft model, of four levels whose four
    best nodes have four children each."""
    found: dict[tuple[int, ...], float] = {}
    level: list[tuple[int, ...]] = [()]
    for _ in range(4):
        children = {}
        for path in level:
            row = draft((*text, *path))
            p = softmax(np.sort(row)[::-1][:64])
            best = np.argsort(-row, kind="stable")[:4]
            for token, share in zip(best.tolist(), p, strict=False):
                child = (*path, token)
                children[child] = found.get(path, 1.0) * float(share)
        found |= children
        level = sorted(children, key=lambda one: -children[one])[:4]
    return set(sorted(found, key=lambda one: -found[one])[:size])


@oracle_test("specee")
def specee() -> Iterator[Check]:
    """Exits behind layers 5, 9, 12 and near those of the last five tokens, at a probability above
    .5, where the most probable token is one of the draft model's first four."""
    with predicting_model() as llm:
        predictors = llm.model.exit_predictors  # type: ignore[attr-defined]
        draft: Network = llm.engine.runners["draft"].model.network  # type: ignore[attr-defined]

    def replay(network: Network) -> Step:
        forward, drafter = HoleForward(network, predictors), Forward(draft)

        def step(token: int, index: int) -> tuple[np.ndarray, int, int]:
            drafted = drafter.step(token)
            logits, num_layers = forward.step_predicted(token, drafted if index >= 0 else None)
            return logits, num_layers, num_layers

        return step

    yield from text_checks("specee", predicting_model, replay)
    for temperature in (0.0, 0.9):
        yield from _tree_checks(predictors, draft, temperature)


def _tree_checks(predictors: ExitPredictors, draft: Network, temperature: float) -> Iterator[Check]:
    """The same for trees of three nodes."""
    names = ("tokens", "exits", "sublayers", "drafts")
    wrong, drafts, kept = dict.fromkeys(names, 0), DraftRows(draft), list[list[int]]()
    with predicting_model() as llm:
        network: Network = llm.model.network  # type: ignore[attr-defined]
        for prompt in PROMPTS[1:]:
            first, *trace = rounds(
                llm, f"specee:size={SIZE}", prompt, LENGTH, temperature=temperature
            )
            forward = TreeForward(network, predictors)
            for token in first.text:
                logits, _ = forward.step_predicted(token, None)
            expected = [plain_token(logits, len(first.text), temperature)]
            wrong["tokens"] += first.generated != expected
            for one in trace:
                text, paths = tuple(one.text), [(), *one.paths]
                logits_of, num_layers = forward.step_tree(
                    [text[-1], *one.tokens],
                    [-1, *(parent + 1 for parent in one.parents)],
                    [drafts((*text, *path)) for path in paths],
                )
                nodes, tokens = [0], list[int]()
                while not tokens or tuple(tokens) in paths:
                    if tokens:
                        nodes.append(paths.index(tuple(tokens)))
                    row = logits_of[nodes[-1]]
                    tokens.append(plain_token(row, len(text) + len(tokens), temperature))
                exits = [num_layers[node] for node in nodes]
                wrong["tokens"] += tokens != one.generated
                wrong["exits"] += exits != one.entry["exits"]
                counts = one.entry["mixers"], one.entry["mlps"]
                wrong["sublayers"] += counts != (sum(num_layers), sum(num_layers))
                if temperature == 0:
                    size = min(SIZE, len(first.text) + LENGTH - len(text) - 1)
                    wrong["drafts"] += set(one.paths) != drafted_tree(drafts, text, size)
                forward.keep(nodes)
                kept.append(exits)
    for name, number in wrong.items():
        yield Check(f"trees, T={temperature}: {name} equal the replay", number == 0, f"{number}")
    where = f"trees, T={temperature}"
    yield Check(f"{where}: drafts are accepted", any(len(exits) > 1 for exits in kept))
    yield Check(
        f"{where}: tokens leave behind different layers",
        len({exit for exits in kept for exit in exits}) > 2,
    )
    yield Check(
        f"{where}: not all tokens of a path that is kept run equally many layers",
        any(len(set(exits)) > 1 for exits in kept),
    )


@measure("specee", "share of tokens that differ from the full model's", samples=12, margin=0.9)
def specee_loss(samples: int) -> float:
    """On the full model's texts, with random predictors."""
    return agreement_lost("specee", samples, predicting_model)
