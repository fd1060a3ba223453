"use strict";
const D = JSON.parse(document.getElementById("data").textContent);
const names = Object.keys(D.planners), L = D.layers.length, G = D.gpus;
const baseline = D.baseline;
// Many GPUs are drawn by node: U units with a name each.
const byNode = D.byNode, U = byNode ? G / D.perNode : G, unit = byNode ? "node" : "GPU";

// Planners differ in dash, marker and fill, not only in colour.
const STYLES = {
  chosen: {colour: "var(--chosen)", dash: "", mark: "diamond", fill: {fill: "var(--chosen)"}},
  static: {colour: "var(--static)", dash: "2 4", mark: "circle",
    fill: {fill: "none", stroke: "var(--static)", "stroke-width": 1.5}},
  eplb: {colour: "var(--eplb)", dash: "8 4", mark: "square", fill: {fill: "url(#hatch)", stroke: "var(--eplb)"}},
};
const style = name => STYLES[name === D.chosen ? "chosen" : name === "static" || name === "live" ? "static" : "eplb"];

// Cividis: even steps of brightness, readable without colour vision.
const CIVIDIS = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55",
  "#fee838"];
function heat(x) {
  const t = Math.min(Math.max(x, 0), 1) * 9, i = Math.min(8, Math.floor(t)), f = t - i;
  const [a, b] = [CIVIDIS[i], CIVIDIS[i + 1]].map(c => [1, 3, 5].map(k => parseInt(c.slice(k, k + 2), 16)));
  return "rgb(" + a.map((v, k) => Math.round(v + (b[k] - v) * f)).join(",") + ")";
}
const textOnHeat = x => x > .5 ? "#000" : "#fff";
const sum = a => a.reduce((x, y) => x + y, 0);
const mean = rows => rows[0].map((_, g) => sum(rows.map(row => row[g])) / rows.length);
const round = (v, n) => Number(v).toLocaleString("en", {maximumFractionDigits: n, minimumFractionDigits: n});

// SVG elements

function el(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [k, v] of Object.entries(attributes || {})) node.setAttribute(k, v);
  for (const c of children) node.append(c);
  return node;
}
const text = (x, y, words, more) => el("text", {x, y, "font-size": 12, ...more}, String(words));
const titled = (node, words) => { node.append(el("title", {}, words)); return node; };
const line = (x1, y1, x2, y2, more) => el("line", {x1, x2, y1, y2, ...more});
const thick = {stroke: "var(--ink)", "stroke-width": 1.5};
function svg(width, height, label) {
  const node = el("svg", {viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label});
  const hatch = {id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)"};
  node.append(el("defs", {}, el("pattern", hatch,
    el("rect", {width: 6, height: 6, fill: "var(--page)"}),
    el("rect", {width: 3.5, height: 6, fill: "var(--eplb)"}))));
  return node;
}
// An SVG that screen readers skip, because text next to it says the same.
function icon(width, height, ...nodes) {
  const s = svg(width, height, "");
  s.removeAttribute("aria-label");
  s.setAttribute("aria-hidden", "true");
  s.append(...nodes);
  return s;
}
function marker(kind, x, y, colour, r = 4) {
  const outline = {fill: "var(--page)", stroke: colour, "stroke-width": 1.8};
  if (kind === "circle") return el("circle", {cx: x, cy: y, r, ...outline});
  if (kind === "square") return el("rect", {x: x - r, y: y - r, width: 2 * r, height: 2 * r, fill: colour});
  const d = r + 1;
  return el("path", {d: `M${x} ${y - d}L${x + d} ${y}L${x} ${y + d}L${x - d} ${y}Z`, fill: colour});
}
const show = (id, ...nodes) => document.getElementById(id).replaceChildren(...nodes);
function span(...nodes) {
  const s = document.createElement("span");
  s.append(...nodes);
  return s;
}
const width = () => Math.max(320, Math.min(1046, document.querySelector("main").clientWidth - 32));

// Charts over layers

