// The view of decoders: one line each, by family, and the card behind each.

import { server } from "./api.js";
import { at, make } from "./dom.js";
import { addRacer } from "./race.js";
import { useDecoder } from "./settings.js";

// The text of a paper, with its arXiv numbers as links.
function paper(text) {
  return text.split(/((?:arXiv:)?\b\d{4}\.\d{4,5}\b)/).map((part) => {
    const number = /^(?:arXiv:)?(\d{4}\.\d{4,5})$/.exec(part)?.[1];
    return number ? make("a", { href: `https://arxiv.org/abs/${number}`, rel: "noopener noreferrer", target: "_blank", textContent: part }) : part;
  });
}

// A text in which names between backticks are code.
const withCode = (text) =>
  text.split("`").map((part, index) => (index % 2 ? make("code", { textContent: part }) : part));

function parameterTable(parameters) {
  const head = ["Parameter", "Default", "Values in requests", "Meaning"].map((text) => make("th", { scope: "col", textContent: text }));
  const rows = parameters.map((one) => make("tr", {},
    make("th", { scope: "row", textContent: one.name }),
    make("td", { textContent: one.default || "required" }),
    make("td", { textContent: one.remote || "not allowed" }),
    make("td", {}, ...withCode(one.description))));
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
  return make("div", { class: "scroll", tabIndex: 0, role: "region", ariaLabel: "Parameters" }, table);
}

const list = (texts) => make("ul", {}, ...texts.map((text) => make("li", {}, ...withCode(text))));

function facts(card) {
  const entries = [
    ["Claim", [`${card.exactness}: ${server.claims[card.exactness]}`]],
    ["Paper", paper(card.paper)],
    ["Needs", [card.needs.join(", ") || "nothing but a model"]],
    ["Works with", [card.works_with.join(", ")]],
    ["Differs from the paper", card.deviations.length ? [list(card.deviations)] : ["in nothing"]],
  ];
  if (card.measured.length) entries.push(["Measured", [list(card.measured)]]);
  if (card.missing.length) entries.unshift(["Partial: not implemented", [list(card.missing)]]);
  if (card.reason) entries.unshift(["Cannot run here", withCode(card.reason)]);
  return make("dl", { class: "card-facts" }, ...entries.flatMap(([name, parts]) => [make("dt", { textContent: name }), make("dd", {}, ...parts)]));
}

function actions(card) {
  const chat = make("button", { type: "button", textContent: "Use in chat" });
  chat.onclick = () => {
    useDecoder(card.key);
    location.hash = "chat";
  };
  const race = make("button", { type: "button", textContent: "Add to the race" });
  race.onclick = () => {
    addRacer(card.key);
    location.hash = "race";
  };
  return make("div", { class: "buttons" }, chat, race);
}

function body(card) {
  const parts = [facts(card)];
  if (card.parameters.length) parts.push(parameterTable(card.parameters));
  if (!card.reason) parts.push(actions(card));
  return make("div", { class: "card" }, ...parts);
}

function entry(card) {
  const summary = make("summary", {},
    make("strong", { textContent: card.key }),
    make("span", { class: `claim-name ${card.exactness}`, textContent: card.exactness }),
    make("span", { class: "summary-text", textContent: card.missing.length ? `Partial: ${card.summary}` : card.summary }));
  const details = make("details", { class: card.reason ? "entry unavailable" : "entry" }, summary);
  details.addEventListener("toggle", () => details.childElementCount > 1 || details.append(body(card)));
  return details;
}

function isFound(card, words) {
  const text = [card.key, card.family, card.exactness, card.summary, card.paper].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

export function refreshGallery() {
  const words = at("gallery-search").value.toLowerCase().split(/\s+/);
  const all = at("gallery-all").checked ? [...server.decoders, ...server.unavailable] : server.decoders;
  const found = all.filter((card) => isFound(card, words)).sort((a, b) => a.key.localeCompare(b.key));
  const families = server.families.filter((family) => found.some((card) => card.family === family));
  at("gallery").replaceChildren(...families.map((family) => {
    const cards = found.filter((card) => card.family === family);
    const title = make("h3", { textContent: `${family} ` }, make("small", { textContent: String(cards.length) }));
    return make("section", { ariaLabel: family }, title, ...cards.map(entry));
  }));
  at("gallery-count").textContent = `${found.length} decoder${found.length === 1 ? "" : "s"}`;
}

export function startGallery() {
  at("gallery-search").oninput = refreshGallery;
  at("gallery-all").onchange = refreshGallery;
}
