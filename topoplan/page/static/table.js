/* The table of plans, with filters. */

import { fixed, h, hours, seconds } from "./dom.js";

const DEGREES = {
  backend: "backend", tp: "tp", pp: "pp", vpp: "vpp", cp: "cp", ep: "ep", etp: "etp", dp: "dp", ulysses: "ulysses",
  zero_stage: "ZeRO", micro_batch_size: "micro batch", sequence_parallel: "sequence parallel",
};

/* The values of a parallel degree among the plans, if there is more than one. */
export function degrees(plans) {
  return Object.entries(DEGREES)
    .map(([key, name]) => ({ key, name, values: [...new Set(plans.map((plan) => plan.layout[key]).filter((value) => value !== undefined && value !== null))] }))
    .filter(({ values }) => values.length > 1)
    .map((one) => ({ ...one, values: one.values.sort((a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b)))) }));
}

export function kept(plans, filters) {
  return plans.filter((plan) => Object.entries(filters).every(([key, value]) => value === "" || String(plan.layout[key]) === value));
}

export function filterFields(plans, filters, change) {
  const found = degrees(plans);
  if (!found.length) return null;
  return h("fieldset", {}, h("legend", {}, "Only plans with"), h("div", { class: "row" }, found.map(({ key, name, values }) =>
    h("label", {}, h("span", { class: "name" }, name), h("select", { id: `filter-${key}`, onchange: (event) => change(key, event.target.value) },
      h("option", { value: "" }, "any"),
      values.map((value) => h("option", { value, selected: filters[key] === String(value) }, value === true ? "yes" : value === false ? "no" : String(value))))))));
}

export function table(plans, { labels, chosen, other, pick, compare }) {
  const timed = plans.some((plan) => plan.job_time);
  const head = ["Pick", "Compare", "Place", "Plan", "GiB", "Step", "Band", "Tokens/s per GPU", "MFU", ...(timed ? ["Hours", "GPU hours"] : []), "Warnings"];
  const choice = (name, plan, checked, act) => h("input", {
    type: name === "pick" ? "radio" : "checkbox", name, id: `${name}-${plan.id}`, checked, onchange: (event) => act(event.target.checked ? plan.id : null),
    "aria-label": `${name === "pick" ? "Pick" : "Compare with"} plan ${plan.rank}, ${labels[plan.id]}`, disabled: name === "compare" && plan.id === chosen,
  });
  return h("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Table of plans" }, h("table", {},
    h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col", class: ["Plan", "Warnings"].includes(name) && "text" }, name)))),
    h("tbody", {}, plans.map((plan) => h("tr", { class: plan.id === chosen && "chosen" },
      h("td", {}, choice("pick", plan, plan.id === chosen, pick)),
      h("td", {}, choice("compare", plan, plan.id === other, compare)),
      h("td", {}, String(plan.rank)),
      h("th", { scope: "row", class: "text id" }, labels[plan.id]),
      h("td", {}, fixed(plan.memory.device_gib, 1)),
      h("td", {}, seconds(plan.time.step_s)),
      h("td", {}, plan.band),
      h("td", {}, fixed(plan.tokens_per_s_per_gpu, 0)),
      h("td", {}, `${fixed(100 * plan.mfu, 0)}%`),
      timed && [h("td", {}, plan.job_time ? hours(plan.job_time.hours) : ""), h("td", {}, plan.job_time ? hours(plan.job_time.gpu_hours) : "")],
      h("td", { class: "text mind" }, [...(plan.fits ? [] : ["does not fit"]), ...plan.tags].join(", ")))))));
}

export function outList(out) {
  if (!out.length) return null;
  return h("details", {}, h("summary", {}, `Out: ${out.length} of the nearest layouts, and why`), h("ul", {}, out.map((one) =>
    h("li", {}, h("span", { class: "id" }, one.label), `: ${one.reason}`, one.fix && `; ${one.fix}`))));
}
