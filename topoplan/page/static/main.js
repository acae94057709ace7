/* The state of the page, and the events that change it. */

import { command, copyButton, fixed, h, hours, put, seconds } from "./dom.js";
import { embedded, inWorker, served } from "./engine.js";
import { chart, sentence } from "./chart.js";
import { filterFields, kept, outList, table } from "./table.js";
import { planView } from "./plan.js";
import { picture } from "./pictures.js";
import { filesView } from "./files.js";
import { questionForm } from "./question.js";
import { whatIf } from "./whatif.js";

const given = JSON.parse(document.getElementById("answers").textContent);
const engine = given.worker ? inWorker(given) : given.form ? served(given) : embedded(given);
const state = { page: null, chosen: null, other: null, filters: {}, bands: true, turn: 0, told: () => "" };

/* The best plans and, if the engine searches, the best plan of every other split. */
function plansOf(page) {
  return [...page.ranking.plans, ...page.others];
}

function found(id) {
  return plansOf(state.page).find((plan) => plan.id === id);
}

/* `picked` holds the selected and the compared plan named by a link. */
function show(page, picked = []) {
  const plans = plansOf(page), among = (id) => plans.find((plan) => plan.id === id)?.id;
  for (const plan of plans) plan.band = page.bands[plan.id];
  state.page = page;
  state.chosen = among(picked[0]) ?? plans[0]?.id ?? null;
  state.other = among(picked[1]) ?? (page.explained ? (plans[1]?.id ?? null) : null);
  state.filters = {};
  document.title = `topoplan: ${page.title}`;
  document.getElementById("title").textContent = page.title;
  const link = state.told();
  document.getElementById("command").replaceChildren(command(page.command), link && copyButton(state.told, "a link to this question", "Copy the link"));
  put("answer", answer(page));
  for (const id of ["plan", "pictures", "files"]) document.getElementById(id).hidden = !plans.length;
  document.getElementById("plans").hidden = !plans.length && !page.out.length;
  drawPlans();
  return drawPlan();
}

function answer(page) {
  const { ranking, lines, further, counts } = page, best = ranking.plans[0];
  const time = best?.job_time;
  const figure = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
  const notes = [...ranking.assumed, ...ranking.notes, ...ranking.crossings, ...(ranking.data_notes || [])];
  return [
    h("dl", { class: "lines" }, lines.map(({ title, first, further: more }) => [
      h("dt", {}, title), h("dd", {}, ["Next", "Then"].includes(title) ? command(first) : [h("strong", {}, first), more && `: ${more}`])])),
    best && h("dl", { class: "figures" },
      figure("A step", seconds(best.time.step_s)), figure("How sure", best.band),
      time && figure("Hours", hours(time.hours)), time && figure("GPU hours", hours(time.gpu_hours)),
      figure("Of the card", `${fixed(best.memory.device_gib, 1)} of ${fixed(best.memory.capacity_gib, 1)} GiB`),
      figure("Tokens/s per GPU", fixed(best.tokens_per_s_per_gpu, 0))),
    further.length > 0 && h("div", { class: "pasted" }, further.map(furtherLine)),
    counts && h("p", { class: "muted" }, `${counts}.`),
    notes.length > 0 && h("details", {}, h("summary", {}, `What is assumed, and what else there is (${notes.length})`), h("ul", {}, notes.map((text) => h("li", {}, text)))),
  ];
}

/* Commands in the terminal's text get a copy button. */
function furtherLine(text) {
  const [, title, typed] = text.match(/^(Next {2})? *(topoplan .*)$/) || [];
  return typed ? h("div", { class: "way" }, title && "Next: ", command(typed)) : h("p", {}, text.trimEnd());
}

function counted({ others }, plans, shown) {
  if (!plans.length) return "no plan fits";
  if (shown.length < plans.length) return `${shown.length} of ${plans.length} plans`;
  const all = `${plans.length} ${plans.length === 1 ? "plan" : "plans"}`;
  return others.length ? `${all}: the best ${plans.length - others.length}, and the best of every other split of the job` : all;
}

