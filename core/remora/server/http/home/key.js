// API key of a server that requires one. It stays in this tab, and is sent in a header, so no other site can use it.

const KEPT = "remora-api-key";
let apiKey = keptKey();
let answered = null;  // resolves when the key that is asked for has been entered

function keptKey() {
  try { return sessionStorage.getItem(KEPT) || ""; } catch { return ""; }  // a browser may forbid storage
}

function useKey(key) {
  apiKey = key;
  try { if (key) sessionStorage.setItem(KEPT, key); else sessionStorage.removeItem(KEPT); } catch { /* this page alone knows it */ }
  byId("forget-key").hidden = !key;
}

// Ask for a key once for all requests. They wait for it, because wrong keys are limited.
function askForKey(reason) {
  if (answered) return answered;
  useKey("");
  const input = element("input", { id: "api-key", type: "password", autocomplete: "off", required: true, autofocus: true });
  return answered = new Promise((resolve) => {
    const dialog = element("dialog", { "aria-labelledby": "key-title", onclose: () => dialog.showModal() },
      element("form", { onsubmit: (event) => {
        event.preventDefault();
        answered = null;
        useKey(input.value.trim());
        dialog.remove();
        resolve();
      } }, element("h2", { id: "key-title" }, "This server requires an API key"),
      reason ? element("p", { class: "error", role: "alert" }, reason) : null,
      element("label", { for: "api-key" }, "Key or token, kept until this tab is closed"), input,
      element("button", { class: "primary", type: "submit" }, "Continue")));
    document.body.append(dialog);
    dialog.showModal();
  });
}

byId("forget-key").addEventListener("click", () => { useKey(""); location.reload(); });
useKey(apiKey);

// With a key the pages are read and shown here, because a link sends no header.
document.addEventListener("click", async (event) => {
  const link = event.target.closest("a[href]");
  if (!apiKey || !link || link.origin !== location.origin || link.getAttribute("href").startsWith("#")) return;
  if (event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;  // for a new tab, a window or a file
  event.preventDefault();
  const isCurrent = beginView();
  try {
    const answer = await request(link.href, undefined, { headers: { Accept: "text/html, application/json;q=0.9" } });
    const text = await answer.text();
    const isPage = answer.headers.get("Content-Type")?.startsWith("text/html");
    const shown = isPage ? [...new DOMParser().parseFromString(text, "text/html").body.children] : [element("pre", {}, text)];
    for (const part of shown) for (const each of part.querySelectorAll("a[href]")) each.href = new URL(each.getAttribute("href"), link.href);
    showPage(section(link.textContent, ...shown.filter((each) => each.tagName !== "H1")));
  } catch (error) { showPage(failure(error)); }

  function showPage(content) {
    if (!isCurrent()) return;
    chosen = null;
    shownCharts = [];
    show(SERVER, content);
  }
});
