// Runs kept.onnx, whose sync batch norms are nodes MMCVSyncBatchNorm with a body of standard operators,
// in stock onnxruntime-web: there is no library to register in a browser, and none is needed.
import * as ort from "./ort.wasm.min.mjs";

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

  const classes = output.dims[1];
  const predictions = labels.map((label, index) => {
    const row = softmax(output.data.slice(index * classes, (index + 1) * classes));
    const digit = row.indexOf(Math.max(...row));
    return { digit, probability: row[digit], label };
  });
  const pixels = images.length / labels.length;
  predictions.forEach((prediction, index) => draw(prediction, images.slice(index * pixels, (index + 1) * pixels)));
  const right = predictions.filter(({ digit, label }) => digit === label).length;
  document.getElementById("status").textContent =
    `${right} of ${labels.length} test digits read right (${(accuracy * 100).toFixed(1)} % of the whole test set in ` +
    `torch). Largest difference from torch: ${difference.toExponential(1)}. ${milliseconds.toFixed(2)} ms for ` +
    `${labels.length} digits, one thread, onnxruntime-web ${ort.env.versions.web}.`;
  return { predictions: predictions.map(({ digit }) => digit), difference, milliseconds };
}

function softmax(row) {
  const largest = Math.max(...row);
  const powers = Array.from(row, (value) => Math.exp(value - largest));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((value) => value / sum);
}

function draw({ digit, probability, label }, image) {
  const size = Math.sqrt(image.length);
  const figure = document.createElement("figure");
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(size, size);
  const [low, high] = [Math.min(...image), Math.max(...image)];
  image.forEach((value, index) => {
    const grey = Math.round((255 * (value - low)) / (high - low));
    pixels.data.set([grey, grey, grey, 255], 4 * index);
  });
  context.putImageData(pixels, 0, 0);
  const caption = document.createElement("figcaption");
  const [name, percent] = [document.createElement("b"), document.createElement("span")];
  name.textContent = digit === label ? digit : `${digit}, not ${label}`;
  percent.textContent = `${(100 * probability).toFixed(0)} %`;
  caption.append(name, percent);
  const [bar, filled] = [document.createElement("div"), document.createElement("i")];
  bar.className = "bar";
  filled.style.width = `${100 * probability}%`;
  bar.append(filled);
  if (digit !== label) figure.className = "wrong";
  figure.append(canvas, caption, bar);
  document.getElementById("digits").append(figure);
}

if (location.search === "?check") {
  // The page counts as loaded when the server answers, which is after the result has arrived there.
  document.body.append(Object.assign(new Image(), { src: "finished", hidden: true }));
}
const result = await main().catch((error) => ({ error: String(error) }));
if (result.error) document.getElementById("status").textContent = result.error;
if (location.search === "?check") await fetch("result", { method: "POST", body: JSON.stringify(result) });
