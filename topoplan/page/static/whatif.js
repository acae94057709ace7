/* What if: sliders for values of the question, and the best plan along each. */

import { fixed, h, hours, put, seconds } from "./dom.js";

const SLIDERS = [["nodes", "Nodes", "nodes"], ["seq_len", "Tokens in a sequence", "seq_len"], ["batch", "Sequences in a step", "global_batch_size"]];
const NUMBERS = ["bf16", "fp16", "fp8"];

/* Up to this many GPUs, a search takes a second or two, and every move of a slider starts one. */
const LIVE_GPUS = 32;

/* `change(name, value)` sets a value of the question, `submit()` asks it, and `along(key, values)` returns the best plan
   for each value. */
export function whatIf(page, { change, submit, along }) {
  const { cluster, job } = page.ranking, now = { nodes: cluster.nodes, seq_len: job.seq_len, batch: job.global_batch_size };
  const result = h("div", { "aria-live": "polite" });
  const moved = (name, value) => {
    change(name, value);
    const gpus = cluster.gpus_per_node * (name === "nodes" ? Number(value) : cluster.nodes);
    if (gpus <= LIVE_GPUS) return submit();
    result.replaceChildren(h("div", { class: "row" }, h("span", {}, `${fixed(gpus, 0)} GPUs: a search of so many takes longer.`),
      h("button", { type: "button", onclick: submit }, "Search them")));
  };
  const rows = SLIDERS.map(([name, label, key]) => {
    const values = around(now[name]), said = h("output", { for: `slide-${name}` }, fixed(now[name], 0));
    const slider = h("input", {
      type: "range", id: `slide-${name}`, min: 0, max: values.length - 1, value: values.indexOf(now[name]), "aria-valuetext": String(now[name]),
      oninput: () => { said.textContent = fixed(values[slider.value], 0); slider.setAttribute("aria-valuetext", values[slider.value]); },
      onchange: () => moved(name, String(values[slider.value])),
    });
    return h("div", { class: "field" }, h("label", { for: slider.id }, label, ": ", said), slider,
      h("button", { type: "button", onclick: () => alongTable(label, () => along(key, values), key, result) }, "The best along it"));
  });
  const numbers = h("select", { id: "slide-precision", onchange: () => moved("set.precision", numbers.value) },
    [...new Set([...NUMBERS, job.precision])].map((one) => h("option", { value: one, selected: one === job.precision }, one)));
  const precision = h("div", { class: "field" }, h("label", { for: numbers.id }, "Precision"), numbers,
    h("button", { type: "button", onclick: () => alongTable("Precision", () => along("precision", NUMBERS), "precision", result) }, "The best along it"));
  document.getElementById("whatif").hidden = false;
  put("whatif", h("div", { class: "row" }, rows, precision), result);
}

/* The value itself, and its doubles and halves. */
function around(value) {
  const halves = [value];
  while (halves.length < 4 && halves[0] % 2 === 0) halves.unshift(halves[0] / 2);
  return [...halves, 2 * value, 4 * value, 8 * value];
}

async function alongTable(label, ask, key, result) {
  result.replaceChildren(h("p", {}, "Searching ..."));
  try {
    const { cases } = await ask();
    const speed = ({ plan, gpus }) => (plan ? gpus * plan.tokens_per_s_per_gpu : 0);
    const highest = Math.max(...cases.map(speed));
    result.replaceChildren(h("h3", {}, `The best plan along: ${label}`), h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "The best plan along it" }, h("table", {},
      h("thead", {}, h("tr", {}, [label, "Best plan", "Step", "GiB", "Tokens/s in all", "", "Hours"].map((name) => (name ? h("th", { scope: "col", class: name === "Best plan" && "text" }, name) : h("td"))))),
      h("tbody", {}, cases.map((one) => h("tr", {}, h("th", { scope: "row" }, one.set[key]), one.plan ? planCells(one, speed(one), highest) : h("td", { class: "text", colspan: 6 }, one.reason)))))));
  } catch (problem) {
    result.replaceChildren(h("p", { class: "bad" }, problem.message));
  }
}

function planCells({ plan }, speed, highest) {
  return [
    h("td", { class: "text id" }, plan.id), h("td", {}, seconds(plan.time.step_s)), h("td", {}, fixed(plan.memory.device_gib, 1)), h("td", {}, fixed(speed, 0)),
    h("td", { class: "text" }, h("div", { class: "length k0", style: { width: `${(140 * speed) / highest}px` } })), h("td", {}, plan.job_time ? hours(plan.job_time.hours) : ""),
  ];
}
