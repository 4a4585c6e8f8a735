// Nodes, never markup: text of a model or a user stays text.

/** An element. `properties`: `class`, `data` (dataset), `on` (listeners), `aria-...` and `role` as attributes, the rest as properties. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name === "class") element.className = value;
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "role" || name === "scope" || name.startsWith("aria-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** An SVG element with attributes. */
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const TURNS = /[\p{Bidi_C}\p{sc=Arab}\p{sc=Hebr}\p{sc=Syrc}\p{sc=Thaa}\p{sc=Nkoo}]/u;

/** A text of somebody's for a sentence of ours, whose order stays however the text runs. */
export const isolated = (text) => (TURNS.test(text) ? `\u2068${text.replaceAll(/[\u2066-\u2069]/g, "")}\u2069` : text);

const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  sliders: "M4 8h10m4 0h2M4 16h2m4 0h10M14 8a2 2 0 1 0 4 0a2 2 0 1 0-4 0M6 16a2 2 0 1 0 4 0a2 2 0 1 0-4 0",
  key: "M8 16.500a4.500 4.500 0 1 1 4.200-6.100H21v3.500h-2.500V17H15v-3.100h-2.800A4.500 4.500 0 0 1 8 16.500ZM8 12h.01",
  layers: "m12 4 8.500 4.500L12 13 3.500 8.500ZM4 12.500l8 4.200 8-4.200M4 16.300l8 4.200 8-4.200",
  auto: "M12 4a8 8 0 1 0 0 16ZM12 4a8 8 0 0 1 0 16",
  light: "M12 8a4 4 0 1 0 0 8a4 4 0 1 0 0-8M12 2.500v2M12 19.500v2M2.500 12h2M19.500 12h2M5.300 5.300l1.400 1.400M17.300 17.300l1.400 1.400M18.700 5.300l-1.400 1.400M6.700 17.300l-1.400 1.400",
  dark: "M20 14.500A8.500 8.500 0 1 1 9.500 4a7 7 0 0 0 10.500 10.500Z",
  send: "M12 19V5m0 0-6 6m6-6 6 6",
  stop: "M7 7h10v10H7Z",
  trash: "M5 7h14M10 7V4.500h4V7m-7.500 0 .8 12.500h9.400L17.500 7M10 11v5M14 11v5",
  copy: "M9 9h10v11H9ZM5 15V4h10",
  check: "M5 12.500l4.500 4.500L19 7.500",
  again: "M19 12a7 7 0 1 1-2.200-5.100M19 4v4h-4",
  edit: "M4 20l1-4L16 5l3 3L8 19ZM14 7l3 3",
  fork: "M7 4a2 2 0 1 0 0 4a2 2 0 1 0 0-4M17 4a2 2 0 1 0 0 4a2 2 0 1 0 0-4M12 16a2 2 0 1 0 0 4a2 2 0 1 0 0-4M7 8c0 4 5 4 5 8c0-4 5-4 5-8",
  before: "M14 6l-6 6 6 6",
  after: "M10 6l6 6-6 6",
  bolt: "M13 3 5 14h6l-1 7 8-11h-6Z",
  pin: "M9 4h6l-.6 6.500 3.100 3.500H6.500l3.100-3.500ZM12 14v6",
  down: "M12 5v14m0 0-6-6m6 6 6-6",
  close: "M6 6l12 12M18 6 6 18",
};

/** Draw an icon into an element; its name for screen readers is the element's own label. */
export function icon(element, name) {
  const path = s("path", { d: ICONS[name] });
  const picture = s("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true", focusable: "false" }, path);
  element.querySelector("svg.icon")?.remove();
  element.prepend(picture);
  return element;
}

const COPIED_MS = 1500; // for which a button shows that it has copied

/** A button that copies what `text()` is by then, and says whether it could. */
export function copyButton(name, className, text) {
  const button = h("button", { type: "button", class: className, "aria-label": name, title: name });
  const show = (label, picture) => {
    button.setAttribute("aria-label", label);
    button.title = label;
    icon(button, picture);
  };
  button.addEventListener("click", async () => {
    const done = await copy(text());
    show(done ? "Copied" : "Not copied: the browser does not allow it", done ? "check" : "close");
    setTimeout(() => show(name, "copy"), COPIED_MS);
  });
  return icon(button, "copy");
}

/** The clipboard proper is there over https and on this machine only; elsewhere a selection is copied, the old way. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = h("textarea", { value: text, readOnly: true, class: "visually-hidden", "aria-hidden": "true" });
    const focused = document.activeElement;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return done;
  }
}

/** A number and what it counts, between which no line ends. */
export const withUnit = (value, unit) => `${value}\u00a0${unit}`;

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let unit = 0;
  while (count >= 1024 && unit < UNITS.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return withUnit(count < 10 && unit ? count.toFixed(1) : Math.round(count), UNITS[unit]);
}

export function milliseconds(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 10) return withUnit(ms.toFixed(1), "ms");
  return ms < 1000 ? withUnit(Math.round(ms), "ms") : withUnit((ms / 1000).toFixed(ms < 10000 ? 2 : 1), "s");
}

const GROUPED = new Intl.NumberFormat("en"); // made once: it takes longer than to use it
export const number = (value) => GROUPED.format(value);
export const percent = (part, whole) => withUnit(whole ? Math.round((100 * part) / whole) : 0, "%");

/** "1 token", "2 tokens". */
export const counted = (count, noun) => withUnit(number(count), count === 1 ? noun : `${noun}s`);
