// Asks for the state once a second and draws it. Text goes in as text, never as markup.
"use strict";

const SECOND_MS = 1000;
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");

let before = null; // {time, tokens} of the last state, for rates
let isPaused = false;
let rate = 0;

function authorization() {
  const key = sessionStorage.getItem("turnkeep-key");
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function tiles(list, values) {
  list.replaceChildren(...values.map(([name, value]) => {
    const tile = element("div");
    tile.append(element("dt", name), element("dd", value));
    return tile;
  }));
}

const share = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–");
const bytes = (count) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return `${count.toFixed(unit ? 1 : 0)} ${units[unit]}`;
};

function showNow(engine) {
  const counters = engine.counters ?? {};
  const prompt = counters.num_prompt_tokens ?? 0;
  const tokens = (counters.num_computed_tokens ?? 0) + (counters.num_decode_tokens ?? 0);
  const now = performance.now();
  if (before && now > before.time && tokens >= before.tokens) {
    rate = (1000 * (tokens - before.tokens)) / (now - before.time);
  }
  before = { time: now, tokens };
  tiles(byId("tiles"), [
    ["running", `${engine.num_running ?? 0} of ${engine.max_running ?? "–"}`],
    ["waiting", number.format(engine.num_waiting ?? 0)],
    ["suspended", number.format(engine.num_suspended ?? 0)],
    ["tokens/s", number.format(Math.round(rate))],
    ["prompt reused", share(counters.num_cached_tokens ?? 0, prompt)],
    ["prompt tokens", number.format(prompt)],
  ]);
  byId("limit").textContent = engine.limiting_resource ? `Limit: ${engine.limiting_resource}` : "";
}

function pool(name, used, total, text) {
  const box = element("div", undefined, "pool");
  const line = element("p");
  line.append(element("span", name), element("span", text));
  const meter = element("meter");
  meter.max = Math.max(total, 1);
  meter.value = used;
  meter.setAttribute("aria-label", `${name}: ${text}`);
  box.append(line, meter);
  return box;
}

function showPools(gauges, counters) {
  const boxes = [];
  for (const [name, unit] of [["pages", "pages"], ["rows", "state rows"]]) {
    const total = gauges[`cache_num_${name}`] ?? 0;
    if (total <= 0) continue;
    const free = gauges[`cache_num_free_${name}`] ?? 0;
    const evictable = gauges[`cache_num_evictable_${name}`] ?? 0;
    boxes.push(pool(unit, total - free, total,
      `${number.format(total - free - evictable)} in use, ${number.format(evictable)} kept, ${number.format(free)} free`));
  }
  for (const tier of ["host", "disk"]) {
    const sum = (suffix) => ["page", "snapshot"]
      .reduce((total, kind) => total + (gauges[`cache_tier_${tier}_${kind}_${suffix}`] ?? 0), 0);
    const budget = sum("budget_bytes");
    if (budget <= 0) continue;
    const hits = counters[`cache_tier_num_hits.${tier}`] ?? 0;
    const text = `${bytes(sum("bytes"))} of ${bytes(budget)}, ${number.format(hits)} hits`;
    boxes.push(pool(`${tier} tier`, sum("bytes"), budget, text));
  }
  byId("pools").replaceChildren(...boxes);
}

function reasons(turn) {
  const lost = turn.lost ?? {};
  const named = Object.entries(lost).filter(([, count]) => count > 0)
    .map(([reason, count]) => `${number.format(count)} ${reason.replaceAll("_", " ")}`);
  const ttft = turn.ttft_s === null || turn.ttft_s === undefined ? "" : `, first token after ${Math.round(1000 * turn.ttft_s)} ms`;
  return `${number.format(turn.prompt_tokens)} prompt tokens: ${number.format(turn.cached_tokens)} reused, `
    + `${number.format(turn.recomputed_tokens)} computed (${number.format(turn.new_tokens)} of them new); `
    + `${number.format(turn.output_tokens)} generated${ttft}. `
    + (named.length ? `Lost: ${named.join(", ")}.` : "Nothing was lost.");
}

