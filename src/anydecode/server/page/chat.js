// The view of a conversation, or of completions.

import { generate, showError, showFacts } from "./answer.js";
import { inWords, server } from "./api.js";
import { announce, at, make, onRun, stop } from "./dom.js";
import { settings } from "./settings.js";

const messages = [];
let last = null; // the newest answer, and its height
const growth = new ResizeObserver(follow);

const isConversation = () => at("ask").elements.mode.value === "chat";

// Selects "chat" or "completion"; a model without a chat template has only completions.
export function setMode(mode) {
  at("ask").elements.mode.value = server.hasChat ? mode : "completion";
  at("chat-mode").hidden = !server.hasChat;
}

function turn(role, text) {
  const item = make("li", { class: role },
    make("h3", { class: "visually-hidden", textContent: role === "user" ? "You" : "Answer" }),
    make("div", { class: "text", textContent: text }));
  if (role === "assistant") item.append(make("dl", { class: "facts" }));
  at("turns").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

// Keeps the end of the newest answer above the form while it grows, if it was there before.
function follow() {
  const { bottom, height } = last.item.getBoundingClientRect();
  const limit = at("ask").getBoundingClientRect().top;
  const wasInView = bottom - (height - last.height) < limit + 1; // scroll positions are rounded
  last.height = height;
  if (bottom > limit && wasInView) last.item.scrollIntoView({ block: "end" });
}

// What the form covers is not in view: neither for a focused control nor for the newest answer.
function reserveForm() {
  document.documentElement.style.scrollPaddingBottom = `${at("ask").offsetHeight}px`;
}

async function answer(signal) {
  const text = at("message").value.trim();
  if (!text) return;
  at("message").value = "";
  at("start").hidden = true;
  turn("user", text);
  const item = turn("assistant", "");
  growth.disconnect();
  last = { item, height: item.getBoundingClientRect().height };
  growth.observe(item);
  const facts = item.querySelector(".facts");
  const message = { role: "user", content: text };
  const request = isConversation() ? { messages: [...messages, message] } : { prompt: text };
  announce("Generating");
  try {
    const result = await generate({ ...settings(), ...request }, item.querySelector(".text"), signal);
    if (request.messages) messages.push(message, { role: "assistant", content: result.text });
    showFacts(facts, result);
    announce(result.text);
  } catch (error) {
    showError(facts, inWords(error));
    announce(inWords(error));
  }
}

function sendOnEnter(key) {
  if (key.key !== "Enter" || key.shiftKey || key.isComposing) return;
  key.preventDefault();
  at("ask").requestSubmit();
}

export function clearChat() {
  stop(at("ask"));
  messages.length = 0;
  at("turns").replaceChildren();
  at("start").hidden = false;
}

export function startChat() {
  onRun(at("ask"), answer);
  new ResizeObserver(reserveForm).observe(at("ask"));
  at("message").onkeydown = sendOnEnter;
  at("clear").onclick = () => {
    clearChat();
    at("message").focus();
  };
}
