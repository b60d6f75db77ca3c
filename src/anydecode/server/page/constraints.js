// The view of constraints: an editor that the server validates while one types.

import { generate, showError, showFacts } from "./answer.js";
import { asking, inWords, post } from "./api.js";
import { announce, at, debounced, onRun } from "./dom.js";
import { settings } from "./settings.js";

const TEMPLATES = {
  json: `{
  "type": "object",
  "properties": {
    "name": {"type": "string"},
    "born": {"type": "integer"},
    "fields": {"type": "array", "items": {"type": "string"}, "maxItems": 3}
  },
  "required": ["name", "born", "fields"],
  "additionalProperties": false
}`,
  regex: "\\d{4}-\\d{2}-\\d{2}",
  grammar: 'root ::= "yes" | "no" | "it depends on " [a-z ]{3,30}',
  choice: "red\ngreen\nblue",
};
let isValidating = false;
let isStale = false; // whether the constraint has changed since the validation began

function constraint() {
  const [kind, text] = [at("constraint-kind").value, at("constraint-text").value];
  return { [kind]: kind === "choice" ? text.split("\n").filter(Boolean) : text };
}

function showState(text, isValid) {
  at("constraint-state").textContent = text;
  at("constraint-state").className = isValid === null ? "" : isValid ? "good" : "error";
  at("constraint-text").ariaInvalid = String(isValid === false);
}

function described({ engine, masked, checked }) {
  const parts = [`Valid. Enforced at every token by ${engine}${masked.length ? `: ${masked.join(", ")}` : ""}.`];
  if (checked.length) parts.push(`Checked when a value is complete, and sampled again if wrong: ${checked.join(", ")}.`);
  return parts.join(" ");
}

// Asks the server about the constraint; if it has changed since, asks again. One request at a time.
async function validate() {
  isStale = true;
  if (isValidating) return;
  isValidating = true;
  while (isStale) {
    isStale = false;
    await validateOnce();
  }
  isValidating = false;
}

async function validateOnce() {
  const body = { structured_outputs: constraint() };
  let state;
  try {
    const answer = await (await post("v1/constraints/validate", body)).json();
    state = answer.valid ? [described(answer.constraint), true] : [`Not valid: ${answer.reason}`, false];
  } catch (error) {
    state = [inWords(error), null];
  }
  const isCurrent = JSON.stringify(body.structured_outputs) === JSON.stringify(constraint());
  if (isCurrent) showState(...state);
}

// Shows a constraint and a prompt.
export function setConstraint(kind, text, prompt) {
  at("constraint-kind").value = kind;
  at("constraint-text").value = text ?? TEMPLATES[kind];
  if (prompt !== undefined) at("constraint-prompt").value = prompt;
  showState("", null);
  validate();
}

async function answer(signal) {
  const [view, facts] = [at("constraint-answer"), at("constraint-facts")];
  facts.replaceChildren();
  announce("Generating");
  try {
    const request = { ...settings(), ...asking(at("constraint-prompt").value), structured_outputs: constraint() };
    const result = await generate(request, view, signal);
    showFacts(facts, result);
    announce(result.text);
  } catch (error) {
    showError(facts, inWords(error));
    announce(inWords(error));
  }
}

// Called when the view is opened.
export function openConstraints() {
  if (!at("constraint-text").value) setConstraint("json", undefined, "Describe Ada Lovelace as JSON.");
}

export function startConstraints() {
  onRun(at("constraint-form"), answer);
  const validateSoon = debounced(validate, 400);
  at("constraint-text").oninput = () => {
    showState("", null);
    validateSoon();
  };
  at("constraint-kind").onchange = () => setConstraint(at("constraint-kind").value);
}
