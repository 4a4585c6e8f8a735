// What a row of the list says beside its name: where what was read lies, and until when it is kept.

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

/** "today 14:00", "tomorrow 14:00", "Dec 4 14:00". */
function when(time) {
  const at = new Date(time);
  const clock = at.toLocaleTimeString("en", { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
  const days = Math.round((new Date(time).setHours(0, 0, 0, 0) - new Date().setHours(0, 0, 0, 0)) / 86_400_000);
  const day = ["today", "tomorrow"][days] ?? at.toLocaleDateString("en", { month: "short", day: "numeric" });
  return `${day} ${clock}`;
}
