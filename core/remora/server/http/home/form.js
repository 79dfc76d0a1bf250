// Form of a model, made from its signature, and its request.

const BYTES_OF = { BOOL: 1, UINT8: 1, INT8: 1, UINT16: 2, INT16: 2, FP16: 2, BF16: 2, UINT32: 4, INT32: 4, FP32: 4, FP64: 8, UINT64: 8, INT64: 8 };
const AUDIO_RATE = 16000;  // samples per second, usual for models of speech

// Return the docstring of a model's function, and the hint, the default and the example of each input.
function wordsOf(config) {
  try {
    const { doc = "", inputs = {} } = JSON.parse(config.parameters?.FUNCTION?.string_value || "{}");
    return { doc: String(doc), inputs: Object(inputs) };
  } catch { return { doc: "", inputs: {} }; }  // a parameter of another program
}

// Return what an input takes: in the words of its function, else as its tensor.
function typeOf(tensor, { isJson, isOptional, hint, default: usual }) {
  const type = hint || `${isJson ? "JSON" : tensor.datatype} [${tensor.shape}]`;
  return usual ? `${type} = ${usual}` : isOptional ? `${type}, optional` : type;
}

// Return the inputs by name of the example request in the model's folder, none without such a request.
async function recordedInputs({ name, version }) {
  try {
    const { paths } = await json("v2/openapi.json");
    const operation = paths[`/v2/models/${name}/versions/${version}/infer`] || paths[`/v2/models/${name}/infer`];
    const { inputs } = operation.post.requestBody.content["application/json"].examples.recorded.value;
    return Object.fromEntries(inputs.map((each) => [each.name, each]));
  } catch { return {}; }  // the form works without it
}

// Return the values of a tensor as the text of its field.
function textOf({ datatype, shape, data }) {
  if (datatype === "BYTES") return data.join("\n");
  if (data.length === 1) return String(data[0]);
  return JSON.stringify(shape.slice(1).reduceRight((rows, size) => {
    const grouped = [];
    for (let at = 0; at < rows.length; at += size) grouped.push(rows.slice(at, at + size));
    return grouped;
  }, data));
}

// `note` is shown below the code.
function form(note) {
  const { metadata, config } = chosen;
  const documents = new Set((config.parameters?.JSON_TENSORS?.string_value || "").split(","));
  const described = wordsOf(config);
  const optional = new Set(config.input.filter((each) => each.optional).map((each) => each.name));
  chosen.batched = config.max_batch_size > 0;
  chosen.fields = metadata.inputs.map((tensor) => field(tensor, documents.has(tensor.name), optional.has(tensor.name), described.inputs[tensor.name] || {}, chosen.recorded[tensor.name]));
  chosen.stream = Boolean(config.model_transaction_policy?.decoupled);
  const answer = element("div", { id: "answer", "aria-live": "polite" });
  const send = element("button", { class: "primary", type: "submit" }, chosen.stream ? "Send and stream" : "Send");
  const stop = stopButton();
  const box = element("form", { oninput: snippets, onsubmit: async (event) => {
    event.preventDefault();
    send.disabled = true;
    answer.replaceChildren(element("p", { class: "soft" }, "waiting for the answer"));
    const begin = performance.now();
    try {
      const asked = await requestOf();
      const signal = stop.begin();
      if (chosen.stream) await stream(asked, answer, signal);
      else answer.replaceChildren(...await infer(asked, signal));
      answer.append(element("p", { class: "soft" }, `${(performance.now() - begin).toFixed(1)} ms, with the network`));
    } catch (error) {
      if (stop.stopped) answer.append(element("p", { class: "soft" }, "stopped"));
      else answer.replaceChildren(failure(error));
    } finally {
      stop.end();
      send.disabled = false;
    }
  } }, chosen.fields.map((each) => each.box), send, stop.button);
  const signature = element("div", { class: "scroll" }, element("table", {}, element("tbody", {}, metadata.outputs.map((each) => element("tr", {},
    element("th", { scope: "row" }, each.name), element("td", {}, `${each.datatype} [${each.shape}]`))))));
  chosen.snippets = element("pre", { tabindex: "0" });
  chosen.language = chosen.language || "curl";
  const tabs = element("div", { role: "tablist" }, Object.keys(LANGUAGES).map((name) => element("button", {
    type: "button", role: "tab", class: "small", "aria-selected": String(name === chosen.language),
    onclick: (event) => { chosen.language = name; for (const tab of tabs.children) tab.setAttribute("aria-selected", String(tab === event.target)); snippets(); },
  }, name)));
  const copy = element("button", { type: "button", class: "small", onclick: async () => {
    try { await navigator.clipboard.writeText(chosen.snippets.textContent); copy.textContent = "Copied"; }
    catch { getSelection().selectAllChildren(chosen.snippets); copy.textContent = "Selected: press Ctrl-C"; }
    setTimeout(() => { copy.textContent = "Copy"; }, 2000);
  } }, "Copy");
  return element("section", {}, element("h2", {}, metadata.name, " ", element("small", { class: "soft" }, `version ${chosen.version}`)),
    described.doc ? element("p", { class: "doc" }, described.doc) : null, controls(), box, element("h3", {}, "Answer"), answer, element("h3", {}, "Outputs"), signature,
    element("h3", {}, "The same request as code"), tabs, chosen.snippets, copy, note || null);
}

