// Choice of the view: the server, or one of its models.

let chosen = null;    // { name, version, row, metadata, config } of the model on the page, null for the server
let control = "none";  // how models are loaded: --model-control-mode
const SERVER = "#/server";  // no model has a slash in its name
let views = 0;  // views chosen so far

// Return a function that is true until another view is chosen, so that a late answer does not replace it. The old view
// takes no input any more: it would be sent to the model that was chosen, or be lost.
function beginView() {
  const mine = ++views;
  byId("view").inert = true;
  return () => mine === views;
}

// Keep the view, although another may have been chosen that is not shown yet.
function keepView() {
  views += 1;
  byId("view").inert = false;
}

async function refresh() {
  try {
    const status = await (await request("v2/status", undefined, { headers: { Accept: "application/json" } })).json();
    byId("server").textContent = `${status.server.version}, ${status.server.ready ? "ready" : "not ready"}`;
    control = status.server.control;
    list(status.models);
    if (chosen) {
      chosen.row = status.models.find((each) => each.name === chosen.name && each.version === chosen.version) || chosen.row;
    } else if (!byId("view").dataset.shown) {
      const wanted = decodeURIComponent(location.hash.slice(1));
      const first = status.models.find((each) => each.name === wanted) || status.models.find((each) => each.state === "READY") || status.models[0];
      if (location.hash === SERVER || !first) showServer();
      else await choose(first);
    }
    await observeAll(status);
  } catch (error) {
    byId("server").textContent = `no answer: ${error.message}`;
  } finally {
    setTimeout(refresh, POLL_MS);
  }
}

const isChosen = (each) => Boolean(chosen && chosen.name === each.name && chosen.version === each.version);

function list(models) {
  const key = JSON.stringify(models.map((each) => [each.name, each.version, each.state, each.reason]));
  if (byId("models").dataset.key === key) return;
  const focused = document.activeElement?.dataset?.name;
  byId("models").dataset.key = key;
  byId("models").replaceChildren(...models.map((each) => element("li", {}, element("button", {
    type: "button", "data-name": `${each.name}/${each.version}`, title: each.reason || null, onclick: () => choose(each),
    "aria-current": String(isChosen(each)),
  }, each.name, " ", element("small", {}, `version ${each.version || "-"}, ${each.backend || "unknown"}, `,
    element("span", { class: `state-${each.state}` }, each.state.toLowerCase() || "not loaded"))))));
  if (!models.length) byId("models").append(element("li", { class: "soft" }, "No models are loaded."));
  [...byId("models").querySelectorAll("button")].find((each) => each.dataset.name === focused)?.focus();
}

// Show a view, and mark its button.
function show(hash, ...parts) {
  if (location.hash !== hash) history.replaceState(null, "", hash);
  byId("view").dataset.shown = "1";
  byId("view").inert = false;
  byId("view").replaceChildren(...parts.filter(Boolean));
  const name = chosen && `${chosen.name}/${chosen.version}`;
  byId("server-view").setAttribute("aria-current", String(!chosen));
  for (const each of byId("models").querySelectorAll("button")) each.setAttribute("aria-current", String(each.dataset.name === name));
}

function showServer() {
  beginView();
  chosen = null;
  shownCharts = [];
  show(SERVER, serverCharts(), startup(), traces());
  for (const each of shownCharts) each();
}

async function choose(row) {
  if (isChosen(row) && chosen.isShown) return keepView();  // with what was typed, and its answer
  const isCurrent = beginView();
  chosen = { name: row.name, version: row.version, row, language: chosen?.language };
  shownCharts = [];
  const hash = `#${encodeURIComponent(row.name)}`;
  try {
    const path = pathOf(row.name, row.version);
    const [metadata, config, recorded] = await Promise.all([json(path), json(`${path}/config`), recordedInputs(row)]);
    if (!isCurrent()) return;
    Object.assign(chosen, { metadata, config, recorded });
    const openai = await openaiView(row);
    if (!isCurrent()) return;
    show(hash, openai?.tagName === "SECTION" && openai, form(openai?.tagName !== "SECTION" && openai), modelCharts(row), explanation(), traces(), startup());
    chosen.isShown = true;
    snippets();
    for (const each of shownCharts) each();
  } catch (error) {
    if (isCurrent()) show(hash, section(row.name, element("p", { class: "error" }, row.reason || error.message), controls()));
  }
}

// Buttons that load and unload the model, if the server's mode allows that.
function controls() {
  if (control !== "explicit" && control !== "ondemand") return null;
  const { name } = chosen;
  const note = element("span", { class: "soft", role: "status" });
  const button = (label, action) => element("button", { type: "button", class: "small", onclick: async () => {
    note.textContent = ` ${action}ing`;
    try {
      await request(`v2/repository/models/${name}/${action}`, {});
      note.textContent = ` ${action}ed`;
      beginView();
      chosen = null;  // the versions may have changed: choose by the name in the address again
      delete byId("view").dataset.shown;
    } catch (error) { note.textContent = ` ${error.message}`; }
  } }, label);
  return element("p", {}, button("Load again", "load"), " ", button("Unload", "unload"), note);
}

byId("server-view").addEventListener("click", showServer);
refresh();
