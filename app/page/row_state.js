// What a row of the list says beside its name: where what was read lies, until when it is kept, and when it was last used.

const PLACES = {
  ready: "Ready: the server has read it.",
  disk: "On disk: it is fetched before the next answer.",
  anew: "The next answer reads it anew.",
};

/** The words for a tooltip. `row`: of ServerList, or undefined. */
export function stateInWords(place, row) {
  if (!place) return "";
  const kept = row?.pinned ? " Pinned: it is kept." : row?.expires > Date.now() ? ` Kept until ${when(row.expires)}.` : "";
  return `${PLACES[place]}${kept}`;
}

/** What tells conversations of one title apart in a list: id -> when it was last used, and a number where that is the same.
 * `entries`: [{id, title, updated}]. */
export function timesOfEqual(entries) {
  const times = new Map();
  const groups = Map.groupBy(entries, ({ title }) => title);
  if (groups.size === entries.length) return times;
  for (const equal of groups.values()) {
    if (equal.length === 1) continue;
    const taken = new Map();
    for (const { id, updated } of equal) {
      const time = when(updated).replace("today ", "");
      const count = (taken.get(time) ?? 0) + 1;
      taken.set(time, count);
      times.set(id, count === 1 ? time : `${time} (${count})`.trim());
    }
  }
  return times;
}

const LAST_TIME_MS = 8.64e15; // of a Date

// Made once: it takes longer than to use them.
const CLOCK = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const DATE = new Intl.DateTimeFormat("en", { month: "short", day: "numeric" });

/** "today 14:00", "tomorrow 14:00", "Dec 4 14:00". */
function when(time) {
  if (!(Math.abs(time) <= LAST_TIME_MS)) return ""; // a file that was read long ago may have said so
  const days = Math.round((new Date(time).setHours(0, 0, 0, 0) - new Date().setHours(0, 0, 0, 0)) / 86_400_000);
  return `${["today", "tomorrow"][days] ?? DATE.format(time)} ${CLOCK.format(time)}`;
}