// `words` are the hint, the default and the example of the input, as far as its function has them; `recorded` is the
// input of an example request.
function field(tensor, isJson, isOptional, words, recorded) {
  const id = `input-${tensor.name}`;
  const shape = tensor.shape.map((size) => (Number(size) < 0 ? 1 : Number(size)));
  const isOpen = tensor.shape.slice(chosen.batched ? 1 : 0).some((size) => Number(size) < 0);  // any number of values
  const count = shape.reduce((product, size) => product * size, 1);
  const title = element("label", { for: id }, tensor.name, " ",
    element("small", { class: "soft" }, typeOf(tensor, { ...words, isJson, isOptional })));
  let control, file, kinds;
  if (tensor.datatype === "BOOL" && count === 1) {
    control = element("select", { id }, isOptional ? element("option", { value: "" }, "-") : null, element("option", {}, "false"), element("option", {}, "true"));
  } else if (tensor.datatype === "BYTES") {
    control = element("textarea", { id, rows: 3, spellcheck: "false" });
    control.value = isOptional || !isJson ? "" : JSON.stringify(words.example ?? {});
    if (takesFile(isJson, words.hint)) file = element("input", { type: "file", "aria-label": `file for ${tensor.name}` });
  } else if (count === 1 && !isOpen) {
    control = element("input", { id, inputmode: "decimal", autocomplete: "off" });
    control.value = isOptional ? "" : "0";
  } else {
    control = element("textarea", { id, rows: 3, spellcheck: "false" });
    const zeros = (sizes) => (sizes.length ? Array.from({ length: sizes[0] }, () => zeros(sizes.slice(1))) : 0);
    control.value = isOptional ? "" : count <= 4096 ? JSON.stringify(zeros(shape)) : "";
    kinds = tensor.datatype === "FP32" ? `raw little-endian FP32, or sound as ${AUDIO_RATE} samples per second` : `raw little-endian ${tensor.datatype}`;
    file = element("input", { type: "file", "aria-label": `file for ${tensor.name}: ${kinds}`, title: kinds });
  }
  if (recorded && recorded.shape.length === tensor.shape.length) control.value = textOf(recorded);
  if (words.default && "placeholder" in control) control.placeholder = words.default;
  const preview = element("div", { class: "preview" });
  file?.addEventListener("change", () => preview.replaceChildren(...previewOf(file.files[0])));
  return { tensor, isJson, isOptional, isImage: words.hint === "Image", control, file, box: element("div", {}, title, control, kinds && element("small", { class: "soft" }, `or a file: ${kinds}`), file, preview) };
}

// Return true if the content of a file may be an element of a BYTES input: a hint of text or of JSON excludes it.
function takesFile(isJson, hint) {
  return hint ? !isJson && !/\bstr\b/.test(hint) : true;
}

// Return what a chosen file looks or sounds like.
function previewOf(file) {
  if (!file) return [];
  const source = () => URL.createObjectURL(file);
  if (file.type.startsWith("image/")) return [element("img", { src: source(), alt: file.name })];
  if (file.type.startsWith("audio/")) return [element("audio", { src: source(), controls: true, "aria-label": file.name })];
  return [];
}

