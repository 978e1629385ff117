// Keeps the figures of a page fresh: once a second the server sends the cells that have changed.
const STALE_SECONDS = 5;
const REOPEN_MS = 3000;
const MOST_NEWER = 50; // that the server names
const page = document.body;
const age = document.getElementById("age");
const setters = new Map();

function on(name, set) {
  for (const element of document.querySelectorAll(`[${name}]`)) {
    const key = element.getAttribute(name);
    setters.set(key, [...(setters.get(key) ?? []), (text) => set(element, text)]);
  }
}

on("data-cell", (element, text) => {
  if (element.textContent !== text) element.textContent = text;
  element.classList.toggle("zero", ["0", "0 s", "none"].includes(text));
});
on("data-cell-state", (element, text) => { element.dataset.state = text; });
on("data-cell-d", (element, text) => { element.setAttribute("d", text); });

on("data-cell-value", (element, text) => { element.value = Number(text.replaceAll(",", "")); });

// Which banners and buttons there are stays as it was read; a line offers the new ones.
on("data-differs", (element, text) => {
  element.hidden = text === element.dataset.from;
  const { over } = element.dataset;
  if (over) element.firstElementChild.textContent = text === "" ? over : "Something else is wrong now.";
});
// So does a list; a line offers what has changed since, or come: those that ended after its newest.
on("data-changes", (element, text) => { element.hidden &&= text === element.dataset.from; });
on("data-newer", (element, text) => {
  const ends = text.split(" ").filter((at) => Number(at) > Number(element.dataset.than));
  element.hidden = ends.length === 0;
  element.firstElementChild.textContent = `${ends.length}${ends.length < MOST_NEWER ? "" : " or more"} newer`;
});

// Times are relative, and go on: by the server's clock.
const aheadMs = Date.now() - Number(page.dataset.now);
const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

function span(seconds) {
  for (const [at, [unit, size]] of UNITS.slice(0, -1).entries()) {
    const [smaller, part] = UNITS[at + 1];
    const whole = Math.round(seconds / part) * part;
    if (whole >= 10 * size) return `${Math.round(seconds / size)} ${unit}`;
    const more = (whole % size) / part;
    if (whole >= size) return `${Math.floor(whole / size)} ${unit}${more ? ` ${more} ${smaller}` : ""}`;
  }
  return `${Math.round(seconds)} s`;
}

export function showTimes() {
  for (const time of document.querySelectorAll("time[data-ago]")) {
    const seconds = (Date.now() - aheadMs - Date.parse(time.dateTime)) / 1000;
    const text = seconds < 0 ? `in ${span(-seconds)}` : `${span(seconds)} ago`;
    if (time.textContent !== text) time.textContent = text;
  }
}

// What is copied has the exact times.
document.addEventListener("copy", () => {
  const selection = getSelection();
  for (const time of document.querySelectorAll("time[data-ago]")) {
    if (!selection.containsNode(time, true)) continue;
    const isAlone = time.contains(selection.anchorNode) && time.contains(selection.focusNode);
    time.textContent = time.title;
    if (isAlone) selection.selectAllChildren(time);
  }
  setTimeout(showTimes);
});

// A link to the page itself would lead to its top.
for (const link of document.querySelectorAll(".changed a")) {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    location.reload();
  });
}

const hold = document.getElementById("hold");
let isHeld = false;
let isLoggedOut = false;
let source = null;
let heardAt = performance.now();
let ageThen = page.dataset.age === "" ? Infinity : Number(page.dataset.age);

function showAge() {
  if (isLoggedOut) return;
  const seconds = ageThen + (performance.now() - heardAt) / 1000;
  const isStale = seconds > STALE_SECONDS;
  page.classList.toggle("stale", isStale);
  if (!Number.isFinite(seconds)) age.textContent = "no data yet";
  else age.textContent = isStale ? `data is ${Math.round(seconds)} s old` : `live, ${seconds.toFixed(1)} s old`;
}

function hear(event) {
  if (isHeld) return;
  const beat = JSON.parse(event.data);
  [ageThen, heardAt] = [beat.age, performance.now()];
  for (const [key, text] of Object.entries(beat.cells)) {
    for (const set of setters.get(key) ?? []) set(text);
  }
  showAge();
}

function logOut() {
  close();
  isLoggedOut = true;
  page.classList.add("stale");
  const link = document.createElement("a");
  link.href = `/login?next=${encodeURIComponent(location.pathname + location.search)}`;
  link.textContent = "Log in again";
  age.replaceChildren(link);
}

function open() {
  if (source !== null || document.hidden || isLoggedOut || !page.dataset.live) return;
  source = new EventSource(`/live?${page.dataset.live}`);
  source.onmessage = hear;
  source.addEventListener("login", logOut);
  source.onerror = () => {
    if (source?.readyState !== EventSource.CLOSED) return;
    close();
    setTimeout(open, REOPEN_MS);
  };
}

function close() {
  source?.close();
  source = null;
}

// Held figures stay as they are, and grow old; all of them come anew with the next stream.
hold.hidden = !page.dataset.live;
hold.addEventListener("click", () => {
  isHeld = !isHeld;
  hold.setAttribute("aria-pressed", isHeld);
  if (!isHeld) {
    close();
    open();
  }
});

// A browser has six connections to a site: a hidden tab needs none.
document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
addEventListener("pagehide", close);
addEventListener("pageshow", open);
setInterval(showTimes, 1000);
if (page.dataset.live) setInterval(showAge, 1000);
open();
