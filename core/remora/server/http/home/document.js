"use strict";
// Elements of the document, and requests to the server.

const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child != null));
  return made;
}

function drawing(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function section(title, ...children) {
  return element("section", {}, element("h2", {}, title), ...children);
}

function failure(error) {
  return element("p", { class: "error", role: "alert" }, error.message);
}

function tableOf(head, rows) {
  return element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, head.map((each) => element("th", { scope: "col" }, each)))),
    element("tbody", {}, rows.map((row) => element("tr", {},
      row.map((each) => element("td", {}, each == null ? "" : String(each))))))));
}

function factsOf(facts) {
  return element("div", { class: "facts" }, Object.entries(facts).map(([name, value]) => element("span", {},
    element("span", { class: "soft" }, name), element("b", {}, String(value)))));
}

// Return the answer of a request, or throw an error with the server's text. A server with keys asks for one first.
async function request(path, body, options = {}) {
  const sent = body === undefined ? {} : { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  for (;;) {
    await answered;  // while a key is asked for
    const used = apiKey;
    const headers = { ...sent.headers, ...options.headers, ...(used && { "X-API-Key": used }) };
    const answer = await fetch(path, { ...sent, ...options, headers });
    if (answer.ok) return answer;
    const text = await answer.text();
    let found;
    try { found = JSON.parse(text).error; } catch { found = text; }
    if (answer.status !== 401) throw new Error(`${answer.status}: ${found?.message || found || answer.statusText}`);
    if (used === apiKey) await askForKey(used && (found?.message || found));
  }
}

async function json(path, body) {
  return (await request(path, body)).json();
}

// Yield the data of server-sent events as they arrive.
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data:")) yield part.slice(5).trim();
  }
}

// Button that ends a request in flight; the server then frees what the request held.
function stopButton() {
  let controller = null;
  const button = element("button", { type: "button", class: "small", disabled: true, onclick: () => controller?.abort() }, "Stop");
  return {
    button,
    begin() { controller = new AbortController(); button.disabled = false; return controller.signal; },
    end() { button.disabled = true; },
    get stopped() { return Boolean(controller?.signal.aborted); },
  };
}

const pathOf = (name, version) => `v2/models/${name}${version ? `/versions/${version}` : ""}`;
