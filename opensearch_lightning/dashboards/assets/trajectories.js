// The trajectory browser: choose by run, split, step and outcome; see pictures, calls, observations and the token mask.

const OUTCOMES = { right: "right", wrong: "wrong", fatal: "fatal", unfinished: "ran out", unscored: "no score" };
const OUTCOME_CLASS = { right: "right", wrong: "wrong", fatal: "fatal", unfinished: "fatal", unscored: "" };
const MAX_SEPARATE_TOKENS = 6000;

function trajectoriesSection(data) {
  const section = el("section", { id: "trajectories" });
  const bar = el("div", { class: "bar" });
  const list = el("div", { class: "list card", role: "group", "aria-label": "Trajectories", keydown: moveInList });
  const detail = el("article", { class: "detail card", "aria-live": "off" });
  const body = el("div", { class: "browser" }, list, detail);
  section.append(bar, body);
  if (!data.trajectories.length) {
    bar.append(el("h2", {}, "Trajectories"));
    body.replaceWith(el("p", { class: "muted" }, "No trajectories to show."));
    return section;
  }
  const last = data.trajectories.at(-1);
  const filter = { run: last.run, split: "", step: "", outcome: "" };
  const train = data.trajectories.filter((item) => item.run === last.run && item.split === "train");
  if (train.length) Object.assign(filter, { split: "train", step: String(train.at(-1).step) });

  const select = (item, button) => {
    list.querySelectorAll("[aria-current]").forEach((other) => other.removeAttribute("aria-current"));
    button.setAttribute("aria-current", "true");
    detail.replaceChildren(...trajectoryDetail(item, data.images));
  };
  const refresh = () => {
    drawFilters(bar, data, filter, refresh);
    const shown = data.trajectories.filter((item) => matches(item, filter));
    list.replaceChildren(...shown.map((item) => listButton(item, filter, select)));
    if (shown.length) select(shown[0], list.firstChild);
    else detail.replaceChildren(el("p", { class: "muted" }, "No trajectory fits this choice."));
    list.scrollTop = 0;
  };
  refresh();
  return section;
}

function matches(item, filter, except) {
  return Object.entries(filter).every(([key, value]) => key === except || value === "" || String(item[key]) === value);
}

/** The selects; each offers what the others leave, with its number. Focus stays on the one that was used. */
function drawFilters(bar, data, filter, refresh) {
  const used = document.activeElement?.closest("label")?.firstChild?.textContent;
  const fields = [["run", "Run"], ["split", "Split"], ["step", "Step"], ["outcome", "Outcome"]];
  const selects = fields.map(([key, label]) => {
    const counts = new Map();
    for (const item of data.trajectories) {
      if (matches(item, filter, key)) counts.set(String(item[key]), (counts.get(String(item[key])) ?? 0) + 1);
    }
    if (filter[key] !== "" && !counts.has(filter[key])) counts.set(filter[key], 0);
    const entries = [...counts];
    if (key === "step") entries.sort((a, b) => a[0] - b[0]);
    const name = (value) => (key === "outcome" ? OUTCOMES[value] : value);
    const options = [["", "all"], ...entries.map(([value, count]) => [value, `${name(value)} (${count})`])];
    return choice(label, options, filter[key], (value) => { filter[key] = value; refresh(); });
  });
  const total = data.found > data.trajectories.length
    ? `${data.trajectories.length} of ${data.found.toLocaleString("en")} recorded trajectories fit on this page`
    : plural(data.found, "trajectory", "trajectories");
  bar.replaceChildren(el("h2", {}, "Trajectories ", el("span", { class: "muted small" }, total)), ...selects);
  selects.find((label) => label.firstChild.textContent === used)?.querySelector("select").focus();
}

function listButton(item, filter, select) {
  const where = [filter.run === "" && item.run, filter.split === "" && item.split, filter.step === "" && `step ${item.step}`].filter(Boolean).join(", ");
  const button = el(
    "button", { type: "button", click: () => select(item, button) },
    el("span", { class: "line1" }, el("span", {}, `${item.task_id} #${item.rollout}`), chip(OUTCOMES[item.outcome], OUTCOME_CLASS[item.outcome])),
    el("span", { class: "question" }, where ? `${where} · ${item.question}` : item.question),
  );
  return button;
}

function moveInList(event) {
  const buttons = [...event.currentTarget.children];
  const at = buttons.indexOf(document.activeElement);
  const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: buttons.length - 1 }[event.key];
  if (at < 0 || next === undefined) return;
  event.preventDefault();
  const button = buttons[Math.max(0, Math.min(buttons.length - 1, next))];
  button.focus();
  button.click();
}

function trajectoryDetail(item, images) {
  const made = new Set(item.steps.map((step) => step.image_name).filter(Boolean));
  const response = item.steps.at(-1)?.action.response ?? null;
  return [
    el(
      "div", {},
      el("div", { class: "chips" }, chip(OUTCOMES[item.outcome], OUTCOME_CLASS[item.outcome]), chip(`ended by ${words(item.stop_reason)}`),
        item.fatal_step !== null && chip(`fatal from step ${item.fatal_step}`, "fatal"), chip(`${item.task_id} #${item.rollout}`)),
    ),
    el("p", { class: "question-text" }, item.question),
    el("div", { class: "pictures" }, item.images.filter(({ name }) => !made.has(name)).map((image) => picture(image, images))),
    facts(item, response),
    el("ol", { class: "steps", "aria-label": "Steps" }, item.steps.map((step) => stepCard(step, item, images))),
    tokensBlock(item),
  ];
}

