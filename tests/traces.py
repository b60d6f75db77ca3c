"""A small traced generation, and a reader of its HTML page."""

from __future__ import annotations

from html.parser import HTMLParser

from anydecode.api.generation import Generation, Stats


def make_generation(records: list[dict] | None, tokens: list[int], **facts: object) -> Generation:
    stats = Stats(passes=2, num_tokens=len(tokens), num_prompt_tokens=2, seconds=1.0,
                  time_to_first_token=0.1)  # fmt: skip
    show = {11: "<b>", 12: " no", 13: "\n", 14: "alt", 15: "end", 10: "start"}
    return Generation("text", tokens, "stop", 1, stats, "auto", trace=records,
                      token_text=lambda token: show.get(token, f"[{token}]"), **facts)  # fmt: skip


class Reader(HTMLParser):
    """Checks that tags are balanced, and collects ids, links and linked texts."""

    VOID = frozenset(("meta", "input", "br", "link"))

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.words: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if "id" in found:
            self.ids.append(str(found["id"]))
        if tag == "a":
            self.links.append(str(found["href"]))
        assert tag not in ("script", "img", "iframe")
        if tag not in self.VOID:
            self.open.append((tag, found))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][0] == "a":
            self.words.append((str(self.open[-1][1].get("class")), data))
