// The list beside the chat and the live view. On a narrow screen they lie over it, on others they stand beside it, and
// whether they are open is kept. Only a wide one has room for both.

const KEPT = "reprise.panels";
const AT_FIRST = { sidebar: true, live: false };

const element = (id) => document.querySelector(`#${id}`);
const TOGGLES = { sidebar: element("toggle-sidebar"), live: element("toggle-live") };

export const NARROW = matchMedia("(max-width: 1099px)");
const NOT_WIDE = matchMedia("(max-width: 1279px)");

export const isOpen = (name) => TOGGLES[name].getAttribute("aria-expanded") === "true";

export class Panels {
  opened = () => {}; // called with the name of one that has been opened

  constructor() {
    for (const [name, toggle] of Object.entries(TOGGLES)) {
      toggle.addEventListener("click", () => {
        this.open(name, !isOpen(name));
        if (NARROW.matches) return;
        localStorage.setItem(KEPT, JSON.stringify({ ...wanted(), [name]: isOpen(name) }));
        if (NOT_WIDE.matches && !isOpen(name)) this.#layOut(); // what was closed for want of room comes back
      });
    }
    for (const width of [NARROW, NOT_WIDE]) width.addEventListener("change", () => this.#layOut());
    this.#layOut();
  }

  /** What a narrow panel covers cannot be reached meanwhile. */
  open(name, open) {
    for (const [other, toggle] of Object.entries(TOGGLES)) {
      const willBe = other === name ? open : open && NOT_WIDE.matches ? false : isOpen(other);
      toggle.setAttribute("aria-expanded", String(willBe));
      element(other).classList.toggle("open", willBe);
    }
    const covered = NARROW.matches && document.querySelector(".panel.open") !== null;
    element("main").inert = covered;
    if (open) this.opened(name);
    if (covered && open) (element(name).querySelector("button") ?? element(name)).focus();
  }

  /** Uncover the chat on a narrow screen. */
  close() {
    const open = NARROW.matches && document.querySelector(".panel.open");
    if (!open) return;
    this.open(open.id, false);
    TOGGLES[open.id].focus();
  }

  #layOut() {
    const { sidebar, live } = NARROW.matches ? { sidebar: false, live: false } : wanted();
    this.open("sidebar", sidebar);
    this.open("live", live && !(sidebar && NOT_WIDE.matches)); // the list may hold what is typed
  }
}

/** What is to be open where there is room. */
function wanted() {
  try {
    return { ...AT_FIRST, ...JSON.parse(localStorage.getItem(KEPT)) };
  } catch {
    return AT_FIRST;
  }
}
