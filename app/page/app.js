// The page: puts its parts together and listens to the keyboard.

import * as address from "./address.js";
import { apiKey, expectTurn, models } from "./api.js";
import { Chat } from "./chat.js";
import { Composer, forget as forgetDraft } from "./composer.js";
import { icon, isolated } from "./dom.js";
import { Feed } from "./feed.js";
import { doEarly, listed, panels, server, sidebar } from "./first_list.js";
import { Joined } from "./joined.js";
import { onDemand } from "./on_demand.js";
import { NARROW, isOpen } from "./panels.js";
import * as store from "./store.js";

const element = (id) => document.querySelector(`#${id}`);
// Much is loaded when it is wanted: a first visit is to be light.
const bring = async (...args) => (await onDemand("bring")).bring(...args);
const THEMES = { auto: "as the system", light: "light", dark: "dark" };

const EXPECT_AGAIN_MS = 30_000; // what was brought to memory may have left it again
// Conversation -> when the server last answered in it, or was last told that it goes on. Infinity: it knows nothing of it.
const expected = new Map();

/** A module, or null where it cannot be fetched, which is said. */
async function wanted(name) {
  return onDemand(name).catch(({ message }) => {
    notice(message);
    return null;
  });
}

const dialogs = () => wanted("settings");

const UNBEGUN = "reprise.options"; // of a new conversation of this tab, for a reload
let unbegun = null; // the id of the conversation whose they are

let openings = 0; // of conversations, so that one that is fetched does not come over another

const chat = new Chat();
const composer = new Composer();
const feed = new Feed();
let live = null; // a Live, once the live view has been opened
let fleet = null; // a Fleet, once the server is known to be in one
const joined = new Joined(chat, server, () => drawList());

// --- the server ---------------------------------------------------------------------------------------------------------

function showServer(state, text) {
  const pill = element("server");
  if (pill.dataset.state === state && pill.textContent === text) return;
  pill.dataset.state = state;
  pill.textContent = pill.title = text;
}

/** Until it is known what is served: a model may be loading, a key may be wanted. */
async function connect() {
  for (;;) {
    try {
      const [model] = await models();
      chat.serve(model);
      showServer("ready", model.id);
      composer.ready();
      expect();
      if (!document.hidden) {
        feed.start();
        server.refresh();
        fleet?.goOn();
      }
      return;
    } catch (error) {
      if (error.status === 401) {
        showServer("away", "key wanted");
        await (await dialogs())?.askKey("This server wants a key. It is sent to this server only.");
        if (!apiKey.get()) return; // the key button asks again
      } else {
        if (error.code === "no_replica") watchFleet(); // it is there although none of its servers is
        showServer("waiting", error.code === "no_replica" ? "no server is there" : error.status === 503 ? "loading the model" : "no connection");
        await new Promise((resolve) => setTimeout(resolve, 1000));
      }
    }
  }
}

async function watchLive() {
  fleet?.goOn();
  const found = live ? null : await wanted("live");
  if (found) live ??= new found.Live(feed, () => new Map([...server.others(new Set()), ...store.list()].map(({ id, title }) => [id, title])));
}

async function watchFleet() {
  const found = await onDemand("fleet").catch(() => null); // it is asked for again, or the live view goes without
  if (!found) return;
  fleet ??= new found.Fleet();
  fleet.start();
}

feed.addEventListener("engine", ({ detail: state }) => {
  if (state === "ready" && chat.model) showServer("ready", chat.model);
  else showServer("waiting", state === "away" ? "no connection" : state === "loading" ? "loading the model" : state);
});
feed.addEventListener("fleet", watchFleet, { once: true });
feed.addEventListener("key", connect);
// What nobody sees, nobody has to be told: a tab in the background costs the server nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    feed.stop();
    fleet?.stop();
    server.stop();
  } else {
    if (chat.model) {
      feed.start();
      server.refresh();
    }
    fleet?.goOn();
  }
});
feed.addEventListener("sessions", ({ detail: sessions }) => {
  server.hear(sessions);
  const { id } = chat.conversation;
  const used = sessions.find((session) => session.id === id && !session.running)?.last_used_at * 1000;
  if (used > server.get(id)?.updated && !chat.streaming) server.refreshSoon(); // another device may have gone on with it
});
const KEPT_BY_SERVER = element("kept-by-server").textContent;
feed.addEventListener("state", ({ detail: { disk_problem: problem } }) => {
  element("kept-by-server").textContent = problem ? `The server keeps no new ones now: its disk has a problem, ${problem}.` : KEPT_BY_SERVER;
});
feed.addEventListener("turn", ({ detail: turn }) => chat.hear(turn));
element("open-key").addEventListener("click", async () => {
  const found = await dialogs();
  if (await found?.askKey("Sent to this server only. Leave it empty where no key is needed.")) connect();
});

// --- conversations ------------------------------------------------------------------------------------------------------

let drawing = null; // the timer of a list that will be drawn

/** Draw the list in a task of its own, once for all that happens until then. */
function drawListSoon() {
  drawing ??= setTimeout(drawList);
}

