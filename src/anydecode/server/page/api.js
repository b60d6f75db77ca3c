// Requests to the server.

import { at } from "./dom.js";

// What the server serves: its models, the selected one, and the decoders that can run on it.
export const server = {
  models: [], model: null, hasChat: true, decoders: [], unavailable: [], claims: {}, families: [],
};

const hasChoice = () => server.models.length > 1;

function headers() {
  const key = at("key").value;
  return key ? { authorization: "Bearer " + key } : {};
}

async function checked(response) {
  if (response.ok) return response;
  if (response.status === 401) {
    throw new Error("This server requires an API key: enter it in the settings, under Access.");
  }
  const failure = await response.json().catch(() => null);
  throw new Error(failure?.error?.message ?? `the server returned status ${response.status}`);
}

// The error of a request in the user's words.
export function inWords(error) {
  if (isAbort(error)) return "stopped";
  if (error instanceof TypeError) return "the server cannot be reached; is it still running?";
  return error.message;
}

// Whether an error only says that the request was stopped.
export const isAbort = (error) => error.name === "AbortError";

// The JSON at `path`.
export async function get(path) {
  return (await checked(await fetch(path, { headers: headers() }))).json();
}

// The JSON at `path` for the selected model; of an adapter, for the model that it belongs to.
export function getOfModel(path) {
  if (!hasChoice()) return get(path);
  const { id, parent } = server.models.find((one) => one.id === server.model);
  return get(`${path}?model=${encodeURIComponent(parent ?? id)}`);
}

// Sends `body` as JSON, for the selected model.
export async function post(path, body, signal) {
  const content = hasChoice() ? { ...body, model: server.model } : body;
  return checked(await fetch(path, {
    method: "POST",
    headers: { "content-type": "application/json", ...headers() },
    body: JSON.stringify(content),
    signal,
  }));
}

// The path that answers a request: it has `messages` or a `prompt`.
export const pathOf = (request) => (request.messages ? "v1/chat/completions" : "v1/completions");

// A request with one text: a conversation if the model has a chat template.
export const asking = (text) =>
  server.hasChat ? { messages: [{ role: "user", content: text }] } : { prompt: text };

// The events of a streamed answer.
export async function* events(request, signal) {
  const response = await post(pathOf(request), { ...request, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (buffer + value).split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
