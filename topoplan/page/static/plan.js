/* The memory and step time of one plan by part, or the differences between two plans. */

import { bytes, command, fixed, GIB, h, seconds } from "./dom.js";
import { sentence } from "./chart.js";
import { bar, paired, signed, termList } from "./terms.js";

/* The account of a plan; without details, only the parts in the ranking, without formulas. */
function account(plan, details) {
  if (details) {
    const { time, memory } = details.explain;
    return { step: time.step, device: memory.device, stages: memory.stages, worst: memory.worst_stage };
  }
  const term = (name, value, children) => ({ name, value, children });
  const all = (parts, unit) => Object.entries(parts).map(([name, value]) => term(name, value * unit));
  const memory = plan.memory;
  const stages = memory.by_stage.map((one) => ({ ...term("allocated", one.allocated_gib * GIB, all(one.parts_gib, GIB)), stages: [one.stage] }));
  const worst = stages.reduce((first, second) => (second.value > first.value ? second : first), stages[0]);
  const waste = term("allocator's fragments", (memory.reserved_gib - memory.allocated_gib) * GIB);
  const beside = term("context and NCCL", (memory.device_gib - memory.reserved_gib) * GIB);
  const reserved = term("reserved", memory.reserved_gib * GIB, [worst, waste]);
  return {
    step: term("step", plan.time.step_s, all(plan.time.parts_s, 1)),
    device: term("device", memory.device_gib * GIB, [reserved, beside]), stages, worst: worst.stages[0],
  };
}

/* The parts of allocated memory, then the other memory on the GPU. */
function onCard(device) {
  const [reserved, ...beside] = device.children, [allocated, ...waste] = reserved.children;
  return [...allocated.children, ...waste, ...beside];
}

const numbered = (terms) => terms.map((term, number) => ({ term, number }));
const sorted = (terms) => [...terms].sort((first, second) => second.value - first.value);

export function planView({ plan, details, label, other }) {
  const own = account(plan, details);
  const parts = [h("p", { class: "said" }, sentence(plan, label))];
  const mind = details ? [...details.explain.plan.warnings, ...(details.explain.notes || []), ...(details.explain.data_notes || [])] : plan.warnings || [];
  if (mind.length) parts.push(h("ul", {}, [...new Set(mind)].map((text) => h("li", {}, text))));
  if (!details) parts.push(h("p", { class: "muted" }, "This file holds the formulas of the first plans only. This one's: "), command(`topoplan explain SPEC --plan ${plan.id} --html plan.html`));
  const theirs = other && account(other.plan, other.details);
  if (theirs) parts.push(difference(plan, other.plan, label, other.label));
  parts.push(h("div", { class: "two" }, h("div", {}, memory(plan, own, theirs)), h("div", {}, step(plan, own, theirs))));
  return parts;
}

function difference(plan, other, label, otherLabel) {
  const time = other.time.step_s - plan.time.step_s, size = other.memory.device_gib - plan.memory.device_gib;
  const changes = paired(terms(plan.time.parts_s), terms(other.time.parts_s)).map(([one, two]) => ({ name: (one || two).name, more: (two?.value || 0) - (one?.value || 0) }));
  const largest = changes.sort((one, two) => Math.abs(two.more) - Math.abs(one.more)).slice(0, 3).filter(({ more }) => Math.abs(more) > 1e-6);
  return h("p", { id: "difference" }, `The other plan, ${otherLabel}, compared with the picked one, ${label}: ${signed(time, seconds)} per step and ${signed(size * GIB, bytes)}. `,
    largest.length && `Most of the time: ${largest.map(({ name, more }) => `${name} ${signed(more, seconds)}`).join(", ")}. `, "Below: picked | other, and what the other has more.");
}

const terms = (parts) => Object.entries(parts).map(([name, value]) => ({ name, value }));

function memory(plan, own, theirs) {
  const card = plan.memory.capacity_gib * GIB, margin = plan.memory.margin_gib * GIB;
  const all = onCard(own.device), number = new Map(all.map((term, place) => [kind(term.name), place]));
  const highest = Math.max(card, own.device.value) * 1.02;
  const marks = [{ value: card, name: "the card" }, { value: card - margin, dashed: true, name: "less the margin" }];
  const rows = own.stages.length ? own.stages : [{ ...own.device.children[0].children[0], stages: [] }];
  const bars = rows.map((stage) => {
    const isWorst = !stage.stages.length || stage.stages.includes(own.worst);
    const parts = isWorst ? numbered(all) : stage.children.map((term) => ({ term, number: number.get(kind(term.name)) ?? all.length }));
    const value = isWorst ? own.device.value : stage.value, name = stageName(stage.stages);
    const label = `${name}: ${bytes(value)} of ${bytes(card)}; ${parts.map(({ term }) => `${term.name} ${bytes(term.value)}`).join(", ")}`;
    return barRow(name, bar(parts, { whole: highest, marks, label, format: bytes }), bytes(value));
  });
  const pairs = theirs ? paired(all, onCard(theirs.device)) : paired(all);
  const rest = rows.length > 1 ? " The fullest stage with all that lies on its card, the others with what torch allocates." : "";
  return [
    h("h3", {}, "Memory"),
    h("p", { class: "muted" }, `${bytes(own.device.value)} of a card of ${bytes(card)} (full line), of which ${bytes(margin)} are kept free (dashed line).${rest}`),
    bars,
    termList(pairs, { totals: [own.device.value], format: bytes }),
  ];
}

function barRow(name, drawn, value) {
  return h("div", { class: "bars" }, h("span", {}, name), drawn, h("span", { class: "value" }, value));
}

/* Maps `peak (loss)` in the ranking to `peak` in the account. */
const kind = (name) => name.split(" (")[0];

function stageName(stages) {
  if (!stages.length) return "A GPU";
  return stages.length === 1 ? `Stage ${stages[0]}` : `Stages ${stages[0]}-${stages[stages.length - 1]}`;
}

function step(plan, own, theirs) {
  const all = sorted(own.step.children);
  const label = `A step: ${seconds(own.step.value)}; ${all.map((term) => `${term.name} ${seconds(term.value)}`).join(", ")}`;
  const [low, high] = plan.time.band;
  return [
    h("h3", {}, "Step"),
    h("p", { class: "muted" }, `${seconds(own.step.value)}, expected within ${fixed(low, 3)} to ${fixed(high, 3)} s. Each part opens into its terms.`),
    barRow("A step", bar(numbered(all), { whole: own.step.value, label, format: seconds }), seconds(own.step.value)),
    termList(theirs ? paired(all, theirs.step.children) : paired(all), { totals: [own.step.value], format: seconds }),
  ];
}