function drawList() {
  clearTimeout(drawing);
  drawing = null;
  const { id, title } = chat.conversation;
  sidebar.draw(id, chat.running);
  element("title").textContent = title || "New conversation";
  document.title = title ? `${isolated(title)} – Reprise` : "Reprise";
}

/** Tells the server that a conversation which is opened or typed into will go on. */
async function expect() {
  const { id, messages } = chat.conversation;
  if (!chat.model || chat.streaming || chat.conversation.isReadOnly || Date.now() < (expected.get(id) ?? 0) + EXPECT_AGAIN_MS) return;
  if (!messages.some(({ role }) => role === "assistant")) return;
  expected.set(id, Date.now());
  if (!(await expectTurn(id))) expected.set(id, Infinity);
}

/** Open a conversation, null: a new one. `isStep`: Back leads from it to the one before. `uncovers`: on a narrow screen, what
 * lies over the chat goes away. */
function show(conversation, isStep = true, uncovers = true) {
  openings += 1;
  const hadFocus = document.activeElement !== document.body;
  if (conversation?.id !== chat.conversation.id) chat.open(conversation ?? fresh()); // else it is there already, and maybe streams
  address.write(addressed(), isStep);
  notice("");
  composer.open(chat.conversation);
  composer.streaming = chat.streaming;
  expect();
  drawList();
  if (uncovers) panels.close();
  if (!NARROW.matches) composer.focus(); // it brings up a phone's keyboard
  else if (hadFocus && document.activeElement === document.body) element("thread").focus({ preventScroll: true }); // it was in what is gone
}

const addressed = () => (chat.conversation.messages.length ? chat.conversation.id : null);

/** Open a conversation by its id, unless it has gone meanwhile. */
async function showById(id, isStep) {
  if (id && id === chat.conversation.id) return show(chat.conversation, isStep);
  const asked = (openings += 1);
  const found = await store.load(id);
  if (found || !id) {
    show(found, isStep);
    return joined.catchUp();
  }
  notice("");
  element("list-status").textContent = "Fetching the conversation from the server.";
  const brought = await bring(id, server.get(id)).catch((error) => error);
  element("list-status").textContent = "";
  if (asked !== openings) return; // another one was opened meanwhile
  if (!(brought instanceof Error)) return show(brought, isStep);
  if (!isStep) show(null, false);
  const why = brought.status === 404 ? "it is not in this browser, and the server does not keep it." : brought.message;
  notice(`That conversation cannot be opened: ${why}`);
}

/** What the address says, which may be only in the server, or what was open last in this browser. */
async function showFirst() {
  const id = address.shownId();
  if (id) return showById(id, false);
  show(await store.load(store.last()), false);
}

/** A new conversation begins with the settings that were made for one, else with those of the one before. */
function fresh() {
  const conversation = store.create();
  const kept = readKept();
  if (kept) {
    unbegun = conversation.id;
    conversation.options = { ...conversation.options, ...kept };
  } else if (chat.conversation.messages.length && !chat.conversation.isReadOnly) conversation.options = { ...chat.conversation.options };
  return conversation;
}

function readKept() {
  try {
    return JSON.parse(sessionStorage.getItem(UNBEGUN));
  } catch {
    return null;
  }
}

function keepUnbegun({ id, options }) {
  unbegun = id;
  try {
    sessionStorage.setItem(UNBEGUN, JSON.stringify(options));
  } catch {} // full: they hold until the page is loaded anew
}

/** Something to know about that is no part of the conversation; an empty one goes away. */
function notice(text) {
  element("notice").textContent = text;
  element("notice").hidden = !text;
}

async function forget(id, title) {
  const [found, deletion] = await Promise.all([dialogs(), wanted("deletion")]);
  if (!deletion || !(await found?.confirmDelete(title))) return;
  await chat.stop(id);
  let isGone;
  try {
    isGone = await deletion.deleteSession(id);
  } catch (error) {
    notice(`Not deleted: ${error.message}`);
    return;
  }
  server.forget(id);
  await store.remove(id);
  forgetDraft(id);
  element("list-status").textContent = isGone
    ? `“${isolated(title)}” is gone from this browser and from every tier of the server.`
    : `“${isolated(title)}” is gone from this browser. The server was not told: it has no way to delete a conversation.`;
  if (id === chat.conversation.id) show(fresh(), false, false); // that it is gone is said in the list
  else drawList();
}

const NOTICES = {
  kept: "",
  full: "The browser's storage is full, so this conversation is not kept. Delete others.",
  unkept: "The browser keeps nothing for this page, so conversations are gone when it is closed.",
  branched: "Another tab changed this conversation meanwhile. What was said here is kept as a conversation of its own.",
};

