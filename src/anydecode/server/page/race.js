// The view of a race: decoders side by side, with the same prompt, seed and sampling.

import { generate, showError, showFacts } from "./answer.js";
import { asking, inWords, server } from "./api.js";
import { announce, at, make, onRun } from "./dom.js";
import { cardOf, chosen, listDecoders, parameterHint, sampling, settings } from "./settings.js";

const MIN_RACERS = 2;
const MAX_RACERS = 4;
const PREFERRED = ["autoregressive", "prompt-lookup", "lookahead", "suffix", "llada", "fast-dllm"];
// What the acceptance rules that a request may select claim in place of the card.
const ACCEPTANCE = { rejection: "distribution-exact", typical: "lossy", "top-m": "lossy" };

const racers = () => [...at("racers").children];
const choiceOf = (racer) => chosen(racer.querySelector("select"), racer.querySelector("input"));

// Adds a column with the decoder `key`, by default one that does not race yet.
export function addRacer(key) {
  if (racers().length === MAX_RACERS) at("racers").lastElementChild.remove();
  const taken = racers().map((racer) => racer.querySelector("select").value);
  const racer = at("racer").content.firstElementChild.cloneNode(true);
  const [select, parameters] = [racer.querySelector("select"), racer.querySelector("input")];
  listDecoders(select, [key, ...PREFERRED.filter((one) => !taken.includes(one))]);
  const hint = () => (parameters.title = parameterHint(select.value));
  select.onchange = () => {
    parameters.value = "";
    hint();
  };
  hint();
  racer.querySelector(".remove").onclick = () => {
    racer.remove();
    refreshColumns();
    at("add-racer").focus();
  };
  at("racers").append(racer);
  refreshColumns();
  return racer;
}

function refreshColumns() {
  racers().forEach((racer, index) => {
    racer.querySelector(".racer-name").textContent = `Decoder ${index + 1}`;
    racer.querySelector(".answer").ariaLabel = `Answer of decoder ${index + 1}`;
    racer.querySelector(".remove").hidden = racers().length <= MIN_RACERS;
    racer.querySelector(".remove").ariaLabel = `Remove decoder ${index + 1}`;
  });
  at("add-racer").disabled = racers().length === MAX_RACERS;
}

// Fills the columns anew: the decoders depend on the model.
export function refreshRace() {
  const keys = racers().map((racer) => racer.querySelector("select").value);
  at("racers").replaceChildren();
  for (let index = 0; index < Math.max(MIN_RACERS, keys.length); index += 1) addRacer(keys[index]);
}

async function run(racer, request, signal) {
  const facts = racer.querySelector(".facts");
  const choice = choiceOf(racer);
  try {
    const result = await generate({ ...request, decoder: choice }, racer.querySelector(".answer"), signal);
    showFacts(facts, result);
    return { choice, racer, ...result };
  } catch (error) {
    showError(facts, inWords(error));
    return { choice, racer, error };
  }
}

async function race(signal) {
  at("verdict").replaceChildren();
  for (const racer of racers()) {
    racer.classList.remove("won");
    for (const part of racer.querySelectorAll(".answer, .facts, .claim")) part.replaceChildren();
  }
  const request = { ...settings(), ...asking(at("race-prompt").value) };
  announce("Racing");
  const results = [];
  if (at("in-turn").checked) for (const racer of racers()) results.push(await run(racer, request, signal));
  else results.push(...await Promise.all(racers().map((racer) => run(racer, request, signal))));
  const finished = results.filter((result) => !result.error);
  if (finished.length > 1) showVerdict(finished);
  else announce("The race has not finished.");
}

function showVerdict(results) {
  const ranked = [...results].sort((a, b) => a.seconds - b.seconds);
  const [first, last] = [ranked[0], ranked.at(-1)];
  first.racer.classList.add("won");
  const areEqual = results.every((result) => result.text === results[0].text);
  const count = results.length === 2 ? "Both" : `All ${results.length}`;
  const ratio = (last.seconds / first.seconds).toFixed(2);
  const texts = areEqual ? `${count} texts are equal.` : "The texts are not all equal.";
  const speed = `${first.choice} took the least time; ${last.choice} took ${ratio} times as long.`;
  at("verdict").replaceChildren(make("p", { textContent: `${texts} ${speed}` }));
  const reference = referenceOf(results);
  for (const result of results) showClaim(result, reference);
  announce(`${texts} ${speed}`);
}

// The exactness that a choice claims: its card's, or that of the acceptance rule that it selects.
function exactnessOf(choice) {
  const rule = /:(?:.*,)?acceptance=([a-z-]+)/.exec(choice)?.[1];
  return ACCEPTANCE[rule] ?? cardOf(choice.split(":")[0]).exactness;
}

// The answer that others are compared with: plain decoding, else the first that must equal it.
function referenceOf(results) {
  return results.find((one) => one.choice === "autoregressive")
    ?? results.find((one) => exactnessOf(one.choice) === "token-exact");
}

// How two texts compare with a claim that they are equal, or no such claim.
function verdict(isEqual, isClaimed) {
  if (isClaimed) return isEqual ? "as claimed" : "against the claim";
  return isEqual ? "which is not claimed" : "which the claim allows";
}

function showClaim(result, reference) {
  const claim = result.racer.querySelector(".claim");
  const exactness = exactnessOf(result.choice);
  const meaning = `Claim: ${exactness}: ${server.claims[exactness]}.`;
  const isClaimed = exactness === "token-exact" || (exactness !== "lossy" && sampling().temperature === 0);
  const isEqual = result.text === reference?.text;
  claim.textContent = meaning;
  claim.classList.toggle("error", Boolean(reference) && isClaimed && !isEqual);
  if (!reference || reference === result) return;
  const found = isEqual ? "The same text as" : "Another text than";
  claim.textContent = `${found} ${reference.choice}, ${verdict(isEqual, isClaimed)}. ${meaning}`;
}

export function startRace() {
  onRun(at("race-form"), race);
  at("add-racer").onclick = () => addRacer().querySelector("select").focus();
}
