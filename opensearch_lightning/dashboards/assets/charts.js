// Line charts: hover and arrow keys read values, the legend hides series, a table holds every point.

const HEIGHT = 230;
const MARGIN = { top: 10, right: 14, bottom: 26 };
const smoothing = { window: 1, charts: [] };

function smoothingChoice() {
  const options = [["1", "off"], ["5", "5 points"], ["15", "15 points"], ["50", "50 points"]];
  return choice("Smoothing", options, String(smoothing.window), (value) => {
    smoothing.window = Number(value);
    smoothing.charts.forEach((draw) => draw());
  });
}

/** Mean over the `window` points around each point, fewer towards the ends; a shorter series is left as it is. */
function smooth(values, window) {
  if (window <= 1 || values.length <= window) return values;
  const sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  return values.map((_, i) => {
    const half = Math.min(Math.floor(window / 2), i, values.length - 1 - i);
    return (sums[i + half + 1] - sums[i - half]) / (2 * half + 1);
  });
}

/** About `count` round numbers from at or below `low` to at or above `high`. */
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999) || 10);
  const first = Math.floor(low / step + 1e-9);
  const last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: Math.max(last - first, 1) + 1 }, (_, i) => (first + i) * step);
}

function range(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  return [low, high];
}

function lineChart(chart) {
  const hidden = new Set();
  const plot = el("div", { class: "plot" });
  const tip = el("div", { class: "tip", hidden: true, role: "status" });
  const series = chart.series.map((item, i) => ({ ...item, css: `s${i % 8}` }));
  const draw = () => {
    if (!plot.clientWidth) return;
    const focused = plot.contains(document.activeElement);
    const root = drawing(chart, series.filter((item) => !hidden.has(item)), plot.clientWidth, tip);
    plot.replaceChildren(root, tip);
    if (focused) root.focus();
  };

  const legend = el("div", { class: "legend" }, series.map((item) => el(
    "button",
    {
      class: item.css, type: "button", "aria-pressed": "true", title: item.metric,
      click: (event) => {
        if (!hidden.delete(item)) hidden.add(item);
        event.currentTarget.setAttribute("aria-pressed", String(!hidden.has(item)));
        draw();
      },
    },
    el("span", { class: "swatch" }),
    item.label + (item.not_finite ? ` (${plural(item.not_finite, "value")} not finite)` : ""),
  )));
  smoothing.charts.push(draw);
  new ResizeObserver(draw).observe(plot);
  const averaged = Math.max(...series.map((item) => item.points_per_mean));
  const note = [chart.note, averaged > 1 && `Points are means of ${averaged} logged steps.`].filter(Boolean).join(" ");
  return el(
    "figure", { class: "card chart" },
    el("h3", {}, chart.title), el("p", { class: "muted small note" }, note), legend, plot, values(chart, series),
  );
}

function drawing(chart, series, width, tip) {
  const steps = [...new Set(series.flatMap((item) => item.x))].sort((a, b) => a - b);
  const drawn = series.map((item) => ({ ...item, mean: smooth(item.y, smoothing.window) }));
  const root = svg("svg", { width, height: HEIGHT, tabindex: "0", role: "img", "aria-label": spoken(chart, series) });
  tip.hidden = true;
  if (!steps.length) {
    root.append(svg("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing to draw"));
    return root;
  }
  const floor = HEIGHT - MARGIN.bottom;
  const { y, yTicks } = (chart.log ? logScale : linearScale)(chart.unit, drawn.flatMap((item) => item.y));
  const labels = yTicks.map((tick) => format(tick, chart.unit));
  const left = 16 + 7 * Math.max(4, ...labels.map((label) => label.length));
  const { x, xTicks } = stepScale(steps, left, width - MARGIN.right);
  yTicks.forEach((tick, i) => root.append(
    svg("line", { class: "gridline", x1: left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }),
    svg("text", { x: left - 7, y: y(tick) + 4, "text-anchor": "end" }, labels[i]),
  ));
  for (const tick of xTicks) {
    root.append(svg("text", { x: x(tick), y: HEIGHT - 8, "text-anchor": "middle" }, tick.toLocaleString("en")));
  }
  root.append(svg("line", { class: "axis", x1: left, x2: width - MARGIN.right, y1: floor, y2: floor }));
  root.append(svg("text", { x: 0, y: HEIGHT - 8 }, "step"));
  for (const item of drawn) root.append(curve(item, x, y));
  attachCursor(root, { chart, drawn, steps, x, y, width, tip });
  return root;
}

function between(low, high, from, to) {
  return (value) => from + ((value - low) / (high - low)) * (to - from);
}

function linearScale(unit, values) {
  let [low, high] = range(values);
  if (low >= 0) low = 0;
  if (high <= low) high = low + (Math.abs(low) || 1);
  if (unit === "fraction" && high > 0.6) high = Math.max(high, 1);
  const yTicks = ticks(low, high, 4);
  return { y: between(yTicks[0], yTicks.at(-1), HEIGHT - MARGIN.bottom, MARGIN.top), yTicks };
}

/** Powers of ten as ticks, and values at or below zero at the bottom. */
function logScale(unit, values) {
  const [low, high] = range(values.filter((value) => value > 0));
  if (!(high > 0)) return linearScale(unit, values);
  const first = Math.floor(Math.log10(low)), last = Math.max(first + 1, Math.ceil(Math.log10(high)));
  const stride = Math.ceil((last - first) / 5);
  const yTicks = Array.from({ length: Math.ceil((last - first) / stride) + 1 }, (_, i) => 10 ** (first + i * stride));
  const y = between(first, Math.log10(yTicks.at(-1)), HEIGHT - MARGIN.bottom, MARGIN.top);
  return { y: (value) => y(value > 0 ? Math.log10(value) : first), yTicks };
}

