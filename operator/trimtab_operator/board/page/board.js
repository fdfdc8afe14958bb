"use strict";
// Draws /api/deployments and /api/deployments/NAMESPACE/NAME. All text is set as text, never as HTML.

const REFRESH_MS = 5000;
const STALE_SECONDS = 120; // older data is marked: an idle deployment is read every 30 to 60 s
const SVG = "http://www.w3.org/2000/svg";
const CHART_HEIGHT = 74;
const PARAMETER_HEIGHT = 48;
const MAX_OBJECTIVE_FACTOR = 4; // of the axis of a latency: a peak should not flatten the line of the objective
const MIN_MARK_DISTANCE = 26; // px between decision marks, so that each can be hit

const count = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3)));
const percent = (value) => `${+(100 * value).toFixed(1)}%`;
const seconds = (value) => (value < 1 ? `${+(1000 * value).toPrecision(3)} ms` : `${+value.toPrecision(3)} s`);

// Of each chart: title, format, and series as [name, label, class].
const SECTIONS = [
  ["Load", [
    ["Requests per second", count, [["requests_per_second", "arriving", "first"]]],
    ["Output tokens per second", count, [["tokens_per_second", "generated", "first"]]],
    ["Requests", count, [["running", "running", "first"], ["waiting", "waiting", "second"]]],
    ["Router queue", count, [["router_held", "requests held", "first"]]],
  ]],
  ["Latency", [
    ["Time to first token", seconds, [["ttft", "measured", "first"], ["ttft_objective", "objective", "objective"]]],
    ["Inter-token latency", seconds, [["itl", "measured", "first"], ["itl_objective", "objective", "objective"]]],
  ]],
  ["Capacity", [
    ["KV cache usage", percent, [["kv_usage", "used", "first"]], 1],
    ["Preemptions per minute", count, [["preemptions_per_minute", "preempted", "first"]]],
    ["Replicas", count, [["replicas_ready", "ready", "first"], ["replicas_desired", "desired", "second"]]],
  ]],
  ["Parameters", [
    ["max_num_seqs", count, [["max_num_seqs", "in force", "first"]]],
    ["max_num_batched_tokens", count, [["max_num_batched_tokens", "in force", "first"]]],
    ["gpu_memory_utilization", percent, [["gpu_memory_utilization", "in force", "first"]], 1],
    ["watermark", percent, [["watermark", "in force", "first"]]],
  ]],
];
const STEPS = /replicas|objective|max_num|gpu_memory|watermark/; // series that hold their value until it changes

const byId = (id) => document.getElementById(id);
const state = { list: null, detail: null, range: "hour", cursor: null, selected: null, error: null };

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// --- data ------------------------------------------------------------------------------------------------------------

const key = (entry) => `${entry.namespace}/${entry.name}`;
const chosen = () => (location.hash.startsWith("#/") ? decodeURIComponent(location.hash.slice(2)) : "");

async function load() {
  try {
    state.list = await read("api/deployments");
    if (!chosen() && state.list.deployments.length) history.replaceState(null, "", `#/${key(state.list.deployments[0])}`);
    const exists = state.list.deployments.some((entry) => key(entry) === chosen());
    const detail = exists ? await read(`api/deployments/${chosen()}?range=${state.range}`) : null;
    if (!detail || key(detail) === chosen()) state.detail = detail;
    state.error = null;
  } catch (error) {
    state.error = error;
  }
  draw();
}

async function read(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
  return response.json();
}

function latest(series) {
  const known = (series || []).slice(-8).filter((value) => value !== null);
  return known.length ? known[known.length - 1] : null;
}

// --- page ------------------------------------------------------------------------------------------------------------

function draw() {
  drawUpdated();
  drawList();
  drawDetail();
}

function drawUpdated() {
  const updated = byId("updated");
  const age = state.list && state.detail ? state.list.now - state.detail.at : 0;
  updated.classList.toggle("stale", Boolean(state.error) || age > STALE_SECONDS);
  if (state.error) updated.textContent = `No connection to the operator (${state.error.message}); data is old`;
  else if (age > STALE_SECONDS) updated.textContent = `Last reconciled ${duration(age)} ago`;
  else updated.textContent = state.list ? `Updated ${clock(state.list.now, true)}` : "Loading";
}

