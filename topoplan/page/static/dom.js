/* Elements, and numbers formatted as on the terminal. Text is never parsed as markup. */

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(2).filter((one) => one !== null && one !== undefined && one !== false));
  return element;
}

/* Replaces the content of the element with this id, and restores the focus by the focused element's id. */
export function put(id, ...children) {
  const focused = document.activeElement && document.activeElement.id;
  document.querySelector(`#${id} > div`).replaceChildren(...children.flat(2).filter(Boolean));
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
}

export function fixed(value, digits) {
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/* 0.0123, 1.23, 12.3, 12,345 */
export function significant(value) {
  if (!value) return "0";
  return fixed(value, Math.max(0, 2 - Number(value.toExponential(2).split("e")[1])));
}

export const GIB = 2 ** 30;

export function bytes(value) {
  return Math.abs(value) >= GIB / 20 || !value ? `${fixed(value / GIB, 1)} GiB` : `${significant(value / 2 ** 20)} MiB`;
}

export function seconds(value) {
  return Math.abs(value) >= 0.1 || !value ? `${significant(value)} s` : `${significant(value * 1000)} ms`;
}

export function hours(value) {
  return fixed(value, value < 10 ? 2 : value < 100 ? 1 : 0);
}

export function copyButton(text, what, name = "Copy") {
  const button = h("button", { type: "button", "aria-label": `Copy ${what}` }, name);
  button.addEventListener("click", async () => {
    button.textContent = (await copied(typeof text === "function" ? text() : text)) ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = name; }, 1500);
  });
  return button;
}

/* Fallback: browsers may deny the clipboard API to pages opened from disk. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

export function command(text) {
  return h("div", { class: "copied" }, h("code", {}, text), copyButton(text, `the command ${text}`));
}
