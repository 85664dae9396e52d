"use strict";
const run = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

// Everything that is text goes through textContent: an answer cannot become markup.
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) key === "class" ? (node.className = value) : node.setAttribute(key, value);
  node.append(...children);
  return node;
}
function svg(tag, attributes = {}, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
const color = (i) => `var(--c${i % 8})`;
function number(v) {
  if (v === 0) return "0";
  const a = Math.abs(v);
  if (a < 1e-3 || a >= 1e6) return v.toExponential(1).replace("e+", "e");
  return String(+v.toPrecision(a >= 1000 ? 5 : 4));
}

// ---- charts -------------------------------------------------------------------------------------------------------
const W = 420, H = 190, LEFT = 50, RIGHT = 10, TOP = 8, BOTTOM = 26;

function ticks(low, high, count = 5) {
  if (low === high) return [low];
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].find((u) => u * power >= rough) * power, made = [];
  for (let i = Math.ceil(low / unit - 1e-9); i * unit <= high + unit * 1e-9; i++) made.push(+(i * unit).toPrecision(12));
  return made;
}

function points(metric) {
  const column = run.metrics[metric] || [];
  return run.steps.map((step, i) => [step, column[i]]).filter(([, v]) => typeof v === "number");
}

function frame(parent, title, legend, width, wide) {
  const card = make("div", { class: wide ? "chart wide" : "chart" }, make("h3", {}, title));
  const row = make("div", { class: "legend" });
  for (const { name, fill } of legend) row.append(make("span", {}, make("i", { style: `background:${fill}` }), name));
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${H}`, role: "img", "aria-label": title });
  card.append(row, drawing);
  parent.append(card);
  return drawing;
}

function axes(drawing, width, x, y, xs, ys, xDomain) {
  for (const tick of ys) {
    drawing.append(svg("line", { x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick), stroke: "var(--grid)" }));
    drawing.append(svg("text", { x: LEFT - 7, y: y(tick) + 4, "text-anchor": "end" }, number(tick)));
  }
  for (const tick of xs) {
    if (!Number.isInteger(tick) || tick < xDomain[0] || tick > xDomain[1]) continue;
    drawing.append(svg("text", { x: x(tick), y: H - 8, "text-anchor": "middle" }, tick));
  }
  drawing.append(svg("line", { x1: LEFT, x2: width - RIGHT, y1: H - BOTTOM, y2: H - BOTTOM, stroke: "var(--line)" }));
}

function hover(drawing, width, x, steps, lines) {
  const cursor = svg("line", { y1: TOP, y2: H - BOTTOM, stroke: "var(--muted)", "stroke-dasharray": "3 3", visibility: "hidden" });
  drawing.append(cursor);
  const tip = byId("tip");
  drawing.addEventListener("mousemove", (event) => {
    const box = drawing.getBoundingClientRect(), at = ((event.clientX - box.left) / box.width) * width;
    const step = steps.reduce((best, s) => (Math.abs(x(s) - at) < Math.abs(x(best) - at) ? s : best), steps[0]);
    cursor.setAttribute("x1", x(step));
    cursor.setAttribute("x2", x(step));
    cursor.setAttribute("visibility", "visible");
    tip.replaceChildren(make("b", {}, `step ${step}`));
    for (const { name, fill, value } of lines(step))
      tip.append("\n", make("i", { style: `background:${fill}` }), `${name}  ${number(value)}`);
    tip.hidden = false;
    const right = event.clientX + 16 + tip.offsetWidth > innerWidth;
    tip.style.left = `${right ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16}px`;
    tip.style.top = `${Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 8)}px`;
  });
  drawing.addEventListener("mouseleave", () => {
    cursor.setAttribute("visibility", "hidden");
    tip.hidden = true;
  });
}

// series: [{name, metric, dots, soft}]; soft: also a smoothed line, the raw one pale
const drawn = new Set();
function lineChart(parent, title, wanted, options = {}) {
  for (const { metric } of wanted) drawn.add(metric);
  let lines = wanted.map((s, i) => ({ ...s, data: points(s.metric), fill: color(s.color ?? i) })).filter((s) => s.data.length);
  if (!lines.length) return;
  const all = lines.flatMap((s) => s.data), values = all.map((p) => p[1]);
  const log = options.log && values.every((v) => v >= 0) && values.some((v) => v > 0);
  let low = Math.min(...values), high = Math.max(...values);
  const floor = Math.min(...values.filter((v) => v > 0));
  if (log) {
    low = Math.floor(Math.log10(floor) - 1e-9);
    high = Math.max(Math.ceil(Math.log10(high)), low + 1);
  } else {
    if (options.zero) low = Math.min(low, 0);
    if (options.one && high <= 1) high = 1;
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
    high += options.one && high === 1 ? 0 : pad;
    low -= options.zero && low === 0 ? 0 : pad;
  }
  const steps = [...new Set(all.map((p) => p[0]))].sort((a, b) => a - b), first = steps[0], last = steps[steps.length - 1];
  const x = (s) => (first === last ? (LEFT + W - RIGHT) / 2 : LEFT + ((s - first) / (last - first)) * (W - LEFT - RIGHT));
  const scale = (v) => H - BOTTOM - ((v - low) / (high - low)) * (H - TOP - BOTTOM);
  const y = (v) => scale(log ? Math.log10(Math.max(v, 10 ** low)) : v);
  const ys = log ? ticks(low, high, 4).filter(Number.isInteger).map((t) => 10 ** t) : ticks(low, high);
  const drawing = frame(parent, title, lines.length > 1 || lines[0].dots ? lines : [], W, false);
  axes(drawing, W, x, y, ticks(first, last, 7), ys, [first, last]);
  const path = (data) => data.map(([s, v], i) => `${i ? "L" : "M"}${x(s).toFixed(1)} ${y(v).toFixed(1)}`).join("");
  for (const line of lines) {
    const smooth = line.soft && line.data.length >= 12;
    const attributes = { fill: "none", stroke: line.fill, "stroke-width": 2, "stroke-linejoin": "round" };
    drawing.append(svg("path", { ...attributes, d: path(line.data), ...(smooth ? { opacity: 0.3, "stroke-width": 1.5 } : {}) }));
    if (smooth) {
      const weight = 1 - 2 / (Math.min(line.data.length / 6, 20) + 1);
      let mean = 0, norm = 0;
      const averaged = line.data.map(([s, v]) => {
        mean = weight * mean + (1 - weight) * v;
        norm = weight * norm + (1 - weight);
        return [s, mean / norm];
      });
      drawing.append(svg("path", { ...attributes, d: path(averaged) }));
    }
    if (line.dots || line.data.length === 1)
      for (const [s, v] of line.data) drawing.append(svg("circle", { cx: x(s), cy: y(v), r: 3.5, fill: line.fill }));
  }
  const maps = lines.map((line) => ({ ...line, map: new Map(line.data) }));
  hover(drawing, W, x, steps, (step) =>
    maps.filter((m) => m.map.has(step)).map((m) => ({ name: m.name, fill: m.fill, value: m.map.get(step) })));
}

function stackedChart(parent, title) {
  // What happens once (starting engines) would flatten every step beside it: it is named instead of drawn.
  const all = [...new Set(run.phases.flatMap(Object.keys))];
  const often = all.filter((n) => run.phases.filter((p) => n in p).length > 1), names = often.length ? often : all;
  if (!names.length) return;
  const width = 1190, size = Math.max(1, Math.ceil(run.steps.length / 160)), bars = [];
  for (let i = 0; i < run.steps.length; i += size) {
    const part = run.phases.slice(i, i + size);
    bars.push({ step: run.steps[i], parts: names.map((n) => part.reduce((sum, p) => sum + (p[n] || 0), 0) / part.length) });
  }
  const legend = names.map((name, i) => ({ name, fill: color(i) }));
  const once = all.filter((n) => !names.includes(n)).map((n) => `${n} ${number(run.phases.find((p) => n in p)[n])} s`);
  if (once.length) legend.push({ name: `once: ${once.join(", ")}`, fill: "none" });
  const drawing = frame(parent, title + (size > 1 ? `, mean of ${size} steps` : ""), legend, width, true);
  const high = Math.max(...bars.map((b) => b.parts.reduce((a, c) => a + c, 0))) * 1.04 || 1;
  const each = (width - LEFT - RIGHT) / bars.length, gap = Math.min(each * 0.2, 6);
  const x = (s) => LEFT + (bars.findIndex((b) => b.step === s) + 0.5) * each;
  const y = (v) => H - BOTTOM - (v / high) * (H - TOP - BOTTOM);
  const wanted = new Set(ticks(0, bars.length - 1, Math.min(16, bars.length)).filter(Number.isInteger).map((i) => bars[i].step));
  axes(drawing, width, x, y, [...wanted], ticks(0, high), [-Infinity, Infinity]);
  bars.forEach((bar, i) => {
    let base = 0;
    bar.parts.forEach((v, k) => {
      if (v > 0)
        drawing.append(svg("rect", { x: LEFT + i * each + gap / 2, width: Math.min(each - gap, 60), y: y(base + v), height: Math.max(y(base) - y(base + v), 0), fill: color(k) }));
      base += v;
    });
  });
  const rows = new Map(bars.map((b) => [b.step, b.parts]));
  hover(drawing, width, x, bars.map((b) => b.step), (step) => [
    { name: "all", fill: "none", value: rows.get(step).reduce((a, c) => a + c, 0) },
    ...names.map((name, i) => ({ name, fill: color(i), value: rows.get(step)[i] })).filter((l) => l.value > 0),
  ]);
}

// ---- page ---------------------------------------------------------------------------------------------------------
byId("name").textContent = run.name;
document.title = `${run.name} · vime`;
const option = (topic, name) => (run.options[topic] || {})[name];
const algorithm = option("train", "loss_type") === "sft_loss" ? "sft" : option("algorithm", "advantage_estimator");
byId("subtitle").textContent = [
  option("checkpoint", "hf_checkpoint"), algorithm,
  option("rollout", "rollout_batch_size") && `${option("rollout", "rollout_batch_size")} prompts × ${option("rollout", "n_samples_per_prompt")} answers`,
  option("optimizer", "lr") !== undefined && `lr ${option("optimizer", "lr")}`,
  option("train", "seed") !== undefined && `seed ${option("train", "seed")}`,
].filter(Boolean).join(" · ");
for (const tile of run.tiles)
  byId("tiles").append(make("div", { class: "tile" }, make("span", {}, tile.label), make("b", {}, tile.value), make("span", {}, tile.note)));

const learning = byId("learning"), health = byId("health"), time = byId("time");
const evals = run.evals.map((name, i) => ({ name: `evaluation: ${name}`, metric: `eval/${name}/reward_mean`, dots: true, color: i + 1 }));
lineChart(learning, "Mean reward", [{ name: "rollout", metric: "rollout/reward_mean", soft: true, color: 0 }, ...evals], { zero: true, one: true });
if (evals.length) lineChart(learning, "Evaluation, mean reward", evals, { zero: true, one: true });
lineChart(learning, "Response length, tokens", [
  { name: "rollout", metric: "rollout/response_length_mean", color: 0 },
  ...run.evals.map((name, i) => ({ name: `evaluation: ${name}`, metric: `eval/${name}/response_length_mean`, dots: true, color: i + 1 })),
], { zero: true });
lineChart(learning, "Share of answers and groups", [
  { name: "truncated answers", metric: "rollout/truncated_fraction", color: 4 },
  { name: "groups of equal rewards", metric: "rollout/zero_std_groups_fraction", color: 3 },
], { zero: true, one: true });
lineChart(health, "Log-prob difference, engine to trainer", [
  { name: "mean", metric: "train/logprob_abs_diff", color: 0 }, { name: "max", metric: "train/logprob_abs_diff_max", color: 4 },
], { log: true });
lineChart(health, "KL to the reference model", [{ name: "KL", metric: "train/kl", color: 3 }], { zero: true });
lineChart(health, "Entropy, nats per token", [{ name: "entropy", metric: "train/entropy", color: 2 }], { zero: true });
lineChart(health, "Gradient norm", [{ name: "norm before clipping", metric: "train/grad_norm", color: 1 }], { zero: true });
lineChart(health, "Loss", [{ name: "loss", metric: "train/loss", color: 0 }, { name: "policy loss", metric: "train/pg_loss", color: 6 }]);
lineChart(health, "Clipped tokens, share", [{ name: "clipped", metric: "train/clip_fraction", color: 4 }], { zero: true });
lineChart(health, "Learning rate", [{ name: "lr", metric: "train/lr", color: 5 }], { zero: true });
stackedChart(time, "Seconds per phase");
const syncs = Object.keys(run.metrics).filter((m) => /^sync\/.*seconds$/.test(m));
lineChart(time, "Weight update, seconds", syncs.map((metric) => ({ name: metric.slice(5), metric })), { zero: true });
const rest = Object.keys(run.metrics).filter((m) => /^(rollout|train|sync)\//.test(m) && !drawn.has(m));
for (const metric of rest) lineChart(byId("rest"), metric, [{ name: metric, metric, color: 0 }]);
if (!rest.length) byId("rest").parentElement.hidden = true;
for (const parent of [learning, health, time]) if (!parent.childElementCount) parent.parentElement.hidden = true;

byId("table").textContent = run.table;
for (const [topic, values] of Object.entries(run.options)) {
  const part = make("section", {}, make("h4", {}, topic));
  for (const [name, value] of Object.entries(values || {}))
    part.append(make("div", {}, make("span", {}, name), make("span", {}, typeof value === "string" ? value : JSON.stringify(value))));
  byId("options").append(part);
}
if (!Object.keys(run.options).length) byId("options").parentElement.hidden = true;

// ---- samples ------------------------------------------------------------------------------------------------------
const sampled = [...new Set(run.samples.map((s) => s.step))].sort((a, b) => a - b);
const slider = byId("step"), source = byId("source"), filter = byId("filter"), search = byId("search");
slider.max = sampled.length - 1;
slider.value = 0;
for (const name of [...new Set(run.samples.map((s) => s.source))].sort((a, b) => (b === "train") - (a === "train"))) source.append(make("option", { value: name }, name));
source.hidden = source.options.length < 2;

function answer(sample, mean, spread) {
  const reward = sample.reward, known = typeof reward === "number";
  const kind = !known || !spread ? (known && reward >= 1 ? "good" : known && reward <= 0 ? "bad" : "") : reward > mean ? "good" : "bad";
  const head = make("div", { class: "head" }, make("span", { class: `chip ${kind}` }, known ? number(reward) : String(reward)),
    `${sample.response_length} tokens`);
  if (sample.status !== "completed") head.append(` · ${sample.status}`);
  const node = make("div", { class: "answer" }, head, make("pre", {}, sample.response || "(empty)"));
  if (sample.reward_info && Object.keys(sample.reward_info).length) node.title = JSON.stringify(sample.reward_info, null, 1);
  return node;
}

function showSamples() {
  const step = sampled[+slider.value], word = search.value.toLowerCase();
  byId("step-label").textContent = `step ${step}`;
  const here = run.samples.filter((s) => s.step === step && s.source === source.value);
  const rewards = here.map((s) => s.reward).filter((r) => typeof r === "number");
  const mean = rewards.reduce((a, b) => a + b, 0) / (rewards.length || 1), spread = new Set(rewards).size > 1;
  const groups = new Map();
  for (const s of here) groups.has(s.group) ? groups.get(s.group).push(s) : groups.set(s.group, [s]);
  const nodes = [];
  let shown = 0;
  for (const group of groups.values()) {
    if (filter.value === "mixed" && new Set(group.map((s) => s.reward)).size < 2) continue;
    const kept = group.filter((s) =>
      (filter.value !== "best" || s.reward > mean) && (filter.value !== "worst" || s.reward < mean) &&
      (filter.value !== "truncated" || s.status === "truncated") &&
      (!word || `${s.prompt}\n${s.response}`.toLowerCase().includes(word)));
    if (!kept.length) continue;
    shown += kept.length;
    const long = kept.some((s) => s.response.length > 160);
    const label = group[0].label;
    nodes.push(make("div", { class: "group" }, make("div", { class: "prompt" }, group[0].prompt),
      make("div", { class: "label" }, label === null || label === undefined ? "" : `right answer: ${typeof label === "string" ? label : JSON.stringify(label)}`),
      make("div", { class: long ? "answers long" : "answers" }, ...kept.map((s) => answer(s, mean, spread)))));
  }
  byId("count").textContent = `${shown} of ${here.length} answers kept, mean reward ${number(mean)}`;
  byId("samples").className = [...groups.values()].every((group) => group.length === 1 && group[0].response.length < 160) ? "answers" : "";
  byId("samples").replaceChildren(...nodes);
}
for (const node of [slider, source, filter, search]) node.addEventListener("input", showSamples);
byId("previous").addEventListener("click", () => { slider.value = +slider.value - 1; showSamples(); });
byId("next").addEventListener("click", () => { slider.value = +slider.value + 1; showSamples(); });
if (sampled.length) showSamples();
else byId("samples-section").hidden = true;

byId("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