// Return the bytes of a file as the tensor takes them; sound becomes samples of one channel for a tensor of floats.
async function bytesOf(file, tensor) {
  const content = await file.arrayBuffer();
  if (tensor.datatype !== "FP32" || !file.type.startsWith("audio/")) return new Uint8Array(content);
  const sound = await new OfflineAudioContext(1, 1, AUDIO_RATE).decodeAudioData(content);
  const samples = new Float32Array(sound.length);
  for (let channel = 0; channel < sound.numberOfChannels; channel += 1) {
    sound.getChannelData(channel).forEach((each, index) => { samples[index] += each / sound.numberOfChannels; });
  }
  return new Uint8Array(samples.buffer);
}

function shapeOf(value) {
  const shape = [];
  for (let each = value; Array.isArray(each); each = each[0]) shape.push(each.length);
  return shape;
}

// Return the declared shape with its variable dimensions filled in from the number of values.
function filledShape(tensor, count) {
  const sizes = tensor.shape.map(Number);
  const known = sizes.filter((size) => size > 0).reduce((product, size) => product * size, 1);
  const open = sizes.filter((size) => size < 0).length;
  if (!open) return sizes;
  let rest = Math.max(1, Math.floor(count / known));
  return sizes.map((size, index) => {
    if (size > 0) return size;
    if (sizes.slice(index + 1).some((other) => other < 0)) return 1;
    return rest;
  });
}

// Return the shape of values in the order of rows, `given` if they are nested as the tensor is.
// Throws an error with the number of values that the tensor takes.
function shapeFor(tensor, count, given) {
  const sizes = tensor.shape.map(Number);
  const isRows = chosen.batched && sizes.length > 0 && sizes[0] < 0;
  const unit = sizes.filter((size) => size > 0).reduce((product, size) => product * size, 1);
  const isOpen = sizes.some((size) => size < 0);
  if (isOpen ? count % unit || (isRows && !count) : count !== unit) {
    const kind = tensor.datatype === "BYTES" ? "text" : tensor.datatype === "BOOL" ? "truth value" : "number";
    const more = isOpen && count > unit ? (isRows ? " for each row" : ", or a multiple of it") : "";
    throw new Error(`${tensor.name} takes ${unit} ${kind}${unit === 1 ? "" : "s"}${more}, here ${count === 1 ? "is" : "are"} ${count}`);
  }
  if (given?.length !== sizes.length) return filledShape(tensor, count);
  if (given.reduce((product, size) => product * size, 1) !== count) throw new Error(`${tensor.name}: the lists have different lengths`);
  const wrong = sizes.findIndex((size, index) => size >= 0 && size !== given[index]);
  if (wrong >= 0) throw new Error(`${tensor.name} takes values of the shape [${sizes}], here is [${given}]; -1 is any size`);
  return given;
}

// Return the inputs as JSON, the bytes of those that came from files, and the names of outputs to ask for as bytes.
async function requestOf() {
  const inputs = [], binary = [];
  for (const { tensor, isJson, isOptional, isImage, control, file } of chosen.fields) {
    const picked = file?.files?.[0];
    const text = control.value;
    if (isOptional && !picked && text === "") continue;
    if (isImage && !picked) throw new Error(`${tensor.name}: choose the file of an image`);
    if (picked) {
      const bytes = await bytesOf(picked, tensor);
      let data = bytes, count;
      if (tensor.datatype === "BYTES") {
        data = new Uint8Array(bytes.length + 4);
        new DataView(data.buffer).setUint32(0, bytes.length, true);
        data.set(bytes, 4);
        count = 1;
      } else {
        count = bytes.length / BYTES_OF[tensor.datatype];
        if (!Number.isInteger(count)) throw new Error(`${tensor.name}: ${bytes.length} bytes are no whole number of ${tensor.datatype} values`);
      }
      binary.push(data);
      inputs.push({ name: tensor.name, datatype: tensor.datatype, shape: shapeFor(tensor, count), parameters: { binary_data_size: data.length } });
      continue;
    }
    inputs.push({ name: tensor.name, datatype: tensor.datatype, ...valueOf(tensor, isJson, text) });
  }
  const outputs = chosen.metadata.outputs.filter((each) => each.datatype === "BYTES" || each.datatype === "FP16" || each.datatype === "BF16")
    .map((each) => each.name);
  return { inputs, binary, binaryOutputs: outputs };
}

