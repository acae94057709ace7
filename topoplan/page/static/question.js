/* The question as a form. What is empty is as the spec has it; a mistake stands at its field. */

import { h, put } from "./dom.js";

/* `ask` is called with a question: options as the command line has them, and the text of a spec or null. */
export function questionForm(form, { ask, stop }) {
  const inputs = new Map(), wrong = new Map();
  const question = { values: { ...form.example }, spec: null };
  const general = h("p", { class: "bad", role: "alert", id: "problem" });
  const state = h("p", { role: "status", id: "searching" });
  const dropped = h("p", { class: "muted" });
  const stopper = h("button", { type: "button", hidden: true, onclick: stop }, "Stop");

  const field = ({ name, label, known }) => {
    const input = h("input", {
      id: `ask-${name}`, list: known.length && `known-${name}`, autocomplete: "off", spellcheck: "false", maxlength: 300,
      placeholder: form.has[name], "aria-describedby": `wrong-${name}`, oninput: (event) => { question.values[name] = event.target.value.trim(); },
    });
    inputs.set(name, input);
    wrong.set(name, h("span", { class: "bad", id: `wrong-${name}` }));
    return h("div", { class: "field" }, h("label", { for: input.id }, label), input, wrong.get(name),
      known.length > 0 && h("datalist", { id: `known-${name}` }, known.map((one) => h("option", { value: one }))));
  };

  const asked = () => ({ options: optionsOf(question.values), spec: question.spec });
  const submit = () => ask(asked());
  const file = h("input", { type: "file", id: "spec-file", accept: ".yaml,.yml,.json", onchange: () => {
    const [chosen] = file.files;
    take(chosen);
    file.value = ""; // the same file may be chosen again when it was edited
  } });
  async function take(chosen) {
    if (!chosen) return;
    if (chosen.size > 200_000) return problem({ message: `${chosen.name} is too large for a spec: expected at most 200 kB`, where: "" });
    question.spec = await chosen.text();
    question.values = {};
    show();
    dropped.textContent = `The spec is ${chosen.name}. `;
    submit();
  }

  function show() {
    for (const [name, input] of inputs) input.value = question.values[name] || "";
  }

  function problem({ message, where }) {
    const name = fieldOf(where, message, inputs);
    for (const [each, input] of inputs) {
      const here = each === name;
      wrong.get(each).textContent = here ? message : "";
      if (here) input.setAttribute("aria-invalid", "true"); else input.removeAttribute("aria-invalid");
    }
    general.textContent = name ? "" : message;
  }

  const view = h("form", { onsubmit: (event) => { event.preventDefault(); submit(); } },
    h("div", { class: "fields" }, form.fields.map(field)),
    h("p", {}, h("label", { for: "spec-file" }, "A spec file of yours, or drop it here: "), file), dropped, general,
    h("div", { class: "row" }, h("button", { class: "first", type: "submit" }, "Rank"), stopper, state));
  view.addEventListener("dragover", (event) => event.preventDefault());
  view.addEventListener("drop", (event) => { event.preventDefault(); take(event.dataTransfer.files[0]); });
  document.getElementById("question").hidden = false;
  put("question", view);
  show();

  return {
    asked, submit, problem,
    value: (name) => question.values[name] || form.has[name] || "",
    set(name, value) { question.values[name] = value; show(); },
    /* What an address says; rubbish in it is left aside, and what the server does not take it says itself. */
    restore(text) {
      try {
        const { values, spec } = JSON.parse(decodeURIComponent(text));
        const known = Object.entries(values).filter(([name, value]) => inputs.has(name) && typeof value === "string");
        question.values = Object.fromEntries(known);
        question.spec = typeof spec === "string" ? spec : null;
        show();
        return true;
      } catch {
        return false;
      }
    },
    link: () => encodeURIComponent(JSON.stringify(question)),
    searching(words) { state.textContent = words; stopper.hidden = !words; },
  };
}

/* `set.KEY` and the field of other keys are values of --set; all else is an option of its own. */
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

/* The field that a message is about: that of its option or key, named in `where` or in the words behind it. */
function fieldOf(where, message, inputs) {
  const [, option] = (where || message).match(/^--([a-z-]+)/) || [];
  const [, key] = (where || message).match(/^--set ([a-z_.]+)=/) || [];
  if (key) return inputs.has(`set.${key.replace("job.", "")}`) ? `set.${key.replace("job.", "")}` : "overrides";
  const name = option?.replaceAll("-", "_");
  return inputs.has(name) ? name : null;
}
