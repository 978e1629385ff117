// Keeps the figures of a page fresh: once a second the server sends the cells that have changed.
const STALE_SECONDS = 5;
const REOPEN_MS = 3000;
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
  element.classList.toggle("zero", text === "0" || text === "0 s");
});
on("data-cell-state", (element, text) => { element.dataset.state = text; });
on("data-cell-d", (element, text) => { element.setAttribute("d", text); });

on("data-cell-value", (element, text) => { element.value = Number(text.replaceAll(",", "")); });

// Banners and buttons stay as they were read; a line offers the new ones.
on("data-differs", (element, text) => { element.hidden = text === element.dataset.from; });
// So does a list; a line offers what has come since.
on("data-newer", (element, text) => {
  const newer = Number(text.replaceAll(",", "")) - Number(element.dataset.than);
  element.hidden = !(newer > 0);
  element.firstElementChild.textContent = `${newer.toLocaleString("en")} newer`;
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
let source = null;
let heardAt = performance.now();
let ageThen = page.dataset.age === "" ? Infinity : Number(page.dataset.age);

function showAge() {
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

function open() {
  if (source !== null || document.hidden) return;
  source = new EventSource(`/live?${page.dataset.live}`);
  source.onmessage = hear;
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
hold.hidden = false;
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
setInterval(showAge, 1000);
open();