function bar(turn, scale) {
  const again = Math.max(0, turn.recomputed_tokens - turn.new_tokens);
  const parts = [
    ["reused", turn.cached_tokens], ["lost", again],
    ["new", turn.recomputed_tokens - again], ["generated", turn.output_tokens],
  ];
  const drawing = document.createElementNS(SVG, "svg");
  drawing.setAttribute("viewBox", "0 0 1000 12");
  drawing.setAttribute("preserveAspectRatio", "none");
  drawing.setAttribute("aria-hidden", "true");
  let x = 0;
  for (const [kind, count] of parts) {
    const width = (1000 * count) / scale;
    const rect = document.createElementNS(SVG, "rect");
    for (const [name, value] of [["class", kind], ["x", x], ["y", 0], ["width", width], ["height", 12]]) {
      rect.setAttribute(name, value);
    }
    drawing.append(rect);
    x += width;
  }
  const button = element("button", undefined, "turn");
  button.type = "button";
  button.setAttribute("aria-label", reasons(turn));
  button.title = reasons(turn);
  button.append(drawing);
  for (const event of ["focus", "pointerenter"]) {
    button.addEventListener(event, () => { byId("detail").textContent = reasons(turn); });
  }
  return button;
}

let shown = ""; // what is drawn: redrawing would take the focus away

function showConversations(conversations) {
  const digest = JSON.stringify(conversations.map((one) => [one.conversation_id, one.num_turns]));
  if (digest === shown) return;
  shown = digest;
  if (!conversations.length) return;
  const boxes = conversations.map((one) => {
    const box = element("div", undefined, "conversation");
    const title = element("h3", `${one.conversation_id} `);
    title.append(element("span", `${one.num_turns} ${one.num_turns === 1 ? "turn" : "turns"}, ${share(one.totals.cached_tokens, one.totals.prompt_tokens)} reused`));
    const turns = element("div", undefined, "turns");
    const scale = Math.max(...one.turns.map((turn) => turn.prompt_tokens + turn.output_tokens), 1);
    turns.append(...one.turns.map((turn) => bar(turn, scale)));
    box.append(title, turns);
    return box;
  });
  byId("conversations").replaceChildren(...boxes);
}

function showDrafts(counters) {
  const depths = Object.keys(counters).filter((name) => name.startsWith("draft_num_verified_nodes."))
    .map((name) => Number(name.split(".")[1])).sort((a, b) => a - b);
  byId("drafts").hidden = depths.length === 0;
  if (!depths.length) return;
  const granted = counters.draft_num_granted_nodes ?? 0;
  const accepted = depths.reduce((sum, depth) => sum + (counters[`draft_num_accepted_nodes.${depth}`] ?? 0), 0);
  const steps = counters.draft_num_steps ?? 0;
  tiles(byId("draft-tiles"), [
    ["steps with drafts", number.format(steps)],
    ["plain steps", number.format(counters.draft_num_plain_steps ?? 0)],
    ["nodes granted", number.format(granted)],
    ["nodes accepted", number.format(accepted)],
  ]);
  byId("depths").replaceChildren(...depths.map((depth) => {
    const verified = counters[`draft_num_verified_nodes.${depth}`] ?? 0;
    const right = counters[`draft_num_accepted_nodes.${depth}`] ?? 0;
    return pool(`depth ${depth}`, right, verified, `${share(right, verified)} of ${number.format(verified)} accepted`);
  }));
}

async function refresh() {
  if (isPaused || document.hidden) return;
  const status = byId("engine-state");
  try {
    const answer = await fetch("/ui/state", { headers: authorization() });
    byId("key-form").hidden = answer.status !== 401;
    if (!answer.ok) { status.textContent = `the server answered ${answer.status}`; return; }
    const state = await answer.json();
    byId("model").textContent = state.model;
    byId("version").textContent = `Turnkeep ${state.version}`;
    status.textContent = state.engine.state;
    showNow(state.engine);
    showPools(state.engine.gauges ?? {}, state.engine.counters ?? {});
    showConversations(state.conversations);
    showDrafts(state.engine.counters ?? {});
  } catch {
    status.textContent = "the server cannot be reached";
  }
}

byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  byId("pause").textContent = isPaused ? "Go on" : "Pause";
  byId("pause").setAttribute("aria-pressed", String(isPaused));
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("turnkeep-key", byId("key").value);
  refresh();
});
refresh();
setInterval(refresh, SECOND_MS);
