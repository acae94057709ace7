/* Chart of memory against speed: plans as points with error bands, the GPU's limit, rejected layouts as crosses. */

import { fixed, s, seconds, significant } from "./dom.js";

/* In GPU memories: larger layouts are drawn at the edge with their size, to leave room for the plans. */
const MOST = 1.25;
const LABEL = 44, LEFT = 58, RIGHT = 18, TOP = 20, BOTTOM = 46;

export function chart({ plans, out, chosen, other, safe, bands, width, pick, hint }) {
  const height = width < 600 || !plans.length ? 300 : 400;
  const legal = out.filter((one) => one.plan);
  const all = [...plans, ...legal.map((one) => one.plan)];
  const picture = s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words(plans, legal) });
  if (!all.length) return picture;
  const speed = (plan) => (bands ? ends(plan) : [plan.tokens_per_s_per_gpu]);
  const card = all[0].memory.capacity_gib, picked = plans.find((plan) => plan.id === chosen);
  const x = scale([...plans.flatMap(speed), ...legal.map((one) => one.plan.tokens_per_s_per_gpu)], LEFT, width - RIGHT);
  const most = plans.length ? Math.max(MOST * card, ...plans.map((plan) => plan.memory.device_gib)) : Infinity;
  const sizes = all.map((plan) => Math.min(plan.memory.device_gib, most));
  const y = scale([...sizes, card, ...(picked ? [card - picked.memory.margin_gib] : [])], height - BOTTOM, TOP);
  picture.append(...axes(x, y, width, height), ...limits(card, picked, y, width));
  for (const plan of plans) if (bands) picture.append(line(plan, x, y, mark(plan, chosen, other)));
  const said = [];
  for (const one of legal) picture.append(...cross(one, x, y, most, hint, said));
  for (const plan of [...plans].reverse()) picture.append(point(plan, x, y, { chosen, other, pick, hint }));
  picture.append(...names(plans, { chosen, other, safe }, x, y, width));
  return picture;
}

function words(plans, legal) {
  return `${plans.length} plans by tokens per second and GPU, and GiB of the card; ${legal.length} that do not fit. The table below has the same.`;
}

function ends(plan) {
  return plan.time.band.map((end) => (plan.tokens_per_s_per_gpu * plan.time.step_s) / end);
}

function scale(values, from, to) {
  const low = Math.min(...values), high = Math.max(...values), room = (high - low || high || 1) * 0.06;
  const first = Math.max(0, low - room), last = high + room;
  const at = (value) => from + ((value - first) / (last - first)) * (to - from);
  return Object.assign(at, { ticks: ticks(first, last, Math.abs(to - from) / 110) });
}

function ticks(first, last, most) {
  const raw = (last - first) / Math.max(3, most), power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
  const found = [];
  for (let value = Math.ceil(first / step) * step; value <= last; value += step) found.push(value);
  return found.map((value) => [value, fixed(value, step < 1 ? 1 : 0)]);
}

function axes(x, y, width, height) {
  return [
    ...y.ticks.map(([value, text]) => [
      s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      s("text", { class: "muted", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, text),
    ]),
    ...x.ticks.map(([value, text]) => s("text", { class: "muted", x: x(value), y: height - 26, "text-anchor": "middle" }, text)),
    s("text", { class: "muted", x: width - RIGHT, y: height - 8, "text-anchor": "end" }, "tokens/s per GPU: faster to the right"),
    s("text", { class: "muted", x: 4, y: 12 }, "GiB of the card"),
  ].flat();
}

/* Margins differ between engines: the dashed line shows that of the selected plan. */
function limits(card, picked, y, width) {
  const rule = (value, name, text) => [
    s("line", { class: name, x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
    s("text", { x: LEFT + 6, y: y(value) + (name === "limit" ? -5 : 15) }, text),
  ];
  const limit = picked && card - picked.memory.margin_gib;
  return [...rule(card, "limit", `card ${fixed(card, 1)} GiB`), ...(picked ? rule(limit, "margin", `less the picked plan's margin: ${fixed(limit, 1)}`) : [])];
}

function mark(plan, chosen, other) {
  return plan.id === chosen ? "chosen" : plan.id === other ? "other" : "";
}

function line(plan, x, y, name) {
  const [first, last] = ends(plan).map(x), at = y(plan.memory.device_gib);
  return s("line", { class: `band ${name}`, x1: first, x2: last, y1: at, y2: at });
}

function point(plan, x, y, { chosen, other, pick, hint }) {
  const name = mark(plan, chosen, other), at = [x(plan.tokens_per_s_per_gpu), y(plan.memory.device_gib)];
  const said = { onclick: () => pick(plan.id), onmouseenter: () => hint(plan), class: `point ${name}`, "data-id": plan.id };
  if (!plan.fits) return s("path", { ...said, class: `point out ${name}`, d: crossed(...at) });
  return plan.tags.length
    ? s("path", { ...said, d: `M${at[0]} ${at[1] - 7}l7 12h-14z` })
    : s("circle", { ...said, cx: at[0], cy: at[1], r: name ? 8 : 6 });
}

function crossed(x, y) {
  return `M${x - 5} ${y - 5}l10 10m0 -10l-10 10`;
}

/* `said` holds the positions at the edge that already have a size label. */
function cross(one, x, y, most, hint, said) {
  const { tokens_per_s_per_gpu: speed, memory: { device_gib: size } } = one.plan, at = [x(speed), y(Math.min(size, most))];
  const acts = { onmouseenter: () => hint(one), onclick: () => hint(one) };
  const free = size > most && said.every((other) => Math.abs(other - at[0]) > LABEL);
  if (free) said.push(at[0]);
  const words = free && s("text", { class: "muted", x: at[0] + 9, y: at[1] + 4 }, `\u2191 ${fixed(size, 0)}`);
  return [s("path", { class: "point out", d: crossed(...at), ...acts }), words].filter(Boolean);
}

/* Labels of named points: the best, the safe, the selected and the compared plan. */
function names(plans, { chosen, other, safe }, x, y, width) {
  const named = new Map();
  const add = (id, text) => id && named.set(id, [...(named.get(id) || []), text]);
  add(plans.find((plan) => plan.rank === 1 && plan.fits)?.id, "best");
  add(safe, "safe");
  add(chosen, "picked");
  add(other, "other");
  return plans.filter((plan) => named.has(plan.id)).map((plan) => {
    const at = x(plan.tokens_per_s_per_gpu), left = at > width / 2;
    const place = { x: at + (left ? -11 : 11), y: y(plan.memory.device_gib) - 9, "text-anchor": left ? "end" : "start" };
    return s("text", place, named.get(plan.id).join(", "));
  });
}

export function sentence(plan, label) {
  const tags = plan.tags?.length ? `; ${plan.tags.join(", ")}` : "";
  return `${label}: ${fixed(plan.memory.device_gib, 1)} of ${fixed(plan.memory.capacity_gib, 1)} GiB, ${seconds(plan.time.step_s)} per step ${plan.band}, ${significant(plan.tokens_per_s_per_gpu)} tokens/s per GPU${tags}`;
}
