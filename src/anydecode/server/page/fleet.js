// The workers of a fleet, in the view of the load.

import { at, make } from "./dom.js";

const percent = (value) => `${(100 * value).toFixed(1)} %`;
const number = (value) => value.toLocaleString("en");
const COLUMNS = {
  Role: (one) => one.role,
  Scenario: (one) => one.scenario,
  State: (one) => one.state,
  Answers: (one) => number(one.tasks),
  "Rows to compute": (one) => number(one.waiting_rows),
  "Cache used": (one) => percent(one.used / one.positions),
  Leases: (one) => number(one.leases),
  Passes: (one) => number(one.passes),
  "Rows computed": (one) => number(one.rows),
  "Reused tokens": (one) => number(one.hits),
};

// The cache positions of all workers.
export function cacheOfFleet({ workers }) {
  const sum = (name) => workers.reduce((total, one) => total + one[name], 0);
  return { used: sum("used"), capacity: sum("positions") || 1 };
}

// What has happened in a fleet so far.
export function fleetInWords({ counts }) {
  const parts = Object.entries(counts).map(([name, count]) => `${name.replaceAll("_", " ")} ${number(count)}`);
  return `The fleet so far: ${parts.join(", ")}.`;
}

// Shows the workers; none for null.
export function drawFleet(fleet) {
  at("fleet").hidden = !fleet;
  if (!fleet) return;
  const hasScenarios = fleet.workers.some((one) => one.scenario !== null);
  const columns = Object.entries(COLUMNS).filter(([name]) => name !== "Scenario" || hasScenarios);
  const heads = ["Worker", ...columns.map(([name]) => name)];
  at("fleet-head").replaceChildren(...heads.map((name) => make("th", { scope: "col", textContent: name })));
  const workers = fleet.workers.toSorted((one, other) => one.name.localeCompare(other.name, "en", { numeric: true }));
  at("fleet-workers").replaceChildren(...workers.map((one) => make("tr", { class: one.state },
    make("th", { scope: "row", textContent: one.name }),
    ...columns.map(([, text]) => make("td", { textContent: text(one) ?? "any" })))));
  at("fleet-none").hidden = fleet.workers.length > 0;
}
