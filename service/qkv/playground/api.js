// Calls of the service, with a key where it needs one, and its problems.

import { askForKey, forgetKey, key } from "./key.js";

/** What the service, or the way to it, has against a call: RFC 9457's members. */
export class Problem extends Error {
  constructor({ title = "The call failed", detail, status = 0, pointer = null }) {
    super(detail ?? title);
    this.name = "Problem";
    this.detail = detail ?? title;
    this.status = status;
    this.pointer = pointer;
  }
}

/** GET, answered in JSON. */
export const get = async (path, signal) => (await call(path, { signal })).json();

/**
 * POST of JSON, answered in JSON.
 *
 * @returns {Promise<{answer: Object, took: number}>} and the milliseconds that this page waited
 */
export async function post(path, body, signal) {
  const begin = performance.now();
  const response = await call(path, posted(body, signal));
  const answer = await response.json();
  return { answer, took: performance.now() - begin };
}

/**
 * POST of JSON, answered in server-sent events.
 *
 * @yields {{event: string, data: Object}}
 */
export async function* events(path, body, signal) {
  const response = await call(path, posted(body, signal, "text/event-stream"));
  let text = "";
  for await (const chunk of read(response.body.pipeThrough(new TextDecoderStream()))) {
    text += chunk.replaceAll("\r\n", "\n");
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      const lines = text.slice(0, end).split("\n");
      text = text.slice(end + 2);
      const said = (name) =>
        lines.filter((l) => l.startsWith(`${name}:`)).map((l) => l.slice(name.length + 1).trim());
      const data = said("data").join("\n");
      if (data) yield { event: said("event")[0] ?? "message", data: JSON.parse(data) };
    }
  }
}

// for await over the stream itself is not in every browser
async function* read(stream) {
  const reader = stream.getReader();
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
  } finally {
    await reader.cancel();
  }
}

function posted(body, signal, wanted = "application/json") {
  const headers = { "Content-Type": "application/json", Accept: wanted };
  return { method: "POST", body: JSON.stringify(body), headers, signal };
}

async function call(path, init) {
  for (;;) {
    const known = key();
    const bearer = known ? { Authorization: `Bearer ${known}` } : {};
    const response = await reach(path, { ...init, headers: { ...init.headers, ...bearer } });
    if (response.ok) return response;
    const problem = await problemOf(response);
    if (response.status !== 401) throw problem;
    if (known && known === key()) forgetKey();
    if (!(await askForKey(Boolean(known)))) throw problem;
  }
}

async function reach(path, init) {
  try {
    return await fetch(path, init);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({ detail: "The service cannot be reached. Is it still running?" });
  }
}

async function problemOf(response) {
  try {
    return new Problem({ status: response.status, ...(await response.json()) });
  } catch {
    return new Problem({ status: response.status, detail: `The answer was ${response.status}.` });
  }
}