function stepScale(steps, left, right) {
  let [first, last] = [steps[0], steps.at(-1)];
  if (first === last) [first, last] = [first - 1, last + 1];
  const xTicks = ticks(first, last, Math.max(2, Math.floor((right - left) / 60)))
    .filter((tick) => tick >= first && tick <= last && Number.isInteger(tick));
  return { x: between(first, last, left, right), xTicks };
}

function curve(item, x, y) {
  const points = (values) => item.x.map((step, i) => `${x(step).toFixed(1)},${y(values[i]).toFixed(1)}`).join(" ");
  const isSmooth = item.mean !== item.y;
  const group = svg("g", { class: item.css });
  if (isSmooth) group.append(svg("polyline", { class: "line raw", points: points(item.y) }));
  group.append(svg("polyline", { class: "line", points: points(item.mean) }));
  if (item.x.length <= 30) {
    item.x.forEach((step, i) => group.append(svg("circle", { class: `dot ${isSmooth ? "raw" : ""}`, cx: x(step), cy: y(item.y[i]), r: 2.6 })));
  }
  return group;
}

function attachCursor(root, view) {
  const line = svg("line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
  const marks = svg("g");
  root.append(line, marks);
  let index = null;
  const show = (next) => {
    index = Math.max(0, Math.min(view.steps.length - 1, next));
    const at = view.x(view.steps[index]);
    line.setAttribute("x1", at);
    line.setAttribute("x2", at);
    line.setAttribute("visibility", "visible");
    marks.replaceChildren(...fillTip(view, view.steps[index], at));
  };
  const hide = () => {
    index = null;
    line.setAttribute("visibility", "hidden");
    marks.replaceChildren();
    view.tip.hidden = true;
  };
  root.addEventListener("pointermove", (event) => {
    const at = event.clientX - root.getBoundingClientRect().left;
    show(nearest(view.steps.map(view.x), at));
  });
  root.addEventListener("pointerleave", hide);
  root.addEventListener("blur", hide);
  root.addEventListener("keydown", (event) => {
    const last = view.steps.length - 1;
    const next = { ArrowLeft: (index ?? last + 1) - 1, ArrowRight: (index ?? -1) + 1, Home: 0, End: last }[event.key];
    if (next !== undefined) { event.preventDefault(); show(next); }
    if (event.key === "Escape") hide();
  });
}

/** Fills the tip with every series' point nearest to `step`; returns the marks of those points. */
function fillTip(view, step, at) {
  const rows = [], marks = [];
  for (const item of view.drawn) {
    if (!item.x.length) continue;
    const i = nearest(item.x, step);
    const aside = [
      item.mean !== item.y && `mean ${format(item.mean[i], view.chart.unit)}`,
      item.x[i] !== step && `step ${item.x[i].toLocaleString("en")}`,
    ].filter(Boolean).join(", ");
    rows.push(
      el("span", { class: `swatch ${item.css}` }), el("span", {}, item.label),
      el("span", { class: "number" }, format(item.y[i], view.chart.unit)), el("span", { class: "muted" }, aside),
    );
    marks.push(svg("circle", { class: `dot ${item.css}`, cx: view.x(item.x[i]), cy: view.y(item.y[i]), r: 4 }));
  }
  view.tip.replaceChildren(el("b", {}, `Step ${step.toLocaleString("en")}`), ...rows);
  view.tip.hidden = false;
  const size = view.tip.offsetWidth;
  const wanted = at > view.width / 2 ? at - size - 12 : at + 12;
  view.tip.style.left = `${Math.max(0, Math.min(view.width - size, wanted))}px`;
  return marks;
}

function nearest(sorted, value) {
  let best = 0;
  for (let i = 1; i < sorted.length; i++) if (Math.abs(sorted[i] - value) < Math.abs(sorted[best] - value)) best = i;
  return best;
}

function spoken(chart, series) {
  const parts = series.filter((item) => item.x.length).map((item) => {
    const last = item.y.length - 1;
    return `${item.label} from ${format(item.y[0], chart.unit)} to ${format(item.y[last], chart.unit)}`;
  });
  return `${chart.title}: ${parts.join("; ")}. Arrow keys read values.`;
}

/** A table of all points, made when it is opened, with a CSV to save. */
function values(chart, series) {
  const details = el("details", { toggle: () => {
    if (!details.open || details.children.length > 1) return;
    const steps = [...new Set(series.flatMap((item) => item.x))].sort((a, b) => a - b);
    const columns = series.map((item) => new Map(item.x.map((step, i) => [step, item.y[i]])));
    const rows = steps.map((step) => [step, ...columns.map((column) => column.get(step))]);
    details.append(
      el("div", { class: "values", tabindex: "0" }, el(
        "table", {},
        el("thead", {}, el("tr", {}, ["step", ...series.map((item) => item.label)].map((name) => el("th", { scope: "col" }, name)))),
        el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => el("td", {}, i ? format(cell, chart.unit) : cell.toLocaleString("en")))))),
      )),
      el("button", { class: "small", type: "button", click: () => save(chart.title, series, rows) }, "Save as CSV"),
    );
  } }, el("summary", {}, "Values"));
  return details;
}

function save(title, series, rows) {
  const quoted = (cell) => `"${String(cell ?? "").replaceAll('"', '""')}"`;
  const text = [["step", ...series.map((item) => item.metric)].map(quoted), ...rows.map((row) => row.map((cell) => cell ?? ""))];
  const url = URL.createObjectURL(new Blob([text.map((row) => row.join(",")).join("\n") + "\n"], { type: "text/csv" }));
  el("a", { href: url, download: `${title.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-")}.csv` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
