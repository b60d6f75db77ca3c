// The web page at /: chat, a race of two decoders, traces and the load. Uses the public API.
"use strict";

const at = (id) => document.getElementById(id);
const messages = [];
let pending = null; // the AbortController of the running request
let hasChatTemplate = true; // if false, the last message is the prompt of a completion

function settings(decoder) {
  const body = {
    decoder,
    stream: true,
    temperature: Number(at("temperature").value),
    max_tokens: Number(at("tokens").value),
    stream_options: { include_usage: true },
  };
  if (at("seed").value !== "") body.seed = Number(at("seed").value);
  if (at("trace").checked) body.trace = "html";
  return body;
}

function keyHeader() {
  return at("key").value ? { authorization: "Bearer " + at("key").value } : {};
}

async function* events(body, signal) {
  const headers = { "content-type": "application/json", ...keyHeader() };
  const { messages: conversation, ...options } = body;
  const request = hasChatTemplate ? body : { ...options, prompt: conversation.at(-1).content };
  const response = await fetch(hasChatTemplate ? "v1/chat/completions" : "v1/completions", {
    method: "POST", headers, body: JSON.stringify(request), signal,
  });
  if (!response.ok) {
    const failure = await response.json().catch(() => null);
    throw new Error(failure?.error?.message ?? "the server returned status " + response.status);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (buffer + value).split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// Streams one answer into `element`; resolves to its text and statistics.
async function generate(body, element, signal) {
  const start = performance.now();
  const result = { text: "", tokens: 0, first: null, seconds: 0, extension: null };
  let reasoning = null;
  const content = document.createElement("span");
  element.replaceChildren(content);
  let canvas = null;
  for await (const event of events(body, signal)) {
    const choice = event.choices[0] ?? {};
    const delta = choice.delta ?? { content: choice.text };
    if (delta.reasoning_content) {
      if (!reasoning) element.prepend((reasoning = Object.assign(document.createElement("span"), { className: "thought" })));
      reasoning.append(delta.reasoning_content);
    }
    if (delta.content) {
      result.first ??= performance.now() - start;
      result.text += delta.content;
      content.append(delta.content);
    }
    if (event.anydecode?.canvas) {
      if (!canvas) element.append((canvas = Object.assign(document.createElement("span"), { className: "canvas", ariaHidden: "true" })));
      content.hidden = true;
      showCanvas(canvas, event.anydecode.canvas);
    }
    if (event.anydecode?.decoder) result.extension = event.anydecode;
    if (event.usage) result.tokens = event.usage.completion_tokens;
  }
  canvas?.remove();
  content.hidden = false;
  result.seconds = (performance.now() - start) / 1000;
  return result;
}

// Shows a diffusion model's canvas while it fills: masks are dots, new tokens are highlighted.
function showCanvas(canvas, positions) {
  const previous = [...canvas.children];
  canvas.replaceChildren(...positions.map((text, index) => {
    const old = previous[index]?.className === "mask" ? null : previous[index]?.textContent;
    return Object.assign(document.createElement("span"), {
      className: text === null ? "mask" : text === old ? "" : "new",
      textContent: text ?? "·",
    });
  }));
}

function showFacts(element, result) {
  const extension = result.extension ?? {};
  const facts = [
    extension.decoder,
    `${result.tokens} tokens`,
    `${(result.tokens / result.seconds).toFixed(1)} tokens/s`,
    `${(extension.tokens_per_pass ?? 0).toFixed(2)} per pass`,
    `${result.seconds.toFixed(2)} s`,
    `seed ${extension.seed}`,
  ];
  element.replaceChildren(...facts.map((fact) => Object.assign(document.createElement("span"), { textContent: fact })));
  if (extension.trace_html) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: "Trace" });
    button.onclick = () => {
      at("viewer").querySelector("iframe").srcdoc = extension.trace_html[0];
      at("viewer").showModal();
    };
    element.append(button);
  }
}

function showError(element, error) {
  const text = error.name === "AbortError" ? "stopped" : error.message;
  element.replaceChildren(Object.assign(document.createElement("span"), { className: "error", textContent: text }));
}

