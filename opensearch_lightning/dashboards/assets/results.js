// Held-out results: the table of rows and conditions, and what changed between the two to compare.

const CONDITIONS = [
  ["greedy", "greedy", "without faults"],
  ["sampled", "sampled", "without faults"],
  ["greedy_faults", "greedy", "with faults"],
  ["sampled_faults", "sampled", "with faults"],
];

function conditionsOf(rows) {
  const present = new Set(rows.flatMap((row) => Object.keys(row.cells)));
  const known = CONDITIONS.filter(([key]) => present.delete(key));
  return [...known, ...[...present].map((key) => [key, key, ""])];
}

function resultsSection(data) {
  const section = el("section", { id: "results" }, el("h2", {}, "Held-out results"));
  if (data.evaluation) {
    const { rows, meta, compare } = data.evaluation;
    const conditions = conditionsOf(rows);
    section.append(el("div", { class: "card scroll", tabindex: "0" }, resultsTable(rows, conditions), metaFacts(meta)));
    if (rows.length > 1) {
      section.append(el("h2", { class: "before" }, "Before and after"), el("div", { class: "grid narrow" }, conditions.map((condition) => beforeAfter(rows, compare, condition))));
    }
    return section;
  }
  const curves = data.runs.flatMap((run) => firstAndLast(run));
  section.append(curves.length ? el("div", { class: "card" }, el("p", { class: "muted small" }, "From the curves of training:"), curves)
    : el("p", { class: "muted" }, "No held-out results yet."));
  return section;
}

function resultsTable(rows, conditions) {
  const groups = [];
  for (const [, , group] of conditions) {
    if (groups.length && groups.at(-1).name === group) groups.at(-1).span += 1;
    else groups.push({ name: group, span: 1 });
  }
  return el(
    "table", {},
    el(
      "thead", {},
      el("tr", {}, el("th"), groups.map(({ name, span }) => el("th", { class: "group", colspan: span, scope: "colgroup" }, name))),
      el("tr", {}, el("th", { scope: "col" }, "Accuracy ± standard error"), conditions.map(([, label]) => el("th", { scope: "col" }, label))),
    ),
    el("tbody", {}, rows.map((row) => el("tr", {}, el("th", { scope: "row" }, row.name), conditions.map(([key]) => resultCell(row.cells[key]))))),
  );
}

function resultCell(cell) {
  if (!cell) return el("td", { class: "muted" }, "–");
  const details = [
    Number.isFinite(cell.n) && `n = ${cell.n.toLocaleString("en")}`,
    Number.isFinite(cell.fatal_fraction) && `fatal ${format(cell.fatal_fraction, "fraction")}`,
  ].filter(Boolean);
  return el(
    "td", {},
    el("div", { class: "value" }, `${fixed(cell.accuracy)}%`, Number.isFinite(cell.stderr) && el("span", { class: "muted" }, ` ± ${fixed(cell.stderr)}`)),
    el("div", { class: "muted small details" }, details.map((detail) => el("span", {}, detail))),
  );
}

/** Hundredths with one decimal, so that a column of them lines up. */
function fixed(fraction) {
  return (100 * fraction).toFixed(1);
}

function metaFacts(meta) {
  const entries = Object.entries(meta);
  return entries.length > 0 && el("dl", { class: "facts small meta" }, entries.map(([key, value]) => [el("dt", {}, key.replaceAll("_", " ")), el("dd", {}, value)]));
}

function beforeAfter(rows, compare, [key, label, group]) {
  const shown = rows.filter((row) => row.cells[key]);
  const [before, after] = compare.map((name) => shown.find((row) => row.name === name)?.cells[key]);
  return el(
    "div", { class: "card" },
    el("h3", {}, [label, group].filter(Boolean).join(", ")),
    before && after && change(before, after, compare),
    el("div", { class: "bars" }, shown.map((row) => accuracyBar(row.name, row.cells[key], row.name === compare.at(-1)))),
  );
}

function change(before, after, [nameBefore, nameAfter]) {
  const points = 100 * (after.accuracy - before.accuracy);
  const error = 100 * Math.hypot(before.stderr ?? NaN, after.stderr ?? NaN);
  return el(
    "p", { class: "change" },
    el("b", {}, signed(trim(points, 1))),
    el("span", { class: "muted small" }, `${Number.isFinite(error) ? `± ${error.toFixed(1)} ` : ""}points, ${nameBefore} → ${nameAfter}`),
  );
}

function accuracyBar(name, cell, isAfter) {
  const error = Number.isFinite(cell.stderr) ? cell.stderr : 0;
  const percent = (value) => `${100 * Math.min(1, Math.max(0, value))}%`;
  const whisker = error > 0 && [
    svg("line", { class: "whisker", x1: percent(cell.accuracy - error), x2: percent(cell.accuracy + error), y1: 9, y2: 9 }),
    ...[cell.accuracy - error, cell.accuracy + error].map((at) => svg("line", { class: "whisker", x1: percent(at), x2: percent(at), y1: 5, y2: 13 })),
  ];
  return [
    el("span", { class: "name" }, name),
    svg(
      "svg", { role: "img", "aria-label": `${fixed(cell.accuracy)}%` },
      svg("rect", { class: "track", width: "100%", height: 18, rx: 3 }),
      svg("rect", { class: `fill ${isAfter ? "after" : ""}`, width: percent(cell.accuracy), height: 18, rx: 3 }),
      whisker,
    ),
    el("span", { class: "number" }, `${fixed(cell.accuracy)}%`),
  ];
}

function firstAndLast(run) {
  const chart = run.charts.find(({ title }) => title === "Accuracy");
  return (chart?.series ?? []).filter((item) => item.metric.startsWith("val") && item.x.length > 1).map((item) => el(
    "p", {},
    `${run.name}, ${item.label}: ${format(item.y[0], "fraction")} (step ${item.x[0]}) → ${format(item.y.at(-1), "fraction")} (step ${item.x.at(-1)})`,
  ));
}
