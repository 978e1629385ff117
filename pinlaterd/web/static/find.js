// Shows what a search finds, as it comes. Without this the page loads itself again.
import { showTimes } from "/static/live.js";

const PAUSE_MS = 300;
const search = document.querySelector("[data-search]");
const count = new Intl.NumberFormat("en");

function say(name, text) {
  const place = search.querySelector(`[data-said=${name}]`);
  if (place.textContent !== text) place.textContent = text;
}

function cell(kind, text, name = "") {
  const made = document.createElement(kind);
  made.className = name;
  made.append(text);
  return made;
}

function row(job) {
  const link = cell("a", job.descriptor, "code");
  link.href = `/j/${job.descriptor}`;
  const name = cell("th", link);
  name.scope = "row";
  const state = cell("td", cell("strong", job.word, "mark"), "verdict");
  state.dataset.state = job.state;
  const time = cell("time", "");
  time.dateTime = new Date(job.at_ms).toISOString();
  time.title = `${time.dateTime.slice(0, 19).replace("T", " ")} UTC`;
  time.dataset.ago = "";
  const made = document.createElement("tr");
  made.append(name, state, cell("td", time), cell("td", job.said.slice(-200), "soft"));
  return made;
}

function show(progress) {
  const rows = search.querySelector("tbody");
  rows.append(...progress.jobs.map(row));
  showTimes();
  search.dataset.found = rows.children.length;
  search.querySelector(".card").hidden = rows.children.length === 0;
  say("found", count.format(progress.found));
  say("problem", progress.problem);
  if (!progress.is_waiting) {
    const about = progress.about === null ? "" : ` of about ${count.format(progress.about)}`;
    say("far", `Looked at ${count.format(progress.looked_at)}${about} jobs, ${progress.queues}, ${progress.seconds.toFixed(1)} s.`);
  }
  const bar = search.querySelector("progress");
  bar.max = progress.about || 1;
  bar.value = progress.looked_at;
  if (progress.is_over) search.querySelector("form").remove();
}

async function follow() {
  if (!document.hidden) {
    const answer = await fetch(`${search.dataset.search}&seen=${search.dataset.found}`);
    if (!answer.ok) return say("problem", "No answer came: load the page again.");
    const progress = await answer.json();
    show(progress);
    if (progress.is_over) return undefined;
  }
  return setTimeout(follow, PAUSE_MS);
}

if (search && !("over" in search.dataset)) follow();