function drawPlans() {
  const { page, filters, chosen, other, bands } = state, plans = plansOf(page);
  const shown = kept(plans, filters), labels = page.labels;
  const hint = h("p", { class: "hint", "aria-live": "polite" }, 
    plans.length ? "Point at a plan to read it, click it to pick it. Triangles have something to mind, crosses are out." : "Point at a cross to read why it is out.");
  const say = (one) => { hint.textContent = one.reason ? `${one.label}: ${one.reason}${one.fix ? `; ${one.fix}` : ""}` : sentence(one, labels[one.id]); };
  const width = Math.max(320, Math.min(1240, document.querySelector("#plans > div").clientWidth || 1000));
  put("plans",
    filterFields(plans, filters, (key, value) => { filters[key] = value; drawPlans(); }),
    h("p", { role: "status" }, counted(page, plans, shown)),
    chart({ plans: shown, out: page.out, chosen, other, safe: page.ranking.safe?.id, bands, width, pick, hint: say }),
    hint,
    plans.length > 0 && h("label", {}, h("input", { type: "checkbox", id: "bands", checked: bands, onchange: (event) => { state.bands = event.target.checked; drawPlans(); } }), " show the band of each"),
    shown.length > 0 && table(shown, { labels, chosen, other, pick, compare }),
    outList(page.out));
}

function pick(id) {
  state.chosen = id;
  if (state.other === id) state.other = null;
  state.told();
  drawPlans();
  return drawPlan();
}

function compare(id) {
  state.other = id;
  state.told();
  drawPlans();
  return drawPlan();
}

/* Details arrive asynchronously: an answer to an earlier click is dropped. */
async function drawPlan() {
  const { chosen, other, page } = state, turn = ++state.turn;
  if (!chosen) return;
  const [details, others] = await Promise.all([engine.details(chosen), other && engine.details(other)]);
  if (turn !== state.turn) return;
  const plan = found(chosen), label = page.labels[chosen];
  put("plan", planView({ plan, details, label, other: other && { plan: found(other), details: others, label: page.labels[other] } }));
  document.getElementById("pictures").hidden = document.getElementById("files").hidden = !details;
  if (!details) return;
  put("pictures", picture(details.timeline, "Timeline", `One step of ${label} on every pipeline rank or part of a GPU; the terms above have its figures`),
    picture(details.topology, "Topology", `The machines and their network, with the groups of ${label}`));
  put("files", filesView(details.bundle));
}

let drawn = 0;
new ResizeObserver(([entry]) => {
  const width = Math.round(entry.contentRect.width);
  if (state.page && Math.abs(width - drawn) > 8) { drawn = width; drawPlans(); }
}).observe(document.querySelector("main"));

if (engine.form) {
  const form = questionForm(engine.form, { ask, stop: () => engine.stop(), useOf: engine.useOf });
  for (const id of ["answer", "plans", "plan", "pictures", "files"]) document.getElementById(id).hidden = true;
  let searches = 0;

  /* Awaits a search, showing its progress and a stop button. */
  async function watched(search) {
    const own = ++searches;
    const say = (words) => { if (own === searches) form.searching(words); };
    const watch = setInterval(async () => {
      const { starting, done, total } = await engine.progress().catch(() => ({}));
      say(starting ? "Starting Python in this browser ..." : total ? `Searching: ${Math.floor((100 * done) / total)}%` : "Searching ...");
    }, 400);
    say("Searching ...");
    try {
      return await search();
    } finally {
      clearInterval(watch);
      say("");
      if (own === searches) searches++; // a progress report may still arrive
    }
  }

  async function ask(question, picked = []) {
    try {
      const page = await watched(() => engine.answer(question));
      if (!page) return;
      form.problem({ message: "", field: "" });
      form.holds(page.has);
      document.getElementById("answer").hidden = false;
      whatIf(page, { change: form.set, submit: form.submit, along: (key, values) => watched(() => engine.along(key, values)) });
      await show(page, picked);
    } catch (problem) {
      form.problem(problem);
    }
  }

  state.told = () => {
    const link = form.link([state.chosen, state.other]);
    history.replaceState(null, "", link ? `#${link}` : location.pathname);
    return link ? location.href : "";
  };
  const restored = location.hash.length > 1 ? form.restore(location.hash.slice(1)) : null;
  if (restored || Object.keys(engine.form.has).length) await ask(form.asked(), restored?.picked);
} else {
  await show(await engine.answer());
}
document.body.dataset.ready = "yes";