function turn(role, text) {
  const item = Object.assign(document.createElement("li"), { className: role });
  item.append(
    Object.assign(document.createElement("div"), { className: "text", textContent: text }),
    Object.assign(document.createElement("p"), { className: "facts" }),
  );
  if (role === "user") item.lastChild.remove();
  at("turns").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

function setPending(controller) {
  pending = controller;
  at("send").textContent = controller ? "Stop" : "Send";
  at("go").textContent = controller ? "Stop" : "Race";
}

at("ask").onsubmit = async (submit) => {
  submit.preventDefault();
  if (pending) return pending.abort();
  const text = at("message").value.trim();
  if (!text) return;
  at("message").value = "";
  turn("user", text);
  messages.push({ role: "user", content: text });
  const item = turn("assistant", "");
  setPending(new AbortController());
  try {
    const body = { ...settings(at("decoder").value), messages };
    const result = await generate(body, item.querySelector(".text"), pending.signal);
    messages.push({ role: "assistant", content: result.text });
    showFacts(item.querySelector(".facts"), result);
  } catch (error) {
    messages.pop();
    showError(item.querySelector(".facts"), error);
  }
  setPending(null);
  item.scrollIntoView({ block: "end" });
};

at("message").onkeydown = (key) => {
  if (key.key === "Enter" && !key.shiftKey && !key.isComposing) {
    key.preventDefault();
    at("ask").requestSubmit();
  }
};

at("clear").onclick = () => {
  pending?.abort();
  messages.length = 0;
  at("turns").replaceChildren();
};

at("start").onsubmit = async (submit) => {
  submit.preventDefault();
  if (pending) return pending.abort();
  const seed = at("seed").value === "" ? Math.floor(Math.random() * 1e9) : Number(at("seed").value);
  const prompt = [{ role: "user", content: at("prompt").value }];
  setPending(new AbortController());
  at("verdict").textContent = "";
  const racers = [...document.querySelectorAll(".racers article")];
  let winner = null;
  const results = await Promise.all(racers.map(async (racer) => {
    const facts = racer.querySelector(".facts");
    racer.classList.remove("won");
    facts.replaceChildren();
    try {
      const body = { ...settings(racer.querySelector("select").value), messages: prompt, seed };
      const result = await generate(body, racer.querySelector("output"), pending.signal);
      if (!winner) (winner = racer).classList.add("won");
      showFacts(facts, result);
      return result;
    } catch (error) {
      showError(facts, error);
      return null;
    }
  }));
  if (results.every(Boolean)) {
    const [a, b] = results;
    const same = a.text === b.text ? "the same text" : "different texts";
    const ratio = Math.max(a.seconds, b.seconds) / Math.min(a.seconds, b.seconds);
    at("verdict").textContent = `${winner.querySelector("select").value} finished first, ${ratio.toFixed(2)} times as fast; ${same}.`;
  }
  setPending(null);
};

for (const button of document.querySelectorAll("nav button")) {
  button.onclick = () => {
    for (const other of document.querySelectorAll("nav button")) {
      other.setAttribute("aria-pressed", String(other === button));
      at(other.dataset.view).hidden = other !== button;
    }
    document.querySelector(".only-chat").hidden = button.dataset.view !== "chat";
  };
}

let lastLoad = null;
async function showLoad() {
  try {
    const live = await (await fetch("live", { headers: keyHeader() })).json();
    const now = performance.now();
    const target = live.runners.target;
    at("model").textContent = live.model;
    at("running").textContent = live.running;
    at("waiting").textContent = live.waiting;
    at("cache").value = target.used / target.capacity;
    at("cache").title = `${target.used} of ${target.capacity} positions, ${target.shared} for shared prefixes`;
    if (lastLoad) at("rate").textContent = ((live.num_tokens - lastLoad.num_tokens) / (now - lastLoad.now) * 1000).toFixed(0);
    lastLoad = { num_tokens: live.num_tokens, now };
  } catch {
    at("running").textContent = "–";
  }
}

async function initialise() {
  const { decoders, chat } = await (await fetch("decoders")).json();
  hasChatTemplate = chat;
  const keys = decoders.map(({ key }) => key);
  const defaultKey = ["autoregressive", "llada"].find((key) => keys.includes(key)) ?? keys[0];
  for (const id of ["decoder", "left", "right"]) {
    at(id).append(...decoders.map(({ key, exactness, summary }) =>
      Object.assign(document.createElement("option"), { value: key, textContent: key, title: `${exactness}: ${summary}` })));
    at(id).value = defaultKey;
  }
  if (keys.includes("auto")) at("decoder").value = "auto";
  const secondKey = ["prompt-lookup", "fast-dllm"].find((key) => keys.includes(key));
  if (secondKey) at("right").value = secondKey;
  await showLoad();
  setInterval(() => document.hidden || showLoad(), 1000);
  document.body.dataset.ready = "yes";
}

initialise();
