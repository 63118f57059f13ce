// Sends requests to the service, with the API key if it requires one.

import { forgetKey, getKey, promptForKey } from "./api_key.js";
import { encodeBody, JSON_TYPE } from "./data/request_body.js";

/** An error response of the service (RFC 9457) or a failed connection. */
export class Problem extends Error {
  constructor({ title = "The request failed", detail, status = 0, pointer = null }) {
    super(detail ?? title);
    this.name = "Problem";
    this.detail = detail ?? title;
    this.status = status;
    this.pointer = pointer;
    this.isUnreachable = status === 0;
  }
}

/** Sends GET and returns the JSON of the response. */
export const get = async (path, signal) => (await sendRequest(path, { signal })).json();

/**
 * Sends a body by POST, as JSON or safetensors, and returns the JSON of the response.
 *
 * @returns {Promise<{result: Object, elapsedMs: number}>} `elapsedMs`: as measured by this page
 */
export async function post(path, body, signal) {
  const startedAt = performance.now();
  const response = await sendRequest(path, postOptions(body, signal));
  const result = await response.json();
  return { result, elapsedMs: performance.now() - startedAt };
}

/**
 * Sends JSON by POST and yields the server-sent events of the response.
 *
 * @yields {{event: string, data: Object}}
 */
export async function* streamEvents(path, body, signal) {
  const response = await sendRequest(path, postOptions(body, signal, "text/event-stream"));
  let text = "";
  for await (const chunk of readChunks(response.body.pipeThrough(new TextDecoderStream()))) {
    text += chunk.replaceAll("\r\n", "\n");
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      const lines = text.slice(0, end).split("\n");
      text = text.slice(end + 2);
      const fieldValues = (name) =>
        lines.filter((l) => l.startsWith(`${name}:`)).map((l) => l.slice(name.length + 1).trim());
      const data = fieldValues("data").join("\n");
      if (data) yield { event: fieldValues("event")[0] ?? "message", data: JSON.parse(data) };
    }
  }
}

// not every browser supports `for await` over a stream
async function* readChunks(stream) {
  const reader = stream.getReader();
  try {
    for (let next = await reader.read(); !next.done; next = await reader.read()) yield next.value;
  } finally {
    await reader.cancel();
  }
}

function postOptions(body, signal, accept = JSON_TYPE) {
  const { content, type } = encodeBody(body);
  return {
    method: "POST",
    body: content,
    headers: { "Content-Type": type, Accept: accept },
    signal,
  };
}

async function sendRequest(path, init) {
  for (;;) {
    const apiKey = getKey();
    const bearer = apiKey ? { Authorization: `Bearer ${apiKey}` } : {};
    const response = await fetchOrThrow(path, { ...init, headers: { ...init.headers, ...bearer } });
    if (response.ok) return response;
    const problem = await parseProblem(response);
    if (response.status !== 401) throw problem;
    if (apiKey && apiKey === getKey()) forgetKey();
    if (!(await promptForKey(Boolean(apiKey)))) throw problem;
  }
}

async function fetchOrThrow(path, init) {
  try {
    return await fetch(path, init);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({
      detail: "The service does not respond. The page asks again until it does.",
    });
  }
}

async function parseProblem(response) {
  try {
    return new Problem({ status: response.status, ...(await response.json()) });
  } catch {
    return new Problem({
      status: response.status,
      detail: `The service responded with status ${response.status}.`,
    });
  }
}
