// The view of sampling: the next token's probabilities before and after the settings.
//
// The engine computes both, so that the chart has the rules and their order as generation has.

import { asking, inWords, isAbort, pathOf, post } from "./api.js";
import { announce, at, debounced, make, onRun } from "./dom.js";
import { sampling } from "./settings.js";

const NUM_TOKENS = 20; // as many as the server returns
const STEPS = {
  repetition_penalty: "repetition penalty", temperature: "temperature", top_k: "top-k", top_p: "top-p", min_p: "min-p",
};
let isShown = false;
let update = null; // the AbortController of the running update

// The text of a token, or its bytes if they are a part of a character.
function nameOf({ token, bytes }) {
  return token.includes("\ufffd") ? bytes.map((byte) => "\\x" + byte.toString(16).padStart(2, "0")).join("") : token;
}

// Probabilities by token, the most probable first.
async function distribution(options, signal) {
  const request = { ...asking(at("sampling-prompt").value), ...options, decoder: "autoregressive", max_tokens: 1, ignore_eos: true };
  Object.assign(request, request.messages ? { logprobs: true, top_logprobs: NUM_TOKENS } : { logprobs: NUM_TOKENS });
  const answer = await (await post(pathOf(request), request, signal)).json();
  const { logprobs } = answer.choices[0];
  const pairs = logprobs.content
    ? logprobs.content[0].top_logprobs.map((one) => [nameOf(one), one.logprob])
    : Object.entries(logprobs.top_logprobs[0]);
  const probabilities = pairs.map(([token, value]) => [token, Math.exp(value)]);
  return new Map(probabilities.filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]));
}

const visible = (token) => token.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ | $/g, "␣");

// A probability as text: of null, a removed token; of undefined, one that is not among the listed.
function percent(value) {
  if (value === null) return "removed";
  if (value === undefined) return "not listed";
  return value > 0 && value < 0.0005 ? "< 0.1 %" : `${(100 * value).toFixed(1)} %`;
}

function bar(value, kind, max) {
  const fill = make("span", { class: `bar ${kind}` });
  fill.style.width = `${(100 * (value ?? 0)) / max}%`;
  return make("td", {}, make("span", { class: "track", "aria-hidden": "true" }, fill),
    make("span", { class: value == null ? "removed" : "value", textContent: percent(value) }));
}

const row = (name, before, after, max) =>
  make("tr", {}, make("th", { scope: "row", textContent: name }), bar(before, "before", max), bar(after, "after", max));

const rest = (probabilities) => Math.max(0, 1 - [...probabilities.values()].reduce((sum, value) => sum + value, 0));

function show(before, after) {
  const isCut = rest(after) < 1e-4; // then a token without a row has been removed
  const missing = isCut ? null : undefined;
  const max = Math.max(...before.values(), ...after.values(), rest(before), rest(after));
  const tokens = [...new Set([...before.keys(), ...after.keys()])];
  const rows = tokens.map((token) => row(visible(token), before.get(token), after.get(token) ?? missing, max));
  rows.push(row("all others", rest(before), isCut ? null : rest(after), max));
  at("distribution").tBodies[0].replaceChildren(...rows);
  at("distribution").hidden = false;
  const active = Object.keys(STEPS).filter((name) => name in sampling()).map((name) => STEPS[name]);
  at("distribution-order").textContent = `Applied in this order: ${active.join(", ")}.`;
}

async function refresh(signal) {
  at("sampling-error").textContent = "";
  try {
    const after = sampling();
    const results = [distribution({ temperature: 1 }, signal), distribution({ ...after, processed_logprobs: true }, signal)];
    show(...await Promise.all(results));
    isShown = true;
  } catch (error) {
    if (!isAbort(error)) at("sampling-error").textContent = inWords(error);
  }
}

async function refreshAgain() {
  if (!isShown || at("sampling").hidden) return;
  update?.abort();
  update = new AbortController();
  await refresh(update.signal);
}

// Called when the view is opened.
export function openSampling() {
  if (!isShown) at("sampling-form").requestSubmit();
  else refreshAgain();
}

export function startSampling() {
  onRun(at("sampling-form"), async (signal) => {
    await refresh(signal);
    if (isShown) announce("The distribution is shown in the table.");
  });
  at("sampling-settings").addEventListener("input", debounced(refreshAgain, 250));
}
