// The web page at /: opens its views, and reads what the server serves. Uses the public API only.

import { get, getOfModel, inWords, server } from "./api.js";
import { setMode, startChat } from "./chat.js";
import { openConstraints, startConstraints } from "./constraints.js";
import { at, make } from "./dom.js";
import { refreshExamples } from "./examples.js";
import { refreshGallery, startGallery } from "./gallery.js";
import { openLoad, resetLoad, startLoad } from "./load.js";
import { refreshRace, startRace } from "./race.js";
import { openSampling, startSampling } from "./sampling.js";
import { refreshSettings, startSettings } from "./settings.js";

const ON_OPEN = { constraints: openConstraints, sampling: openSampling, load: openLoad };
const links = () => [...document.querySelectorAll("nav a")];

function showView(name) {
  document.body.dataset.view = name;
  for (const link of links()) {
    const isCurrent = link.hash === "#" + name;
    at(link.hash.slice(1)).hidden = !isCurrent;
    if (isCurrent) link.ariaCurrent = "page";
    else link.removeAttribute("aria-current");
  }
  ON_OPEN[name]?.();
}

// Opens the view that the address names.
function openCurrent() {
  const name = location.hash.slice(1);
  if (!links().some((link) => link.hash === "#" + name)) return;
  showView(name);
  scrollTo(0, 0);
  at(name + "-title").focus({ preventScroll: true });
}

function showProblem(error) {
  at("problem").hidden = !error;
  at("problem").textContent = error ? inWords(error) : "";
}

async function readModels() {
  const { data } = await get("v1/models");
  const isListed = data.some((one) => one.id === server.model);
  Object.assign(server, { models: data, model: isListed ? server.model : data[0].id });
  at("model").replaceChildren(...data.map((one) => make("option", { value: one.id, textContent: one.id })));
  at("model").value = server.model;
  at("model-choice").hidden = data.length === 1;
  at("model-name").hidden = data.length > 1;
  at("model-name").textContent = server.model;
}

async function readDecoders() {
  const { chat, ...lists } = await getOfModel("decoders");
  Object.assign(server, lists, { hasChat: chat });
  refreshSettings();
  refreshRace();
  refreshGallery();
  refreshExamples();
  setMode("chat");
}

async function read() {
  showProblem(null);
  await readModels().catch(showProblem);
  await readDecoders().catch(showProblem); // needs no key
}

at("model").onchange = async () => {
  server.model = at("model").value;
  resetLoad();
  await readDecoders().catch(showProblem);
};

startSettings(read);
startChat();
startRace();
startConstraints();
startSampling();
startGallery();
startLoad();
addEventListener("hashchange", openCurrent);
at("skip").onclick = () => at(document.body.dataset.view + "-title").focus();
await read();
openCurrent();
document.body.dataset.ready = "yes";
