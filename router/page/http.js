// Requests to the router, and the events that it streams. Every error becomes a Failure with a readable message.

import { Kept } from "./kept.js";

const key = new Kept("sessionStorage", "baton-api-key");

export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export const apiKey = () => key.value;

export const setApiKey = (value) => key.set(value);

// Parsed `data:` events until the stream ends. Throws Failure, or the AbortError of `signal`.
export async function* events(path, { body, signal } = {}) {
  const response = await send(path, body, signal);
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Failure("The router ended the stream early.");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const payload = part.replace(/^data: /, "");
        if (payload === "[DONE]") return;
        const event = JSON.parse(payload);
        if (event.error) throw new Failure(sentence(event.error.message));
        yield event;
      }
    }
  } catch (error) {
    if (error instanceof Failure || error.name === "AbortError") throw error;
    throw new Failure("The connection to the router was lost.");
  } finally {
    reader.cancel().catch(() => {}); // it is over either way
  }
}

async function send(path, body, signal) {
  const headers = apiKey() ? { Authorization: `Bearer ${apiKey()}` } : {};
  const init = { headers, signal, cache: "no-store" };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    Object.assign(init, { method: "POST", body: JSON.stringify(body) });
  }
  try {
    return await fetch(path, init);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The router cannot be reached.");
  }
}

async function refusal(response) {
  let message = `The router answered ${response.status} ${response.statusText}.`;
  try {
    message = sentence((await response.json()).error.message);
  } catch {
    // the error is not the router's own: something between the router and this page answered
  }
  const wait = response.headers.get("Retry-After");
  if (response.status === 429 && wait) message += ` Try again in ${wait} s.`;
  return new Failure(message, response.status);
}

function sentence(message) {
  const text = String(message);
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}
