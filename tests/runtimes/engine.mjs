// One case in onnxruntime-node or onnxruntime-web: node engine.mjs PACKAGE CASE.json, where PACKAGE is installed.
import fs from "node:fs";
import path from "node:path";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [name, file] = process.argv.slice(2);
const require = createRequire(path.join(process.cwd(), "package.json"));
const entry = name === "onnxruntime-web" ? "node_modules/onnxruntime-web/dist/ort.node.min.mjs" : null;
const loaded = await import(pathToFileURL(entry ? path.resolve(entry) : require.resolve(name)).href);
const ort = loaded.InferenceSession ? loaded : loaded.default;
const read = (where) => JSON.parse(fs.readFileSync(where, "utf8"));
const result = { version: read(`node_modules/${name}/package.json`).version };
const arrays = { float32: Float32Array, float64: Float64Array, int64: BigInt64Array };

try {
  const given = read(file);
  if (given.libraries.length) throw new Error("it takes no custom-op libraries");
  if (name === "onnxruntime-web") ort.env.wasm.numThreads = 1;
  const session = await ort.InferenceSession.create(
    name === "onnxruntime-web" ? new Uint8Array(fs.readFileSync(given.path)) : given.path,
    { logSeverityLevel: 4 },
  );
  const feeds = {};
  for (const input of session.inputNames) {
    const { dtype, shape, data } = given.inputs[input];
    feeds[input] = new ort.Tensor(dtype, arrays[dtype].from(dtype === "int64" ? data.map(BigInt) : data), shape);
  }
  const names = Object.keys(given.outputs);
  const values = await session.run(feeds, names);
  result.outputs = {};
  for (const output of names) {
    result.outputs[output] = { shape: [...values[output].dims], data: Array.from(values[output].data, Number) };
  }
} catch (error) {
  result.reason = `${error.name}: ${error.message}`;
}
console.log(JSON.stringify(result));
