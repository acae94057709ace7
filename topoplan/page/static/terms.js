/* The terms of an account: a bar, and a list in which each term expands into its own terms, with formula and source.
   For two accounts, each row shows both values and their difference. */

import { fixed, h } from "./dom.js";

const SAID = new Set(["name", "value", "unit", "what", "times", "source", "children"]);
export const letter = (number) => (number < 26 ? String.fromCharCode(65 + number) : String(number + 1));

export function bar(parts, { whole, marks = [], label, format }) {
  const share = (value) => `${Math.max(0, (100 * value) / whole)}%`;
  return h("div", { class: "bar", role: "img", "aria-label": label },
    parts.map(({ term, number }) => h("div", { class: `part k${number % 8}`, style: { width: share(term.value) }, title: `${letter(number)} ${term.name}: ${format(term.value)}` },
      term.value / whole > 0.025 ? letter(number) : "")),
    marks.map(({ value, dashed, name }) => h("div", { class: dashed ? "at dashed" : "at", style: { left: share(value) }, title: name })));
}

/* `terms` is [first, second or null], both with the same name. */
export function termList(pairs, { totals, format, badges = true }) {
  return h("div", { class: "terms" }, pairs.map((pair, number) => term(pair, { totals, format, number: badges ? number : null })));
}

/* Pairs the terms of two lists by name, in the order of the first list. */
export function paired(first, second) {
  if (!second) return (first || []).map((one) => [one]);
  const names = [...new Set([...(first || []), ...second].map((one) => one.name))];
  const of = (terms, name) => (terms || []).find((one) => one.name === name) || null;
  return names.map((name) => [of(first, name), of(second, name)]);
}

function term(pair, { totals, format, number }) {
  const one = pair.find(Boolean), [first, second] = pair.map((each) => each?.value || 0);
  const values = pair.length > 1
    ? [h("span", { class: "value" }, `${format(first)} | ${format(second)}`), h("span", { class: "value share" }, signed(second - first, format))]
    : [h("span", { class: "value" }, format(first)), h("span", { class: "value share muted" }, `${fixed((100 * first) / totals[0], 1)}%`)];
  const badge = h("span", { class: number === null ? "badge" : `badge k${number % 8}` }, number === null ? "" : letter(number));
  const node = h("details", {}, h("summary", {}, badge, h("span", { class: "name" }, one.name), ...values));
  node.addEventListener("toggle", () => open(node, pair, { totals, format }), { once: true });
  return node;
}

/* The content is created when the term is opened, because an account has hundreds of terms. */
function open(node, pair, how) {
  const one = pair.find(Boolean);
  pair.filter(Boolean).forEach((each, place) => {
    const whose = pair.length > 1 ? `${pair[0] === each ? "Picked" : "Other"}: ` : "";
    const words = [each.what, facts(each)].filter(Boolean).join("; ");
    if (words) node.append(h("p", { class: "said" }, whose + words));
    if (each.source && (place === 0 || each.source !== one.source)) node.append(h("p", { class: "said" }, "Formula: ", h("code", {}, each.source)));
  });
  const below = pair.length > 1 ? paired(pair[0]?.children, pair[1]?.children || []) : paired(one.children);
  if (below.length) node.append(termList(below, { ...how, badges: false }));
}

function facts(term) {
  const said = Object.entries(term).filter(([key]) => !SAID.has(key)).map(([key, value]) => `${key.replaceAll("_", " ")} ${plain(value)}`);
  return [...(term.times ? [`${plain(term.times)} times`] : []), ...said].join(", ");
}

function plain(value) {
  if (typeof value === "number") return value.toLocaleString("en-US", { maximumSignificantDigits: 6 });
  return Array.isArray(value) ? value.map(plain).join(" ") : typeof value === "object" && value ? JSON.stringify(value) : String(value);
}

export function signed(value, format) {
  return `${value > 0 ? "+" : value < 0 ? "\u2212" : "\u00b1"}${format(Math.abs(value))}`;
}