function drawList() {
  if (!state.list) return;
  const wanted = byId("filter").value.trim().toLowerCase();
  const entries = state.list.deployments.filter((entry) => key(entry).toLowerCase().includes(wanted));
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.key : null;
  byId("list").replaceChildren(...entries.map((entry) => {
    const link = element("a", { href: `#/${key(entry)}` },
      element("b", { textContent: entry.name }),
      element("span", { className: `ready${entry.problem ? " bad" : ""}`, textContent: `${entry.ready || "–"} ready` }),
      element("span", { className: "place", textContent: entry.namespace }),
      sparkline(entry.trend.requests_per_second || []));
    link.dataset.key = key(entry);
    if (key(entry) === chosen()) link.setAttribute("aria-current", "page");
    return element("li", {}, link);
  }));
  if (focused) document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  const without = state.list.reconciles_without_room ? "Deployments beyond the first 1,000 are not shown. " : "";
  byId("list-note").textContent = without + (entries.length ? "" : state.list.deployments.length ? "No name matches." :
    "No deployment was reconciled since the operator started.");
}

function sparkline(values) {
  const svg = shape("svg", { viewBox: "0 0 72 18", "aria-hidden": "true" });
  const top = Math.max(...values.map((value) => value || 0), 1e-9);
  const step = 72 / Math.max(1, values.length - 1);
  svg.append(shape("path", { class: "first", d: path(values, (i) => i * step, (v) => 17 - (15 * v) / top, false) }));
  return svg;
}

function drawDetail() {
  const detail = state.detail;
  for (const id of ["timeline", "decisions", "tiles"]) byId(id).hidden = !detail;
  if (!detail) {
    byId("name").textContent = chosen() && state.list ? `${chosen()} is not recorded` : "No deployment";
    byId("facts").textContent = "";
    byId("problem").hidden = true;
    return;
  }
  byId("name").textContent = key(detail);
  document.title = `${key(detail)} – Trimtab board`;
  byId("facts").textContent = [detail.model, `tuning ${detail.mode}`, detail.phase].filter(Boolean).join(" · ");
  byId("problem").hidden = !detail.problem;
  byId("problem").textContent = detail.problem || "";
  byId("since").textContent = `Measured since ${clock(detail.since, false, true)}, when this operator process first ` +
    `reconciled the deployment. Each point covers ${duration(detail.step_seconds)}.`;
  drawTiles(detail);
  drawCharts(detail);
  drawCards(detail);
}

function drawTiles(detail) {
  const now = Object.fromEntries(Object.entries(detail.series).map(([name, values]) => [name, latest(values)]));
  const against = (value, objective) => (value == null ? null : [seconds(value), objective == null ? "" : `of ${seconds(objective)}`,
    objective != null && value > objective]);
  const plain = (value, format, unit = "") => (value == null ? null : [format(value), unit, false]);
  const replicas = now.replicas_desired == null ? null : [`${now.replicas_ready ?? 0} of ${now.replicas_desired}`, "ready",
    (now.replicas_ready ?? 0) < now.replicas_desired];
  const tiles = [
    ["Arriving", plain(now.requests_per_second, count, "requests/s")],
    ["Waiting", plain(now.waiting, count, "requests")],
    [`TTFT p${percentile(detail, "ttft")}`, against(now.ttft, now.ttft_objective)],
    [`ITL p${percentile(detail, "itl")}`, against(now.itl, now.itl_objective)],
    ["Attained", plain(detail.attained, percent, "in about 1 h")],
    ["KV cache", plain(now.kv_usage, percent, "used")],
    ["Replicas", replicas],
    ["Router queue", plain(now.router_held, count, "held")],
  ];
  byId("tiles").replaceChildren(...tiles.filter(([, shown]) => shown).map(([name, [value, unit, isBad]]) =>
    element("div", { className: isBad ? "bad" : "" }, element("dt", { textContent: name }),
      element("dd", {}, value, " ", element("small", { textContent: unit })))));
}

const percentile = (detail, name) => ((detail.objectives || {})[name] || {}).percentile || 95;

// --- timeline --------------------------------------------------------------------------------------------------------

