// Answers of a model: text, tables, bars, images and sound.

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

function bars(values) {
  const best = values.map((value, index) => [value, index]).sort((a, b) => b[0] - a[0]).slice(0, 10);
  return best.map(([value, index]) => element("div", { class: "bar" }, element("span", {}, `class ${index}`),
    element("progress", { max: 1, value, "aria-label": `class ${index}` }), element("span", {}, value.toPrecision(3))));
}