function valueOf(tensor, isJson, text) {
  if (isJson) {
    try { JSON.parse(text); } catch (error) { throw new Error(`${tensor.name}: the text is not JSON: ${error.message}`); }
    return { shape: filledShape(tensor, 1), data: [text] };
  }
  if (tensor.datatype === "BYTES") {
    const known = tensor.shape.map(Number).filter((size) => size > 0).reduce((product, size) => product * size, 1);
    if (known === 1) return { shape: filledShape(tensor, 1), data: [text] };
    const lines = text.split("\n");
    return { shape: shapeFor(tensor, lines.length), data: lines };
  }
  const cleaned = text.trim();
  let value;
  try { value = JSON.parse(cleaned.startsWith("[") ? cleaned : cleaned.includes(",") ? `[${cleaned}]` : cleaned); }
  catch { throw new Error(`${tensor.name}: expected ${tensor.datatype === "BOOL" ? "true or false" : "numbers"}, such as 1.5 or [[1, 2], [3, 4]]`); }
  if (!Array.isArray(value)) value = [value];
  const shape = shapeOf(value);
  const flat = value.flat(Infinity);
  const isWrong = tensor.datatype === "BOOL" ? (each) => typeof each !== "boolean" : (each) => typeof each !== "number" || (/INT/.test(tensor.datatype) && !Number.isInteger(each));
  const at = flat.findIndex(isWrong);
  if (at >= 0) throw new Error(`${tensor.name}: expected ${tensor.datatype === "BOOL" ? "true or false" : /INT/.test(tensor.datatype) ? "integers" : "numbers"}, here is ${JSON.stringify(flat[at])}`);
  return { shape: shapeFor(tensor, flat.length, shape), data: flat };
}

async function infer({ inputs, binary, binaryOutputs }, signal) {
  const labelled = new Set(chosen.config.output.filter((each) => each.label_filename).map((each) => each.name));
  const wanted = (name) => (labelled.has(name) ? { classification: MOST_BARS } : binaryOutputs.includes(name) ? { binary_data: true } : {});
  const asked = { inputs, outputs: chosen.metadata.outputs.map(({ name }) => ({ name, parameters: wanted(name) })) };
  const header = new TextEncoder().encode(JSON.stringify(asked));
  const answer = await request(`${pathOf(chosen.name, chosen.version)}/infer`, undefined, { method: "POST", signal,
    body: new Blob([header, ...binary]), headers: { "Inference-Header-Content-Length": String(header.length) } });
  const bytes = new Uint8Array(await answer.arrayBuffer());
  const length = Number(answer.headers.get("Inference-Header-Content-Length")) || bytes.length;
  const text = new TextDecoder().decode(bytes.subarray(0, length));
  const value = JSON.parse(text);
  let offset = length;
  for (const output of value.outputs) {
    output.isRanked = labelled.has(output.name);
    const size = output.parameters?.binary_data_size;
    if (size === undefined) continue;
    output.bytes = bytes.subarray(offset, offset + size);
    offset += size;
  }
  return drawn(value.outputs);
}

// Return the outputs of an event as text: a line, or for a language model the piece of the text.
function itemText(found, isPiece) {
  const text = found.map((each) => (typeof each === "string" ? each : JSON.stringify(each))).join(" ");
  return isPiece && found.every((each) => typeof each === "string") ? text : `${text}\n`;
}

// Show the events of generate_stream as they arrive.
async function stream({ inputs, binary }, place, signal) {
  if (binary.length) throw new Error("streams take no files: use a gRPC client, or paste the text");
  const body = Object.fromEntries(inputs.map((each) => [each.name, each.data.length === 1 ? each.data[0] : each.data]));
  const answer = await request(`${pathOf(chosen.name, chosen.version)}/generate_stream`, body, { signal });
  const names = chosen.metadata.outputs.map((each) => each.name);
  const lines = element("pre", {});
  place.replaceChildren(lines);
  let events = 0;
  for await (const data of eventsOf(answer)) {
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error);
    events += 1;
    const found = names.map((name) => event[name]);
    lines.append(itemText(found, chosen.row.generates));
  }
  place.append(element("p", { class: "soft" }, `${events} ${events === 1 ? "event" : "events"}`));
}
