/* The pictures drawn by Python, as images, so that nothing inside them can run. */

import { h } from "./dom.js";

export function picture(svg, name, words) {
  const source = `data:image/svg+xml;base64,${btoa(binary(svg))}`;
  const image = h("img", { src: source, alt: words });
  const frame = h("div", { class: "scroll paper", tabindex: "0", role: "region", "aria-label": name }, image);
  const natural = Number(svg.match(/ width="(\d+)/)[1]);
  let zoom = 1;
  const show = (factor) => {
    zoom = factor === 0 ? 1 : Math.min(16, Math.max(0.5, zoom * factor));
    image.style.width = `max(min(${100 * zoom}%, ${natural * zoom}px), ${Math.min(natural, 700) * zoom}px)`;
  };
  show(0);
  const button = (text, what, factor) => h("button", { type: "button", "aria-label": `${what}: ${name}`, onclick: () => show(factor) }, text);
  return [
    h("h3", {}, name),
    h("div", { class: "row" }, button("+", "Larger", 1.5), button("\u2212", "Smaller", 1 / 1.5), button("Fit", "Fit the page", 0), h("a", { href: source, download: `${name.toLowerCase()}.svg` }, "Save the picture")),
    frame,
  ];
}

function binary(text) {
  return Array.from(new TextEncoder().encode(text), (byte) => String.fromCharCode(byte)).join("");
}
