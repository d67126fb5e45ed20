// A loss curve that grows over another one, known beforehand: the first wide and pale, the second narrow.
const WIDTH = 850;
const HEIGHT = 260;
const MARGIN = { left: 40, right: 16, top: 30, bottom: 28 };

export class Chart {
  constructor(svg, reference, [referenceName, pageName]) {
    this.svg = svg;
    this.steps = reference.length;
    this.top = Math.ceil(Math.max(...reference) * 2) / 2;
    for (let value = 0; value <= this.top; value += 0.5) {
      const [x, y] = [MARGIN.left, this.y(value)];
      this.add("line", { class: "grid", x1: x, x2: WIDTH - MARGIN.right, y1: y, y2: y });
      this.add("text", { x: x - 8, y: y + 4, "text-anchor": "end" }, value.toFixed(1));
    }
    for (let step = 0; step < this.steps; step += 10) {
      this.add("text", { x: this.x(step), y: HEIGHT - MARGIN.bottom + 18, "text-anchor": "middle" }, step);
    }
    this.add("text", { x: WIDTH - MARGIN.right, y: HEIGHT - MARGIN.bottom + 18, "text-anchor": "end" }, "step");
    this.add("text", { x: MARGIN.left, y: 18 }, "training loss");
    this.legend("reference", referenceName, WIDTH - 240);
    this.legend("page", pageName, WIDTH - 130);
    this.add("polyline", { class: "reference", points: this.points(reference) });
    this.line = this.add("polyline", { class: "page", points: "" });
  }

  draw(losses) {
    this.line.setAttribute("points", this.points(losses));
  }

  points(values) {
    return Array.from(values, (value, step) => `${this.x(step).toFixed(1)},${this.y(value).toFixed(1)}`).join(" ");
  }

  x(step) {
    return MARGIN.left + (step / (this.steps - 1)) * (WIDTH - MARGIN.left - MARGIN.right);
  }

  y(loss) {
    return HEIGHT - MARGIN.bottom - (loss / this.top) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  }

  legend(name, text, x) {
    this.add("polyline", { class: name, points: `${x},14 ${x + 24},14` });
    this.add("text", { x: x + 32, y: 18 }, text);
  }

  add(tag, attributes, text = "") {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value));
    element.textContent = text;
    return this.svg.appendChild(element);
  }
}
