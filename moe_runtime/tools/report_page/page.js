"use strict";
// Draws the charts of a report from the JSON that the page holds. Each figure has a table behind it, made when it is opened.
const report = JSON.parse(document.getElementById("report").textContent);

// Cividis (Nunez, Anderton and Renslow, PLOS ONE 13(7), 2018), nine points: alike for people who see all colours and those who do not.
const CIVIDIS = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#fee838"];
const STOPS = CIVIDIS.map(hex => [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16)));

function colour(share) {
  const place = Math.min(Math.max(share, 0), 1) * (STOPS.length - 1);
  const low = Math.min(Math.floor(place), STOPS.length - 2);
  return STOPS[low].map((value, i) => Math.round(value + (place - low) * (STOPS[low + 1][i] - value)));
}

// Three significant digits.
function short(value) {
  if (value === null || value === undefined) return "-";
  if (Number.isInteger(value) && Math.abs(value) < 10000) return String(value);
  const size = Math.abs(value);
  for (const [least, unit, letter] of [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]]) {
    if (size >= least) return Number((value / unit).toPrecision(3)) + letter;
  }
  return size > 0 && size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}
const time = us => us >= 1e6 ? short(us / 1e6) + " s" : us >= 1e3 ? short(us / 1e3) + " ms" : short(us) + " µs";
const percent = value => value === null ? "-" : (Math.round(1000 * value) / 10 + 0).toFixed(1) + " %";
const numbers = length => Array.from({ length }, (_, i) => i);

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function table(head, rows, words = []) {
  const top = element("tr", {}, ...head.map((text, i) => element("th", words.includes(i) ? { scope: "col", class: "words" } : { scope: "col" }, text)));
  const body = rows.map(row => element("tr", {}, ...row.map((cell, i) =>
    i === 0 ? element("th", { scope: "row" }, String(cell))
      : element("td", words.includes(i) ? { class: "words" } : {}, typeof cell === "number" ? short(cell) : String(cell)))));
  return element("table", {}, element("thead", {}, top), element("tbody", {}, ...body));
}

// A table that is made when it is first opened.
function addTable(figure, title, make) {
  const details = element("details", {}, element("summary", {}, title));
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) {
      details.append(element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, make()));
    }
  });
  figure.append(details);
}

function paint(canvas, matrix, toShare) {
  canvas.width = matrix[0].length;
  canvas.height = matrix.length;
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  matrix.flat().forEach((value, i) => image.data.set([...colour(toShare(value)), 255], 4 * i));
  context.putImageData(image, 0, 0);
}

// Numbers in the cells of a small matrix, where they are wide enough.
function labels(matrix, toShare) {
  const columns = matrix[0].length;
  const grid = element("div", { class: "labels", "aria-hidden": "true", style: `grid-template-columns:repeat(${columns},minmax(0,1fr))` });
  for (const value of matrix.flat()) grid.append(element("span", { class: toShare(value) > 0.5 ? "dark" : "" }, short(value)));
  const wide = 6 + 7 * Math.max(...matrix.flat().map(value => short(value).length));
  new ResizeObserver(() => { grid.style.visibility = grid.clientWidth < wide * columns ? "hidden" : "visible"; }).observe(grid);
  return grid;
}

// options: matrix, rows and columns (names of the axes), first and last column labels, low, high, log, say (label of the scale), mark
function heat(id, options) {
  const figure = document.getElementById(id);
  const { matrix, low, high } = options;
  const scale = options.log ? Math.log : value => value;
  const toShare = value => high > low ? (scale(Math.max(value, low)) - scale(low)) / (scale(high) - scale(low)) : 0;
  const cells = element("canvas", { role: "img", "aria-label": `${options.label}: rows are ${options.rows}s, columns are ${options.columns}; the table below has the numbers` });
  paint(cells, matrix, toShare);
  cells.style.height = Math.min(Math.max(matrix.length * (matrix.length > 24 ? 6 : 20), 48), 400) + "px";
  const box = element("div", { class: "cells" }, cells);
  if (matrix.length * matrix[0].length <= 64 && matrix[0].length <= 8) box.append(labels(matrix, toShare));
  if (options.mark) box.append(element("div", { class: "mark", style: `left:${100 * options.mark}%` }));
  const bar = element("canvas", { "aria-hidden": "true" });
  paint(bar, [numbers(64).map(i => i / 63)], value => value);
  const ends = options.ends || [0, matrix[0].length - 1];
  figure.append(element("div", { class: "heat" },
    element("div", { class: "rows" }, element("span", {}, `${options.rows} 0`), element("span", {}, String(matrix.length - 1))), box,
    element("div", { class: "columns" }, element("span", {}, `${options.columns} ${ends[0]}`), element("span", {}, String(ends[1]))),
    element("div", { class: "scale" }, element("span", {}, short(low)), bar, element("span", {}, `${short(high)} ${options.say}`))));
  if (options.table !== false) {
    addTable(figure, "Table", () => table([options.rows, ...(options.names || numbers(matrix[0].length)).map(String)],
      matrix.map((row, i) => [i, ...row])));
  }
}

