// IndexedDB with promises: conversations whole, and beside them the little that a list of them needs.

const NAME = "reprise";
const VERSION = 1;
const STORES = ["conversations", "entries"];

/** An IDBDatabase. Rejects where the browser keeps nothing, as in some private windows. */
export async function open() {
  const asked = indexedDB.open(NAME, VERSION);
  asked.onupgradeneeded = () => {
    for (const name of STORES) asked.result.createObjectStore(name, { keyPath: "id" });
  };
  return new Promise((resolve, reject) => {
    asked.onerror = () => reject(asked.error);
    asked.onsuccess = () => {
      const database = asked.result;
      database.onversionchange = () => database.close(); // another tab has a newer page, or deletes all
      resolve(database);
    };
  });
}

/** Run `work(stores)` in one transaction over both stores; it may await `result` of their requests alone. Resolves to what
 * it returns once all is on disk; rejects, and nothing is changed, if anything fails. */
export async function transact(database, mode, work) {
  const transaction = database.transaction(STORES, mode);
  const ended = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onerror = transaction.onabort = () => reject(transaction.error ?? new DOMException("It was given up.", "AbortError"));
  });
  ended.catch(() => {}); // heard of below, unless `work` fails first
  try {
    const found = await work(Object.fromEntries(STORES.map((name) => [name, transaction.objectStore(name)])));
    await ended;
    return found;
  } catch (error) {
    if (transaction.error === null) abort(transaction);
    throw error;
  }
}

function abort(transaction) {
  try {
    transaction.abort();
  } catch {} // it has ended already
}

/** What an IDBRequest gives. */
export function result(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
