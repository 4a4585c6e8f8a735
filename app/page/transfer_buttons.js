// The buttons under the list: conversations leave as files, and come back. What does it is loaded when it is wanted.

import { onDemand } from "./on_demand.js";

const element = (id) => document.querySelector(`#${id}`);
const transfer = () => onDemand("transfer");

/** Make them work. `current()`: the conversation that is open. `done(problem)` is called after an import, and when something
 * failed: with a sentence if so, else "". */
export function listen({ current, done }) {
  const exporting = (work) => () => transfer().then(work).catch(({ message }) => done(`Not exported: ${message}`));
  element("export").addEventListener("click", exporting(async ({ allAsJson, download }) => download(await allAsJson(), "conversations.json")));
  element("export-one").addEventListener("click", exporting(({ asMarkdown, download, fileName }) => {
    const conversation = current();
    if (conversation.messages.length) download(asMarkdown(conversation), fileName(conversation.title, "md"));
  }));
  element("import").addEventListener("click", () => element("import-file").click());
  element("import-file").addEventListener("change", async () => {
    const [file] = element("import-file").files;
    element("import-file").value = ""; // so that the same file may be chosen again
    if (!file) return;
    try {
      const { importJson } = await transfer();
      const { added, known } = await importJson(file);
      element("list-status").textContent = `${added} added${known ? `, ${known} were here already` : ""}.`;
      done("");
    } catch (error) {
      done(`Not imported: ${error.message}`);
    }
  });
}