function ticks(low, top) {
  const raw = (top - low) / 4, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(k => k * power).find(s => s >= raw);
  const out = [];
  for (let v = Math.ceil(low / step) * step; v <= top * 1.001; v += step) out.push(v);
  return out;
}
function frame(s, W, H, low, top, unit) {
  const x0 = 46, y0 = H - 26;
  const x = i => x0 + 8 + (W - x0 - 16) * (L > 1 ? i / (L - 1) : .5);
  const y = v => y0 - (y0 - 14) * (v - low) / (top - low);
  for (const v of ticks(low, top)) {
    const label = round(v, top - low < 8 ? 1 : 0);
    s.append(line(x0, y(v), W, y(v), {class: "axis"}));
    s.append(text(x0 - 6, y(v) + 4, label, {"text-anchor": "end", class: "quiet"}));
  }
  const every = Math.ceil(L / Math.max(4, Math.floor(W / 70)));
  D.layers.forEach((layer, i) => {
    if (i % every === 0) s.append(text(x(i), H - 8, layer, {"text-anchor": "middle", class: "quiet"}));
  });
  s.append(text(2, 10, unit, {class: "quiet", "font-size": 11}));
  if (low > 0) { // a zigzag: the axis does not start at zero
    const points = [[0, 0], [-5, -4], [5, -8], [0, -12]].map(([dx, dy]) => `${x0 + dx},${y0 + dy}`).join(" ");
    s.append(titled(el("polyline", {points, fill: "none", class: "break", ...thick}), `the axis starts at ${low}`));
    s.append(line(x0, y0, W, y0, {class: "axis", "stroke-dasharray": "2 3"}));
  }
  return {x, y};
}
const lineOf = look => ({stroke: look.colour, "stroke-width": 2, "stroke-dasharray": look.dash});
// One line per planner over the layers. The chosen planner is drawn last, on top.
function lineChart(s, x, y, values, describe) {
  for (const n of [...names.filter(n => n !== D.chosen), D.chosen]) {
    const look = style(n);
    const points = values[n].map((v, i) => `${x(i)},${y(v)}`).join(" ");
    s.append(el("polyline", {points, fill: "none", ...lineOf(look)}));
    values[n].forEach((v, i) => s.append(titled(marker(look.mark, x(i), y(v), look.colour, L > 40 ? 2.5 : 4),
      `${n}, layer ${D.layers[i]}: ${describe(v)}`)));
  }
}
const lineLegend = () => names.map(n => {
  const look = style(n);
  return span(icon(34, 14, line(0, 7, 30, 7, lineOf(look)), marker(look.mark, 15, 7, look.colour)), n);
});
function drawLines() {
  const W = width(), H = 240, s = svg(W, H, "time of each layer, one line per planner");
  const totals = Object.fromEntries(names.map(n => [n, D.planners[n].us.map(sum)]));
  const all = names.flatMap(n => totals[n]), low = Math.floor(.85 * Math.min(...all));
  const {x, y} = frame(s, W, H, low, 1.03 * Math.max(...all), `µs (axis starts at ${low})`);
  lineChart(s, x, y, totals, v => `${round(v, 1)} µs`);
  show("lines", s);
  show("legend-lines", ...lineLegend());
}
function drawPeaks() {
  const W = width(), H = 240, s = svg(W, H, "load of the busiest GPU of each layer, one line per planner");
  const peaks = Object.fromEntries(names.map(n => [n, D.planners[n].peak]));
  const {x, y} = frame(s, W, H, 0, 1.05 * Math.max(...names.flatMap(n => peaks[n])), "pairs of the busiest GPU");
  const even = sum(D.planners[D.chosen].pairs[0]) / G;
  s.append(line(46, y(even), W, y(even), {stroke: "var(--ink)", "stroke-dasharray": "4 3", class: "even"}));
  s.append(text(W, y(even) + 14, `even: ${round(even, 0)}`, {"text-anchor": "end", class: "quiet"}));
  lineChart(s, x, y, peaks, v => `${round(v, 0)} pairs on the busiest GPU`);
  show("peaks", s);
  show("legend-peaks", ...lineLegend());
}
function drawParts() {
  const W = width(), H = 200, us = D.planners[D.chosen].us, kinds = ["dispatch", "compute", "combine"];
  const s = svg(W, H, "parts of each layer's time");
  const {x, y} = frame(s, W, H, 0, 1.05 * Math.max(...us.map(sum)), "µs");
  const bar = Math.max(2, Math.min(22, .7 * (W - 70) / L));
  us.forEach((row, i) => {
    let base = 0;
    row.forEach((v, k) => {
      const box = {x: x(i) - bar / 2, y: y(base + v), width: bar, height: Math.max(0, y(base) - y(base + v))};
      s.append(titled(el("rect", {...box, fill: `var(--${kinds[k]})`, stroke: "var(--page)", "stroke-width": .5}),
        `layer ${D.layers[i]}, ${kinds[k]}: ${round(v, 1)} µs`));
      base += v;
    });
  });
  document.getElementById("parts-title").textContent = `Parts of the time of ${D.chosen}`;
  show("parts", s);
  const order = {combine: "top", compute: "middle", dispatch: "bottom"};
  show("legend-parts", ...Object.entries(order).map(([kind, where]) => {
    const box = {x: 4, y: 1, width: 22, height: 12, fill: `var(--${kind})`, stroke: "var(--soft)", "stroke-width": .5};
    return span(icon(34, 14, el("rect", box)), `${kind} (${where})`);
  }));
}