function drawCharts(detail) {
  const width = Math.max(120, byId("charts").clientWidth);
  const gutter = parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--gutter"));
  const first = detail.times[0], last = detail.times[detail.times.length - 1];
  const x = (at) => gutter + ((at - first) / (last - first)) * (width - gutter);
  const ticks = timeTicks(first, last, width < 500 ? 4 : 7);
  state.scale = { width, gutter, first, last, x };
  drawAxis(ticks, x);
  const number = numbers(detail);
  const marks = detail.decisions.filter((decision) => decision.at >= first).map((decision) => ({ decision, at: x(decision.at) }));
  drawMarks(marks, number, gutter, width);
  const cursor = byId("cursor");
  Object.assign(cursor, { max: detail.times.length - 1 });
  cursor.value = state.cursor ?? detail.times.length - 1;
  const made = [];
  for (const [title, charts] of SECTIONS) {
    const shown = charts.filter(([, , series]) => detail.series[series[0][0]]);
    if (shown.length) made.push(element("h3", { textContent: title }), ...shown.map((chart) => figure(chart, detail, x, ticks, marks)));
  }
  byId("charts").replaceChildren(...made);
  drawCursor();
}

function drawAxis(ticks, x) {
  byId("axis").replaceChildren(...ticks.map((at) =>
    shape("text", { x: x(at), y: 12, "text-anchor": x(at) > state.scale.width - 16 ? "end" : "middle" }, clock(at))));
}

function drawMarks(marks, number, gutter, width) {
  const group = byId("marks");
  const focused = group.contains(document.activeElement) ? document.activeElement.dataset.id : null;
  let right = Infinity;
  group.replaceChildren(...marks.map(({ decision, at }) => {
    right = Math.min(at - gutter, right - MIN_MARK_DISTANCE);
    const button = element("button", { type: "button", textContent: number.get(decision.id), title: decision.sentence });
    button.style.left = `${Math.max(right, 0)}px`;
    button.dataset.id = decision.id;
    button.setAttribute("aria-pressed", String(decision.id === state.selected));
    button.setAttribute("aria-label", `Decision ${number.get(decision.id)}, ${clock(decision.at)}: ${decision.sentence}`);
    button.addEventListener("click", () => select(decision.id, true));
    return button;
  }).reverse());
  if (focused) group.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
}

function figure([title, format, series, fixedTop], detail, x, ticks, marks) {
  const { width, gutter } = state.scale;
  const shown = series.filter(([name]) => detail.series[name]);
  const known = shown.flatMap(([name]) => detail.series[name].filter((value) => value !== null));
  const peak = Math.max(...known);
  const top = fixedTop || niceTop(Math.min(peak, MAX_OBJECTIVE_FACTOR * (objectiveOf(shown, detail) || Infinity)));
  const height = STEPS.test(shown[0][0]) && shown.length === 1 ? PARAMETER_HEIGHT : CHART_HEIGHT;
  const y = (value) => height - 4 - (Math.min(value, top) / top) * (height - 12);
  const at = (index) => x(detail.times[index]);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
  svg.setAttribute("aria-label", describe(title, format, shown, detail));
  for (const tick of ticks) svg.append(shape("line", { class: "grid", x1: x(tick), x2: x(tick), y1: 8, y2: height - 4 }));
  for (const value of [0, top / 2, top]) {
    svg.append(shape("line", { class: value ? "grid" : "base", x1: gutter, x2: width, y1: y(value), y2: y(value) }));
    if (value !== top / 2) svg.append(shape("text", { x: gutter - 8, y: y(value) + 4, "text-anchor": "end" }, format(value)));
  }
  for (const mark of marks) {
    const line = shape("line", { class: "mark", x1: mark.at, x2: mark.at, y1: 0, y2: height });
    line.dataset.id = mark.decision.id;
    line.classList.toggle("selected", mark.decision.id === state.selected);
    svg.append(line);
  }
  const isSingle = shown.length === 1 || shown[1][2] === "objective";
  for (const [name, , kind] of [...shown].reverse()) {
    const values = detail.series[name];
    const line = path(values, at, y, STEPS.test(name));
    if (kind === "first" && isSingle && !STEPS.test(name)) svg.append(shape("path", { class: "area", d: area(values, at, y, STEPS.test(name)) }));
    svg.append(shape("path", { class: kind, d: line }));
    const objective = detail.series[`${name}_objective`];
    if (objective) svg.append(...overObjective(name, line, objective, at, y));
  }
  svg.append(shape("line", { class: "cursor", y1: 4, y2: height - 4 }));
  svg.addEventListener("pointermove", (event) => moveCursor(event, svg));
  svg.addEventListener("pointerleave", () => setCursor(null));
  const caption = element("figcaption", {}, element("b", { textContent: title }), ...shown.map(([name, label, kind]) => {
    const readout = element("span", {}, element("i", { className: kind }), `${label} `, element("output"));
    readout.dataset.series = name;
    return readout;
  }));
  if (!fixedTop && peak > top) caption.append(element("span", { textContent: `peak ${format(peak)}` }));
  const made = element("figure", {}, caption, svg);
  made.readouts = shown.map(([name]) => [name, format]);
  return made;
}

