// Draws the history of a queue with uPlot: the same x axis and cursor on all plots, marks for what
// happened, gaps where nothing is known. Times are UTC, as on all pages.
const HEIGHT = 150;
const NEAR_MARK_PX = 5;
const DASHES = [[], [6, 4], [2, 3]];
const TIME_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 15e3, 3e4, 6e4, 12e4, 3e5, 6e5,
  18e5, 36e5, 72e5, 216e5, 864e5, 1728e5, 6048e5];
const WHOLE_STEPS = [1, 2, 5].flatMap((step) => Array.from({ length: 10 }, (_, power) => step * 10 ** power))
  .sort((one, other) => one - other);
const STEPS = { time: TIME_STEPS, jobs: WHOLE_STEPS };
const LEAST_TOP = { time: 1000 }; // of an axis
const MARK_PX = 5;
const DAYS_FROM_SECONDS = 3 * 86400;
const UNITS = [[864e5, "d"], [36e5, "h"], [6e4, "min"], [1e3, "s"], [1, "ms"]];
const board = document.querySelector(".plots");
const line = document.getElementById("marks");
const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const minute = new Intl.DateTimeFormat("en-GB", { timeStyle: "short", timeZone: "UTC" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", timeZone: "UTC" });
const DAY_MS = 86_400_000;
const clock = (ms) => new Date(ms).toISOString().slice(Math.abs(Date.now() - ms) < DAY_MS ? 11 : 5, 19).replace("T", " ");

function duration(ms) {
  const [size, unit] = UNITS.find(([least]) => ms >= least) ?? [1000, "s"];
  return `${digits.format(ms / size)} ${unit}`;
}

function count(jobs) {
  return jobs < 1e6 ? whole.format(jobs) : `${digits.format(jobs / 1e6)} M`;
}

const WORDS = { rate: (value) => digits.format(value), jobs: count, time: duration };
const said = (words, value) => (value === null || value === undefined ? "–" : words(value));

function timesOf(plot, splits) {
  const seconds = plot.scales.x.max - plot.scales.x.min;
  return splits.map((at) => (seconds > DAYS_FROM_SECONDS ? day : minute).format(at * 1000));
}

function colourOf(element, property = "color") {
  return getComputedStyle(element)[property];
}

// The point of now may not be there yet.
function newestOf(values) {
  return values.at(-1) ?? values.at(-2);
}

class Figure {
  constructor(element) {
    this.element = element;
    this.words = WORDS[element.dataset.unit];
    this.place = element.querySelector(".canvas");
    this.outputs = [...element.querySelectorAll("output")];
    this.marks = [];
  }

  draw(times, series, marks) {
    const data = [times, ...this.outputs.map((output) => series[output.dataset.series])];
    this.marks = marks;
    this.knows(data.slice(1).some((values) => values.some(Number.isFinite)));
    if (this.plot) this.plot.setData(data);
    else this.plot = new uPlot(this.options(), data, this.place);
    this.say(null);
  }

  knows(any) {
    this.element.classList.toggle("without", !any);
  }

  redraw() { // in other colours
    if (!this.plot) return;
    const data = this.plot.data;
    this.plot.destroy();
    this.plot = new uPlot(this.options(), data, this.place);
  }

  options() {
    const [soft, grid] = [colourOf(line), colourOf(this.element, "borderTopColor")];
    const axis = { stroke: soft, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const { unit } = this.element.dataset;
    const [steps, top] = [STEPS[unit], LEAST_TOP[unit] ?? 1];
    return {
      width: this.place.clientWidth,
      height: HEIGHT,
      padding: [8, 8, 0, 0],
      legend: { show: false },
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "UTC"),
      cursor: { y: false, drag: { x: false, y: false }, sync: { key: "history" }, points: { size: 6 } },
      scales: { y: { range: (_, __, most) => [0, most > 0 ? most * 1.1 : top] } },
      axes: [
        { ...axis, size: 24, space: 70, values: timesOf },
        {
          ...axis,
          size: 60,
          space: 28,
          values: (_, splits) => splits.map(this.element.matches(".without") ? () => "" : this.words),
          ...(steps ? { incrs: steps } : {}),
        },
      ],
      series: [{}, ...this.outputs.map((output, place) => ({
        stroke: colourOf(output.parentElement.querySelector("i")),
        width: 1.5,
        dash: DASHES[place],
        points: { show: false },
      }))],
      hooks: {
        draw: [(plot) => this.drawMarks(plot)],
        setCursor: [(plot) => this.say(plot.cursor.idx ?? null)],
      },
    };
  }

  drawMarks(plot) {
    const { ctx, bbox } = plot;
    const size = MARK_PX * devicePixelRatio;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colourOf(board, "outlineColor");
    ctx.setLineDash([]); // the last series' is left
    for (const mark of this.marks) {
      const x = Math.round(plot.valToPos(mark.at_ms / 1000, "x", true)) + 0.5;
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.beginPath(); // a flag, which no line of figures has
      ctx.moveTo(x - size, bbox.top);
      ctx.lineTo(x + size, bbox.top);
      ctx.lineTo(x, bbox.top + size);
      ctx.fill();
    }
    ctx.restore();
  }

  // Shows the values under the cursor, or the newest.
  say(at) {
    const data = this.plot.data;
    this.outputs.forEach((output, place) => {
      const values = data[place + 1];
      output.textContent = said(this.words, at === null ? newestOf(values) : values[at]);
    });
    if (at !== null) sayMarks(this.plot, at);
  }
}

const figures = [...board.querySelectorAll("figure")].map((element) => new Figure(element));
let newest = "";

function sayMarks(plot, at) {
  const near = figures[0].marks.filter((mark) => {
    const x = plot.valToPos(mark.at_ms / 1000, "x");
    return Math.abs(x - plot.cursor.left) <= NEAR_MARK_PX;
  });
  const when = clock(plot.data[0][at] * 1000);
  line.textContent = near.length ? near.map(sentence).join("; ") : `${when} UTC`;
}

const sentence = (mark) => `▾ ${clock(mark.at_ms)} ${mark.text}`;

async function load() {
  try {
    const answer = await fetch(board.dataset.history);
    if (!answer.ok) throw new Error(answer.statusText);
    const found = await answer.json();
    const points = Math.max(...Object.values(found.series).map((values) => values.length));
    const times = Array.from({ length: points }, (_, at) => (found.from_ms + at * found.step_ms) / 1000);
    const away = found.unanswered.map((server) => `Without server ${server}: it does not answer.`);
    newest = [...away, ...found.events.slice(-2).map(sentence)].join("  ") || (points ? "" : "No figures yet.");
    figures.forEach((figure) => (points ? figure.draw(times, found.series, found.events) : figure.knows(false)));
    line.textContent = newest;
    return found.step_ms;
  } catch {
    line.textContent = "No figures came: the plots are as they were.";
    return 5000;
  }
}

async function follow() {
  const isWatched = !document.hidden && !board.matches(":hover");
  const stepMs = isWatched ? await load() : 5000;
  setTimeout(follow, Math.min(stepMs, 60000));
}

new ResizeObserver(() => {
  for (const { plot, place } of figures) plot?.setSize({ width: place.clientWidth, height: HEIGHT });
}).observe(board);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => figures.forEach((figure) => figure.redraw()));
board.addEventListener("mouseleave", () => { line.textContent = newest; });
follow();
