// Modules that not every visit needs, fetched when they are wanted.

const loaded = new Map(); // name -> module
let tries = 0;

/** A module, by its path without the ending. Throws Error with a sentence for people; the next call tries again, under
 * another address, since browsers remember that one could not be fetched. */
export async function onDemand(name) {
  if (!loaded.has(name)) loaded.set(name, await fetched(name));
  return loaded.get(name);
}

async function fetched(name) {
  try {
    return await import(tries ? `./${name}.js?try=${tries}` : `./${name}.js`);
  } catch {
    tries += 1;
    throw new Error("This part of the page cannot be fetched: there is no connection to the server. Try again.");
  }
}
