// Chat and embeddings over OpenAI's routes.

let served = null;  // names of the models that OpenAI's routes serve

async function openaiModels() {
  if (served) return served;
  try { served = (await json("v1/models")).data.map((each) => each.id); } catch { served = []; }
  return served;
}

// Return the view of a model for OpenAI's routes, null if they do not serve it.
async function openaiView(row) {
  const view = { text: chat, embeddings }[row.openai];
  if (!view) return null;
  if ((await openaiModels()).includes(row.name)) return view();
  return element("p", {}, element("small", { class: "soft" }, "remora serve --openai adds OpenAI's routes."));
}

function chat() {
  const messages = [];
  const log = element("div", { class: "chat", role: "log", "aria-label": "conversation" });
  const text = element("textarea", { id: "chat-text", rows: 2, "aria-label": "message", placeholder: "Message; Enter sends, Shift+Enter begins a line",
    onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); box.requestSubmit(); } } });
  const most = element("input", { id: "chat-tokens", inputmode: "numeric", value: "256" });
  const temperature = element("input", { id: "chat-temperature", inputmode: "decimal", value: "0.7" });
  const takesMessages = Boolean(chosen.config.parameters?.openai?.string_value?.includes("chat_template"))
    || chosen.config.input.some((each) => each.name === "messages");
  const plain = element("input", { type: "checkbox", checked: !chosen.row.generates && !takesMessages });
  const send = element("button", { class: "primary", type: "submit" }, "Send");
  const stop = stopButton();
  const figures = element("p", { class: "soft", role: "status" });
  const add = (role, content) => {
    const line = element("p", { class: role }, content);
    log.append(line);
    log.scrollTop = log.scrollHeight;
    return line;
  };
  const box = element("form", { onsubmit: async (event) => {
    event.preventDefault();
    const content = text.value;
    if (!content.trim() || send.disabled) return;
    text.value = "";
    send.disabled = true;
    messages.push({ role: "user", content });
    add("user", content);
    const line = add("assistant", "");
    const begin = performance.now();
    let first = null, usage = null;
    try {
      const asked = { model: chosen.name, stream: true, stream_options: { include_usage: true }, max_tokens: Number(most.value), temperature: Number(temperature.value) };
      const body = plain.checked ? { ...asked, prompt: content } : { ...asked, messages };
      const answer = await request(plain.checked ? "v1/completions" : "v1/chat/completions", body, { signal: stop.begin() });
      for await (const data of eventsOf(answer)) {
        if (data === "[DONE]") break;
        const piece = JSON.parse(data);
        if (piece.error) throw new Error(piece.error.message);
        usage = piece.usage || usage;
        const words = piece.choices?.[0]?.delta?.content ?? piece.choices?.[0]?.text ?? "";
        if (words && first == null) first = performance.now();
        line.append(words);
        log.scrollTop = log.scrollHeight;
      }
    } catch (error) {
      if (!stop.stopped) add("assistant", "").append(failure(error));
    } finally {
      stop.end();
      send.disabled = false;
      if (line.textContent) messages.push({ role: "assistant", content: line.textContent }); else line.remove();
      const seconds = (performance.now() - (first ?? begin)) / 1000;
      figures.textContent = [stop.stopped && "stopped", first != null && `first token after ${Math.round(first - begin)} ms`,
        usage && `${usage.completion_tokens} tokens, ${(usage.completion_tokens / seconds).toFixed(1)} per second`].filter(Boolean).join(", ");
      text.focus();
    }
  } }, text, element("div", { class: "fields" },
    element("label", {}, "Most tokens", most), element("label", {}, "Temperature", temperature)),
  element("label", { class: "check" }, plain, "Continue the text, without a chat template"), send, stop.button, " ",
  element("button", { type: "button", class: "small", onclick: () => { messages.length = 0; log.replaceChildren(); figures.textContent = ""; } }, "New conversation"));
  return section("Chat", log, box, figures);
}

function embeddings() {
  const text = element("textarea", { id: "embedding-texts", rows: 4, "aria-label": "texts, one in each line" });
  text.value = "The cat sleeps on the sofa.\nA kitten naps on the couch.\nShares fell sharply on Monday.";
  const output = element("div", { class: "output" });
  const box = element("form", { onsubmit: async (event) => {
    event.preventDefault();
    const lines = text.value.split("\n").map((each) => each.trim()).filter(Boolean);
    const begin = performance.now();
    try {
      const { data } = await json("v1/embeddings", { model: chosen.name, input: lines, encoding_format: "float" });
      const vectors = data.map((each) => each.embedding);
      output.replaceChildren(cosineTable(lines, vectors),
        element("p", { class: "soft" }, `${vectors[0].length} dimensions, ${(performance.now() - begin).toFixed(1)} ms, with the network`));
    } catch (error) { output.replaceChildren(failure(error)); }
  } }, element("label", { for: "embedding-texts" }, "Texts, one in each line"), text,
  element("button", { class: "primary", type: "submit" }, "Compare"));
  return section("Embeddings", box, output);
}

function cosine(left, right) {
  const dot = (a, b) => a.reduce((sum, each, index) => sum + each * b[index], 0);
  return dot(left, right) / (Math.sqrt(dot(left, left) * dot(right, right)) || 1);
}

function cosineTable(texts, vectors) {
  const short = (each) => (each.length > 24 ? `${each.slice(0, 23)}…` : each);
  return element("div", { class: "scroll" }, element("table", { class: "cosines" },
    element("caption", { class: "soft" }, "Cosine of each pair"),
    element("thead", {}, element("tr", {}, element("td", {}), texts.map((each) => element("th", { scope: "col", title: each }, short(each))))),
    element("tbody", {}, texts.map((each, row) => element("tr", {}, element("th", { scope: "row", title: each }, short(each)),
      vectors.map((vector) => {
        const value = cosine(vectors[row], vector);
        const cell = element("td", {}, value.toFixed(3));
        cell.style.background = `color-mix(in srgb, var(--main) ${Math.round(45 * Math.max(value, 0))}%, transparent)`;
        return cell;
      }))))));
}
