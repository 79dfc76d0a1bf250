// Reports that the server computes on request: explanation of batches, start, and traces of the last requests.

// Show what a route answers below a button, or its error.
function onDemand(title, text, label, load) {
  const output = element("div", { class: "output" });
  return section(title, element("p", { class: "soft" }, text),
    element("button", { type: "button", class: "small", onclick: async () => {
      try { output.replaceChildren(...await load()); } catch (error) { output.replaceChildren(failure(error)); }
    } }, label), output);
}

function titled(title, ...children) {
  return [element("h3", {}, title), ...children];
}

function linesOf(title, lines) {
  return lines.length ? titled(title, element("ul", {}, lines.map((each) => element("li", {}, each)))) : [];
}

function explanation() {
  return onDemand("Explain", "How the scheduler runs this model, and what limits it.", "Explain this model", async () => {
    const found = await json(`${pathOf(chosen.name, chosen.version)}/explain`);
    const { measured } = found, parts = [];
    if (measured) {
      parts.push(factsOf({ "requests": measured.requests, "arrivals per s": measured.arrivals_per_s,
        "mean wait, µs": measured.mean_wait_us, "mean batch, rows": measured.mean_batch_rows,
        "instances busy": `${Math.round(measured.busy * 100)} %` }));
      parts.push(...titled("Why batches ran", tableOf(["reason", "batches"], Object.entries(measured.reasons))));
      parts.push(...titled("Batches by size", tableOf(["rows", "batches", "µs each"],
        Object.entries(measured.batch_sizes).map(([size, count]) => [size, count, measured.batch_us[size]]))));
    }
    if (found.answers) parts.push(element("pre", {}, JSON.stringify(found.answers, null, 2)));
    if (found.predicted.length) {
      parts.push(...titled("Predicted", tableOf(["setting", "model alone, req/s", "mean wait, µs", "p99 wait, µs", "mean batch"],
        found.predicted.map((each) => [each.change, each.throughput_per_s, each.mean_wait_us ?? "grows",
          each.p99_wait_us ?? "grows", each.mean_batch_rows]))));
    }
    return [...parts, ...linesOf("Worth trying", found.advice), ...linesOf("Notes", found.notes)];
  });
}

// The start of the server; with a model also the steps of its load, else those of all models.
function startup() {
  const model = chosen?.name;
  return onDemand("Start", "How long each phase of the server's start took.", "Show the start", async () => {
    const found = await json("v2/startup");
    const steps = found.models.filter((each) => !model || each.model === model);
    const slowest = [...found.imports].sort((a, b) => b.ms - a.ms).slice(0, 10);
    return [
      element("p", {}, `Ready after ${Math.round(found.total_ms)} ms`,
        found.first_answer_ms == null ? "." : `, first answer after ${Math.round(found.first_answer_ms)} ms.`),
      tableOf(["phase", "began at ms", "took ms"], found.phases.map((each) => [each.phase, each.begin_ms, each.ms])),
      ...(steps.length ? titled(model ? "This model" : "Models", tableOf(["model", "step", "began at ms", "took ms"],
        steps.map((each) => [each.model, each.step, each.begin_ms, each.ms]))) : []),
      ...(slowest.length ? titled("Slowest imports", tableOf(["module", "took ms", "within"],
        slowest.map((each) => [each.module, each.ms, each.within]))) : []),
    ];
  });
}

const HOW_TO_TRACE = "remora serve MODELS --trace-config level=TIMESTAMPS --trace-config rate=1 --trace-config triton,file=traces.json";
const TRACED_AT_ONCE = 50;

// The last traced requests, each with its phases as bars; of one model or of all.
function traces() {
  const model = chosen?.name;
  return onDemand("Traces", "Where the time of the last traced requests went.", "Show the last traces", async () => {
    const [{ traces: all }, settings] = await Promise.all([json("v2/trace/recent"), json("v2/trace/setting")]);
    const found = all.filter((each) => !model || each.model === model);
    const isOff = settings.trace_level.includes("OFF");
    const hint = [];
    if (isOff && !settings.trace_file && settings.trace_mode === "triton") {
      hint.push(element("p", {}, "Tracing is off, and needs a file for the traces. Start the server with:"), element("pre", {}, HOW_TO_TRACE));
    } else if (isOff) {
      const note = element("span", { class: "soft", role: "status" });
      hint.push(element("p", {}, "Tracing is off. "), element("button", { type: "button", class: "small", onclick: async () => {
        try {
          await json("v2/trace/setting", { trace_level: ["TIMESTAMPS"], trace_rate: "1", trace_count: String(TRACED_AT_ONCE) });
          note.textContent = " On: send requests, then show the last traces again.";
        } catch (error) { note.textContent = ` ${error.message}`; }
      } }, `Trace the next ${TRACED_AT_ONCE} requests`), note);
    } else {
      hint.push(element("p", { class: "soft" }, `Traced: one of ${settings.trace_rate} requests${settings.trace_count === "-1" ? "" : `, ${settings.trace_count} more`}.`));
    }
    if (!found.length) hint.push(element("p", { class: "soft" }, "No traced request yet."));
    return [...hint, ...found.map(traceOf)];
  });
}

function traceOf(trace) {
  const total = Math.max(trace.total_us, 1e-3);
  const bar = (each) => {
    const inner = element("b", {});
    inner.style.left = `${100 * each.begin_us / total}%`;
    inner.style.width = `${100 * each.took_us / total}%`;
    const name = element("span", {}, each.name);
    name.style.paddingLeft = `${each.depth}rem`;
    return element("div", { class: each.error ? "span failed" : "span", title: each.error || null },
      name, element("i", {}, inner), element("span", {}, `${each.took_us.toFixed(1)} µs`));
  };
  const title = [trace.protocol || "in process", `${trace.model}/${trace.version}`, trace.request_id && `id ${trace.request_id}`,
    `${(trace.total_us / 1000).toFixed(2)} ms`, `${(trace.ago_ms / 1000).toFixed(1)} s ago`, trace.error && "failed"].filter(Boolean).join(", ");
  const tokens = trace.events.filter((each) => each.name.endsWith("TOKEN"));
  return element("details", {}, element("summary", {}, title), trace.spans.map(bar),
    tokens.length ? element("p", { class: "soft" }, `${tokens.length} tokens, the first after ${(tokens[0].at_us / 1000).toFixed(2)} ms`) : null,
    trace.error ? element("p", { class: "error" }, trace.error) : null);
}
