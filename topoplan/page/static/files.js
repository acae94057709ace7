/* The bundle of a plan: each file to view, copy and save, and the commands that start it. */

import { command, copyButton, h } from "./dom.js";

export function filesView({ files, refused, commands }) {
  if (refused) return [h("p", { class: "bad" }, `No files: ${refused}`)];
  const names = Object.keys(files).sort();
  const first = names.includes("README.md") ? "README.md" : names[0];
  const text = h("pre", { tabindex: "0", "aria-label": "Content of the file" }, files[first]);
  const choice = h("select", { id: "file", onchange: () => { text.textContent = files[choice.value]; } }, names.map((name) => h("option", { value: name, selected: name === first }, name)));
  return [
    h("p", {}, "The first command writes them, the next one starts them."),
    commands.map(command),
    h("div", { class: "row" },
      h("label", {}, h("span", { class: "name" }, `File, one of ${names.length}`), choice),
      copyButton(() => files[choice.value], "the file"),
      h("button", { type: "button", onclick: () => save(choice.value, files[choice.value]) }, "Save the file")),
    text,
  ];
}

function save(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  h("a", { href: address, download: name.split("/").pop() }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
