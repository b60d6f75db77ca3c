// One streamed answer: its text, the canvas of a diffusion model, its figures and its trace.

import { events } from "./api.js";
import { at, make } from "./dom.js";

// Streams an answer into `element`; returns its text and figures.
export async function generate(request, element, signal) {
  const start = performance.now();
  const result = { text: "", tokens: 0, first: null, seconds: 0, extension: {} };
  const view = new AnswerView(element);
  element.ariaBusy = "true";
  try {
    for await (const event of events({ ...request, stream_options: { include_usage: true } }, signal)) {
      const choice = event.choices[0] ?? {};
      const delta = choice.delta ?? { content: choice.text };
      if (delta.reasoning_content) view.addReasoning(delta.reasoning_content);
      if (delta.content) {
        result.first ??= (performance.now() - start) / 1000;
        result.text += delta.content;
        view.addText(delta.content);
      }
      if (event.anydecode?.canvas) view.showCanvas(event.anydecode.canvas);
      if (event.anydecode?.decoder) result.extension = event.anydecode;
      if (event.usage) result.tokens = event.usage.completion_tokens;
    }
  } finally {
    view.end();
    element.ariaBusy = "false";
  }
  result.seconds = (performance.now() - start) / 1000;
  return result;
}

const NO_TEXT = "∅";

class AnswerView {
  constructor(element) {
    this.element = element;
    this.text = make("span");
    this.reasoning = null;
    this.canvas = null;
    this.progress = null;
    element.replaceChildren(this.text);
  }

  addText(text) {
    this.text.append(text);
  }

  addReasoning(text) {
    if (!this.reasoning) this.element.prepend((this.reasoning = make("span", { class: "reasoning" })));
    this.reasoning.append(text);
  }

  // Shows the positions of a canvas while it fills: masks are dots, new tokens are highlighted, and
  // tokens without a text, such as the end of the text, have a sign as in the trace.
  showCanvas(positions) {
    if (!this.canvas) {
      this.canvas = make("span", { class: "canvas", "aria-hidden": "true" });
      this.progress = make("span", { class: "progress" });
      this.element.append(this.canvas, this.progress);
    }
    this.text.hidden = true;
    const previous = [...this.canvas.children];
    this.canvas.replaceChildren(...positions.map((text, index) => {
      const shown = text === null ? "·" : text || NO_TEXT;
      const old = previous[index]?.className === "mask" ? null : previous[index]?.textContent;
      const kind = text === null ? "mask" : shown === old ? "" : "new";
      return make("span", { class: kind, textContent: shown });
    }));
    const filled = positions.filter((text) => text !== null).length;
    this.progress.textContent = `${filled} of ${positions.length} positions are filled; a dot is a mask`
      + (positions.includes("") ? `, ${NO_TEXT} an end of text or another token without text.` : ".");
  }

  end() {
    this.canvas?.remove();
    this.progress?.remove();
    this.text.hidden = false;
  }
}

// Shows the figures of an answer in `list`, a <dl>, and a button that opens its trace.
export function showFacts(list, result) {
  const { extension } = result;
  const facts = {
    decoder: extension.decoder,
    tokens: result.tokens,
    "tokens/s": (result.tokens / result.seconds).toFixed(1),
    "tokens per pass": (extension.tokens_per_pass ?? 0).toFixed(2),
    passes: extension.passes,
    "first token": result.first === null ? "–" : `${(result.first * 1000).toFixed(0)} ms`,
    total: `${result.seconds.toFixed(2)} s`,
    seed: extension.seed,
  };
  list.replaceChildren(...Object.entries(facts).map(([name, value]) =>
    make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }))));
  if (extension.trace_html) {
    const button = make("button", { type: "button", textContent: "Trace" });
    button.onclick = () => openTrace(extension.trace_html[0]);
    list.append(make("div", {}, make("dt", { textContent: "every pass" }), make("dd", {}, button)));
  }
}

function openTrace(html) {
  at("viewer").querySelector("iframe").srcdoc = html;
  at("viewer").showModal();
}

// Shows an error in the place of the figures.
export function showError(list, text) {
  list.replaceChildren(make("div", {}, make("dt", { class: "visually-hidden", textContent: "error" }),
    make("dd", { class: "error", textContent: text })));
}
