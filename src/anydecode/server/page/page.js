// The page at /: chat, two decoders racing, traces and the load. It speaks the same API as any client.
"use strict";

const at = (id) => document.getElementById(id);
const messages = [];
let pending = null; // the AbortController of what is being said
let chats = true; // whether the model has a chat template; if not, the last message is the prompt

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
  const { messages: said, ...rest } = body;
  const asked = chats ? body : { ...rest, prompt: said.at(-1).content };
  const answer = await fetch(chats ? "v1/chat/completions" : "v1/completions", {
    method: "POST", headers, body: JSON.stringify(asked), signal,
  });
  if (!answer.ok) {
    const told = await answer.json().catch(() => null);
    throw new Error(told?.error?.message ?? "the server answered " + answer.status);
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// Streams one answer into `place`; resolves to its text and figures.
async function say(body, place, signal) {
  const began = performance.now();
  const result = { text: "", tokens: 0, first: null, seconds: 0, more: null };
  let thought = null;
  const content = document.createElement("span");
  place.replaceChildren(content);
  let canvas = null;
  for await (const event of events(body, signal)) {
    const choice = event.choices[0] ?? {};
    const delta = choice.delta ?? { content: choice.text };
    if (delta.reasoning_content) {
      if (!thought) place.prepend((thought = Object.assign(document.createElement("span"), { className: "thought" })));
      thought.append(delta.reasoning_content);
    }
    if (delta.content) {
      result.first ??= performance.now() - began;
      result.text += delta.content;
      content.append(delta.content);
    }
    if (event.anydecode?.canvas) {
      if (!canvas) place.append((canvas = Object.assign(document.createElement("span"), { className: "canvas", ariaHidden: "true" })));
      content.hidden = true;
      showCanvas(canvas, event.anydecode.canvas);
    }
    if (event.anydecode?.decoder) result.more = event.anydecode;
    if (event.usage) result.tokens = event.usage.completion_tokens;
  }
  canvas?.remove();
  content.hidden = false;
  result.seconds = (performance.now() - began) / 1000;
  return result;
}

// A diffusion model's canvas while it fills: a dot for a mask, and what came last stands out.
function showCanvas(canvas, places) {
  const before = [...canvas.children];
  canvas.replaceChildren(...places.map((text, index) => {
    const had = before[index]?.className === "mask" ? null : before[index]?.textContent;
    return Object.assign(document.createElement("span"), {
      className: text === null ? "mask" : text === had ? "" : "new",
      textContent: text ?? "·",
    });
  }));
}

function showFacts(place, result) {
  const more = result.more ?? {};
  const facts = [
    more.decoder,
    `${result.tokens} tokens`,
    `${(result.tokens / result.seconds).toFixed(1)} tokens/s`,
    `${(more.tokens_per_pass ?? 0).toFixed(2)} per pass`,
    `${result.seconds.toFixed(2)} s`,
    `seed ${more.seed}`,
  ];
  place.replaceChildren(...facts.map((fact) => Object.assign(document.createElement("span"), { textContent: fact })));
  if (more.trace_html) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: "Trace" });
    button.onclick = () => {
      at("viewer").querySelector("iframe").srcdoc = more.trace_html[0];
      at("viewer").showModal();
    };
    place.append(button);
  }
}

function showError(place, error) {
  const text = error.name === "AbortError" ? "stopped" : error.message;
  place.replaceChildren(Object.assign(document.createElement("span"), { className: "error", textContent: text }));
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

function working(controller) {
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
  working(new AbortController());
  try {
    const body = { ...settings(at("decoder").value), messages };
    const result = await say(body, item.querySelector(".text"), pending.signal);
    messages.push({ role: "assistant", content: result.text });
    showFacts(item.querySelector(".facts"), result);
  } catch (error) {
    messages.pop();
    showError(item.querySelector(".facts"), error);
  }
  working(null);
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
  const asked = [{ role: "user", content: at("prompt").value }];
  working(new AbortController());
  at("verdict").textContent = "";
  const lanes = [...document.querySelectorAll(".lanes article")];
  let winner = null;
  const results = await Promise.all(lanes.map(async (lane) => {
    const facts = lane.querySelector(".facts");
    lane.classList.remove("won");
    facts.replaceChildren();
    try {
      const body = { ...settings(lane.querySelector("select").value), messages: asked, seed };
      const result = await say(body, lane.querySelector("output"), pending.signal);
      if (!winner) (winner = lane).classList.add("won");
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
    at("verdict").textContent = `${winner.querySelector("select").value} came first, ${ratio.toFixed(2)} times as fast; ${same}.`;
  }
  working(null);
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

let before = null;
async function showLoad() {
  try {
    const live = await (await fetch("live", { headers: keyHeader() })).json();
    const now = performance.now();
    const target = live.lanes.target;
    at("model").textContent = live.model;
    at("running").textContent = live.running;
    at("waiting").textContent = live.waiting;
    at("cache").value = target.used / target.capacity;
    at("cache").title = `${target.used} of ${target.capacity} positions, ${target.shared} for shared prefixes`;
    if (before) at("rate").textContent = ((live.said - before.said) / (now - before.now) * 1000).toFixed(0);
    before = { said: live.said, now };
  } catch {
    at("running").textContent = "–";
  }
}

async function begin() {
  const { decoders, chat } = await (await fetch("decoders")).json();
  chats = chat;
  const keys = decoders.map(({ key }) => key);
  const plain = ["autoregressive", "llada"].find((key) => keys.includes(key)) ?? keys[0];
  for (const id of ["decoder", "left", "right"]) {
    at(id).append(...decoders.map(({ key, exactness, summary }) =>
      Object.assign(document.createElement("option"), { value: key, textContent: key, title: `${exactness}: ${summary}` })));
    at(id).value = plain;
  }
  if (keys.includes("auto")) at("decoder").value = "auto";
  const rival = ["prompt-lookup", "fast-dllm"].find((key) => keys.includes(key));
  if (rival) at("right").value = rival;
  await showLoad();
  setInterval(() => document.hidden || showLoad(), 1000);
  document.body.dataset.ready = "yes";
}

begin();
