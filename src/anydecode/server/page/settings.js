// The settings: decoder, sampling, key and theme.

import { server } from "./api.js";
import { at, make } from "./dom.js";

// Values that change nothing; these fields are left out of requests.
const NEUTRAL = { top_k: 0, top_p: 1, min_p: 0, repetition_penalty: 1, presence_penalty: 0, frequency_penalty: 0 };

const samplingFields = () => at("sampling-settings").querySelectorAll("input");

// The sampling fields of a request.
export function sampling() {
  const values = [...samplingFields()]
    .filter((field) => field.value !== "" && Number(field.value) !== NEUTRAL[field.name])
    .map((field) => [field.name, Number(field.value)]);
  return Object.fromEntries(values);
}

// Sets the sampling to the default values, and then to `values`.
export function setSampling(values = {}) {
  for (const field of samplingFields()) field.value = values[field.name] ?? field.defaultValue;
}

// The given seed, or a random one that JavaScript shows without rounding.
const seed = () => (at("seed").value === "" ? Math.floor(Math.random() * 2 ** 32) : Number(at("seed").value));

// The fields of a request that generates, without its prompt.
export function settings(decoder = chosen(at("decoder"), at("decoder-parameters"))) {
  const request = { decoder, ...sampling(), max_tokens: Number(at("tokens").value), seed: seed() };
  if (at("trace").checked) request.trace = "html";
  return request;
}

// The decoder and parameters of two fields, as "key:name=value".
export function chosen(select, parameters) {
  const given = parameters.value.trim();
  return given ? `${select.value}:${given}` : select.value;
}

// Fills `select` with the decoders that can run, by family.
export function listDecoders(select, preferred) {
  const groups = server.families.map((family) => {
    const options = server.decoders
      .filter((card) => card.family === family)
      .map((card) => make("option", { value: card.key, textContent: card.key, title: `${card.exactness}: ${card.summary}` }));
    return make("optgroup", { label: family }, ...options);
  });
  select.replaceChildren(...groups.filter((group) => group.childElementCount));
  select.value = preferred.find(isListed) ?? server.decoders[0]?.key ?? "";
}

export const isListed = (key) => server.decoders.some((card) => card.key === key);

export const cardOf = (key) => server.decoders.find((card) => card.key === key);

// The parameters that requests may give to a decoder, with their values, as text.
export function parameterHint(key) {
  const allowed = (cardOf(key)?.parameters ?? []).filter((one) => one.remote);
  if (!allowed.length) return "It has no parameters that requests may set.";
  return allowed.map((one) => `${one.name}: ${one.remote}`).join("; ");
}

// Selects a decoder for chat and constraints.
export function useDecoder(key) {
  at("decoder").value = key;
  at("decoder-parameters").value = "";
  showHint();
}

function showHint() {
  at("decoder-hint").textContent = parameterHint(at("decoder").value);
}

// Fills the list of decoders.
export function refreshSettings() {
  listDecoders(at("decoder"), [at("decoder").value, "auto", "autoregressive", "llada"]);
  showHint();
}

// Connects the settings. `onKey` is called when the key has changed.
export function startSettings(onKey) {
  at("settings-form").onsubmit = (submit) => submit.preventDefault();
  at("decoder").onchange = () => {
    at("decoder-parameters").value = "";
    showHint();
  };
  at("reset-sampling").onclick = () => {
    setSampling();
    at("sampling-settings").dispatchEvent(new Event("input", { bubbles: true }));
  };
  at("settings").open = matchMedia("(min-width: 64rem)").matches;
  at("key").value = sessionStorage.getItem("key") ?? "";
  at("key").onchange = () => {
    sessionStorage.setItem("key", at("key").value);
    onKey();
  };
  at("theme").value = localStorage.getItem("theme") ?? "";
  at("theme").onchange = () => {
    localStorage.setItem("theme", at("theme").value);
    showTheme();
  };
  showTheme();
}

function showTheme() {
  document.documentElement.dataset.theme = at("theme").value;
}
