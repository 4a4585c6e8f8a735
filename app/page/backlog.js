// The messages of a long conversation that are drawn once there is time for it, or the reader comes near.

const NEAR = "1000px"; // so close to what is seen, a message is drawn at once
const SLICE_MS = 8; // of drawing at a time, where the browser does not say how long it is idle
const LEAST_IDLE_MS = 4;

export const idle = globalThis.requestIdleCallback ?? ((work) => setTimeout(() => {
  const until = performance.now() + SLICE_MS;
  work({ timeRemaining: () => until - performance.now() });
}, 50));

export class Backlog {
  #articles = new Map(); // element -> article that is not drawn, the oldest first
  #near;
  #drawn;
  #isAsked = false;

  /** `root`: what scrolls. `drawn()` is called when something near to what is seen was drawn; what is farther is not laid
   * out before it comes near. */
  constructor(root, drawn) {
    this.#drawn = drawn;
    this.#near = new IntersectionObserver((entries) => {
      const seen = entries.filter(({ isIntersecting }) => isIntersecting).map(({ target }) => this.#articles.get(target)).filter(Boolean);
      for (const article of seen) this.#draw(article);
      if (seen.length) this.#drawn();
    }, { root, rootMargin: NEAR });
  }

  /** Draw these articles later, the last ones first. */
  add(articles) {
    for (const element of this.#articles.keys()) if (!element.isConnected) this.#forget(element); // another conversation's
    for (const article of articles) {
      this.#articles.set(article.element, article);
      this.#near.observe(article.element);
    }
    this.#ask();
  }

  #ask() {
    if (this.#isAsked || !this.#articles.size) return;
    this.#isAsked = true;
    idle((time) => this.#work(time));
  }

  #work(time) {
    this.#isAsked = false;
    const left = [...this.#articles.values()].reverse();
    for (const article of left) {
      this.#draw(article);
      if (time.timeRemaining() < LEAST_IDLE_MS) break;
    }
    this.#ask();
  }

  #forget(element) {
    this.#articles.delete(element);
    this.#near.unobserve(element);
  }

  #draw(article) {
    this.#forget(article.element);
    if (article.element.isConnected) article.draw();
  }
}