// Returns the highest objective of a chart in the shown time; null without one.
function objectiveOf(shown, detail) {
  const name = shown.map(([one]) => one).find((one) => one.endsWith("_objective"));
  return name ? Math.max(...detail.series[name].filter((value) => value !== null)) : null;
}

// Returns the part of a line above its objective, drawn again in another colour, and its clip path.
function overObjective(name, line, objective, at, y) {
  const clip = shape("clipPath", { id: `over-${name}` });
  let points = "";
  objective.forEach((value, index) => {
    if (value === null) return;
    const next = index + 1 < objective.length ? at(index + 1) : at(index) + 1;
    points += `M${at(index)} 0H${next}V${y(value)}H${at(index)}Z`;
  });
  clip.append(shape("path", { d: points }));
  return [clip, shape("path", { class: "over", d: line, "clip-path": `url(#over-${name})` })];
}

// Splits at unknown values. A single point between them becomes a short line.
function path(values, x, y, isStep) {
  let d = "";
  values.forEach((value, index) => {
    if (value === null) return;
    const isStart = index === 0 || values[index - 1] === null;
    if (isStart) d += `M${x(index).toFixed(1)} ${y(value).toFixed(1)}h.5`;
    else if (isStep) d += `H${x(index).toFixed(1)}V${y(value).toFixed(1)}`;
    else d += `L${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
  });
  return d;
}

function area(values, x, y, isStep) {
  let d = "";
  let start = null;
  for (let index = 0; index <= values.length; index += 1) {
    const isKnown = index < values.length && values[index] !== null;
    if (isKnown && start === null) start = index;
    if (isKnown || start === null) continue;
    const part = values.slice(start, index);
    const offset = start;
    d += `${path(part, (i) => x(i + offset), y, isStep)}V${y(0)}H${x(start)}Z`;
    start = null;
  }
  return d;
}

function describe(title, format, shown, detail) {
  const parts = shown.map(([name, label]) => {
    const known = detail.series[name].filter((value) => value !== null);
    return `${label} from ${format(Math.min(...known))} to ${format(Math.max(...known))}, last ${format(known[known.length - 1])}`;
  });
  return `${title}: ${parts.join("; ")}`;
}

function moveCursor(event, svg) {
  const { gutter, width } = state.scale;
  const box = svg.getBoundingClientRect();
  const share = (event.clientX - box.left - gutter) / (width - gutter);
  setCursor(Math.round(Math.min(1, Math.max(0, share)) * (state.detail.times.length - 1)));
}

function setCursor(index) {
  const end = state.detail.times.length - 1;
  state.cursor = index === null || index >= end ? null : index;
  byId("cursor").value = state.cursor ?? end;
  drawCursor();
}

// Shows the values at the cursor, or the latest known ones.
function drawCursor() {
  const { detail, cursor, scale } = state;
  const index = cursor ?? detail.times.length - 1;
  const text = cursor === null ? "now" : clock(detail.times[index]);
  byId("cursor").setAttribute("aria-valuetext", text);
  for (const made of byId("charts").querySelectorAll("figure")) {
    const line = made.querySelector(".cursor");
    line.setAttribute("x1", scale.x(detail.times[index]));
    line.setAttribute("x2", scale.x(detail.times[index]));
    line.setAttribute("visibility", cursor === null ? "hidden" : "visible");
    for (const [name, format] of made.readouts) {
      const value = cursor === null ? latest(detail.series[name]) : detail.series[name][index];
      made.querySelector(`[data-series="${name}"] output`).textContent = value === null ? "–" : format(value);
    }
  }
}

// --- decisions -------------------------------------------------------------------------------------------------------

// Numbers decisions from the oldest known one, so that a number does not change while the page is open.
function numbers(detail) {
  return new Map([...detail.decisions].reverse().map((decision, index) => [decision.id, index + 1]));
}

function drawCards(detail) {
  const number = numbers(detail);
  const list = byId("cards");
  const focused = list.contains(document.activeElement) ? document.activeElement.dataset.id : null;
  const cards = detail.decisions.map((decision) => card(decision, number.get(decision.id)));
  if (detail.recommendation) cards.unshift(card(detail.recommendation, "★", "recommended"));
  list.replaceChildren(...cards);
  if (!cards.length) list.append(element("li", { className: "note", textContent: "No decision was necessary yet." }));
  if (focused) list.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
}

function card(decision, number, note) {
  const isRange = decision.from !== null && decision.to !== null;
  const button = element("button", { type: "button" }, element("span", { className: "number", textContent: number }),
    element("span", { textContent: decision.reason }),
    element("time", { textContent: note || clock(decision.at, false, true), dateTime: new Date(1000 * decision.at).toISOString() }));
  button.dataset.id = decision.id;
  button.setAttribute("aria-pressed", String(decision.id === state.selected));
  button.addEventListener("click", () => select(decision.id, false));
  const facts = element("dl");
  const add = (name, text) => text && facts.append(element("dt", { textContent: name }), element("dd", { textContent: text }));
  decision.predictions.forEach((prediction) => add("Predicted", prediction));
  add("Outcome", decision.outcome);
  const made = element("li", { className: decision.id === state.selected ? "selected" : "" }, button);
  if (isRange) made.append(element("p", { className: "change", textContent: `${decision.target}: ${decision.from} → ${decision.to}` }));
  made.append(element("p", { textContent: decision.sentence.split("; ")[0].replace(/\.?$/, ".") }));
  if (decision.id === state.selected && decision.sentence.includes("; ")) {
    made.append(element("p", { className: "note", textContent: decision.sentence.split("; ").slice(1).join("; ") }));
  }
  if (facts.children.length) made.append(facts);
  return made;
}

function select(id, isFromTimeline) {
  state.selected = state.selected === id ? null : id;
  drawDetail();
  const made = byId("cards").querySelector(".selected");
  if (!isFromTimeline || !made) return;
  const pane = byId("decisions");
  if (pane.scrollHeight > pane.clientHeight) pane.scrollTop = made.offsetTop - 8; // the page itself stays in place
  else made.scrollIntoView({ block: "nearest" });
}

// --- time and numbers ------------------------------------------------------------------------------------------------

function clock(at, hasSeconds = false, hasDate = false) {
  const moment = new Date(1000 * at);
  const time = moment.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: hasSeconds ? "2-digit" : undefined });
  const isToday = moment.toDateString() === new Date(1000 * state.list.now).toDateString();
  return hasDate && !isToday ? `${moment.toLocaleDateString("en-CA")} ${time}` : time;
}

function duration(value) {
  return value < 120 ? `${Math.round(value)} s` : value < 7200 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`;
}

function timeTicks(first, last, most) {
  const step = [300, 600, 900, 1800, 3600, 7200, 14400, 21600].find((one) => (last - first) / one <= most) || 43200;
  const offset = 60 * new Date(1000 * first).getTimezoneOffset();
  const ticks = [];
  for (let at = Math.ceil((first - offset) / step) * step + offset; at <= last; at += step) ticks.push(at);
  return ticks;
}

function niceTop(value) {
  if (!(value > 0)) return 1;
  const scale = 10 ** Math.floor(Math.log10(value));
  return scale * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((factor) => factor * scale >= value * 1.02 || factor === 10);
}

// --- events ----------------------------------------------------------------------------------------------------------

byId("filter").addEventListener("input", drawList);
byId("cursor").addEventListener("input", (event) => setCursor(Number(event.target.value)));
byId("range").addEventListener("click", (event) => {
  if (!event.target.dataset.range) return;
  Object.assign(state, { range: event.target.dataset.range, cursor: null });
  for (const button of byId("range").children) button.setAttribute("aria-pressed", String(button === event.target));
  load();
});
window.addEventListener("hashchange", () => {
  Object.assign(state, { cursor: null, selected: null, detail: null });
  load();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && state.selected) select(state.selected, false);
});
new ResizeObserver(() => state.detail && drawCharts(state.detail)).observe(byId("timeline"));
load();
setInterval(load, REFRESH_MS);
