// The examples that the page opens with: each fills a view's form and runs it.

import { server } from "./api.js";
import { clearChat, setMode } from "./chat.js";
import { setConstraint } from "./constraints.js";
import { at, make, restart } from "./dom.js";
import { isListed, setSampling } from "./settings.js";

const EXAMPLES = [
  {
    title: "Chat", note: "a question, answered at temperature 0.7",
    view: "chat", mode: "chat", text: "Why is the sky blue? Answer in two sentences.",
  },
  {
    title: "Completion", note: "the text goes on as it is, without the chat template",
    view: "chat", mode: "completion", text: "The lighthouse keeper had not spoken to anyone for a year, until",
  },
  {
    title: "JSON Schema", note: "an object with the properties of a schema",
    view: "constraints", kind: "json", text: "Describe Ada Lovelace as JSON.", sampling: { temperature: 0.3 },
  },
  {
    title: "Regular expression", note: "a date, whatever the model prefers to say",
    view: "constraints", kind: "regex", text: "On which date did people first land on the Moon?", sampling: { temperature: 0 },
  },
  {
    title: "Creative", note: "a high temperature, with min-p against nonsense",
    view: "chat", mode: "chat", text: "Write the first lines of a story about a library at the bottom of the sea.",
    sampling: { temperature: 1.3, min_p: 0.1 },
  },
  {
    title: "Race", note: "plain decoding and drafts from the text, side by side",
    view: "race", text: "Write a Python function for each of add, subtract, multiply and divide of two numbers.", sampling: { temperature: 0 },
  },
];
// Of the tasks that the small diffusion models are trained on.
const TASKS = [
  { title: "Sort", note: "names in the order of the alphabet", text: "sort Leo Ada Ben:" },
  { title: "Shuffle", note: "another order: several answers are right", text: "shuffle Leo Ada Ben:" },
  { title: "Insert", note: "a name into a list, at a position", text: "insert Leo at 2 in Ada Ben:" },
  { title: "Add", note: "the sum of two numbers", text: "13+18=" },
  { title: "Chain", note: "a sum, one step after the other", text: "chain 3+1+2:" },
  { title: "JSON", note: "a record in another notation", text: "json age 28 city Rome:" },
].map((task) => ({ ...task, view: "chat", mode: "completion", tokens: 32, sampling: { temperature: 0 } }));
const FORMS = { chat: "ask", constraints: "constraint-form", race: "race-form" };
const FIELDS = { chat: "message", constraints: "constraint-prompt", race: "race-prompt" };

function fill(example) {
  setSampling(example.sampling);
  if (example.tokens) at("tokens").value = example.tokens;
  if (example.view === "chat") {
    clearChat();
    setMode(example.mode);
  }
  if (example.kind) setConstraint(example.kind);
  at(FIELDS[example.view]).value = example.text;
}

// Offers the examples that suit the model: a diffusion model without a chat template has tasks.
export function refreshExamples() {
  const examples = server.hasChat || isListed("autoregressive") ? EXAMPLES : TASKS;
  at("examples").replaceChildren(...examples.map((example) => {
    const button = make("button", { type: "button" }, make("strong", { textContent: example.title }), make("span", { textContent: example.note }));
    button.onclick = () => {
      fill(example);
      location.hash = example.view;
      restart(at(FORMS[example.view]));
    };
    return make("li", {}, button);
  }));
}
