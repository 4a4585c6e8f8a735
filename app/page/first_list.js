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

/** Resolves when the database has been read and the list is there. What happens to it is heard of by the caller then. */
export async function listed() {
  await drawn;
  untilThen.abort();
}

const drawn = start().then(() => sidebar.draw(address.shownId() ?? last(), []));
