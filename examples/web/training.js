// Trains with step.onnx, one step as one graph of standard operators, in stock onnxruntime-web. All state goes
// in as inputs `name` and comes out as outputs `name.new`; step.safetensors holds its first values.
import * as ort from "./ort.wasm.min.mjs";
import { Chart } from "./chart.js";
import { predict, show } from "./digits.js";
import { report } from "./report.js";
import { load } from "./safetensors.js";

ort.env.wasm.numThreads = 1; // more need a page that is isolated from other origins

const NEW = ".new";
const SHOWN = 24;

async function main() {
  const open = (file) => ort.InferenceSession.create(file, { executionProviders: ["wasm"] });
  const [step, evaluation] = [await open("step.onnx"), await open("step.eval.onnx")];
  const state = await load("step.safetensors");
  const data = await load("training_data.safetensors");
  const [steps, batch] = data.indices.dims;
  const expected = data.losses.data;
  const chart = new Chart(document.getElementById("losses"), expected, ["in Python", "in this page"]);

  const losses = [];
  const times = [];
  for (let index = 0; index < steps; ++index) {
    const rows = data.indices.data.subarray(index * batch, (index + 1) * batch);
    const start = performance.now();
    const outputs = await step.run({
      ...inputsOf(step, state),
      images: take(data.train_images, rows),
      labels: take(data.train_labels, rows), // int64: a BigInt64Array
      lr: new ort.Tensor("float64", Float64Array.of(data.rates.data[index]), []),
    });
    for (const [name, value] of Object.entries(outputs)) {
      if (name.endsWith(NEW)) state[name.slice(0, -NEW.length)] = value;
    }
    times.push(performance.now() - start);
    losses.push(outputs.loss.data[0]);
    chart.draw(losses);
    setStatus(`Step ${index + 1} of ${steps}, loss ${losses[index].toFixed(4)}.`);
    await painted();
  }

  const { test_images: images, test_labels: labels } = data;
  const { output } = await evaluation.run({ ...inputsOf(evaluation, state), images, labels });
  const predictions = predict(output.data, labels.data);
  const right = predictions.filter(({ digit, label }) => digit === label).length;
  const accuracy = right / predictions.length;
  const pixels = images.data.length / predictions.length;
  show(predictions.slice(0, SHOWN), images.data.slice(0, SHOWN * pixels), document.getElementById("digits"));

  const milliseconds = times.sort((a, b) => a - b)[steps >> 1];
  const difference = Math.max(...losses.map((loss, index) => Math.abs(loss - expected[index])));
  setStatus(
    `${steps} steps of ${batch} digits from random weights on, ${milliseconds.toFixed(0)} ms each, one thread, ` +
      `onnxruntime-web ${ort.env.versions.web}. Largest difference of a loss from ONNX Runtime in Python: ` +
      `${difference.toExponential(1)}.`,
  );
  document.getElementById("result").textContent =
    `${right} of ${predictions.length} test digits read right (${(accuracy * 100).toFixed(1)} %); the first ${SHOWN}`;
  return { losses, logits: Array.from(output.data), accuracy, milliseconds };
}

// The part of the state that a graph reads.
function inputsOf(session, state) {
  return Object.fromEntries(session.inputNames.filter((name) => name in state).map((name) => [name, state[name]]));
}

// The rows of a tensor that `indices` (int64) name, in one tensor.
function take(tensor, indices) {
  const [, ...shape] = tensor.dims;
  const size = shape.reduce((a, b) => a * b, 1);
  const data = new tensor.data.constructor(indices.length * size);
  indices.forEach((index, row) => {
    const start = Number(index) * size;
    data.set(tensor.data.subarray(start, start + size), row * size);
  });
  return new ort.Tensor(tensor.type, data, [indices.length, ...shape]);
}

function setStatus(text) {
  document.getElementById("status").textContent = text;
}

// Running a session never yields to the page by itself.
function painted() {
  return new Promise((resolve) => setTimeout(resolve));
}

await report(main);
