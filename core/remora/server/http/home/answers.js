// Answers of a model: text, tables, bars, images and sound.

const MOST_BARS = 10;

function elementsOf(output) {
  if (output.datatype !== "BYTES" || !output.bytes) return output.data || [];
  const found = [];
  const view = new DataView(output.bytes.buffer, output.bytes.byteOffset, output.bytes.byteLength);
  for (let at = 0; at + 4 <= output.bytes.length;) {
    const size = view.getUint32(at, true);
    found.push(output.bytes.subarray(at + 4, at + 4 + size));
    at += 4 + size;
  }
  return found;
}

const KINDS = [[/^\x89PNG/, "image/png"], [/^\xff\xd8\xff/, "image/jpeg"], [/^GIF8/, "image/gif"], [/^RIFF....WEBP/s, "image/webp"],
  [/^RIFF....WAVE/s, "audio/wav"], [/^OggS/, "audio/ogg"], [/^fLaC/, "audio/flac"], [/^(ID3|\xff[\xfb\xf3\xf2])/, "audio/mpeg"],
  [/^....ftypM4A/s, "audio/mp4"]];

// Return the media type of an image or a sound by its first bytes, "" for others.
function mediaType(bytes) {
  const head = String.fromCharCode(...bytes.subarray(0, 12));
  return KINDS.find(([pattern]) => pattern.test(head))?.[1] || "";
}

function shownBytes(bytes) {
  const type = mediaType(bytes);
  const source = type && URL.createObjectURL(new Blob([bytes], { type }));
  if (type.startsWith("image/")) return element("img", { src: source, alt: "image in the answer" });
  if (type) return element("audio", { src: source, controls: true, "aria-label": "sound in the answer" });
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    try { return element("pre", {}, JSON.stringify(JSON.parse(text), null, 2)); } catch { return element("pre", {}, text); }
  } catch {
    return element("pre", {}, `${bytes.length} bytes that are no text`);
  }
}

function shown(output) {
  const title = element("h3", {}, output.name, " ", element("small", { class: "soft" }, `${output.datatype} [${output.shape}]`));
  const values = elementsOf(output);
  if (output.datatype === "BYTES") {
    return element("div", {}, title, values.slice(0, 100).map((each) => (typeof each === "string" ? element("pre", {}, each) : shownBytes(each))),
      values.length > 100 ? element("p", { class: "soft" }, `and ${values.length - 100} more`) : null);
  }
  const last = output.shape.at(-1) || 0;
  if (output.datatype.startsWith("FP") && output.shape.length >= 1 && last >= 2 && last <= 10000 && values.length === last
      && values.every((each) => each >= 0 && each <= 1)) {
    return element("div", {}, title, bars(values));
  }
  const columns = output.shape.length > 1 ? last : 1;
  if (values.length === 1) return element("div", {}, title, element("pre", {}, String(values[0])));
  if (columns > 50 || values.length > 2000) {
    return element("div", {}, title, element("pre", {}, JSON.stringify(values.slice(0, 1000)) + (values.length > 1000 ? ` and ${values.length - 1000} more` : "")));
  }
  const rows = [];
  for (let at = 0; at < values.length; at += columns) rows.push(values.slice(at, at + columns));
  return element("div", {}, title, element("div", { class: "scroll" }, element("table", {}, element("tbody", {}, rows.map((row) => element("tr", {}, row.map((each) => element("td", {}, String(each)))))))));
}

// Return a bar for each of the best classes.
function bars(values) {
  const best = values.map((value, index) => [`class ${index}`, value]).sort((a, b) => b[1] - a[1]).slice(0, MOST_BARS);
  return best.map(bar);
}

function bar([name, value]) {
  const share = value >= 0 && value <= 1;
  return element("div", { class: "bar" }, element("span", { title: name }, name),
    share ? element("progress", { max: 1, value, "aria-label": name }) : element("span", {}), element("span", {}, numberText(value)));
}

// Return a number with three digits, and a tiny one with its power of ten, which fits beside a bar.
function numberText(value) {
  return value !== 0 && Math.abs(value) < 0.0005 ? value.toExponential(1) : value.toPrecision(3);
}

// Return the classes of an output with labels, which the classification extension writes as VALUE:INDEX:LABEL.
function ranked(output) {
  const columns = output.shape.at(-1);
  const rows = Array.from({ length: output.data.length / columns }, (_, row) => output.data.slice(row * columns, (row + 1) * columns));
  return element("div", {}, element("h3", {}, output.name), rows.map((row, index) => [
    rows.length > 1 ? element("p", { class: "soft" }, `row ${index + 1}`) : null,
    ...row.map((text) => {
      const [, value, place, label] = /^([^:]*):([^:]*):?(.*)$/s.exec(text);
      return bar([label || `class ${place}`, Number(value)]);
    })]).flat());
}

// Return what an answer shows: a label and its score are one bar for each row, all else is shown by output.
function drawn(outputs) {
  const [label, score] = ["label", "score"].map((name) => outputs.find((each) => each.name === name));
  if (outputs.length === 2 && label?.bytes && score?.data?.length === elementsOf(label).length) {
    const names = elementsOf(label).map((each) => new TextDecoder().decode(each));
    return [element("div", {}, names.map((name, index) => bar([name, score.data[index]])))];
  }
  return outputs.map((each) => (each.isRanked ? ranked(each) : shown(each)));
}
