// Live figures: the status and the metrics of the server, read once a second, as small charts.

const POLL_MS = 1000;
const POINTS = 120;
const LEAST_BARS = 8;   // places in a chart of bars, so that a single bar is not as wide as the chart
const WINDOW = 5;       // samples over which quantiles are computed
const series = new Map();  // values over time, by model ("name/version", "" for the server) and name
const samples = new Map(); // last samples of counters, by model
const MEMORY = { "server memory": "process_resident_memory_bytes", memory: "remora_memory_used_bytes", "memory limit": "remora_memory_limit_bytes" };
let metricsError = "";
let shownCharts = [];

const WANTED = /^(remora_request_duration_seconds_bucket|remora_memory_|process_resident_memory_|nv_cpu_utilization|nv_gpu_|remora_open_connections|vllm:(request_success|num_requests_|generation_tokens_total|e2e_request_latency_seconds_bucket|time_to_first_token_seconds_bucket))/;

// Return the rows of Prometheus' text that the page shows.
function metricsOf(text) {
  const rows = [];
  for (const line of text.split("\n")) {
    if (!WANTED.test(line)) continue;
    const [, name, labels = "", value] = /^([\w:]+)(?:\{(.*)\})? (\S+)/.exec(line) || [];
    if (name) rows.push({ name, value: Number(value), labels: Object.fromEntries([...labels.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map((each) => [each[1], each[2]])) });
  }
  return rows;
}

// Return the duration in ms that the part `share` of requests did not exceed, null without requests.
function quantile(now, before, share) {
  const counts = now.map(([bound, count], index) => [bound, count - (before[index]?.[1] || 0)]);
  const total = counts.at(-1)?.[1] || 0;
  if (total <= 0) return null;
  let lower = 0, below = 0;
  for (const [bound, count] of counts) {
    if (count >= share * total) {
      if (!Number.isFinite(bound)) return lower * 1000;
      return 1000 * (lower + (bound - lower) * (share * total - below) / Math.max(count - below, 1e-9));
    }
    lower = bound;
    below = count;
  }
  return lower * 1000;
}

function push(key, name, value) {
  const id = `${key} ${name}`;
  if (!series.has(id)) series.set(id, []);
  const values = series.get(id);
  values.push(value);
  if (values.length > POINTS) values.shift();
}

// Add the change of a model's (or the server's) counters to its series.
function observe(key, sample) {
  if (!samples.has(key)) samples.set(key, []);
  const known = samples.get(key);
  const last = known.at(-1);
  known.push(sample);
  if (known.length > WINDOW + 1) known.shift();
  if (!last) return;
  const reloaded = sample.requests < last.requests;  // a new version counts from 0
  if (reloaded) known.splice(0, known.length - 1);
  const seconds = (sample.time - last.time) / 1000;
  const executions = sample.executions - last.executions;
  push(key, "rate", reloaded ? 0 : (sample.requests - last.requests) / seconds);
  push(key, "waiting", sample.waiting);
  push(key, "running", sample.running);
  push(key, "batch", executions > 0 ? (sample.rows - last.rows) / executions : null);
  push(key, "p50", quantile(sample.buckets, known[0].buckets, 0.5));
  push(key, "p99", quantile(sample.buckets, known[0].buckets, 0.99));
  if (!sample.first) return;
  push(key, "tokens", reloaded ? 0 : (sample.tokens - last.tokens) / seconds);
  push(key, "first p50", quantile(sample.first, known[0].first, 0.5));
  push(key, "first p99", quantile(sample.first, known[0].first, 0.99));
}

function addUp(all) {
  const sum = (name) => all.reduce((total, each) => total + each[name], 0);
  // Language models have other bounds than the others.
  const bounds = [...new Set(all.flatMap((each) => each.buckets.map(([bound]) => bound)))].sort((a, b) => a - b);
  const below = (buckets, most) => buckets.findLast(([bound]) => bound <= most)?.[1] || 0;
  const buckets = bounds.map((bound) => [bound, all.reduce((total, each) => total + below(each.buckets, bound), 0)]);
  return { time: performance.now(), requests: sum("requests"), rows: sum("rows"), executions: sum("executions"), waiting: sum("waiting"), running: sum("running"), buckets };
}

const boundOf = (labels) => (labels.le === "+Inf" ? Infinity : Number(labels.le));

// Return the sample of a language model from its metrics, which count the answers of all routes.
function generationSample(row, rows, time) {
  const mine = rows.filter(({ labels }) => labels.model_name === row.name && labels.engine === row.version);
  const of = (name) => mine.filter((each) => each.name === `vllm:${name}`);
  const ended = Object.fromEntries(of("request_success_total").map(({ labels, value }) => [labels.finished_reason, value]));
  const value = (name) => of(name)[0]?.value || 0;
  const buckets = (name) => of(`${name}_bucket`).map((each) => [boundOf(each.labels), each.value]);
  return { time, requests: (ended.stop || 0) + (ended.length || 0), stopped: ended.abort || 0, failed: ended.error || 0, rows: 0, executions: 0,
    waiting: value("num_requests_waiting"), running: value("num_requests_running"), tokens: value("generation_tokens_total"),
    buckets: buckets("e2e_request_latency_seconds"), first: buckets("time_to_first_token_seconds") };
}

async function observeAll(status) {
  let rows = [];
  if (!metricsError) {
    try { rows = metricsOf(await (await request("v2/metrics")).text()); } catch (error) { metricsError = error.message; }
  }
  const buckets = new Map();
  for (const { name, labels, value } of rows) {
    if (name !== "remora_request_duration_seconds_bucket") continue;
    const key = `${labels.model}/${labels.version}`;
    if (!buckets.has(key)) buckets.set(key, []);
    buckets.get(key).push([boundOf(labels), value]);
  }
  const time = performance.now();
  const found = status.models.filter((each) => each.requests).map((each) => {
    const key = `${each.name}/${each.version}`;
    const sample = each.generates && !metricsError ? generationSample(each, rows, time) : {
      time, requests: each.requests.success, rows: each.inferences, executions: each.executions,
      waiting: each.queue.waiting, running: each.queue.running, buckets: buckets.get(key) || [] };
    observe(key, sample);
    return sample;
  });
  observe("", addUp(found));
  const value = (name) => rows.find((each) => each.name === name)?.value ?? null;
  for (const [name, metric] of Object.entries(MEMORY)) push("", name, value(metric) == null ? null : value(metric) / 2 ** 20);
  const processor = value("nv_cpu_utilization");
  push("", "processor", processor == null ? null : 100 * processor);
  push("", "connections", rows.filter((each) => each.name === "remora_open_connections").reduce((total, each) => total + each.value, 0));
  const gpus = new Set(rows.filter((each) => each.labels.gpu_uuid).map((each) => each.labels.gpu_uuid));
  for (const gpu of gpus) {
    const of = (name) => rows.find((each) => each.name === name && each.labels.gpu_uuid === gpu)?.value ?? null;
    push("", `use of ${gpu}`, of("nv_gpu_utilization") == null ? null : 100 * of("nv_gpu_utilization"));
    push("", `memory of ${gpu}`, of("nv_gpu_memory_used_bytes") == null ? null : of("nv_gpu_memory_used_bytes") / 2 ** 20);
  }
  if (gpus.size !== live.gpus.length) { live.gpus = [...gpus]; if (!chosen) showServer(); }
  for (const each of shownCharts) each();
}

const live = { gpus: [] };

// Return a value with so many decimals below ten, and fewer above, so that the caption stays in one line.
function valueText(value, digits) {
  return value == null ? "-" : value.toFixed(Math.max(0, digits - Math.floor(Math.log10(Math.max(Math.abs(value), 1)))));
}

// Return a chart of one or two series: [[label, name of the series], ...]. `total` names a series that is text alone.
function chart(key, title, digits, lines, total) {
  const paths = lines.map(() => drawing("path"));
  const svg = drawing("svg", { viewBox: `0 0 ${POINTS - 1} 30`, preserveAspectRatio: "none", role: "img" }, ...paths);
  const now = element("b", {}, "-");
  shownCharts.push(() => {
    const values = lines.map(([, name]) => series.get(`${key} ${name}`) || []);
    const most = Math.max(...values.flat().filter((each) => each != null), 1e-9);
    paths.forEach((path, index) => {
      let pen = "M";
      path.setAttribute("d", values[index].map((each, at) => {
        if (each == null) { pen = "M"; return ""; }
        const step = `${pen}${at + POINTS - values[index].length},${(29 - 28 * each / most).toFixed(2)}`;
        pen = "L";
        return step;
      }).join(""));
    });
    const last = lines.map(([label], index) => `${label}${label && " "}${valueText(values[index].at(-1), digits)}`).join(", ");
    const whole = total && series.get(`${key} ${total}`)?.at(-1);
    const text = whole ? `${last} of ${whole.toFixed(digits)}` : last;
    now.textContent = text;
    svg.setAttribute("aria-label", `${title}: ${text}, at most ${most.toFixed(digits)} in ${POINTS} s`);
  });
  return element("figure", {}, element("figcaption", {}, element("span", { class: "soft" }, title), now), svg);
}

// Return a chart of the batches of a model by their size, since it was loaded.
function batchChart() {
  const svg = drawing("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img" });
  const now = element("b", {}, "-");
  shownCharts.push(() => {
    const found = Object.entries(chosen?.row?.batches || {}).map(([size, count]) => [Number(size), count]).sort((a, b) => a[0] - b[0]);
    const most = Math.max(...found.map(([, count]) => count), 1);
    const width = 100 / Math.max(found.length, LEAST_BARS);
    svg.replaceChildren(...found.map(([size, count], index) => drawing("rect",
      { x: index * width + width * 0.1, width: width * 0.8, y: 30 - 29 * count / most, height: 29 * count / most },
      drawing("title", {}, `${size} rows: ${count} batches`))));
    const text = found.slice(0, 6).map(([size, count]) => `${size}: ${count}`).join(", ") + (found.length > 6 ? " ..." : "");
    now.textContent = text || "none";
    svg.setAttribute("aria-label", `batches by rows: ${text || "none"}`);
  });
  return element("figure", {}, element("figcaption", {}, element("span", { class: "soft" }, "Batches by rows"), now), svg);
}