// Charts of one layer. Traffic is also shown as the mean of all layers (layer < 0).

function drawBars(layer) {
  const at = Math.max(layer, 0), busiest = pairs => !byNode ? pairs :
    [...Array(U).keys()].map(u => Math.max(...pairs.slice(u * D.perNode, (u + 1) * D.perNode)));
  const loads = Object.fromEntries(names.map(n => [n, busiest(D.planners[n].pairs[at])]));
  const W = width(), thin = 7, row = names.length * (thin + 1) + 8, H = U * row + 24, x0 = 64;
  const top = Math.max(...names.flatMap(n => loads[n])), x = v => x0 + (W - x0 - 56) * v / top;
  const s = svg(W, H, `load of each ${unit} in layer ${D.layers[at]}, one bar per planner`);
  document.getElementById("bars-title").textContent =
    `Load of ${byNode ? "the busiest GPU of each node" : "each GPU"} in layer ${D.layers[at]}`;
  for (let g = 0; g < U; g++) {
    const y = g * row + 4;
    if (!byNode && g % D.perNode === 0 && g) s.append(line(0, y - 4, W, y - 4, {class: "axis"}));
    s.append(text(0, y + row / 2, `${unit} ${g}`, {"dominant-baseline": "middle"}));
    names.forEach((n, k) => {
      const v = loads[n][g], top = y + k * (thin + 1);
      s.append(titled(el("rect", {x: x0, y: top, width: Math.max(1, x(v) - x0), height: thin, ...style(n).fill}),
        `${unit} ${g}, ${n}: ${round(v, 0)} pairs`));
      if (v === Math.max(...loads[n])) {
        s.append(text(x(v) + 4, top + thin / 2 + .5, round(v, 0), {"font-size": 10, "dominant-baseline": "middle"}));
      }
    });
  }
  const even = sum(D.planners[D.chosen].pairs[at]) / G;
  s.append(line(x(even), 0, x(even), H - 18, {stroke: "var(--ink)", "stroke-dasharray": "4 3"}));
  s.append(text(x(even), H - 4, `even: ${round(even, 0)}`, {"text-anchor": "middle", class: "quiet"}));
  show("bars", s);
  const sample = n => el("rect", {x: 2, y: 2, width: 26, height: 10, ...style(n).fill});
  show("legend-bars", ...names.map(n => span(icon(34, 14, sample(n)), n)));
}
function drawScale(id, low, high) {
  const step = i => el("rect", {x: 3 * i, y: 1, width: 3.2, height: 14, fill: heat(i / 59)});
  const steps = [...Array(60).keys()].map(step);
  show(id, span(`${low} `, icon(180, 16, ...steps), ` ${high}`));
}
function panel(name, node, note) {
  const d = document.createElement("div"), h = document.createElement("h3"), wrap = document.createElement("div");
  h.textContent = `${name === baseline ? "before" : "plan"}: ${name} · ${note}`;
  wrap.className = "scroll";
  wrap.append(node);
  d.append(h, wrap);
  return d;
}
// The load of an expert in the mean pass, divided evenly among its replicas.
function replicas(name, layer) {
  const slots = D.planners[name].slots[layer], copies = new Map();
  slots.flat().forEach(e => copies.set(e, (copies.get(e) || 0) + 1));
  return {slots, copies, load: e => D.loads[layer][e] / copies.get(e)};
}
function drawPlacements(layer) {
  const at = Math.max(layer, 0), both = [baseline, D.chosen].map(n => replicas(n, at));
  const top = Math.max(...both.flatMap(b => b.slots.flat().map(b.load)));
  const S = both[0].slots[0].length, cell = 30, height = 24, x0 = 52, rows = byNode ? D.perNode : G;
  const first = byNode ? D.perNode * Number(document.getElementById("node").value) : 0;
  show("placement", ...[baseline, D.chosen].map((n, k) => {
    const b = both[k], s = svg(x0 + S * cell + 2, rows * height + 2, `placement of layer ${D.layers[at]} by ${n}`);
    b.slots.slice(first, first + rows).forEach((row, i) => {
      const y = i * height, g = first + i;
      s.append(text(0, y + 16, `GPU ${g}`, {"font-size": 11}));
      if (g % D.perNode === 0 && i) s.append(line(0, y + .5, x0 + S * cell, y + .5, {stroke: "var(--ink)"}));
      [...row].sort((a, c) => b.load(c) - b.load(a)).forEach((e, i) => {
        const v = b.load(e) / top, x = x0 + i * cell, copies = b.copies.get(e);
        const box = {x: x + 1.5, y: y + 2.5, width: cell - 3, height: 20};
        const border = {stroke: copies > 1 ? "var(--ink)" : "none", "stroke-width": 2};
        s.append(titled(el("rect", {...box, fill: heat(v), ...border}),
          `GPU ${g}: expert ${e}, ${round(b.load(e), 0)} tokens per pass, ${copies} replica(s)`));
        s.append(text(x + cell / 2, y + 16, e,
          {"text-anchor": "middle", "font-size": 11, style: `fill:${textOnHeat(v)};pointer-events:none`}));
      });
    });
    return panel(n, s, `layer ${D.layers[at]}${byNode ? `, node ${first / D.perNode}` : ""}`);
  }));
  drawScale("legend-heat", "0", `${round(top, 0)} tokens per pass`);
}
function drawTraffic(layer) {
  if (!D.exact) {
    document.getElementById("traffic-section")?.remove();
    return;
  }
  const megabytes = n => {
    const copies = D.planners[n].copies;
    const chosen = layer < 0 ? copies[0].map((_, g) => mean(copies.map(c => c[g]))) : copies[layer];
    return chosen.map(row => row.map(v => v * D.tokenKB / 1e3));
  };
  const both = [baseline, D.chosen].map(megabytes), top = Math.max(...both.flat(2)) || 1;
  const cell = Math.max(11, Math.min(26, 400 / U)), x0 = 30, end = x0 + U * cell;
  show("traffic", ...[baseline, D.chosen].map((n, k) => {
    const s = svg(end + 2, end + 2, `traffic between ${unit}s, ${n}`);
    for (let g = 0; g < U; g += cell < 16 ? 4 : 1) {
      s.append(text(x0 - 4, x0 + g * cell + cell / 2 + 4, g, {"text-anchor": "end", "font-size": 10}));
      s.append(text(x0 + g * cell + cell / 2, x0 - 6, g, {"text-anchor": "middle", "font-size": 10}));
    }
    both[k].forEach((row, i) => row.forEach((v, j) => {
      if (i === j && !byNode) return;
      const box = {x: x0 + j * cell, y: x0 + i * cell, width: cell - .6, height: cell - .6, fill: heat(v / top)};
      s.append(titled(el("rect", box), `${unit} ${i} → ${unit} ${j}: ${round(v, 2)} MB`));
    }));
    for (let g = 0; g <= U; g += byNode ? U : D.perNode) {
      const at = x0 + g * cell;
      s.append(line(at, x0, at, end, thick), line(x0, at, end, at, thick));
    }
    return panel(n, s, `${round(sum(both[k].flat()), 1)} MB in total`);
  }));
  drawScale("legend-traffic", "0", `${round(top, 2)} MB`);
}

