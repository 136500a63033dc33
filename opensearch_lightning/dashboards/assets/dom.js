// Elements and number formats. Data reaches the page as text nodes and as attributes that hold no code, never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element; a function among the attributes listens to the event of its name. */
function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  const present = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  node.append(...present.map((child) => (child instanceof Node ? child : visible(String(child)))));
  return node;
}

/** Control characters, hidden characters and those that turn the direction of text, made visible. */
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u2028-\u202e\u2060-\u2069\ufeff\u{e0000}-\u{e007f}]/gu;

function visible(text) {
  return text.replace(HIDDEN, (character) => `⟨U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

function chip(text, kind = "") {
  return el("span", { class: `chip ${kind}` }, text);
}

/** A select for `options`, pairs of value and label. */
function choice(label, options, value, onChange) {
  const select = el(
    "select",
    { change: () => onChange(select.value) },
    options.map(([key, text]) => el("option", { value: key, selected: key === value }, text)),
  );
  return el("label", {}, label, select);
}

function plural(count, word, words = `${word}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? word : words}`;
}

/** `value` in the words of its unit: "fraction", "seconds", "count" or "number". */
function format(value, unit) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (unit === "fraction") return `${trim(100 * value, 1)}%`;
  if (unit === "seconds") return duration(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return Number(value.toPrecision(3)).toExponential().replaceAll("-", "−").replace("+", "");
  if (size >= 1000) return trim(value, 0);
  return trim(value, size >= 100 ? 1 : unit === "count" ? 2 : 3);
}

function trim(value, digits) {
  const text = value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: 0 });
  return (text === "-0" ? "0" : text).replace("-", "−");
}

function duration(seconds) {
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${trim(seconds * 1e6, 0)} µs`;
  if (size < 1) return `${trim(seconds * 1e3, size < 0.01 ? 2 : size < 0.1 ? 1 : 0)} ms`;
  if (size < 120) return `${trim(seconds, size < 10 ? 2 : 1)} s`;
  return size < 7200 ? `${trim(seconds / 60, 1)} min` : `${trim(seconds / 3600, 1)} h`;
}

function signed(text) {
  return text.startsWith("−") || Number.parseFloat(text) === 0 ? text : `+${text}`;
}
