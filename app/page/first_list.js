// The list of conversations, which is drawn and seen while the rest of the page is still on its way.

import * as address from "./address.js";
import { Panels } from "./panels.js";
import { ServerList } from "./server_list.js";
import { Sidebar } from "./sidebar.js";
import { last, start } from "./store.js";

export const server = new ServerList();
export const sidebar = new Sidebar(server);
export const panels = new Panels(); // a list is seen where its panel is open

const untilThen = new AbortController();
// What is chosen before the page can open it is opened by its address then.
sidebar.addEventListener("open", ({ detail: id }) => address.write(id, true), { signal: untilThen.signal });
const early = []; // what was chosen to be deleted, renamed or pinned before the page could do it
for (const act of ["remove", "rename", "pin"]) sidebar.addEventListener(act, ({ detail }) => early.push(new CustomEvent(act, { detail })), { signal: untilThen.signal });

/** Resolves when the database has been read and the list is there. What happens to it is heard of by the caller then. */
export async function listed() {
  await drawn;
  untilThen.abort();
}

/** Does what was chosen in the list before its caller heard of it. */
export function doEarly() {
  for (const event of early.splice(0)) sidebar.dispatchEvent(event);
}

const drawn = start().then(() => sidebar.draw(address.shownId() ?? last(), []));
