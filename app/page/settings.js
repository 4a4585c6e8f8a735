// The dialogs: system prompt and sampling of a conversation, the API key, and a question before something is lost.

import { apiKey } from "./api.js";
import { DEFAULTS } from "./store.js";

const element = (id) => document.querySelector(`#${id}`);
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "repetition_penalty", "seed"];

function fill(options) {
  element("system").value = options.system;
  for (const name of NUMBERS) element(name).value = options[name] ?? "";
}

/** The options as they are in the fields. One that is out of its range stays what it was before; an empty one is the
 * default, or not sent where a placeholder says so. */
function read(before) {
  const options = { system: element("system").value };
  for (const name of NUMBERS) {
    const field = element(name);
    if (!field.validity.valid) options[name] = before[name];
    else if (field.value === "") options[name] = field.placeholder ? null : DEFAULTS[name];
    else options[name] = field.valueAsNumber;
  }
  return options;
}

/** Empty fields say what the model is drawn with where a request says nothing. */
function hint(sampling) {
  for (const [name, value] of Object.entries(sampling ?? {})) {
    const field = element(name);
    if (field) field.placeholder = name === "top_k" && value === 0 ? "off" : `${value}, the model's`;
  }
}

/** Resolves to the options when the dialog is closed. `sampling` is the model's own. */
export function editOptions(options, sampling) {
  const dialog = element("settings");
  hint(sampling);
  fill(options);
  element("defaults").onclick = () => fill(DEFAULTS);
  return closed(dialog, () => read(options));
}

/** Resolves to whether the key has changed. */
export function askKey(why) {
  element("key-why").textContent = why;
  element("key").value = apiKey.get();
  element("key-remember").checked = apiKey.remembered();
  const before = apiKey.get();
  element("forget-key").onclick = () => {
    apiKey.forget();
    element("key-dialog").close("forget");
  };
  return closed(element("key-dialog"), (answer) => {
    if (answer === "done") apiKey.set(element("key").value.trim(), element("key-remember").checked);
    return apiKey.get() !== before;
  });
}

/** Resolves to whether it may be deleted. */
export function confirmDelete(title) {
  element("confirm-what").textContent = `“${title}” leaves this browser, and its KV cache every tier of the server.`;
  return closed(element("confirm"), (answer) => answer === "delete");
}

function closed(dialog, result) {
  dialog.returnValue = "";
  dialog.showModal();
  // "close" comes in a task of its own, and what is typed and sent next may overtake it.
  return new Promise((resolve) => {
    const heard = new AbortController();
    const settle = (answer) => {
      heard.abort();
      resolve(result(answer));
    };
    const { signal } = heard;
    dialog.addEventListener("submit", (event) => settle(event.submitter?.value ?? ""), { signal });
    dialog.addEventListener("cancel", () => settle(""), { signal });
    dialog.addEventListener("close", () => settle(dialog.returnValue), { signal });
  });
}
