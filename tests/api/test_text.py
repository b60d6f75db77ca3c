"""Incremental detokenization against decoding at once, and stop strings against brute force."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anydecode.api.text import Detokenizer, OutputProcessor, completing_tokens
from anydecode.certification.checks import scripted_llm


class TokenPieces:
    """A tokenizer whose token i adds the i-th piece of bytes."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.vocab_size = len(pieces)

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    positions = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in zip(positions, positions[1:], strict=False)]


def stream(pieces: list[bytes]) -> list[str]:
    detokenizer = Detokenizer(TokenPieces(pieces))
    return [detokenizer.push(i) for i in range(len(pieces))] + [detokenizer.flush()]


cuts = st.lists(st.integers(0, 1000), max_size=30)


@given(st.text(max_size=30).filter(lambda text: "\ufffd" not in text), cuts)
def test_only_complete_characters_are_emitted(text, cuts):
    pieces = split(text.encode(), cuts)
    parts = stream(pieces)
    assert "".join(parts) == text
    assert parts[-1] == ""
    data, decoded = b"", ""
    for piece, part in zip(pieces, parts, strict=False):
        data, decoded = data + piece, decoded + part
        assert decoded == data.decode(errors="ignore")  # all complete characters, and nothing else


@given(st.binary(max_size=40), cuts)
def test_incremental_decoding_equals_decoding_at_once(data, cuts):
    assert "".join(stream(split(data, cuts))) == data.decode(errors="replace")


def test_complete_characters_are_not_held_back():
    parts = stream([b"a\xc3", b"\xa9", b"\xf0\x9f", b"\x98", b"\x80!"])
    assert parts == ["a", "é", "", "", "😀!", ""]


def test_a_naive_detokenizer_is_detected():
    pieces = split("né 😀".encode(), [2, 5])
    naive = "".join(piece.decode(errors="replace") for piece in pieces)
    assert naive != "né 😀" == "".join(stream(pieces))


def oracle(
    pieces: list[bytes], stops: list[str], include: bool = False
) -> tuple[int, str, str | None]:
    """Tokens taken, text and stop string, recomputed from the whole text for every character."""
    data = b""
    for taken, piece in enumerate(pieces, 1):
        data += piece
        text = data.decode()
        for end in range(len(text) + 1):
            begun = [(end - len(s), s) for s in stops if text[:end].endswith(s)]
            if begun:
                start, stop = min(begun)
                return taken, text[: end if include else start], stop
    return len(pieces), data.decode(), None


def rules(pieces: list[bytes], **options) -> OutputProcessor:
    return OutputProcessor(TokenPieces(pieces), **options)


letters = st.text("ab", max_size=25)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)


@given(letters, stop_lists, cuts, st.booleans(), st.integers(1, 4))
def test_stop_strings_equal_a_brute_force_search(text, stops, cuts, include, run):
    pieces = split(text.encode(), cuts)
    subject = rules(pieces, stop_strings=stops, include_stop=include)
    taken, streamed = 0, ""
    expected, whole, stop = oracle(pieces, stops, include)
    for start in range(0, len(pieces), run):
        tokens = list(range(start, min(start + run, len(pieces))))
        took, reason = subject.push(tokens)
        taken += took
        streamed += subject.take()
        assert whole.startswith(streamed)  # no streamed text has to be retracted
        if reason:
            break
    assert (taken, subject.stopped_by) == (expected, stop)
    assert subject.finish_reason == ("stop" if stop else None)
    assert streamed == subject.text
    held_back = whole.removeprefix(streamed)
    assert not held_back or any(s.startswith(held_back) and s != held_back for s in stops)


accented = st.text("aé", min_size=1, max_size=20)


@given(accented, cuts, st.lists(accented, min_size=1, max_size=3))
def test_only_some_tokens_complete_stop_strings(text, cuts, stops):
    tokenizer = TokenPieces(split(text.encode(), cuts))
    possible = completing_tokens(tokenizer, tokenizer.vocab_size, stops)
    assert possible is not None
    subject = OutputProcessor(tokenizer, stops, completing=possible)
    assert subject.end_tokens == possible
    taken, reason = subject.push(range(tokenizer.vocab_size))
    assert reason is None or taken - 1 in possible
    for token, piece in enumerate(tokenizer.pieces):
        parts = [stop.encode() for stop in stops]
        begins = any(piece.startswith(part[i:]) for part in parts for i in range(1, len(part)))
        assert (token in possible) == (begins or any(part in piece for part in parts))