// Sections of `clustergym demo`

function drawDomains() {
  const rows = D.domains.rows, experts = D.domains.experts, x0 = 84, height = 22;
  const cell = Math.max(7, (width() - x0) / experts.length), top = Math.max(...rows.flatMap(r => r.loads));
  const s = svg(x0 + experts.length * cell, rows.length * height + 20, "load of each expert, one row per domain");
  rows.forEach((row, i) => {
    s.append(text(0, i * height + 15, row.name));
    row.loads.forEach((v, k) => {
      const box = {x: x0 + k * cell, y: i * height + 1, width: cell - .6, height: height - 2, fill: heat(v / top)};
      s.append(titled(el("rect", box), `${row.name}: expert ${experts[k]} has ${round(v, 2)} times the mean load`));
    });
  });
  s.append(text(x0, rows.length * height + 14, "experts, busiest first", {class: "quiet"}));
  show("domains", s);
  drawScale("legend-domains", "0", `${round(top, 1)} × the mean`);
}
function drawPareto() {
  const W = Math.max(560, width()), H = 380, x0 = 52, y0 = H - 40, points = D.pareto;
  const s = svg(W, H, "time saved compared with EPLB over decision time, one point per planner");
  const logs = points.map(p => Math.log10(p.ms)), first = Math.floor(Math.min(...logs));
  const last = Math.ceil(Math.max(...logs) + .3), x = ms => x0 + 14 + (W - x0 - 130) * (Math.log10(ms) - first) / (last - first);
  const low = Math.min(0, ...points.map(p => p.saved - p.half)), high = Math.max(...points.map(p => p.saved + p.half));
  const y = v => y0 - (y0 - 22) * (v - low) / (high - low || 1);
  const step = high - low > 12 ? 5 : high - low > 5 ? 2 : 1;
  for (let v = Math.ceil(low / step) * step; v <= high; v += step) {
    s.append(line(x0, y(v), W, y(v), {class: "axis"}));
    s.append(text(x0 - 6, y(v) + 4, `${v} %`, {"text-anchor": "end", class: "quiet"}));
  }
  s.append(line(x0, y(0), W, y(0), {stroke: "var(--eplb)", "stroke-dasharray": "6 4", "stroke-width": 1.5}));
  for (let k = first; k <= last; k++) {
    s.append(text(x(10 ** k), y0 + 18, 10 ** k, {"text-anchor": "middle", class: "quiet"}));
  }
  s.append(text((x0 + W) / 2, H - 4, "decision time, ms per layer", {"text-anchor": "middle", class: "quiet"}));
  s.append(text(2, 10, "time saved compared with EPLB", {class: "quiet", "font-size": 11}));
  const front = [];
  for (const p of points.filter(p => !p.bound).sort((a, b) => a.ms - b.ms || b.saved - a.saved)) {
    if (!front.length || p.saved > front.at(-1).saved) front.push(p);
  }
  const steps = front.flatMap((p, i) => i ? [[p.ms, front[i - 1].saved], [p.ms, p.saved]] : [[p.ms, p.saved]]);
  s.append(el("polyline", {points: steps.map(([ms, v]) => `${x(ms)},${y(v)}`).join(" "), fill: "none",
    stroke: "var(--chosen)", "stroke-width": 2}));
  const taken = [], halo = {"paint-order": "stroke", stroke: "var(--page)", "stroke-width": 4, "stroke-linejoin": "round"};
  for (const p of [...points].sort((a, b) => b.saved - a.saved)) {
    // The label moves down until it covers no other one.
    const best = front.includes(p), from = x(p.ms) + 8, to = from + 7 * p.name.length;
    let at = y(p.saved) + (best ? -6 : 4);
    while (taken.some(([a, b, v]) => from < b && to > a && Math.abs(v - at) < 12)) at += 3;
    taken.push([from, to, at]);
    s.append(text(from, at, p.name, {"font-size": 11, ...halo, ...(best ? {"font-weight": 600} : {class: "quiet"})}));
  }
  for (const p of [...points].sort((a, b) => b.saved - a.saved)) {
    const best = front.includes(p), colour = p.bound ? "var(--static)" : best ? "var(--chosen)" : "var(--eplb)";
    s.append(line(x(p.ms), y(p.saved - p.half), x(p.ms), y(p.saved + p.half), {stroke: colour}));
    s.append(titled(marker(p.bound ? "circle" : best ? "diamond" : "square", x(p.ms), y(p.saved), colour),
      `${p.name}: ${round(p.saved, 1)} ± ${round(p.half, 1)} % saved, ${p.ms} ms per layer`));
  }
  show("pareto", s);
}

let current = -1;
function drawLayer(layer) {
  current = layer;
  drawBars(layer);
  drawPlacements(layer);
  drawTraffic(layer);
  document.getElementById("shown").textContent = layer < 0 ? `layer ${D.layers[0]}; traffic: mean of all` : `layer ${D.layers[layer]}`;
}
function drawAll() {
  if (D.pareto) {
    drawDomains();
    drawPareto();
  }
  drawLines();
  drawParts();
  drawPeaks();
  drawLayer(current);
}
const slider = document.getElementById("layer"), node = document.getElementById("node");
if (byNode) {
  node.max = U - 1;
  node.addEventListener("input", () => drawPlacements(current));
  document.getElementById("traffic-title").textContent = "Traffic between nodes, and inside them";
} else document.getElementById("pick-node").remove();
slider.max = L - 1;
slider.value = 0;
slider.addEventListener("input", () => drawLayer(Number(slider.value)));
document.getElementById("all").addEventListener("click", () => drawLayer(-1));
let drawnWidth = width();
addEventListener("resize", () => {
  if (width() !== drawnWidth) {
    drawnWidth = width();
    drawAll();
  }
});
drawAll();
