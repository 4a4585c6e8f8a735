// What the buttons under the list do: conversations leave as files, and come back.

import * as store from "./store.js";
import { allAsJson, asMarkdown, download, fileName, importJson } from "./transfer.js";

const was = (count) => (count === 1 ? "was" : "were");
const element = (id) => document.querySelector(`#${id}`);

/** Do what a button says: "export", "export-one" or "import", for which a file has been chosen. Returns a sentence if it
 * failed, else "". */
export async function press(name, chat) {
  try {
    await ACTIONS[name](chat);
    return "";
  } catch (error) {
    return `Not ${name === "import" ? "imported" : "exported"}: ${error.message}`;
  }
}

const ACTIONS = {
  async export() {
    download(await allAsJson(), "conversations.json");
  },
  "export-one"({ conversation }) {
    if (conversation.messages.length) download(asMarkdown(conversation), fileName(conversation.title, "md"));
  },
  async import(chat) {
    const [file] = element("import-file").files;
    element("import-file").value = ""; // so that the same file may be chosen again
    if (!file) return;
    const { added, grown, known } = await importJson(file, chat.running);
    const more = grown ? `, ${grown} that ${was(grown)} here got more from the file` : "";
    element("list-status").textContent = `${added} added${more}${known ? `, ${known} ${was(known)} here already` : ""}.`;
    const now = await store.load(chat.conversation.id); // the file may have had more of it
    if (now && !chat.streaming && now.id === chat.conversation.id && now.revision !== chat.conversation.revision) chat.replace(now);
  },
};
