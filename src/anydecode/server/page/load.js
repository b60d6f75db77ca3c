// The view of the live load: current values, and charts of the last two minutes.

import { getOfModel, inWords } from "./api.js";
import { at, make } from "./dom.js";
import { cacheOfFleet, drawFleet, fleetInWords } from "./fleet.js";

const SECONDS = 120;
const MAX_GAP = 3; // seconds between two samples that a line joins
const [WIDTH, HEIGHT] = [240, 64];
const SVG = "http://www.w3.org/2000/svg";
const CHARTS = {
  running: { title: "Running requests", text: (value) => value.toFixed(0), floor: 4 },
  waiting: { title: "Waiting requests", text: (value) => value.toFixed(0), floor: 4 },
  cache: { title: "Cache used", text: (value) => `${(100 * value).toFixed(1)} %`, floor: 0.05 },
  rate: { title: "Tokens per second", text: (value) => value.toFixed(0), floor: 10 },
  between: { title: "Time between tokens", text: (value) => `${(1000 * value).toFixed(1)} ms`, floor: 0.01 },
};
let samples = []; // by chart name, and when; null where nothing was generated
let last = null; // the load read before, and when
const views = {};

function newChart(name) {
  const value = make("strong", { textContent: "–" });
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  const line = document.createElementNS(SVG, "path");
  svg.append(line);
  const scale = make("span", { class: "hint" });
  views[name] = { value, svg, line, scale };
  const axis = make("div", { class: "axis", "aria-hidden": "true" },
    ...["2 min ago", "1 min ago", "now"].map((textContent) => make("span", { textContent })));
  return make("figure", {}, make("figcaption", {}, make("span", { textContent: CHARTS[name].title }), value), svg, axis, scale);
}

// The path of a series, the newest value at the right; gaps where a value is null or none was read.
function pathOfSeries(values, max) {
  const times = samples.map((sample) => sample.time);
  return values.map((value, index) => {
    if (value === null) return "";
    const isJoined = index > 0 && values[index - 1] !== null && times[index] - times[index - 1] <= MAX_GAP;
    const x = WIDTH - (times.at(-1) - times[index]) * (WIDTH / SECONDS);
    const y = HEIGHT - 2 - (value / max) * (HEIGHT - 4);
    const point = `${x.toFixed(1)} ${y.toFixed(1)}`;
    return isJoined ? `L${point}` : `M${point}h0`; // a single value is a dot
  }).join("");
}

function draw(name) {
  const { title, text, floor } = CHARTS[name];
  const { value, svg, line, scale } = views[name];
  const values = samples.map((sample) => sample[name]);
  const known = values.filter((one) => one !== null);
  const peak = Math.max(0, ...known);
  const highest = known.length ? `highest ${text(peak)}` : "no tokens yet";
  const current = values.at(-1);
  value.textContent = current === null ? "–" : text(current);
  scale.textContent = highest;
  line.setAttribute("d", pathOfSeries(values, Math.max(peak, floor)));
  svg.setAttribute("aria-label", `${title} of the last two minutes: now ${value.textContent}, ${highest}`);
}

function sampleOf(live, now) {
  const own = live.runners.target ?? { used: 0, capacity: 1 };
  const { used, capacity } = live.fleet ? cacheOfFleet(live.fleet) : own;
  const seconds = last ? (now - last.now) / 1000 : 0;
  const tokens = last ? Math.max(0, live.num_tokens - last.live.num_tokens) : 0;
  const running = last ? (live.running + last.live.running) / 2 : live.running;
  return {
    time: now / 1000,
    running: live.running,
    waiting: live.waiting,
    cache: used / capacity,
    rate: seconds ? tokens / seconds : 0,
    between: tokens && running ? (running * seconds) / tokens : null,
  };
}

function details(live) {
  if (live.status !== "loaded") return "The model is not loaded: the next request for it loads it.";
  if (live.fleet) return `${live.num_tokens} tokens since the start. ${fleetInWords(live.fleet)}`;
  const runners = Object.entries(live.runners).map(([name, runner]) =>
    `${name}: ${runner.used} of ${runner.capacity} cache positions, ${runner.shared} with prefixes, ${runner.passes} passes`);
  return `${live.num_tokens} tokens since the start; ${live.preemptions} preemptions. ${runners.join("; ")}.`;
}

async function refresh() {
  try {
    const live = await getOfModel("live");
    const now = performance.now();
    samples.push(sampleOf(live, now));
    samples = samples.filter((sample) => now / 1000 - sample.time <= SECONDS);
    last = { live, now };
    at("load-error").textContent = "";
    if (at("load").hidden) return;
    Object.keys(CHARTS).forEach(draw);
    at("load-details").textContent = details(live);
    drawFleet(live.fleet);
  } catch (error) {
    last = null;
    if (at("load-error").textContent !== inWords(error)) at("load-error").textContent = inWords(error);
  }
}

// Forgets what was read, of another model.
export function resetLoad() {
  samples = [];
  last = null;
}

export function startLoad() {
  at("charts").append(...Object.keys(CHARTS).map(newChart));
  setInterval(() => document.hidden || refresh(), 1000);
}

export const openLoad = refresh;
