// What a network made of digits, as tiles.

// Logits and images row after row: digit, its probability and label for each.
export function predict(logits, labels) {
  const classes = logits.length / labels.length;
  return Array.from(labels, (label, index) => {
    const row = softmax(logits.slice(index * classes, (index + 1) * classes));
    const digit = row.indexOf(Math.max(...row));
    return { digit, probability: row[digit], label: Number(label) };
  });
}

export function show(predictions, images, parent) {
  const pixels = images.length / predictions.length;
  parent.replaceChildren(
    ...predictions.map((prediction, index) => tile(prediction, images.slice(index * pixels, (index + 1) * pixels))),
  );
}

function softmax(row) {
  const largest = Math.max(...row);
  const powers = Array.from(row, (value) => Math.exp(value - largest));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((value) => value / sum);
}

function tile({ digit, probability, label }, image) {
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
  name.textContent = digit === label ? digit : `${digit} ≠ ${label}`;
  percent.textContent = `${(100 * probability).toFixed(0)} %`;
  caption.append(name, percent);
  const [bar, filled] = [document.createElement("div"), document.createElement("i")];
  bar.className = "bar";
  filled.style.width = `${100 * probability}%`;
  bar.append(filled);
  if (digit !== label) figure.className = "wrong";
  figure.append(canvas, caption, bar);
  return figure;
}