def test_the_samples_of_a_request_share_the_stop_rules():
    with scripted_llm() as llm:
        request = llm.request("abc", stop=["e", "f"], n=3, temperature=1, max_tokens=5)
    first, *others = [job.sequence.stop_checker for job in request.jobs]
    assert first.end_tokens and all(one.end_tokens is first.end_tokens for one in others)


def test_any_token_may_complete_a_replaced_character():
    pieces = [b"\xe2", b"a", b"b"]
    assert completing_tokens(TokenPieces(pieces), 3, ["b", "\ufffd"]) is None
    subject = rules(pieces, stop_strings=["\ufffd"])
    assert subject.end_tokens is None and subject.push([0, 1, 2]) == (2, "stop")


@given(letters, stop_lists, cuts)
def test_only_prefixes_of_stop_strings_are_held_back(text, stops, cuts):
    pieces = split(text.encode(), cuts)
    subject = rules(pieces, stop_strings=stops)
    _, reason = subject.push(range(len(pieces)))
    if reason is None:
        overlap = max((n for s in stops for n in range(len(s)) if text.endswith(s[:n])), default=0)
        assert subject.text == text[: len(text) - overlap]


def test_the_oracle_detects_a_search_within_single_tokens():
    pieces = [b"xE", b"ND", b"y"]
    assert oracle(pieces, ["END"]) == (2, "x", "END")
    assert not any(b"END" in piece for piece in pieces)
    assert rules(pieces, stop_strings=["END"]).push([0, 1, 2]) == (2, "stop")


def test_a_stop_string_inside_accepted_tokens_ends_the_generation():
    pieces = [b"one ", b"two ", b"thr", b"ee", b" four"]
    subject = rules(pieces, stop_strings=["o th"])
    assert subject.push([0, 1, 2, 3, 4]) == (3, "stop")
    assert subject.take() == "one tw"
    assert subject.push([4]) == (0, "stop")


def test_end_of_text_and_stop_tokens():
    pieces = [b"a", b"b", b"", b"!"]
    subject = rules(pieces, eos_ids={2}, stop_tokens={3})
    assert subject.push([0, 2, 1]) == (2, "stop")
    assert (subject.text, subject.stopped_by) == ("a", 2)
    assert [subject.stops_at(token) for token in range(4)] == [False, False, True, True]

    subject = rules(pieces, eos_ids={2}, stop_tokens={3}, ignore_eos=True)
    assert subject.push([0, 2, 1, 3]) == (4, "stop")
    assert (subject.text, subject.stopped_by) == ("ab", 3)

    subject = rules(pieces, stop_tokens={3}, include_stop=True)
    subject.push([0, 3])
    assert subject.text == "a!"


def test_max_tokens_releases_held_back_text():
    subject = rules([b"EN", b"\xf0\x9f"], stop_strings=["END"], max_tokens=2)
    assert subject.push([0]) == (1, None)
    assert not subject.has_text and subject.take() == ""
    assert subject.push([1, 1]) == (1, "length")
    assert subject.has_text and subject.take() == "EN\ufffd"
    assert not subject.has_text
    assert subject.finish_reason == "length" and subject.stopped_by is None


def test_a_stop_on_the_last_allowed_token_has_reason_stop():
    subject = rules([b"a", b""], eos_ids={1}, max_tokens=2)
    assert subject.push([0, 1]) == (2, "stop")


@pytest.mark.parametrize("minimum, taken", [(0, 1), (1, 3), (3, 4)])
def test_stop_strings_are_ignored_within_min_tokens(minimum, taken):
    subject = rules([b"ab", b"x", b"ab", b"ab"], stop_strings=["ab"], min_tokens=minimum)
    assert subject.push([0, 1, 2, 3]) == (taken, "stop")


def test_a_stop_string_within_min_tokens_is_not_found_later():
    subject = rules([b"xab", b"y"], stop_strings=["ab", "xabc"], min_tokens=1)
    assert subject.push([0, 1]) == (2, None)
    assert subject.text == "xaby"


@given(letters, stop_lists, cuts, st.integers(0, 10))
def test_state_is_plain_data_and_tokens_rebuild_it(text, stops, cuts, at):
    pieces = split(text.encode(), cuts)
    one = rules(pieces, stop_strings=stops, max_tokens=8)
    one.push(range(min(at, len(pieces))))
    other = rules(pieces, stop_strings=stops, max_tokens=8)
    other.push(range(one.num_tokens))
    copy = pickle.loads(pickle.dumps(one))
    rest = range(one.num_tokens, len(pieces))
    for subject in (one, other, copy):
        subject.push(rest)
    assert one.text == other.text == copy.text
    assert one.finish_reason == other.finish_reason == copy.finish_reason
