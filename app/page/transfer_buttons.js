// The buttons under the list: conversations leave as files, and come back. What does it is loaded when it is wanted.

const element = (id) => document.querySelector(`#${id}`);
const transfer = () => import("./transfer.js");

/** Make them work. `current()`: the conversation that is open. `done(problem)` is called after an import, with a sentence
 * if it failed, else "". */
export function listen({ current, done }) {
  element("export").addEventListener("click", async () => {
    const { allAsJson, download } = await transfer();
    download(await allAsJson(), "conversations.json");
  });
  element("export-one").addEventListener("click", async () => {
    const conversation = current();
    const { asMarkdown, download, fileName } = await transfer();
    if (conversation.messages.length) download(asMarkdown(conversation), fileName(conversation.title, "md"));
  });
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
