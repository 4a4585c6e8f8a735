// The dialogs: system prompt and sampling of a conversation, the API key, and a question before something is lost.

import { apiKey } from "./api.js";
import { isolated, number } from "./dom.js";
import { BOUNDS, isTaken } from "./options.js";
import { DEFAULTS } from "./store.js";

const element = (id) => document.querySelector(`#${id}`);
const NUMBERS = Object.keys(BOUNDS);

for (const [name, bounds] of Object.entries(BOUNDS)) Object.assign(element(name), bounds);

function fill(options) {
  element("system").value = options.system;
  for (const name of NUMBERS) element(name).value = options[name] ?? "";
}

/** The options as they are in the fields. An empty one is not sent. */
function read() {
  const options = { system: element("system").value };
  for (const name of NUMBERS) {
    const field = element(name);
    options[name] = field.value === "" ? null : field.valueAsNumber;
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

/** Say which number is not one that can be taken, and go there. Returns whether there is one. */
function sayWrong() {
  const isWrong = (name) => element(name).validity.badInput || (element(name).value !== "" && !isTaken(name, element(name).valueAsNumber));
  const name = NUMBERS.find(isWrong);
  element("settings-wrong").hidden = !name;
  if (!name) return false;
  const { min, max, step } = BOUNDS[name];
  const kind = step === 1 ? "a whole number" : "a number";
  element("settings-wrong").textContent = `${element(name).labels[0].textContent.trim()}: it takes ${kind} from ${number(min)} to ${number(max)}.`;
  element(name).focus();
  return true;
}

/** Resolves to the options when the dialog is closed, or to null if it was cancelled. `sampling` is the model's own. */
export function editOptions(options, sampling) {
  const dialog = element("settings");
  hint(sampling);
  fill(options);
  element("settings-wrong").hidden = true;
  element("defaults").onclick = () => fill(DEFAULTS);
  element("cancel-settings").onclick = () => dialog.close("");
  element("settings-form").onsubmit = (event) => {
    if (event.submitter?.value === "done" && sayWrong()) event.preventDefault();
  };
  return closed(dialog, (answer) => (answer === "done" ? read() : null));
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
  element("confirm-what").textContent = `“${isolated(title)}” leaves this browser and the server, and so does all that was read of it.`;
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
    dialog.addEventListener("submit", (event) => event.defaultPrevented || settle(event.submitter?.value ?? ""), { signal });
    dialog.addEventListener("cancel", () => settle(""), { signal });
    // While it is open the event is that of the question before, which came late.
    dialog.addEventListener("close", () => dialog.open || settle(dialog.returnValue), { signal });
  });
}
