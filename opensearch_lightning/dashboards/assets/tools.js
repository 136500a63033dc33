// The tools of a run: a table over the whole run, charts over its steps.

function toolsSection(run, id) {
  const withErrors = run.tools.some((tool) => Object.keys(tool.errors).length);
  return el(
    "section", { id },
    el("h2", {}, `Tools: ${run.name}`),
    el("div", { class: "card scroll", tabindex: "0" }, el(
      "table", {},
      el("thead", {}, el("tr", {}, [
        "Tool", "Calls", "Errors", "Errors by kind", "Cache hits", "Latency, median", "Latency, 95th pct.",
      ].map((name, i) => el("th", { scope: "col", class: i === 3 ? "left" : null }, name)))),
      el("tbody", {}, run.tools.map(toolRow)),
    ), el("p", { class: "muted small" }, "Sums over the logged steps; latencies are medians of the steps' figures.",
      withErrors ? "" : " No errors.")),
    el("div", { class: "grid charts tool-charts" }, run.toolCharts.map(lineChart)),
  );
}

function toolRow(tool) {
  const errors = Object.values(tool.errors).reduce((sum, count) => sum + count, 0);
  const share = tool.calls ? ` (${format(errors / tool.calls, "fraction")})` : "";
  return el(
    "tr", {},
    el("th", { scope: "row" }, tool.name),
    el("td", {}, tool.calls.toLocaleString("en")),
    el("td", { class: "nowrap" }, errors.toLocaleString("en"), errors > 0 && el("span", { class: "muted" }, share)),
    el("td", { class: "left" }, el("div", { class: "chips" }, Object.entries(tool.errors).map(([kind, count]) => chip(`${kind} ${count.toLocaleString("en")}`)))),
    el("td", {}, tool.cache_hits.toLocaleString("en")),
    el("td", {}, format(tool.latency_p50_s, "seconds")),
    el("td", {}, format(tool.latency_p95_s, "seconds")),
  );
}