function loadCharts(key) {
  return [chart(key, "Requests per second", 1, [["", "rate"]]),
    chart(key, "Latency, ms", 2, [["p50", "p50"], ["p99", "p99"]]),
    chart(key, "Requests", 0, [["waiting", "waiting"], ["running", "running"]])];
}

// Return charts, or a sentence while there has been no traffic, which would leave them empty.
function chartsOfTraffic(key, count, charts) {
  const none = element("p", { class: "soft" }, "No traffic yet.");
  const box = element("div", { class: "charts" }, ...charts);
  shownCharts.push(() => {
    const moved = ["rate", "waiting", "running"].some((name) => series.get(`${key} ${name}`)?.some((each) => each > 0));
    box.hidden = !moved && !count();
    none.hidden = !box.hidden;
  });
  return [none, box];
}

function modelCharts(row) {
  const key = `${row.name}/${row.version}`;
  const facts = element("div", {});
  shownCharts.push(() => {
    const { requests, load_ms } = chosen.row;
    const last = samples.get(key)?.at(-1);
    const failed = Object.entries(requests).filter(([name]) => name !== "success").reduce((sum, [, count]) => sum + count, 0);
    const counts = last?.first ? { "answered": last.requests, "stopped": last.stopped, "failed": last.failed } : { "answered": requests.success, "failed": failed };
    facts.replaceChildren(factsOf({ ...counts, "loaded in": `${Math.round(load_ms)} ms` }));
  });
  const more = row.generates && !metricsError
    ? [chart(key, "First token, ms", 1, [["p50", "first p50"], ["p99", "first p99"]]), chart(key, "Tokens per second", 1, [["", "tokens"]])]
    : [chart(key, "Rows of a batch, mean", 1, [["", "batch"]]), batchChart()];
  const count = () => Object.values(chosen?.row?.requests || {}).reduce((sum, each) => sum + each, 0) || samples.get(key)?.at(-1)?.requests;
  return section("Live", facts, chartsOfTraffic(key, count, [...loadCharts(key), ...more]));
}

function serverCharts() {
  const charts = [chart("", "Memory of the server, MiB", 0, [["", "server memory"]], "memory limit"),
    chart("", "Memory of all processes, MiB", 0, [["", "memory"]], "memory limit"),
    chart("", "Processors, %", 0, [["", "processor"]]), chart("", "Open connections", 0, [["", "connections"]]),
    ...live.gpus.flatMap((gpu, index) => [chart("", `GPU ${index}, %`, 0, [["", `use of ${gpu}`]]),
      chart("", `GPU ${index}, memory, MiB`, 0, [["", `memory of ${gpu}`]])])];
  const note = element("p", { class: "soft" });
  shownCharts.push(() => { note.textContent = metricsError && `Latencies, memory and processors come from v2/metrics, which answered ${metricsError}`; });
  const count = () => samples.get("")?.at(-1)?.requests;
  return section("Live", chartsOfTraffic("", count, loadCharts("")), element("div", { class: "charts" }, ...charts), note);
}
