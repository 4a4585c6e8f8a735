// What the list of conversations is drawn from, asked of the browser's database while the other modules are still on their way.

import { open, result, transact } from "./database.js";

export const channel = new BroadcastChannel("reprise.conversations");
export const changed = []; // ids that other tabs have changed meanwhile; the store hears of them itself once it has the entries
channel.onmessage = ({ data: { id } }) => changed.push(id);

export const database = open();
export const entries = database.then((opened) => transact(opened, "readonly", (stores) => result(stores.entries.getAll())));
for (const asked of [database, entries]) asked.catch(() => {}); // heard of by the store, where the browser keeps nothing
