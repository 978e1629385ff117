// The keys of all pages: go somewhere, choose a row, act on it. They can be off.
const PLACES = { o: "/", f: "/failures", s: "/system", a: "/audit", w: "/workers" };
const isOff = document.documentElement.dataset.keys === "off";
const find = document.getElementById("find");
const help = document.getElementById("keys");
let goes = false; // whether `g` was the key before

const rows = () => [...document.querySelectorAll("main tbody tr:has(th a, td a)")];

function move(step) {
  const all = rows();
  const at = all.findIndex((row) => row.classList.contains("current"));
  const next = all[Math.min(all.length - 1, Math.max(0, at + step))];
  if (!next) return;
  all[at]?.classList.remove("current");
  next.classList.add("current");
  next.scrollIntoView({ block: "nearest" });
}

const current = (what) => document.querySelector(`main tr.current ${what}`);

const ACTIONS = {
  "/": () => find.focus(),
  "?": () => (help.open ? help.close() : help.showModal()),
  j: () => move(1),
  k: () => move(-1),
  x: () => current("input[type=checkbox]")?.click(),
  r: () => {
    if (!document.querySelector("main td :checked")) current("input[type=checkbox]")?.click();
    (current("[data-key=r]") ?? document.querySelector("[data-key=r]"))?.click();
  },
  p: () => document.getElementById("hold").click(),
};

function press(event) {
  if (isOff || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input:not([type=checkbox], [type=radio]), textarea, select")) return;
  if (event.key === "Enter") {
    if (!event.target.closest("a, button, input, summary")) current("a")?.click();
    return;
  }
  const place = goes ? PLACES[event.key] : undefined;
  goes = event.key === "g" && !goes;
  const act = place ? () => location.assign(place) : ACTIONS[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}

document.addEventListener("keydown", press);