function words(name) {
  return name.replaceAll("_", " ");
}

function facts(item, response) {
  const reward = item.reward;
  const number = (value) => (typeof value === "number" ? format(value, "number") : String(value));
  const rows = [
    ["Answer", response ?? "none"],
    ["Reference", item.answer],
    ["Reward", reward ? `${number(reward.total)} (format ${number(reward.format)}, accuracy ${number(reward.accuracy)}, query quality ${number(reward.query)})` : "not scored"],
    ["Advantage", advantage(item, number)],
    ["Gradient", gradient(item)],
  ];
  return el("dl", { class: "facts" }, rows.filter(([, value]) => value !== null).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function advantage(item, number) {
  if (item.advantage === null) return item.split === "train" ? "not recorded" : null;
  const raw = item.raw_advantage;
  return raw !== null && raw !== undefined && raw !== item.advantage ? `${number(item.advantage)} (clamped from ${number(raw)})` : number(item.advantage);
}

function gradient(item) {
  if (item.split !== "train") return null;
  const { kept, masked } = item.token_counts;
  if (item.advantage === 0) return "none: the advantage is 0";
  return masked ? `${plural(kept, "token")} of ${(kept + masked).toLocaleString("en")} sampled ones` : `all ${plural(kept, "sampled token")}`;
}

function picture(image, images) {
  const found = images[image.file];
  return el(
    "figure", {},
    found ? el("img", { src: found.src, alt: `Picture ${image.name}` }) : el("div", { class: "missing" }, "picture not on this page"),
    el("figcaption", {}, image.name + (found ? ` · ${found.width} × ${found.height} px` : "")),
  );
}

function stepCard(step, item, images) {
  const masked = item.kept_before !== null && step.index >= item.kept_before;
  const { action, observation } = step;
  const title = action.kind === "response" ? "answer" : observation?.tool ?? action.name ?? "no action";
  return el(
    "li", { class: `step ${masked ? "masked" : ""}` },
    el(
      "header", {},
      el("h4", {}, `Step ${step.index}: ${title}`),
      observation?.error && chip(words(observation.error), "error"),
      observation?.injected && chip("injected"),
      observation?.cached && chip("cached"),
      !action.well_formed && chip("not well formed", "fatal"),
      masked && chip("masked: no gradient", "fatal"),
    ),
    actionBlock(step),
    observation && observationBlock(step, item, images),
  );
}

function actionBlock({ text, action }) {
  const think = /^\s*<think>([\s\S]*?)<\/think>/.exec(text);
  if (action.kind === "error" || !action.well_formed) return [el("pre", { tabindex: "0", "aria-label": "As sampled" }, text || "(nothing)")];
  return [
    think && think[1].trim() && el("p", { class: "text think" }, think[1].trim()),
    action.kind === "response" ? el("p", { class: "text answer" }, action.response)
      : el("pre", { tabindex: "0", "aria-label": "Call" }, `${action.name}(${JSON.stringify(action.arguments, null, 2)})`),
  ];
}

function observationBlock({ observation, image_name }, item, images) {
  const image = item.images.find(({ name }) => name === image_name);
  const detail = [observation.tool && format(observation.latency_s, "seconds"), observation.note].filter(Boolean).join(" · ");
  return el(
    "div", { class: `observation ${observation.error ? "failed" : ""}` },
    el("span", { class: "muted small" }, `Observation${detail ? ` · ${detail}` : ""}`),
    el("pre", { tabindex: "0", "aria-label": "Observation" }, observation.text || "(empty)"),
    image && picture(image, images),
  );
}

function tokensBlock(item) {
  const { kept, masked, not_sampled: other } = item.token_counts;
  const separate = kept + masked <= MAX_SEPARATE_TOKENS;
  return el(
    "div", {},
    el("div", { class: "bar" }, el("h3", {}, "Tokens"),
      el("span", { class: "key kept" }, `sampled, with gradient: ${kept.toLocaleString("en")}`),
      el("span", { class: "key masked" }, `sampled, masked: ${masked.toLocaleString("en")}`),
      el("span", { class: "key other" }, `not sampled: ${other.toLocaleString("en")}`)),
    el("div", { class: "tokens", tabindex: "0", "aria-label": "Tokens" }, item.tokens.map(([step, hasGradient, texts]) => {
      if (step < 0) return el("span", { class: "other", title: "prompt or observation" }, texts);
      const pieces = separate ? texts : [texts.join("")];
      const title = `step ${step}, ${hasGradient ? "with gradient" : "masked"}`;
      return el("span", { class: hasGradient ? "kept" : "masked", title }, pieces.map((text) => el("span", { class: "tok" }, text)));
    })),
  );
}
