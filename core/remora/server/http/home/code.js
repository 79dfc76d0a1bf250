// The request of the form as code in several languages.

const NUMPY = { BOOL: "bool_", BYTES: "object_", FP16: "float16", FP32: "float32", FP64: "float64" };
const numpyOf = (datatype) => NUMPY[datatype] || datatype.toLowerCase();
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const python = (value) => JSON.stringify(value).replaceAll(/\btrue\b/g, "True").replaceAll(/\bfalse\b/g, "False");

// Return the values of inputs as the plain route takes them: nested by row, and one row without brackets.
function plain(inputs) {
  return Object.fromEntries(inputs.map(({ name, shape, data }) => {
    const { isJson } = chosen.fields.find((each) => each.tensor.name === name);
    const dims = chosen.batched ? shape.slice(1) : shape;
    const isScalar = dims.every((size) => size === 1);
    const values = isJson ? data.map((each) => JSON.parse(each)) : data || [];
    const rows = isScalar ? values : nested(values, chosen.batched ? shape : [1, ...shape]);
    return [name, rows.length === 1 ? rows[0] : rows];
  }));
}

function nested(flat, shape) {
  if (shape.length < 2) return flat;
  const size = flat.length / shape[0];
  return Array.from({ length: shape[0] }, (_, index) => nested(flat.slice(index * size, (index + 1) * size), shape.slice(1)));
}

const LANGUAGES = {
  curl: (url, body) => `curl -s ${url}/infer -d ${quoted(JSON.stringify(body))}`,
  "plain JSON": (url, body) => `curl -s ${url.replace("/v2/models/", "/models/")} -d ${quoted(JSON.stringify(plain(body.inputs)))}`,
  Python: (url, body) => `import requests\n\nanswer = requests.post("${url}/infer", json=${python(body)})\nanswer.raise_for_status()\nfor output in answer.json()["outputs"]:\n    print(output["name"], output["data"])`,
  JavaScript: (url, body) => `const answer = await fetch("${url}/infer", {\n  method: "POST",\n  body: JSON.stringify(${JSON.stringify(body)}),\n});\nconst { outputs } = await answer.json();\nconsole.log(outputs);`,
  tritonclient: (url, body) => `import numpy as np\nimport tritonclient.http as triton\n\nwith triton.InferenceServerClient("${location.host}") as client:\n    inputs = []\n${body.inputs.map((each) => `    tensor = triton.InferInput("${each.name}", ${JSON.stringify(each.shape)}, "${each.datatype}")\n    tensor.set_data_from_numpy(np.array(${python(each.data || [])}, np.${numpyOf(each.datatype)}).reshape(${JSON.stringify(each.shape)}))\n    inputs.append(tensor)`).join("\n")}\n    answer = client.infer("${chosen.name}", inputs)\n${chosen.metadata.outputs.map((each) => `    print(answer.as_numpy("${each.name}"))`).join("\n")}`,
};

async function snippets() {
  if (!chosen?.snippets) return;
  try {
    const { inputs } = await requestOf();
    const url = `${location.origin}${location.pathname.replace(/\/$/, "")}/${pathOf(chosen.name)}`;
    if (chosen.stream) {
      const body = Object.fromEntries(inputs.map((each) => [each.name, each.data.length === 1 ? each.data[0] : each.data]));
      chosen.snippets.textContent = ["curl", "plain JSON"].includes(chosen.language) ? `curl -sN ${url}/generate_stream -d ${quoted(JSON.stringify(body))}`
        : LANGUAGES[chosen.language](url, { inputs }).replaceAll("/infer\"", "/generate_stream\"");
      return;
    }
    chosen.snippets.textContent = LANGUAGES[chosen.language](url, { inputs });
  } catch (error) {
    chosen.snippets.textContent = error.message;
  }
}
