// Charts in plain SVG: lines with bands, stacked areas, flows, points, grids. Texts are inserted as text, never as markup.
"use strict";
const Charts = (() => {
  const NS = "http://www.w3.org/2000/svg";
  const NOT_SEEN = -1, OTHERS = -2;

  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else node.setAttribute(key, value === true ? "" : String(value));
    }
    for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
    return node;
  }

  function draw(tag, attributes, parent) {
    const node = document.createElementNS(NS, tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "text") node.textContent = value;
      else if (value !== null && value !== undefined) node.setAttribute(key, String(value));
    }
    if (parent) parent.append(node);
    return node;
  }

  const colour = (i) => (i < 0 ? "var(--c7)" : `var(--c${i % 8})`);
  const clusterName = (k) => (k === NOT_SEEN ? "not seen" : k === OTHERS ? "other clusters" : `cluster ${k}`);
  const known = (v) => v !== null && v !== undefined && Number.isFinite(v);

  // After eight, the colours repeat with another shape.
  function shape(i, x, y, r) {
    const turn = i < 0 ? 1 : Math.floor(i / 8) % 4;
    if (turn === 1) return `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}z`;
    if (turn === 2) return `M${x} ${y - 1.3 * r}L${x + 1.2 * r} ${y + r}H${x - 1.2 * r}z`;
    if (turn === 3) return `M${x} ${y - 1.4 * r}L${x + 1.4 * r} ${y}L${x} ${y + 1.4 * r}L${x - 1.4 * r} ${y}z`;
    return `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`;
  }

  // ---- numbers ----

  function ticks(low, high, most) {
    const span = high - low || 1;
    const rough = span / Math.max(1, most);
    const power = Math.pow(10, Math.floor(Math.log10(rough)));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => span / s <= most) || 10 * power;
    const found = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) found.push(Math.abs(v) < step * 1e-6 ? 0 : v);
    return found;
  }

  function short(value) {
    if (!known(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1e9) return +(value / 1e9).toPrecision(3) + " G";
    if (size >= 1e6) return +(value / 1e6).toPrecision(3) + " M";
    if (size >= 1e4) return +(value / 1e3).toPrecision(3) + " k";
    return String(+value.toPrecision(size < 1 ? 3 : 4));
  }
  const percent = (value) => (known(value) ? (100 * value).toFixed(2) + " %" : "–");
  const bytes = (value) => {
    if (!known(value)) return "–";
    const units = ["B", "kB", "MB", "GB", "TB"];
    let i = 0;
    while (value >= 1000 && i < 4) { value /= 1000; i++; }
    return (i ? value.toFixed(1) : Math.round(value)) + " " + units[i];
  };

  // ---- tooltip ----

  function tip(event, lines) {
    let box = document.getElementById("tip");
    if (!box) { box = el("div", { id: "tip", role: "status" }); document.body.append(box); }
    if (!lines) { box.style.visibility = "hidden"; return; }
    box.replaceChildren(...lines.map((line) => el("div", {}, line)));
    box.style.visibility = "visible";
    const width = box.offsetWidth, height = box.offsetHeight;
    const x = Math.min(event.clientX + 14, innerWidth - width - 6);
    const y = event.clientY + 16 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 16;
    box.style.left = Math.max(4, x) + "px";
    box.style.top = Math.max(4, y) + "px";
  }
  const untip = () => tip(null, null);

  function swatch(i, dash) {
    const svg = draw("svg", { width: 14, height: 12, "aria-hidden": "true" });
    if (dash !== undefined) draw("line", { x1: 0, x2: 14, y1: 6, y2: 6, stroke: colour(i), "stroke-width": 2.5, "stroke-dasharray": dash }, svg);
    else draw("path", { d: shape(i, 7, 6, 4.5), fill: colour(i) }, svg);
    return svg;
  }

  function legend(entries, hidden, redraw) {
    return el("div", { class: "legend" }, entries.map((entry) => hidden
      ? el("button", { type: "button", "aria-pressed": hidden.has(entry.name) ? "false" : "true",
          onclick: () => { if (!hidden.delete(entry.name)) hidden.add(entry.name); redraw(); } },
        swatch(entry.colour, entry.dash), entry.name)
      : el("span", {}, swatch(entry.colour, entry.dash), entry.name)));
  }

  function frame(host, title, height, margin) {
    const width = Math.max(240, Math.floor(host.clientWidth) || 600);
    const m = Object.assign({ left: 46, right: 12, top: 10, bottom: 34 }, margin);
    const svg = draw("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": title, tabindex: 0 }, host);
    return { svg, width, height, x0: m.left, x1: width - m.right, y0: height - m.bottom, y1: m.top };
  }

  function yAxis(f, low, high, format, label) {
    const place = (v) => f.y0 - ((v - low) / (high - low || 1)) * (f.y0 - f.y1);
    for (const v of ticks(low, high, 5)) {
      draw("line", { class: "gridline", x1: f.x0, x2: f.x1, y1: place(v), y2: place(v) }, f.svg);
      draw("text", { x: f.x0 - 6, y: place(v) + 4, "text-anchor": "end", text: format(v) }, f.svg);
    }
    draw("line", { class: "axis", x1: f.x0, x2: f.x0, y1: f.y0, y2: f.y1 }, f.svg);
    if (label) draw("text", { x: 0, y: 0, transform: `translate(11 ${(f.y0 + f.y1) / 2}) rotate(-90)`, "text-anchor": "middle", text: label }, f.svg);
    return place;
  }

  function xAxis(f, low, high, format, label) {
    const place = (v) => f.x0 + ((v - low) / (high - low || 1)) * (f.x1 - f.x0);
    const whole = label === "round"; // rounds are integers
    for (const v of ticks(low, high, f.width < 420 ? 4 : 8).filter((v) => !whole || Number.isInteger(+v.toFixed(6)))) {
      draw("line", { class: "axis", x1: place(v), x2: place(v), y1: f.y0, y2: f.y0 + 4 }, f.svg);
      draw("text", { x: place(v), y: f.y0 + 16, "text-anchor": "middle", text: format(v) }, f.svg);
    }
    draw("line", { class: "axis", x1: f.x0, x2: f.x1, y1: f.y0, y2: f.y0 }, f.svg);
    if (label) draw("text", { x: (f.x0 + f.x1) / 2, y: f.height - 3, "text-anchor": "middle", text: label }, f.svg);
    return place;
  }

  function extent(lists, pad) {
    let low = Infinity, high = -Infinity;
    for (const list of lists) for (const v of list) if (known(v)) { if (v < low) low = v; if (v > high) high = v; }
    if (low > high) return [0, 1];
    if (low === high) { low -= Math.abs(low) * 0.05 || 0.5; high += Math.abs(high) * 0.05 || 0.5; }
    const room = (high - low) * (pad === undefined ? 0.05 : pad);
    return [low - room, high + room];
  }

  // ---- lines ----

  // series: {name, colour, values, x?, band?: [low, high], dash?}; those without x share spec.x.
  function lines(host, spec) {
    host.replaceChildren();
    const hidden = host.hiddenSeries || (host.hiddenSeries = new Set());
    const shown = spec.series.filter((s) => !hidden.has(s.name));
    if (spec.series.length > 1 || spec.series.some((s) => s.band)) {
      const entries = spec.series.map((s) => ({ name: s.name, colour: s.colour, dash: s.dash || "" }));
      host.append(legend(entries, spec.series.length > 1 ? hidden : null, () => lines(host, spec)));
    }
    const f = frame(host, spec.title, spec.height || 230, { left: spec.yLabel ? 58 : 46 });
    const xs = shown.map((s) => s.x || spec.x);
    let [xl, xh] = extent(xs.length ? xs : [[0, 1]], 0);
    if (spec.xMax !== undefined) xh = Math.max(xh, spec.xMax);
    if (spec.xMin !== undefined) xl = Math.min(xl, spec.xMin);
    const all = shown.flatMap((s) => [s.values, ...(s.band || [])]);
    let [yl, yh] = spec.range || extent(all);
    if (spec.floor !== undefined) yl = Math.max(yl, spec.floor);
    if (spec.zero) yl = Math.min(0, yl);
    if (spec.ceiling !== undefined) yh = Math.min(yh, spec.ceiling);
    if (yh <= yl) yh = yl + 1;
    const format = spec.format || short, xFormat = spec.xFormat || short;
    const axisFormat = spec.axisFormat || format;
    const py = yAxis(f, yl, yh, axisFormat, spec.yLabel), px = xAxis(f, xl, xh, xFormat, spec.xLabel);
    const clip = (y) => Math.max(f.y1 - 1, Math.min(f.y0 + 1, y));
    shown.forEach((s) => {
      const x = s.x || spec.x;
      for (const [lowest, highest, opacity] of s.bands || (s.band ? [[...s.band, 0.18]] : [])) {
        const up = [], down = [];
        x.forEach((v, i) => {
          if (!known(lowest[i]) || !known(highest[i]) || !known(v)) return;
          up.push(`${px(v).toFixed(1)} ${clip(py(highest[i])).toFixed(1)}`);
          down.unshift(`${px(v).toFixed(1)} ${clip(py(lowest[i])).toFixed(1)}`);
        });
        if (up.length > 1) draw("path", { class: "mark band", d: `M${up.join("L")}L${down.join("L")}z`, fill: colour(s.colour), opacity }, f.svg);
      }
    });
    shown.forEach((s) => {
      const x = s.x || spec.x, points = [];
      x.forEach((v, i) => { if (known(v) && known(s.values[i])) points.push(`${px(v).toFixed(1)} ${clip(py(s.values[i])).toFixed(1)}`); });
      if (points.length > 1) draw("path", { class: "mark line", "data-points": points.length, d: "M" + points.join("L"), fill: "none", stroke: colour(s.colour), "stroke-width": s.width || 1.8, "stroke-dasharray": s.dash || null, "stroke-linejoin": "round" }, f.svg);
      if (points.length && points.length < 3) for (const p of points) { const [cx, cy] = p.split(" "); draw("circle", { class: "mark dot", cx, cy, r: 3, fill: colour(s.colour) }, f.svg); }
    });
    for (const event of spec.events || []) {
      const x = px(event.x);
      draw("path", { class: "mark event", d: `M${x} ${f.y1}l4 -7h-8z`, fill: "var(--bad)" }, f.svg);
    }
    const cross = draw("line", { class: "cross", y1: f.y1, y2: f.y0, visibility: "hidden" }, f.svg);
    const rounds = [...new Set(xs.flat().filter(known))].sort((a, b) => a - b);
    const look = (place, event) => {
      const x = rounds[place];
      cross.setAttribute("x1", px(x)); cross.setAttribute("x2", px(x)); cross.setAttribute("visibility", "visible");
      const text = [`${spec.xName || spec.xLabel || ""} ${xFormat(x)}`.trim()];
      for (const s of shown) {
        const own = s.x || spec.x;
        let best = -1;
        own.forEach((v, i) => { if (known(v) && known(s.values[i]) && (best < 0 || Math.abs(v - x) < Math.abs(own[best] - x))) best = i; });
        if (best < 0 || (!s.x && own[best] !== x && shown.length > 0 && !spec.nearest && Math.abs(own[best] - x) > (xh - xl) / 50)) continue;
        const more = s.band ? ` (${format(s.band[0][best])} … ${format(s.band[1][best])})` : "";
        text.push(`${s.name}: ${format(s.values[best])}${more}`);
      }
      for (const happened of spec.events || []) if (happened.x === x) text.push(happened.text);
      tip(event, text.slice(0, 14));
    };
    hover(f, rounds, px, look, cross);
  }

  function hover(f, rounds, px, look, cross) {
    if (!rounds.length) return;
    let at = rounds.length - 1;
    const scale = () => f.svg.getBoundingClientRect();
    f.svg.addEventListener("pointermove", (event) => {
      const box = scale(), x = ((event.clientX - box.left) / box.width) * f.width;
      if (x < f.x0 - 10 || x > f.x1 + 10) { cross.setAttribute("visibility", "hidden"); return untip(); }
      let low = 0, high = rounds.length - 1;
      while (high - low > 1) { const mid = (low + high) >> 1; if (px(rounds[mid]) < x) low = mid; else high = mid; }
      at = Math.abs(px(rounds[low]) - x) < Math.abs(px(rounds[high]) - x) ? low : high;
      look(at, event);
    });
    f.svg.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); untip(); });
    f.svg.addEventListener("blur", () => { cross.setAttribute("visibility", "hidden"); untip(); });
    f.svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      at = Math.max(0, Math.min(rounds.length - 1, at + step));
      const box = scale();
      look(at, { clientX: box.left + (px(rounds[at]) / f.width) * box.width, clientY: box.top + 20 });
    });
  }

  // ---- stacked areas ----

  function stacked(host, spec) {
    host.replaceChildren();
    host.append(legend(spec.series, null, null));
    const f = frame(host, spec.title, spec.height || 230);
    const count = spec.x.length, base = new Array(count).fill(0);
    const tops = spec.series.map((s) => s.values.map((v, i) => (base[i] += known(v) ? v : 0)));
    const high = Math.max(1e-9, ...base);
    const py = yAxis(f, 0, high * 1.02, spec.format || short, null);
    // A single round extends half a round to each side.
    const half = count === 1 ? 0.5 : 0;
    const px = xAxis(f, spec.x[0] - half, Math.max(spec.x[count - 1] + half, spec.xMax || 0), short, spec.xLabel);
    const xs = half ? [spec.x[0] - half, spec.x[0] + half] : spec.x;
    const at = (list, i) => list[half ? 0 : i];
    spec.series.forEach((s, k) => {
      const up = xs.map((v, i) => `${px(v).toFixed(1)} ${py(at(tops[k], i)).toFixed(1)}`);
      const down = xs.map((v, i) => `${px(v).toFixed(1)} ${py(k ? at(tops[k - 1], i) : 0).toFixed(1)}`).reverse();
      draw("path", { class: "mark area", "data-points": count, d: `M${up.join("L")}L${down.join("L")}z`, fill: colour(s.colour), opacity: 0.85, stroke: "var(--card)", "stroke-width": 0.5 }, f.svg);
    });
    const cross = draw("line", { class: "cross", y1: f.y1, y2: f.y0, visibility: "hidden" }, f.svg);
    hover(f, spec.x, px, (i, event) => {
      cross.setAttribute("x1", px(spec.x[i])); cross.setAttribute("x2", px(spec.x[i])); cross.setAttribute("visibility", "visible");
      tip(event, [`${spec.xLabel} ${spec.x[i]}`, ...spec.series.map((s) => `${s.name}: ${(spec.format || short)(s.values[i])}`).slice(0, 14)]);
    }, cross);
  }

  // ---- flow ----

  function flow(host, data, title) {
    host.replaceChildren();
    const labels = [...new Set(data.nodes.flat().map(([k]) => k))].sort((a, b) => (a < 0 ? 1e9 - a : a) - (b < 0 ? 1e9 - b : b));
    host.append(legend(labels.map((k) => ({ name: clusterName(k), colour: k })), null, null));
    const f = frame(host, title, 300, { left: 8, right: 8, top: 8, bottom: 34 });
    const total = data.nodes[0].reduce((sum, [, n]) => sum + n, 0) || 1;
    const gap = 6, usable = f.y0 - f.y1 - gap * (labels.length - 1), bar = 12, last = data.rounds.length - 1;
    const x = (c) => f.x0 + (last ? (c / last) * (f.x1 - f.x0 - bar) : 0);
    const tall = (n) => (n / total) * Math.max(20, usable);
    const tops = data.nodes.map((column) => {
      const sizes = new Map(column), found = new Map();
      let y = f.y1;
      for (const k of labels) if (sizes.has(k)) { found.set(k, y); y += tall(sizes.get(k)) + gap; }
      return found;
    });
    const order = new Map(labels.map((k, i) => [k, i]));
    data.links.forEach((links, c) => {
      const out = new Map(tops[c]), into = new Map(tops[c + 1]);
      const sorted = [...links].sort((a, b) => order.get(a[0]) - order.get(b[0]) || order.get(a[1]) - order.get(b[1]));
      for (const [from, to, n] of sorted) {
        const h = tall(n), a = out.get(from), b = into.get(to), x1 = x(c) + bar, x2 = x(c + 1), mid = (x1 + x2) / 2;
        out.set(from, a + h); into.set(to, b + h);
        const path = draw("path", { class: "mark link", d: `M${x1} ${a}C${mid} ${a} ${mid} ${b} ${x2} ${b}V${b + h}C${mid} ${b + h} ${mid} ${a + h} ${x1} ${a + h}z`, fill: colour(from), opacity: from === to ? 0.32 : 0.6 }, f.svg);
        const text = [`rounds ${data.rounds[c]} → ${data.rounds[c + 1]}`, `${n} client${n === 1 ? "" : "s"}`, from === to ? `stayed in ${clusterName(from)}` : `${clusterName(from)} → ${clusterName(to)}`];
        path.addEventListener("pointermove", (event) => tip(event, text));
        path.addEventListener("pointerleave", untip);
      }
    });
    data.nodes.forEach((column, c) => {
      for (const [k, n] of column) {
        const node = draw("rect", { class: "mark node", x: x(c), y: tops[c].get(k), width: bar, height: Math.max(1, tall(n)), fill: colour(k), rx: 2 }, f.svg);
        node.addEventListener("pointermove", (event) => tip(event, [`round ${data.rounds[c]}`, `${clusterName(k)}: ${n} clients`]));
        node.addEventListener("pointerleave", untip);
      }
      const anchor = c === 0 ? "start" : c === last ? "end" : "middle";
      const name = data.rounds[c] === 0 ? "start" : String(data.rounds[c]);
      const px = c === 0 ? x(c) : c === last ? x(c) + bar : x(c) + bar / 2;
      draw("text", { x: px, y: f.y0 + 16, "text-anchor": anchor, text: name }, f.svg);
    });
    draw("text", { x: (f.x0 + f.x1) / 2, y: f.height - 3, "text-anchor": "middle", text: "round" }, f.svg);
  }

  // ---- a tree of cuts, from left to right ----

  function tree(host, spec) {
    host.replaceChildren();
    const leaves = [], cuts = [];
    const order = (node, depth) => {
      node.depth = depth;
      node.now = node.cluster === undefined ? 0 : node.size; // clients at the end
      if (!node.parts) { node.row = leaves.push(node) - 1; return; }
      cuts.push(node);
      for (const part of node.parts) { order(part, depth + 1); node.now += part.now; }
      node.row = (node.parts[0].row + node.parts[node.parts.length - 1].row) / 2;
    };
    order(spec.root, 0);
    const deepest = Math.max(...leaves.map((leaf) => leaf.depth)), total = spec.clients || 1;
    const places = [108], right = 132, high = leaves.length > 30 ? 17 : 26, bend = 34;
    for (let d = 1; d <= deepest; d++) places.push(places[d - 1] + (cuts.some((cut) => cut.depth === d) ? 150 : 58)); // room for the labels of cuts
    const stretch = Math.max(1, Math.min(1.5, (spec.room - right) / places[deepest]));
    const width = places[deepest] * stretch + right, height = 36 + high * (leaves.length - 1);
    const svg = draw("svg", { class: "plot tree", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": spec.title, tabindex: 0 }, host);
    svg.style.width = `${width}px`; // a wide tree scrolls
    const x = (node) => places[node.depth] * stretch, y = (node) => 18 + high * node.row;
    const thick = (node) => 1.5 + 5 * Math.min(1, node.now / total);
    const stroke = (node) => (node.cluster === undefined ? "var(--c7)" : colour(node.cluster));
    const branch = (node, d) => draw("path", { class: "mark branch", d, fill: "none", stroke: stroke(node), "stroke-width": thick(node).toFixed(2), "stroke-opacity": 0.55, "stroke-dasharray": node.removed || node.merged ? "3 3" : null }, svg);
    branch(spec.root, `M0 ${y(spec.root)}H${x(spec.root)}`);
    for (const cut of cuts) for (const part of cut.parts) {
      const from = x(cut), mid = from + bend / 2;
      branch(part, `M${from} ${y(cut)}C${mid} ${y(cut)} ${mid} ${y(part)} ${from + bend} ${y(part)}H${x(part)}`);
    }
    const above = (node, text) => draw("text", { x: x(node) - 9, y: y(node) - 4 - thick(node) / 2, "text-anchor": "end", text }, svg);
    const below = (node, text) => draw("text", { x: x(node) - 9, y: y(node) + 11 + thick(node) / 2, "text-anchor": "end", text }, svg);
    above(spec.root, `all ${total.toLocaleString("en")} clients`);
    if (!spec.root.parts) below(spec.root, "no cut");
    for (const cut of cuts) {
      if (cut !== spec.root) above(cut, `${cut.size.toLocaleString("en")} signed`);
      below(cut, `round ${cut.round}${known(cut.z) ? `, z = ${evidence(cut.z)}` : ""}`);
      const node = draw("circle", { class: "mark node", cx: x(cut), cy: y(cut), r: 5, fill: "var(--ink)" }, svg);
      node.addEventListener("pointermove", (event) => tip(event, [cut.text]));
      node.addEventListener("pointerleave", untip);
    }
    for (const leaf of leaves) {
      const gone = leaf.cluster === undefined;
      draw("path", { class: "mark leaf", d: shape(gone ? 0 : leaf.cluster, x(leaf), y(leaf), 5), fill: gone ? "var(--card)" : colour(leaf.cluster), stroke: gone ? "var(--dim)" : null }, svg);
      draw("text", { class: gone ? null : "strong", x: x(leaf) + 11, y: y(leaf) + 4, text: gone ? (leaf.merged ? `merged in round ${leaf.merged}` : `empty since round ${leaf.removed}`) : `${clusterName(leaf.cluster)}: ${counted(leaf.size)}` }, svg);
    }
  }
  const counted = (n) => `${n.toLocaleString("en")} client${n === 1 ? "" : "s"}`;
  const evidence = (v) => (!known(v) ? "–" : v >= 1e9 ? "∞" : Math.abs(v) >= 100 ? v.toFixed(0) : String(+v.toPrecision(2))); // as in the sentences

  // ---- points ----

  function points(host, spec) {
    host.replaceChildren();
    if (spec.legend) host.append(legend(spec.legend, null, null));
    const f = frame(host, spec.title, spec.height || 280, spec.margin || { left: 10, right: 10, top: 10, bottom: spec.xLabel ? 20 : 10 });
    let px, py;
    if (spec.axes) {
      [px, py] = spec.axes(f);
    } else {
      const [xl, xh] = extent([spec.x], 0.06), [yl, yh] = extent([spec.y], 0.06);
      px = (v) => f.x0 + ((v - xl) / (xh - xl)) * (f.x1 - f.x0);
      py = (v) => f.y0 - ((v - yl) / (yh - yl)) * (f.y0 - f.y1);
      draw("rect", { x: f.x0, y: f.y1, width: f.x1 - f.x0, height: f.y0 - f.y1, fill: "none", class: "axis" }, f.svg);
      if (spec.xLabel) draw("text", { x: (f.x0 + f.x1) / 2, y: f.height - 4, "text-anchor": "middle", text: spec.xLabel }, f.svg);
    }
    const places = [], radius = spec.radius || (spec.x.length > 400 ? 2.6 : spec.x.length > 100 ? 3.4 : 4.5);
    spec.x.forEach((v, i) => {
      if (!known(v) || !known(spec.y[i])) return;
      const x = px(v), y = py(spec.y[i]);
      places.push([x, y, i]);
      draw("path", { class: "mark point", d: shape(spec.colours[i], +x.toFixed(1), +y.toFixed(1), radius), fill: colour(spec.colours[i]), "fill-opacity": 0.8, stroke: "var(--card)", "stroke-width": 0.5 }, f.svg);
    });
    const ring = draw("circle", { class: "ring", r: radius + 3, visibility: "hidden" }, f.svg);
    f.svg.addEventListener("pointermove", (event) => {
      const box = f.svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * f.width, y = ((event.clientY - box.top) / box.height) * f.height;
      let best = null, least = 18 * 18;
      for (const place of places) { const d = (place[0] - x) ** 2 + (place[1] - y) ** 2; if (d < least) { least = d; best = place; } }
      if (!best) { ring.setAttribute("visibility", "hidden"); return untip(); }
      ring.setAttribute("cx", best[0]); ring.setAttribute("cy", best[1]); ring.setAttribute("visibility", "visible");
      tip(event, spec.describe(best[2]));
    });
    f.svg.addEventListener("pointerleave", () => { ring.setAttribute("visibility", "hidden"); untip(); });
  }

  // ---- grids of shades ----

  // values[r][c] in [0, top]; numbers(v, r, c, width) is the text of a cell, with `zeros` also of an empty one. There are eight shades, one path each, so that many cells take little memory.
  function grid(host, spec) {
    host.replaceChildren();
    const rows = spec.values.length, columns = spec.values[0].length;
    const left = spec.left || 46, bottom = spec.bottom === undefined ? 34 : spec.bottom, top = spec.bands ? 20 : 8;
    const width = Math.max(120, Math.floor(host.clientWidth) || 400);
    const cellW = Math.min(spec.most || 60, (width - left - 10) / columns);
    const cellH = spec.square ? cellW : spec.cellHeight || 18;
    const height = top + rows * cellH + bottom;
    const svg = draw("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": spec.title, tabindex: 0 }, host);
    const steps = 8, paths = Array.from({ length: steps }, () => []);
    const high = spec.top || Math.max(1e-9, ...spec.values.map((row) => Math.max(...row.map((v) => v || 0))));
    const pad = cellW > 8 ? 0.5 : 0;
    spec.values.forEach((row, r) => row.forEach((v, c) => {
      if (!known(v) || v <= 0) return;
      const step = Math.min(steps - 1, Math.floor((v / high) * steps));
      paths[step].push(`M${(left + c * cellW + pad).toFixed(2)} ${(top + r * cellH + pad).toFixed(2)}h${(cellW - 2 * pad).toFixed(2)}v${(cellH - 2 * pad).toFixed(2)}h${(2 * pad - cellW).toFixed(2)}z`);
    }));
    paths.forEach((cells, step) => {
      if (!cells.length) return;
      const node = draw("path", { class: "mark cell", "data-cells": cells.length, d: cells.join("") }, svg);
      node.style.setProperty("--a", ((step + 1) / steps).toFixed(3));
    });
    draw("rect", { x: left, y: top, width: columns * cellW, height: rows * cellH, fill: "none", class: "axis" }, svg);
    if (spec.numbers && cellW >= 20) spec.values.forEach((row, r) => row.forEach((v, c) => {
      if (!known(v) || (v <= 0 && !spec.zeros)) return;
      draw("text", { class: v / high > 0.55 ? "inverse" : "strong", x: left + (c + 0.5) * cellW, y: top + (r + 0.5) * cellH + 4, "text-anchor": "middle", "font-weight": spec.bold && spec.bold(r, c) ? 700 : null, text: spec.numbers(v, r, c, cellW) }, svg);
    }));
    const every = Math.max(1, Math.ceil(13 / cellH));
    spec.rows.forEach((name, r) => { if (r % every === 0) draw("text", { x: left - 5, y: top + (r + 0.5) * cellH + 4, "text-anchor": "end", text: clipped(name, Math.max(4, Math.floor((left - 8) / 6.2))) }, svg); });
    if (spec.columns) {
      const longest = Math.max(...spec.columns.map((name) => Math.min(10, String(name).length)));
      const skip = Math.max(1, Math.ceil((longest * 6.5 + 6) / cellW));
      spec.columns.forEach((name, c) => { if (c % skip === 0) draw("text", { x: left + (c + 0.5) * cellW, y: top + rows * cellH + 14, "text-anchor": "middle", text: clipped(name, 10) }, svg); });
    }
    if (spec.xLabel) draw("text", { x: left + (columns * cellW) / 2, y: height - 4, "text-anchor": "middle", text: spec.xLabel }, svg);
    for (const band of spec.bands || []) {
      draw("rect", { class: "mark", x: left + band.from * cellW, y: 12, width: (band.to - band.from) * cellW, height: 5, fill: colour(band.colour) }, svg);
      if ((band.to - band.from) * cellW > band.name.length * 6.5) draw("text", { x: left + ((band.from + band.to) / 2) * cellW, y: 9, "text-anchor": "middle", text: band.name }, svg);
    }
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const c = Math.floor((((event.clientX - box.left) / box.width) * width - left) / cellW);
      const r = Math.floor((((event.clientY - box.top) / box.height) * height - top) / cellH);
      if (r < 0 || c < 0 || r >= rows || c >= columns) return untip();
      tip(event, spec.describe(r, c, spec.values[r][c]));
    });
    svg.addEventListener("pointerleave", untip);
  }

  const clipped = (name, most) => { const text = String(name); return text.length > most ? text.slice(0, most - 1) + "…" : text; };

  // ---- bubbles ----

  function bubbles(host, spec) {
    host.replaceChildren();
    if (spec.legend) host.append(legend(spec.legend, null, null));
    const rows = spec.classes.length, columns = spec.counts.length;
    const high = Math.max(1, ...spec.counts.map((row) => Math.max(...row)));
    const f = frame(host, spec.title, 30 + Math.max(120, Math.min(rows * 22, 420)) + 24, { left: spec.left, right: 10, top: 8, bottom: 24 });
    const cellW = (f.x1 - f.x0) / columns, cellH = (f.y0 - f.y1) / rows;
    // The largest bubble may be wider than its column but not higher than its row: neighbours may touch.
    const most = Math.max(1.5, Math.min(cellH * 0.48, Math.max(cellW * 0.9, 3)));
    spec.classes.forEach((name, r) => {
      const y = f.y0 - (r + 0.5) * cellH;
      draw("line", { class: "gridline", x1: f.x0, x2: f.x1, y1: y, y2: y }, f.svg);
      if (r % Math.max(1, Math.ceil(12 / cellH)) === 0) draw("text", { x: f.x0 - 6, y: y + 4, "text-anchor": "end", text: clipped(String(name), Math.max(4, Math.floor((spec.left - 8) / 6.2))) }, f.svg);
    });
    spec.counts.forEach((row, c) => row.forEach((n, r) => {
      if (!n) return;
      const x = f.x0 + (c + 0.5) * cellW, y = f.y0 - (r + 0.5) * cellH;
      const node = draw("circle", { class: "mark bubble", cx: x.toFixed(1), cy: y.toFixed(1), r: Math.max(0.7, most * Math.sqrt(n / high)).toFixed(2), fill: colour(spec.colours[c]), "fill-opacity": 0.85 }, f.svg);
      node.addEventListener("pointermove", (event) => tip(event, [spec.names[c], `class ${spec.classes[r]}: ${n} samples`]));
      node.addEventListener("pointerleave", untip);
    }));
    draw("line", { class: "axis", x1: f.x0, x2: f.x1, y1: f.y0, y2: f.y0 }, f.svg);
    draw("text", { x: (f.x0 + f.x1) / 2, y: f.height - 4, "text-anchor": "middle", text: spec.xLabel }, f.svg);
  }

  // ---- tables ----

  // columns: {name, number?, show?(value, row)}; cells are plain values; a click on a column head sorts.
  function table(spec) {
    const state = spec.state || { by: spec.by === undefined ? null : spec.by, down: Boolean(spec.down) };
    const body = el("tbody");
    const heads = spec.columns.map((column, c) => el("th", { class: column.number ? "number" : null, scope: "col" },
      el("button", { type: "button", title: "sort", onclick: () => {
        state.down = state.by === c ? !state.down : Boolean(column.number);
        state.by = c;
        fill();
      } }, column.name)));
    function fill() {
      heads.forEach((head, c) => { if (c === state.by) head.setAttribute("aria-sort", state.down ? "descending" : "ascending"); else head.removeAttribute("aria-sort"); });
      let rows = spec.rows.slice();
      if (state.by !== null) {
        const key = (row) => { const cell = row[state.by]; return cell && typeof cell === "object" ? cell.sort : cell; };
        rows = rows.map((row, i) => [row, i]).sort(([a, i], [b, j]) => {
          const x = key(a), y = key(b), none = (v) => v === null || v === undefined;
          if (none(x) || none(y)) return none(x) === none(y) ? i - j : none(x) ? 1 : -1;
          const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
          return (state.down ? -order : order) || i - j;
        }).map(([row]) => row);
      }
      body.replaceChildren(...rows.map((row) => el("tr", {}, row.map((cell, c) => {
        const column = spec.columns[c], inner = cell && typeof cell === "object" ? cell : { text: cell };
        const text = inner.node || (column.show && !(cell && typeof cell === "object") ? column.show(cell) : inner.text);
        return el("td", { class: [column.number ? "number" : "", inner.best ? "best" : "", column.name === "" ? "" : column.wide ? "name" : ""].join(" ").trim() || null },
          text === null || text === undefined ? "–" : text);
      }))));
    }
    fill();
    return el("div", { class: "scroll" }, el("table", { class: spec.class || null }, spec.caption ? el("caption", { class: "dim" }, spec.caption) : null, el("thead", {}, el("tr", {}, heads)), body));
  }

  return { el, draw, lines, stacked, flow, tree, evidence, points, grid, bubbles, table, legend, colour, clusterName, short, percent, bytes, known, xAxis, yAxis, extent, untip };
})();
