// Puts the page together from the data that stands in it.

const data = JSON.parse(document.getElementById("data").textContent);

function themeButton() {
  const themes = ["auto", "light", "dark"];
  let at = 0;
  const button = el("button", { type: "button", click: () => {
    at = (at + 1) % themes.length;
    if (at) document.documentElement.dataset.theme = themes[at];
    else delete document.documentElement.dataset.theme;
    button.textContent = `Theme: ${themes[at]}`;
  } }, "Theme: auto");
  return button;
}

function curvesSection(run, id) {
  return el(
    "section", { id },
    el("h2", {}, `Curves: ${run.name}`),
    el("div", { class: "grid charts" }, run.charts.map(lineChart)),
    run.otherCharts.length > 0 && el(
      "details", { class: "others" }, el("summary", {}, `Other metrics (${run.otherCharts.length})`),
      el("div", { class: "grid charts" }, run.otherCharts.map(lineChart)),
    ),
  );
}

function notesCard(notes) {
  return el("div", { class: "card notes" }, el("h3", {}, "Missing or unreadable"), el("ul", {}, notes.map((note) => el("li", {}, note))));
}

function describeRuns(runs) {
  return runs.map((run) => `${run.name}${run.steps ? ` (steps ${run.steps.map((step) => step.toLocaleString("en")).join(" to ")})` : ""}`).join(", ");
}

const sections = [["Results", resultsSection(data)]];
data.runs.forEach((run, i) => {
  if (run.charts.length + run.otherCharts.length) sections.push([`Curves: ${run.name}`, curvesSection(run, `curves-${i}`)]);
  if (run.tools.length) sections.push([`Tools: ${run.name}`, toolsSection(run, `tools-${i}`)]);
});
sections.push(["Trajectories", trajectoriesSection(data)]);

const when = new Date(data.generated).toLocaleString("en-GB", { dateStyle: "long", timeStyle: "short" });
document.getElementById("top").append(
  el("h1", {}, data.title),
  el("p", { class: "muted" }, `${describeRuns(data.runs)}${data.runs.length ? " · " : ""}written ${when}`),
);
document.getElementById("top").after(el(
  "nav", { "aria-label": "Sections" },
  el(
    "div", {},
    sections.map(([name, section]) => el("a", { href: `#${section.id}` }, name)),
    el("div", { class: "controls" }, data.runs.some((run) => run.charts.length) && smoothingChoice(), themeButton()),
  ),
));
document.getElementById("main").append(...(data.notes.length ? [notesCard(data.notes)] : []), ...sections.map(([, section]) => section));
