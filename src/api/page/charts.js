// Time lines as inline SVG. Each says in words what it shows; the figures stand beside its name.

const WIDTH = 240;
const HEIGHT = 64;

// Bars from left to right, one for an answer. stacks: lists of [class, value], the lowest first.
function bars(stacks, places, label) {
  const highest = Math.max(...stacks.map((stack) => stack.reduce((sum, [, value]) => sum + value, 0)), 0);
  const step = WIDTH / places;
  const left = WIDTH - stacks.length * step;
  const rects = stacks.flatMap((stack, index) => {
    let top = HEIGHT;
    return stack.filter(([, value]) => value > 0).map(([kind, value]) => {
      const height = Math.max((HEIGHT * value) / highest, 0.75);
      top -= height;
      const at = { x: left + index * step + step * 0.1, y: top, width: step * 0.8, height };
      return draw("rect", { class: kind, ...at });
    });
  });
  return picture(label, ...rects);
}

// Lines over the same places. series: [class, values], as many values each.
function lines(series, places, label) {
  const highest = Math.max(...series.flatMap(([, values]) => values), 1);
  return picture(label, ...series.map(([kind, values]) => {
    const left = places - values.length;
    const points = values.map((value, index) =>
      `${(((left + index) * WIDTH) / (places - 1)).toFixed(1)},${(HEIGHT - 2 - ((HEIGHT - 6) * value) / highest).toFixed(1)}`);
    return draw("path", { class: kind, d: points.length ? `M${points.join("L")}` : "" });
  }));
}

function picture(label, ...parts) {
  return draw("svg", { role: "img", "aria-label": label, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" }, ...parts);
}

function figure(name, value, image, ...below) {
  return make("figure", {}, make("figcaption", {}, make("b", {}, name), make("span", {}, value)), image, ...below);
}

function legend(...entries) {
  return make("ul", { class: "legend" }, ...entries.map(([kind, text]) => make("li", {}, make("i", { class: kind }), text)));
}
