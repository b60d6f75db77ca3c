"""Deterministic automata of expressions, by Thompson's construction and the subset construction."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from anydecode.constraints.grammar.byte_regex import (
    EMPTY,
    TEXT_END,
    TEXT_START,
    Expression,
)
from anydecode.errors import ConstraintError

#: Maximum number of states of all automata of a grammar together.
MAX_STATES = 20_000
#: Maximum number of NFA states summed over the states of one automaton: time and memory of the
#: subset construction are proportional to it.
_MAX_SUBSETS = 4_000_000
TOO_LARGE = "the grammar is too large: make its repetitions smaller or its rules fewer"


def leaves(part: Expression) -> Iterable[Expression]:
    """The sets, references and terminals of an expression, in order."""
    kind, body = part
    if kind in ("set", "ref", "terminal"):
        yield part
    elif kind == "star":
        yield from leaves(body)
    elif kind == "graph":
        for _, inner, _ in body:
            yield from leaves(inner)
    else:
        for inner in body:
            yield from leaves(inner)


def byte_classes(sets: Iterable[int]) -> tuple[list[int], dict[int, list[int]]]:
    """Divides the bytes into classes that are alike in all of `sets`, which are bit masks.

    Returns:
        The class of each byte, and the sorted classes of each set.
    """
    masks = dict.fromkeys(sets)
    class_by_signature: dict[tuple[bool, ...], int] = {}
    class_of_byte = []
    for byte in range(256):
        signature = tuple(bool(mask >> byte & 1) for mask in masks)
        class_of_byte.append(class_by_signature.setdefault(signature, len(class_by_signature)))
    members = {
        mask: sorted({class_of_byte[byte] for byte in range(256) if mask >> byte & 1})
        for mask in masks
    }
    return class_of_byte, members


def class_masks(class_of_byte: list[int]) -> list[int]:
    """The bytes of each class, as a bit mask."""
    masks = [0] * (max(class_of_byte) + 1)
    for byte, label in enumerate(class_of_byte):
        masks[label] |= 1 << byte
    return masks


def determinize(
    rule: Expression, labels: Callable[[Expression], list[int]], max_states: int = MAX_STATES
) -> tuple[list[dict[int, int]], list[bool]]:
    """The deterministic automaton of an expression; state 0 is the start.

    Args:
        rule: The expression.
        labels: The labels of a set, reference or terminal, of which any one is read.
        max_states: The maximum number of states.

    Returns:
        The target of each label at each state, and whether the expression may end at each state.

    Raises:
        ConstraintError: It is too large.
    """
    epsilon: list[list[int]] = []
    edges: list[dict[int, list[int]]] = []  # by label

    def new_node() -> int:
        if len(edges) > 8 * MAX_STATES:
            raise ConstraintError(TOO_LARGE)
        epsilon.append([])
        edges.append({})
        return len(edges) - 1

    def build_nfa(part: Expression, first: int, last: int | None = None) -> int:
        """Adds the paths of `part` from `first` and returns their last node: `last` if given."""
        kind, body = part
        if kind in ("set", "ref", "terminal"):
            last = new_node() if last is None else last
            for label in labels(part):
                edges[first].setdefault(label, []).append(last)
            return last
        if last is not None:
            epsilon[build_nfa(part, first)].append(last)
            return last
        if kind == "graph":
            nodes = [first, new_node()]
            for source, inner, target in body:
                while len(nodes) <= max(source, target):
                    nodes.append(new_node())
                build_nfa(inner, nodes[source], nodes[target])
            return nodes[1]
        if kind == "seq":
            for part in body:
                first = build_nfa(part, first)
            return first
        if kind == "star":
            inner_node = new_node()
            epsilon[first].append(inner_node)
            epsilon[build_nfa(body, inner_node)].append(inner_node)
            last = new_node()
            epsilon[inner_node].append(last)
            return last
        last = new_node()
        if kind == "first":
            for part in body:
                epsilon[first].append(last)
                first = build_nfa(part, first)
            epsilon[first].append(last)
            return last
        for part in body:
            inner_node = new_node()
            epsilon[first].append(inner_node)
            epsilon[build_nfa(part, inner_node)].append(last)
        return last

    start = new_node()
    end = build_nfa(rule, start)

    def epsilon_closure(nodes: set[int]) -> frozenset[int]:
        stack = [*nodes]
        while stack:
            for other in epsilon[stack.pop()]:
                if other not in nodes:
                    nodes.add(other)
                    stack.append(other)
        # Others only lead on: without them, equal states are found to be equal.
        return frozenset(node for node in nodes if edges[node] or node == end)

    states: dict[frozenset[int], int] = {}
    queue: deque[frozenset[int]] = deque()
    transitions: list[dict[int, int]] = []
    is_final: list[bool] = []
    work = 0

    def state(nodes: set[int]) -> int:
        nonlocal work
        subset = epsilon_closure(nodes)
        work += len(subset)
        if work > _MAX_SUBSETS:
            raise ConstraintError(TOO_LARGE)
        if subset not in states:
            if len(transitions) >= max_states:
                raise ConstraintError(TOO_LARGE)
            states[subset] = len(transitions)
            transitions.append({})
            is_final.append(end in subset)
            queue.append(subset)
        return states[subset]

    state({start})
    while queue:
        subset = queue.popleft()
        targets: dict[int, set[int]] = {}
        for node in subset:
            for label, nodes in edges[node].items():
                targets.setdefault(label, set()).update(nodes)
        for label in sorted(targets):
            transitions[states[subset]][label] = state(targets[label])
    return transitions, is_final


def partitioned(base: Expression, parts: Sequence[Expression]) -> dict[frozenset[int], Expression]:
    """The texts of `base`, divided by the expressions of `parts` that match them.

    Args:
        base: An expression over bytes, without references.
        parts: Further ones.

    Returns:
        By the indices of the parts that match: the texts. Only classes with texts are listed.

    Raises:
        ConstraintError: The automata are too large.
    """
    expressions = [base, *parts]
    sets = [leaf[1] for one in expressions for leaf in leaves(one)]
    class_of_byte, members = byte_classes(sets)
    masks = class_masks(class_of_byte)
    automata = [determinize(one, lambda leaf: members[leaf[1]]) for one in expressions]
    start = (0,) * len(automata)
    numbers = {start: 0}  # the nodes of the graphs, of which 1 is the end
    queue = deque([start])
    edges: list[tuple[int, int, int]] = []
    sources: dict[int, list[int]] = {}
    ends: dict[frozenset[int], list[int]] = {}
    while queue:
        states = queue.popleft()
        number = numbers[states]
        if automata[0][1][states[0]]:
            matching = [
                index
                for index, state in enumerate(states[1:])
                if state >= 0 and automata[index + 1][1][state]
            ]
            ends.setdefault(frozenset(matching), []).append(number)
        targets: dict[tuple[int, ...], int] = {}
        for label in automata[0][0][states[0]]:
            found = tuple(
                -1 if state < 0 else transitions[state].get(label, -1)
                for (transitions, _), state in zip(automata, states, strict=True)
            )
            targets[found] = targets.get(found, 0) | masks[label]
        for found, bytes_ in targets.items():
            if found not in numbers:
                if len(numbers) >= MAX_STATES:
                    raise ConstraintError(TOO_LARGE)
                numbers[found] = len(numbers) + 1
                queue.append(found)
            edges.append((number, bytes_, numbers[found]))
            sources.setdefault(numbers[found], []).append(number)
    return {matching: ("graph", _graph_to(last, edges, sources)) for matching, last in ends.items()}


def _graph_to(
    ends: list[int], edges: list[tuple[int, int, int]], sources: dict[int, list[int]]
) -> tuple[tuple[int, Expression, int], ...]:
    """Those of `edges` that lead to one of the nodes `ends`, and from there to node 1."""
    useful, stack = {*ends}, [*ends]
    while stack:
        for source in sources.get(stack.pop(), ()):
            if source not in useful:
                useful.add(source)
                stack.append(source)
    kept = [(source, ("set", bytes_), to) for source, bytes_, to in edges if to in useful]
    return (*kept, *((end, EMPTY, 1) for end in ends))


def without_anchors(part: Expression) -> Expression:
    """The texts that an expression with anchors matches from their first byte to their last.

    Args:
        part: An expression over bytes in which the bytes `TEXT_START` and `TEXT_END` match the
            empty text at the start and at the end.

    Raises:
        ConstraintError: The automaton is too large.
    """
    class_of_byte, members = byte_classes(leaf[1] for leaf in leaves(part))
    anchors = {class_of_byte[TEXT_START]: "start", class_of_byte[TEXT_END]: "end"}
    masks = class_masks(class_of_byte)
    transitions, is_final = determinize(part, lambda leaf: members[leaf[1]])
    numbers = {(0, "start"): 0}
    stack = [*numbers]
    edges: list[tuple[int, Expression, int]] = []
    while stack:
        state, place = stack.pop()
        number = numbers[state, place]
        if is_final[state]:
            edges.append((number, EMPTY, 1))
        for label, to in transitions[state].items():
            anchor = anchors.get(label)
            after = _place_after(place, anchor)
            if after is None:
                continue
            if (to, after) not in numbers:
                numbers[to, after] = len(numbers) + 1
                stack.append((to, after))
            read = ("set", masks[label]) if anchor is None else EMPTY
            edges.append((number, read, numbers[to, after]))
    return "graph", tuple(edges)


def _place_after(place: str, anchor: str | None) -> str | None:
    """The place in a text after an anchor (None: a byte) at `place`; None if it is not there.
    "start" is before the first byte, "end" after the last, and "both" in the empty text."""
    if anchor is None:
        return "middle" if place in ("start", "middle") else None
    if anchor == "start":
        return place if place in ("start", "both") else None
    return {"start": "both", "middle": "end"}.get(place, place)