store.onChange(async (id) => {
  if (!store.list().some((entry) => entry.id === id)) server.forget(id); // another tab has deleted it, there too
  if (!chat.streaming && id === chat.conversation.id) {
    const now = await store.load(id);
    const { conversation } = chat; // by now
    if (chat.streaming || id !== conversation.id) return drawList();
    if (now) conversation.title = now.title;
    if (now && now.revision !== conversation.revision) chat.replace(now);
    else if (!now && conversation.revision) {
      composer.moveOn();
      show(store.create(), false);
      notice("Another tab has deleted this conversation.");
    }
  }
  drawList();
});
chat.addEventListener("change", ({ detail }) => {
  if (detail.id === unbegun) sessionStorage.removeItem(UNBEGUN); // it has begun, and keeps them itself
  if (!chat.running.includes(detail.id)) {
    expected.set(detail.id, Date.now()); // its KV is in memory
    server.refreshSoon();
  }
  composer.follow(chat.conversation);
  address.write(addressed(), false);
  composer.streaming = chat.streaming;
  drawListSoon();
  notice(NOTICES[detail.saved]);
});
chat.addEventListener("refused", ({ detail: { text, conversation } }) => composer.giveBack(text, conversation));
chat.addEventListener("fork", async ({ detail: message }) => {
  const found = await wanted("fork");
  if (!found) return;
  const conversation = found.forkAt(chat.conversation, message);
  const saved = await store.save(conversation);
  show(conversation);
  notice(NOTICES[saved]);
});
chat.addEventListener("suggest", ({ detail: text }) => composer.suggest(text));
chat.addEventListener("error", async ({ detail: error }) => {
  if (error.status === 401) await connect();
});
sidebar.addEventListener("leave", () => panels.close());
sidebar.addEventListener("open", ({ detail: id }) => showById(id, true));
sidebar.addEventListener("remove", ({ detail: { id, title } }) => forget(id, title));
sidebar.addEventListener("rename", async ({ detail: { id, title } }) => {
  if (id === chat.conversation.id) chat.conversation.title = title;
  await store.rename(id, title);
  drawList();
  await server.rename(id, title);
});
sidebar.addEventListener("pin", async ({ detail: { id, title, pinned } }) => {
  try {
    await server.pin(id, pinned);
  } catch (error) {
    notice(`“${isolated(title)}” is not ${pinned ? "pinned" : "unpinned"}: ${error.message}`);
  }
});
async function transfer(name) {
  const found = await wanted("transfer_buttons");
  notice(found ? await found.press(name, chat) : element("notice").textContent);
  drawList();
}

for (const name of ["export", "export-one"]) element(name).addEventListener("click", () => transfer(name));
element("import").addEventListener("click", () => element("import-file").click());
element("import-file").addEventListener("change", () => transfer("import"));
address.onStep((id) => showById(id, false));
element("new").addEventListener("click", () => show(fresh()));
element("open-settings").addEventListener("click", async () => {
  if (chat.conversation.isReadOnly) return notice("The program that has this conversation sends its own system prompt and sampling.");
  const found = await dialogs();
  const options = await found?.editOptions(chat.conversation.options, chat.sampling);
  if (!options) return;
  const { conversation } = chat; // by now: another tab may have gone on with it
  conversation.options = options;
  if (!conversation.messages.length) return keepUnbegun(conversation);
  notice(NOTICES[await store.save(conversation)]);
  drawList();
});

// --- the composer -------------------------------------------------------------------------------------------------------

composer.addEventListener("send", ({ detail: text }) => chat.send(text));
composer.addEventListener("previous", () => chat.editLast());
composer.addEventListener("stop", () => chat.stop());
composer.addEventListener("typing", expect);
composer.addEventListener("files", () => notice("Pictures and files cannot be sent: the model reads text."));

// --- theme, keyboard ------------------------------------------------------------------------------------------------------

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("reprise.theme", theme);
  icon(element("theme"), theme);
  element("theme").setAttribute("aria-label", `Theme: ${THEMES[theme]}`);
  element("theme").title = `Theme: ${THEMES[theme]}`;
}

element("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
});

/** Shortcuts of the page, by the key with Ctrl or Command. */
const SHORTCUTS = {
  k: () => {
    panels.open("sidebar", true);
    element("search").focus();
  },
  O: () => show(fresh()),
};

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  const shortcut = event.ctrlKey || event.metaKey ? SHORTCUTS[event.shiftKey ? event.key.toUpperCase() : event.key] : null;
  if (shortcut) {
    event.preventDefault();
    shortcut();
  } else if (event.key === "F2") {
    event.preventDefault();
    panels.open("sidebar", true);
    sidebar.rename(chat.conversation.id);
  } else if (event.key === "Escape") {
    if (chat.streaming) chat.stop();
    else if (composer.isQueued) composer.unqueue();
    else panels.close();
  }
});

for (const place of document.querySelectorAll("[data-icon]")) icon(place, place.dataset.icon);
for (const button of document.querySelectorAll(".top .icon-button[aria-label]")) button.title = button.getAttribute("aria-label");
setTheme(document.documentElement.dataset.theme in THEMES ? document.documentElement.dataset.theme : "auto");
panels.opened = (name) => name === "live" && watchLive();
if (isOpen("live")) watchLive();
await listed();
chat.placeOf = (id) => server.placeOf(id);
chat.join = (...turn) => joined.join(...turn);
await showFirst();
if (store.isSilent()) notice("The browser's storage does not answer. Load the page again to see what it keeps; what is said now is gone when the page is closed.");
doEarly();
connect();
