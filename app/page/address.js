// Each conversation has an address of its own, `#/c/<id>`, so that Back leads to the one before.

const PREFIX = "#/c/";

/** The id in the address, or null. */
export function shownId() {
  if (!location.hash.startsWith(PREFIX)) return null;
  const written = location.hash.slice(PREFIX.length);
  try {
    return decodeURIComponent(written);
  } catch {
    return written; // no address that we wrote: nothing is found by it
  }
}

/** Write a conversation's id into the address, null: that of one that has not begun. `isStep`: Back leads from here to
 * where the reader was. */
export function write(id, isStep) {
  if (id === shownId() && (id || !location.hash)) return;
  const address = id ? `${PREFIX}${encodeURIComponent(id)}` : location.pathname + location.search;
  history[isStep ? "pushState" : "replaceState"](null, "", address);
}

/** `listener(id)` hears of Back, Forward, and addresses that are typed. */
export function onStep(listener) {
  addEventListener("popstate", () => {
    const id = shownId();
    if (id || !location.hash) listener(id);
  });
}