function svgElement(name, attributes, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  return node;
}

// A drawing as wide as its figure, made anew when that changes.
function drawing(id, height, label, draw) {
  const figure = document.getElementById(id);
  const svg = svgElement("svg", { role: "img", "aria-label": label + "; the table below has the numbers", height });
  figure.append(svg);
  let drawn = 0;
  new ResizeObserver(() => {
    const width = Math.round(figure.clientWidth);
    if (width === drawn || width === 0) return;
    drawn = width;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    draw((name, attributes, text) => svg.append(svgElement(name, attributes, text)), width, height);
  }).observe(figure);
  return figure;
}

function ticks(low, high, least = 0) {
  const rough = (high - low) / 4 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= rough * 0.999 && s >= least);
  const first = Math.ceil(low / step - 1e-9);
  return numbers(Math.floor(high / step + 1e-9) - first + 1).map(i => (first + i) * step);
}

// series: [{name, points: [[x, y]], bars: [[x, low, high]], colour, dash}]; across: title of the axis below; options: say (y to text),
// shown (ys that the axis holds at least), whole (x are whole numbers), at (where x has labels)
function lines(id, label, series, across, { say = short, shown = [0], whole = false, at = null } = {}) {
  const height = 230;
  const points = series.flatMap(s => [...s.points, ...(s.bars || []).flatMap(([x, low, high]) => [[x, low], [x, high]])]);
  const xs = points.map(p => p[0]), ys = points.map(p => p[1]).concat(shown);
  const [left, right, top, bottom] = [60, 16, 10, 40];
  const range = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys) || 1];
  const figure = drawing(id, height, label, (add, width) => {
    const x = value => range[1] > range[0] ? left + (value - range[0]) / (range[1] - range[0]) * (width - left - right) : width / 2;
    const y = value => height - bottom - (value - range[2]) / (range[3] - range[2] || 1) * (height - top - bottom);
    for (const value of ticks(range[2], range[3])) {
      add("path", { d: `M${left} ${y(value)}H${width - right}`, class: Math.abs(value) < 1e-12 ? "zero" : "axis" });
      add("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, say(value));
    }
    const wanted = (at || ticks(range[0], range[1], whole ? 1 : 0)).filter(v => v >= range[0] && v <= range[1]);
    for (const value of wanted.filter((v, i) => !i || x(v) - x(wanted[i - 1]) > 20)) add("text", { x: x(value), y: height - bottom + 16, "text-anchor": "middle" }, short(value));
    add("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, across);
    for (const line of series) {
      const path = line.points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
      add("path", { d: path, fill: "none", "stroke-width": 2, "stroke-dasharray": line.dash || "none", style: `stroke:var(${line.colour})` });
      for (const [place, low, high] of line.bars || []) add("path", { d: `M${x(place)} ${y(low)}V${y(high)}m-5 0h10M${x(place) - 5} ${y(low)}h10`, style: `stroke:var(${line.colour})` });
      if (line.points.length <= 64) for (const p of line.points) add("circle", { cx: x(p[0]), cy: y(p[1]), r: 3, style: `fill:var(${line.colour})` });
    }
  });
  if (series.length > 1) figure.append(legend(series.map(s => [s.name + (s.dash ? " (dashed)" : ""), s.colour])));
  return figure;
}

// One bar for each value, numbered from 0 along the axis below.
function bars(id, label, values, across) {
  const [left, right, bottom, height] = [52, 16, 40, 200], high = Math.max(...values) || 1;
  return drawing(id, height, label, (add, width) => {
    const step = (width - left - right) / values.length, every = Math.ceil(values.length * 24 / (width - left - right));
    const y = value => height - bottom - value / high * (height - bottom - 12);
    for (const value of ticks(0, high)) {
      add("path", { d: `M${left} ${y(value)}H${width - right}`, class: value ? "axis" : "zero" });
      add("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, short(value));
    }
    values.forEach((value, i) => {
      const wide = Math.min(step * 0.8, 60), middle = left + (i + 0.5) * step;
      add("rect", { x: middle - wide / 2, y: y(value), width: wide, height: height - bottom - y(value), style: "fill:var(--c2)" });
      if (i % every === 0) add("text", { x: middle, y: height - bottom + 16, "text-anchor": "middle" }, String(i));
    });
    add("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, across);
  });
}

function legend(entries) {
  return element("div", { class: "legend" }, ...entries.map(([name, shade]) =>
    element("span", {}, element("i", { style: `background:var(${shade})` }), name)));
}

// Intervals on one axis with zero: [[name, {mean, low, high}]]
function intervals(id, label, entries) {
  const values = entries.flatMap(([, g]) => [g.mean, g.low, g.high]).filter(v => v !== null).concat(0, 0.01);
  const low = Math.min(...values), high = Math.max(...values), height = 34 + 44 * entries.length;
  const figure = drawing(id, height, label, (add, width) => {
    const x = value => 28 + (value - low) / (high - low || 1) * (width - 58);
    for (const value of ticks(low, high)) {
      add("path", { d: `M${x(value)} 0V${height - 22}`, class: Math.abs(value) < 1e-12 ? "zero" : "axis" });
      add("text", { x: x(value), y: height - 6, "text-anchor": "middle" }, percent(value));
    }
    entries.forEach(([name, gain], i) => {
      const y = 30 + 44 * i, ends = [gain.low ?? gain.mean, gain.high ?? gain.mean];
      add("text", { x: 32, y: y - 12, class: "strong" }, `${name}: ${percent(gain.mean)}`);
      add("path", { d: `M${x(ends[0])} ${y}H${x(ends[1])}M${x(ends[0])} ${y - 6}v12M${x(ends[1])} ${y - 6}v12`, "stroke-width": 2, style: "stroke:var(--c1)" });
      add("circle", { cx: x(gain.mean), cy: y, r: 5, style: "fill:var(--c1)" });
    });
  });
  addTable(figure, "Table", () => table(["", "mean", "lower bound", "upper bound"],
    entries.map(([name, g]) => [name, percent(g.mean), percent(g.low), percent(g.high)])));
}

const PARTS = [["even_us", "even", "--c0"], ["packing", "packing", "--c1"], ["drift", "drift", "--c3"],
  ["noise", "noise", "--c4"], ["padding", "padding", "--c5"], ["incast", "incast", "--c2"]];

function losses() {
  const both = [["before", report.losses_before], ["after", report.losses_after]];
  const sums = both.map(([, parts]) => [PARTS.reduce((s, [key]) => s + Math.min(parts[key], 0), 0), PARTS.reduce((s, [key]) => s + Math.max(parts[key], 0), 0)]);
  const low = Math.min(...sums.map(s => s[0])), high = Math.max(...sums.map(s => s[1])) || 1;
  const figure = drawing("losses", 170, "Parts of the step time before and after", (add, width) => {
    const x = value => 16 + (value - low) / (high - low) * (width - 46);
    for (const value of ticks(low, high)) {
      add("path", { d: `M${x(value)} 0V146`, class: Math.abs(value) < 1e-12 ? "zero" : "axis" });
      add("text", { x: x(value), y: 164, "text-anchor": "middle" }, time(value));
    }
    both.forEach(([name, parts], i) => {
      const y = 30 + 66 * i, end = { plus: 0, minus: 0 };
      add("text", { x: x(0) + 4, y: y - 9, class: "strong" }, `${name}: ${time(parts.total_us)}`);
      for (const [key, , shade] of PARTS) {
        const side = parts[key] < 0 ? "minus" : "plus", from = end[side];
        end[side] += parts[key];
        const x0 = x(Math.min(from, end[side])), x1 = x(Math.max(from, end[side]));
        add("rect", { x: x0, y, width: Math.max(x1 - x0, 0), height: 32, style: `fill:var(${shade});stroke:var(--card)` });
      }
    });
  });
  figure.append(legend(PARTS.map(([, name, shade]) => [name, shade])));
}

function largest(...matrices) {
  return matrices.flat(2).reduce((a, b) => Math.max(a, b), 0);
}

function pairOfHeats(id, before, after, options) {
  heat(id + "-before", { ...options, matrix: before, label: options.label + ", before" });
  heat(id + "-after", { ...options, matrix: after, label: options.label + ", after" });
}

function transpose(matrix) {
  return matrix[0].map((_, i) => matrix.map(row => row[i]));
}

function layers() {
  const { load_LE, replicas_before_LE, replicas_after_LE, fullest_before_L, fullest_after_L, unused_L } = report.layers;
  const axes = { rows: "layer", columns: "expert", table: false };
  const end = Math.min(Math.max(largest(load_LE), 2), 8);
  heat("loads", { ...axes, matrix: load_LE, low: 1 / end, high: end, log: true, say: "times the mean; colours end there", label: "Load" });
  const most = largest(replicas_before_LE, replicas_after_LE);
  pairOfHeats("replicas", replicas_before_LE, replicas_after_LE, { ...axes, low: 1, high: Math.max(most, 2), say: "replicas", label: "Replicas" });
  addTable(document.getElementById("loads"), "Table by layer", () => table(
    ["layer", "hottest expert", "its load", "its replicas before", "after", "experts without tokens"],
    load_LE.map((row, l) => {
      const hottest = row.indexOf(Math.max(...row));
      return [l, hottest, row[hottest], replicas_before_LE[l][hottest], replicas_after_LE[l][hottest], unused_L[l]];
    })));
  const figure = lines("fullest", "Rows of the fullest rank over those of the mean rank, by layer", [
    { name: "before", points: fullest_before_L.map((v, l) => [l, v]), colour: "--c2", dash: "5 4" },
    { name: "after", points: fullest_after_L.map((v, l) => [l, v]), colour: "--c1" }], "layer", { shown: [1, 1.1], whole: true });
  addTable(figure, "Table", () => table(["layer", "before", "after"], fullest_before_L.map((v, l) => [l, v, fullest_after_L[l]])));
  if (report.reasons.length) addTable(document.getElementById("reasons"), `Why each of ${report.reasons.length} experts has several replicas`, () => table(
    ["layer", "expert", "replicas on ranks", "why"], report.reasons.map(r => [r.layer, r.expert, r.ranks.join(", "), r.why]), [2, 3]));
}

function overTime() {
  const { seconds_T, before_TN, after_TN, first_judged } = report.over_time;
  const values = [before_TN, after_TN].flat(2);
  const low = values.reduce((a, b) => Math.min(a, b), 0.9), high = values.reduce((a, b) => Math.max(a, b), 1.1);
  pairOfHeats("time", transpose(before_TN), transpose(after_TN), {
    rows: "rank", columns: "second", ends: [short(seconds_T[0]), short(seconds_T[seconds_T.length - 1])], low, high,
    say: "times the mean rank", mark: first_judged / seconds_T.length, names: seconds_T.map(s => short(s) + " s"), label: "Rows of ranks over time",
  });
}

function between() {
  const b = report.between;
  const axes = { rows: "from rank", columns: "to rank", low: 0 };
  pairOfHeats("bytes", b.bytes_before_NN, b.bytes_after_NN, { ...axes, high: largest(b.bytes_before_NN, b.bytes_after_NN), say: "bytes per step", label: "Bytes from rank to rank" });
  pairOfHeats("waits", b.wait_before_NN, b.wait_after_NN, { ...axes, rows: "waiting rank", columns: "for rank", high: largest(b.wait_before_NN, b.wait_after_NN), say: "microseconds per step", label: "Waiting" });
  const figure = bars("measured", "Measured waiting of each rank", b.measured_wait_us_N, "rank (microseconds of waiting per step)");
  addTable(figure, "Table", () => table(["rank", "waited, us per step", "forward pass, us per step"], b.measured_wait_us_N.map((v, n) => [n, v, b.measured_forward_us_N[n]])));
}

function sweep() {
  const points = report.sweep.map(p => [p.redundant, p.gain.mean]);
  const bars = report.sweep.filter(p => p.gain.low !== null).map(p => [p.redundant, p.gain.low, p.gain.high]);
  const figure = lines("sweep", "Gain by number of redundant experts", [{ name: "gain", points, bars, colour: "--c1" }], "redundant experts per layer", { say: percent, at: points.map(p => p[0]) });
  addTable(figure, "Table", () => table(["redundant", "step, us", "gain", "lower bound", "upper bound", "balanced", "bytes per rank"],
    report.sweep.map(p => [p.redundant, p.step_us.mean, percent(p.gain.mean), percent(p.gain.low), percent(p.gain.high), p.balancedness, p.bytes_per_rank])));
}

function lasting() {
  const points = report.lasting.similarity_lag.map((v, i) => [(i + 1) * report.lasting.window_s, v]);
  const figure = lines("drift", "Similarity of the load by distance in time", [{ name: "similarity", points, colour: "--c1" }], "seconds between windows");
  addTable(figure, "Table", () => table(["seconds", "similarity"], points.map(p => [short(p[0]), p[1]])));
}

intervals("gain", "Predicted gain and its interval", [["predicted gain", report.verdict.gain]]);
losses();
layers();
overTime();
between();
sweep();
lasting();
if (report.audit) intervals("audit", "Gain predicted and achieved", [["predicted", report.audit.predicted], ["achieved", report.audit.achieved]]);
