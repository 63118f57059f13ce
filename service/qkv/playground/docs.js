// Shows the API document. The page fetches it, and sends requests, with the user's API key.

import { get } from "./api.js";
import { getKey } from "./api_key.js";
import { h } from "./dom.js";

/** Adds the API key to a request of the document's page. */
function addKey(request) {
  const key = getKey();
  if (key) request.headers.Authorization ??= `Bearer ${key}`;
  return request;
}

async function start() {
  const main = document.querySelector("main");
  try {
    const spec = await get("/openapi.json");
    globalThis.SwaggerUIBundle({
      spec,
      domNode: main,
      deepLinking: true,
      requestInterceptor: addKey,
    });
  } catch (error) {
    main.replaceChildren(h("p", { role: "alert" }, error.message));
  }
}

start();
