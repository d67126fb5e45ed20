// Runs kept.onnx, whose sync batch norms are nodes MMCVSyncBatchNorm with a body of standard operators,
// in stock onnxruntime-web: there is no library to register in a browser, and none is needed.
import * as ort from "./ort.wasm.min.mjs";
import { predict, show } from "./digits.js";
import { report } from "./report.js";

ort.env.wasm.numThreads = 1; // more need a page that is isolated from other origins

const RUNS = 10;

async function main() {
  const samples = await (await fetch("samples.json")).json();
  const { images, labels, logits, shape, accuracy } = samples;
  const session = await ort.InferenceSession.create("kept.onnx", { executionProviders: ["wasm"] });
  const input = new ort.Tensor("float32", Float32Array.from(images), shape);
  const run = async () => (await session.run({ [session.inputNames[0]]: input }))[session.outputNames[0]];

  const output = await run();
  const times = [];
  for (let index = 0; index < RUNS; ++index) {
    const start = performance.now();
    await run();
    times.push(performance.now() - start);
  }
  const milliseconds = times.sort((a, b) => a - b)[RUNS / 2];
  const difference = Math.max(...logits.map((value, index) => Math.abs(value - output.data[index])));

  const predictions = predict(output.data, labels);
  show(predictions, images, document.getElementById("digits"));
  const right = predictions.filter(({ digit, label }) => digit === label).length;
  document.getElementById("status").textContent =
    `${right} of ${labels.length} test digits read right (${(accuracy * 100).toFixed(1)} % of the whole test set in ` +
    `torch). Largest difference from torch: ${difference.toExponential(1)}. ${milliseconds.toFixed(2)} ms for ` +
    `${labels.length} digits, one thread, onnxruntime-web ${ort.env.versions.web}.`;
  return { predictions: predictions.map(({ digit }) => digit), difference, milliseconds };
}

await report(main);
