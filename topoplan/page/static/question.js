/* The question as a form, with files that replace parts of it. Empty fields take the value of the spec or file; a
   mistake is shown at its field. */

import { fixed, h, put } from "./dom.js";

const MOST_OF_A_FILE = 200_000, MOST_OF_ALL = 600_000, LONGEST_LINK = 200_000;
const USES = { spec: "the spec", model: "the model", job: "the job", "": "named by another" };
/* Fields that a job file determines, unless they are typed again. */
const OF_A_JOB = ["model", "seq_len", "batch", "finetuning", "set.precision"];

/* `ask` is called with a question: command-line options, the name of a spec or null, and the texts of files by name.
   `useOf` classifies a file. */
export function questionForm(form, { ask, stop, useOf }) {
  const inputs = new Map(), wrong = new Map();
  let question = { values: { ...form.example }, spec: null, files: {} }, has = form.has;
  const general = h("p", { class: "bad", role: "alert", id: "problem" });
  const state = h("p", { role: "status", id: "searching" });
  const list = h("ul", { class: "files", id: "dropped" });
  const stopper = h("button", { type: "button", id: "stop", hidden: true, onclick: stop }, "Stop");
  const begun = form.spec && h("p", { class: "muted" }, `What is empty is as ${form.spec} has it.`);

  const field = ({ name, label, known }) => {
    const input = h("input", {
      id: `ask-${name}`, list: known.length && `known-${name}`, autocomplete: "off", spellcheck: "false", maxlength: 300,
      "aria-describedby": `wrong-${name}`, oninput: (event) => type(name, event.target.value.trim()),
    });
    inputs.set(name, input);
    wrong.set(name, h("span", { class: "bad", id: `wrong-${name}` }));
    return h("div", { class: "field" }, h("label", { for: input.id }, label), input, wrong.get(name),
      known.length > 0 && h("datalist", { id: `known-${name}` }, known.map(([value, words]) => h("option", { value }, words))));
  };

  function type(name, value) {
    const before = question.values[name];
    question.values[name] = value;
    if (Object.hasOwn(question.files, before)) remove(before);
  }

  const asked = () => ({ options: optionsOf(question.values), spec: question.spec, files: { ...question.files } });
  const submit = () => ask(asked());
  const chooser = h("input", { type: "file", id: "files-chosen", multiple: true, accept: ".yaml,.yml,.json,.sh,.md", onchange: async () => {
    await take([...chooser.files]);
    chooser.value = ""; // so that the same file can be chosen again after an edit
  } });

  /* A file replaces what was typed for the same purpose. */
  async function take(chosen) {
    try {
      const uses = [];
      for (const file of chosen) {
        const most = file.size > MOST_OF_A_FILE ? MOST_OF_A_FILE : null;
        if (most) throw new Error(`${file.name} has ${fixed(file.size / 1000, 0)} kB: expected a spec, a config.json or a train.yaml of at most ${most / 1000} kB`);
        const text = await file.text().catch(() => { throw new Error(`${file.name} cannot be read`); });
        uses.push([file.name, text, (await useOf(file.name, text)).use]);
      }
      const files = { ...question.files, ...Object.fromEntries(uses) };
      if (lengthOf(files) > MOST_OF_ALL) throw new Error(`these files are too large together: expected at most ${MOST_OF_ALL / 1000} kB`);
      question.files = files;
      for (const use of ["spec", "job", "model"]) for (const [name, , of] of uses) if (of === use) takeFor(use, name);
      show();
      if (uses.length) submit();
    } catch (found) {
      problem({ message: found.message, field: "" });
    }
  }

  function takeFor(use, name) {
    const { values, files } = question, before = use === "spec" ? question.spec : values[use];
    if (before !== name) delete files[before];
    if (use === "spec") {
      question = { values: {}, spec: name, files };
      has = {};
    } else {
      if (use === "job") for (const one of OF_A_JOB) if (!Object.hasOwn(files, values[one])) delete values[one];
      values[use] = name;
    }
  }

  function remove(name) {
    const { values, files } = question;
    delete files[name];
    for (const use of ["model", "job"]) if (values[use] === name) delete values[use];
    if (question.spec === name) question = { values: { ...form.example }, spec: null, files };
    show();
  }

  function show() {
    for (const [name, input] of inputs) {
      input.value = question.values[name] || "";
      input.placeholder = has[name] || form.fields.find((one) => one.name === name).hint;
    }
    const use = (name) => (name === question.spec ? "spec" : ["model", "job"].find((one) => question.values[one] === name) || "");
    list.replaceChildren(...Object.keys(question.files).map((name) => h("li", {}, h("code", {}, name), `, ${USES[use(name)]} `,
      h("button", { type: "button", "aria-label": `Remove ${name}`, onclick: () => remove(name) }, "Remove"))));
    if (begun) begun.hidden = question.spec !== null;
  }

  function problem({ message, field: name }) {
    for (const [each, input] of inputs) {
      const here = each === name;
      wrong.get(each).textContent = here ? message : "";
      if (here) input.setAttribute("aria-invalid", "true"); else input.removeAttribute("aria-invalid");
    }
    general.textContent = inputs.has(name) ? "" : message;
  }

  const view = h("form", { onsubmit: (event) => { event.preventDefault(); submit(); } },
    begun, h("div", { class: "fields" }, form.fields.map(field)),
    h("div", { class: "drop" }, h("label", { for: chooser.id }, "Or files of yours, chosen or dropped here: a spec, a model's config.json, a train.yaml"), chooser, list),
    general, h("div", { class: "row" }, h("button", { class: "first", type: "submit" }, "Rank"), stopper, state));
  view.addEventListener("dragover", (event) => event.preventDefault());
  view.addEventListener("drop", (event) => { event.preventDefault(); take([...event.dataTransfer.files]); });
  document.getElementById("question").hidden = false;
  put("question", view);
  show();

  return {
    asked, submit, problem,
    set(name, value) { type(name, value); show(); },
    /* The values of empty fields, as reported by an answer. */
    holds(values) {
      const untyped = Object.entries(values).filter(([name]) => !question.values[name]);
      has = { ...has, ...Object.fromEntries(untyped) };
      show();
    },
    /* Restores the question in an address, with `picked`; null if it is malformed. The planner validates the rest. */
    restore(text) {
      try {
        const { values, spec, files, picked } = JSON.parse(decodeURIComponent(text));
        const texts = (given) => Object.entries(given || {}).filter(([, value]) => typeof value === "string");
        const found = Object.fromEntries(texts(files));
        if (!values || lengthOf(found) > MOST_OF_ALL) return null;
        const known = texts(values).filter(([name]) => inputs.has(name));
        question = { values: Object.fromEntries(known), spec: Object.hasOwn(found, spec) ? spec : null, files: found };
        show();
        return { picked: Array.isArray(picked) ? picked : [] };
      } catch {
        return null;
      }
    },
    /* Empty if the question is too long for an address. */
    link(picked) {
      const text = encodeURIComponent(JSON.stringify({ ...question, picked }));
      return text.length > LONGEST_LINK ? "" : text;
    },
    searching(words) { state.textContent = words; stopper.hidden = !words; },
  };
}

const lengthOf = (files) => Object.values(files).reduce((sum, text) => sum + text.length, 0);

/* `set.KEY` and the field for other keys become values of --set; every other field is an option. */
function optionsOf(values) {
  const options = { overrides: [] };
  for (const [name, value] of Object.entries(values)) {
    if (!value) continue;
    if (name.startsWith("set.")) options.overrides.push(`${name.slice(4)}=${value}`);
    else if (name === "overrides") options.overrides.push(...value.split(/\s+/));
    else if (name === "pin") options.pin = [value];
    else options[name] = value;
  }
  return options;
}
