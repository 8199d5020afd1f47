// The page: headline, charts and tables of one or more runs. The data is one JSON value, embedded in the page or from
// the server. `Report.show` can be called again with newer data; the reader's choices are kept.
"use strict";
const Report = (() => {
  const { el, lines, stacked, flow, tree, evidence, points, grid, bubbles, table, colour, clusterName, short, percent, bytes, known } = Charts;
  const choices = { run: 0, map: "pca", metric: "accuracy", against: "round", each: false, heat: "accuracy", situation: "" };
  const panels = new Map(); // id -> {node, host, extra, draw}
  let data = null, root = null, options = {};

  // ---- a panel: heading, caption, chart, its numbers ----

  function panel(home, id, title, caption, paint, more) {
    let item = panels.get(id);
    if (!item) {
      const host = el("div", { class: "chart" }), extra = el("div", {}), controls = el("div", { class: "controls" });
      const node = el("section", { id, "aria-label": title },
        el("h3", {}, title), el("p", {}, ""), controls, host, extra);
      item = { node, host, extra, controls, text: node.querySelector("p"), numbers: null };
      panels.set(id, item);
      observer.observe(node);
    }
    item.node.setAttribute("class", "card" + (more && more.wide ? " wide" : ""));
    item.text.textContent = caption;
    item.paint = () => paint(item.host, item);
    if (more && more.table && !item.numbers) {
      const box = el("div", {});
      item.numbers = el("details", { ontoggle: () => { if (item.numbers.open) item.fill(); } }, el("summary", {}, "numbers"), box);
      item.extra.append(item.numbers);
      item.box = box;
    }
    if (item.numbers) { // another run may have no table for this panel
      const rows = more && more.table;
      item.numbers.hidden = !rows;
      item.fill = () => item.box.replaceChildren(...(rows ? [rows()] : []));
      if (item.numbers.open) item.fill();
    }
    if (item.node.parentNode !== home) home.append(item.node);
    item.used = true;
    item.width = 0;
    if (item.visible) repaint(item);
    return item;
  }

  function repaint(item) {
    const width = item.host.clientWidth;
    if (!width) return;
    item.width = width;
    item.paint();
    item.node.dataset.drawn = "yes";
  }

  // Charts are drawn when they come near the viewport, so that a page of many runs opens at once.
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const item = panels.get(entry.target.id);
      if (!item) continue;
      item.visible = entry.isIntersecting;
      if (item.visible && item.width !== item.host.clientWidth) repaint(item);
    }
  }, { rootMargin: "400px" });
  let timer = 0;
  addEventListener("resize", () => {
    clearTimeout(timer);
    timer = setTimeout(() => { for (const item of panels.values()) { item.width = 0; if (item.visible) repaint(item); } }, 120);
  });
  addEventListener("beforeprint", () => { for (const item of panels.values()) repaint(item); });

  function choose(controls, entries, chosen, take) {
    controls.replaceChildren(...entries.map(([key, name]) => el("button", { type: "button", "aria-pressed": key === chosen ? "true" : "false", onclick: () => take(key) }, name)));
  }

  const plain = (head, rows, numbers) => table({ columns: head.map((name, i) => ({ name, number: numbers ? numbers[i] : i > 0 })), rows });

  // ---- the page ----

  function show(payload, home, more) {
    data = payload; root = home || root; options = more || options;
    choices.run = Math.min(choices.run, data.runs.length - 1);
    for (const item of panels.values()) item.used = false;
    const fresh = !root.querySelector(".run");
    if (fresh) root.replaceChildren(el("div", { class: "compare" }), el("nav", { class: "tabs", "aria-label": "runs" }), el("div", { class: "run" }));
    if (data.compare) comparison(root.querySelector(".compare"));
    const tabs = root.querySelector(".tabs");
    tabs.replaceChildren(...(data.runs.length < 2 ? [] : data.runs.map((run, i) => el("button", { type: "button", "aria-pressed": i === choices.run ? "true" : "false", onclick: () => { choices.run = i; show(data); } }, run.name))));
    one(root.querySelector(".run"), data.runs[choices.run]);
    for (const [id, item] of panels) if (!item.used) { item.node.remove(); observer.unobserve(item.node); panels.delete(id); }
    document.documentElement.dataset.shown = String(data.runs[choices.run].done);
  }

  function one(home, run) {
    let head = home.querySelector(".head"), cards = home.querySelector(".cards"), end = home.querySelector(".end");
    if (!head) {
      head = el("div", { class: "head" }); cards = el("div", { class: "cards" }); end = el("div", { class: "end" });
      home.append(head, cards, end);
    }
    const left = run.state === "running" && known(run.left) ? `, about ${duration(run.left)} left` : "";
    head.replaceChildren(...[
      data.runs.length > 1 ? el("h2", {}, run.title) : null,
      el("p", { class: "dim" }, el("span", { class: `badge ${run.state}` }, run.state), ` ${run.name}: round ${run.done} of ${run.planned}${left}`),
      ...run.problems.map((text) => el("div", { class: "note" }, text)),
      el("div", { class: "tiles" }, run.headline.map(([name, value, meaning]) => el("div", { class: "tile" }, el("span", {}, name), el("b", {}, value), el("span", {}, meaning)))),
    ].filter(Boolean));
    curves(cards, run);
    clusters(cards, run);
    clients(cards, run);
    costs(cards, run);
    pictures(cards, run);
    trouble(cards, run);
    closing(cards, run);
  }

  const duration = (s) => (s >= 5400 ? `${(s / 3600).toFixed(1)} h` : s >= 90 ? `${Math.round(s / 60)} min` : `${Math.round(s)} s`);
  const has = (run, name) => run.curves[name] && run.curves[name].some(known);

  const beside = (run, panel) => run.metrics.filter((m) => m.panel === panel && has(run, m.key));
  const formatOf = (m) => ({ "%": percent, MB: bytes, s: (v) => `${short(v)} s` })[m.unit] || short;
  const floorOf = (m) => (m.unit || m.better === "low" ? 0 : undefined); // shares and costs are never negative; other scores may be

  // ---- accuracy, F1, loss ----

  function curves(home, run) {
    const x = run.curves.round, xMax = run.state === "finished" ? undefined : run.planned;
    const events = run.repairs.map((r) => ({ x: r.round, text: `repair: ${r.reason}` }));
    const scored = (id, name, title, text, format, main, floor) => {
      if (!has(run, name)) return;
      const five = run.spread[name], weighted = run.curves[`${name}_micro`];
      const series = [{ name: main, colour: 0, values: run.curves[name], width: 2.2,
        band: five ? [five[0], five[4]] : null,
        bands: five ? [[five[0], five[4], 0.14], [five[1], five[3], 0.2]] : null },
      { name: "weighted by samples", colour: 5, values: weighted, dash: "5 3" },
      ...beside(run, name).map((m, i) => ({ name: m.label, colour: 3 + i, values: run.curves[m.key], dash: "2 3" }))];
      panel(home, id, title, text + (five ? " Bands: the middle 50 % and the middle 80 % of the clients." : ""),
        (host) => lines(host, { title, x, xMax, series: series.filter((s) => s.values), format, xLabel: "round",
          axisFormat: format === percent ? (v) => `${+(100 * v).toFixed(2)} %` : short, events: name === "accuracy" ? events : [], floor, ceiling: format === percent ? 1 : undefined }),
        { table: () => table({ columns: ["round", five ? "mean" : main, ...(weighted ? ["weighted by samples"] : []), ...(five ? ["10th percentile", "25th", "median", "75th", "90th"] : [])].map((n) => ({ name: n, number: true, show: n === "round" ? undefined : format })),
          rows: x.map((r, i) => [r, run.curves[name][i], ...(weighted ? [weighted[i]] : []), ...(five ? five.map((q) => q[i]) : [])]) }) });
    };
    scored("accuracy", "accuracy", "Accuracy by round", "Each client's personal model on its own test samples." + (events.length ? " Triangles: repairs." : ""), percent, "mean over clients", 0);
    scored("f1", "f1", "F1 by round", "The F1 of a client is the mean over its classes.", percent, "mean over clients", 0);
    scored("loss", "loss", "Loss by round", "On the test samples of the clients; lower is better.", short, "mean over clients", 0);
    const more = run.metrics.filter((m) => !m.panel && m.shown.includes("curves") && !["accuracy", "f1", "loss", "churn"].includes(m.key));
    for (const m of more) scored(`metric-${m.key}`, m.key, `${m.label} by round`, `${m.about}.`, formatOf(m), m.label, floorOf(m));
  }

  // ---- clusters ----

  function clusters(home, run) {
    const x = run.curves.round, xMax = run.state === "finished" ? undefined : run.planned;
    if (run.sizes && x.length) {
      panel(home, "sizes", "Cluster sizes by round", "Clients in each cluster, stacked.",
        (host) => stacked(host, { title: "Cluster sizes by round", x, xMax, xLabel: "round", series: run.sizes.clusters.map((k, i) => ({ name: clusterName(k), colour: k, values: run.sizes.values[i] })) }),
        { table: () => plain(["round", ...run.sizes.clusters.map(clusterName)], x.map((r, i) => [r, ...run.sizes.values.map((v) => v[i])]), run.sizes.clusters.map(() => true).concat(true)) });
    }
    if (has(run, "churn") && run.sizes) {
      const series = [["churn", "clients that changed cluster"], ...beside(run, "churn").map((m) => [m.key, m.label])]
        .map(([key, name], i) => ({ name, colour: [3, 0, 2, 4, 5, 6, 7][i % 7], values: run.curves[key], dash: ["", "", "5 3"][i] ?? "2 3", width: i < 2 ? 2 : 1.5 }));
      const caption = "Share of clients that changed cluster in a round" + (series.length > 1 ? ", and agreement of clusters with the true groups (1: exact)." : ".");
      const title = series.length > 1 ? "Churn and agreement by round" : "Churn by round";
      panel(home, "churn", title, caption,
        (host) => lines(host, { title, x, xMax, series, xLabel: "round", format: (v) => v.toFixed(3), axisFormat: short, range: [Math.min(0, ...series.flatMap((s) => s.values.filter(known))), 1.02] }),
        { table: () => plain(["round", ...series.map((s) => s.name)], x.map((r, i) => [r, ...series.map((s) => s.values[i])])) });
    }
    if (run.confusion) {
      const { clusters: rows, counts } = run.confusion;
      panel(home, "confusion", "Clusters and true groups", "Clients of each true group in each cluster. A row with one filled cell is a pure cluster.",
        (host) => grid(host, { title: "Confusion of clusters and true groups", values: counts, rows: rows.map(clusterName), columns: run.groups, left: 78, most: 90, cellHeight: 26, numbers: (v) => String(v), xLabel: "true group",
          describe: (r, c, v) => [`${clusterName(rows[r])}, ${run.groups[c]}`, `${v} clients`] }),
        { table: () => plain(["cluster", ...run.groups], counts.map((row, i) => [clusterName(rows[i]), ...row])) });
    }
    if (run.flow) {
      const moved = run.flow.moves ? `${run.flow.moves.toLocaleString("en")} ${run.flow.moves === 1 ? "move" : "moves"} in total.` : "No client moved.";
      panel(home, "flow", "Moves between clusters", `Bars are clusters, bands are clients that stay or move. The columns are the rounds with the most moves. ${moved}`,
        (host) => flow(host, run.flow, "Moves of clients between clusters"), { wide: true,
          table: () => plain(["from round", "to round", "from", "to", "clients"], run.flow.links.flatMap((links, c) => links.map(([a, b, n]) => [run.flow.rounds[c], run.flow.rounds[c + 1], clusterName(a), clusterName(b), n])), [true, true, false, false, true]) });
    }
    if (run.decisions) decisions(home, run.decisions, run.clients);
    if (run.map && run.clients) {
      const apart = Boolean(run.sizes); // else every client is a cluster of its own
      if (apart) map(home, run, "map-cluster", "Map of client models, by cluster", run.clients.cluster, clusterName);
      else if (!run.clients.group) map(home, run, "map-cluster", "Map of client models", run.clients.name.map(() => 0), () => "clients");
      if (run.clients.group) map(home, run, "map-group", apart ? "The same map, by true group" : "Map of client models, by true group", run.clients.group, (g) => run.groups[g] || `group ${g}`);
    }
  }

  function decisions(home, found, clients) {
    const letters = ["z", "q", "t"], heads = ["round", "what", "clusters", "sizes", ...letters, "clients"];
    const used = heads.map((name, i) => i).filter((i) => found.rows.some((row) => row[i] !== null));
    const notes = [found.rows.some((row) => row[1] === "proposed") ? "A cut that is proposed is tried for a round." : "", found.hidden ? `${found.hidden.toLocaleString("en")} more are not listed, mostly refused cuts without new evidence.` : ""].filter(Boolean);
    panel(home, "decisions", "Decisions", `${found.kinds} ${found.about}`, (host) => {
      const drawing = el("div", { class: "sideways" });
      const moves = found.moves.length ? el("ul", { class: "dim" }, found.moves.map((text) => el("li", {}, text))) : null;
      const rows = table({ columns: used.map((i) => ({ name: heads[i], number: heads[i] === "round" || letters.includes(heads[i]), wide: heads[i] === "clients", show: letters.includes(heads[i]) ? evidence : undefined })), rows: found.rows.map((row) => used.map((i) => row[i])) });
      host.replaceChildren(el("div", { class: "beside" }, drawing, moves), rows, el("p", { class: "dim" }, notes.join(" ")));
      if (found.tree) tree(drawing, { title: "Cuts of clusters", root: found.tree, clients: clients ? clients.name.length : found.tree.size, room: host.clientWidth - (moves ? 320 : 0) });
    }, { wide: true });
  }

  function map(home, run, id, title, labels, name) {
    const { map: places } = run;
    const colours = places.clients.map((i) => (labels ? labels[i] : -1));
    const shownOf = places.clients.length < places.of ? ` ${places.clients.length} of ${places.of} clients are shown.` : "";
    panel(home, id, title, `Each point is the last model a client sent; close points are similar models.${shownOf}`, (host, item) => {
      const later = !places.tsne && options.tsne;
      const kind = choices.map === "tsne" && places.tsne ? "tsne" : "pca";
      const ways = [["pca", "PCA"]].concat(places.tsne || later ? [["tsne", "t-SNE"]] : []);
      choose(item.controls, ways, kind, async (key) => {
        choices.map = key;
        if (key === "tsne" && !places.tsne && options.tsne) { item.controls.append(el("span", { class: "dim" }, "computing …")); places.tsne = await options.tsne(run); }
        for (const other of ["map-cluster", "map-group"]) if (panels.has(other)) repaint(panels.get(other));
      });
      const [px, py] = places[kind];
      const kinds = [...new Set(colours)].sort((a, b) => a - b);
      const label = kind === "pca" ? `component 1 (${(100 * places.share[0]).toFixed(0)} % of the variance) and 2 (${(100 * places.share[1]).toFixed(0)} %)` : "t-SNE: only neighbourhoods are meaningful";
      points(host, { title: `${title} (${kind === "pca" ? "PCA" : "t-SNE"})`, x: px, y: py, colours, xLabel: host.clientWidth > 420 ? label : kind === "pca" ? "PCA" : "t-SNE",
        legend: kinds.length <= 16 ? kinds.map((k) => ({ name: name(k), colour: k })) : null,
        describe: (i) => facts(run, places.clients[i]) });
    });
  }

  function facts(run, i) {
    const c = run.clients, text = [c.name[i]];
    if (c.cluster) text.push(clusterName(c.cluster[i]));
    if (c.group) text.push(`true group ${run.groups[c.group[i]]}`);
    if (c.accuracy) text.push(`accuracy ${percent(c.accuracy[i])}`);
    if (c.samples) text.push(`${c.samples[i]} training samples`);
    return text;
  }

  // ---- clients ----

  function clients(home, run) {
    const c = run.clients;
    if (!c) return;
    const score = c.accuracy || c.loss;
    if (score) {
      const isLoss = !c.accuracy, cluster = c.cluster || c.name.map(() => 0);
      const alone = !run.sizes && run.curves.round.length > 0;
      const lot = (i) => (alone ? 0 : cluster[i]);
      const order = c.name.map((_, i) => i).filter((i) => known(score[i])).sort((a, b) => lot(a) - lot(b) || score[a] - score[b]);
      const title = isLoss ? "Loss of each client" : "Accuracy of each client";
      panel(home, "clients", title, `Last evaluation, sorted${alone ? "" : " within each cluster"}; dashed lines are means.`, (host) => {
        const values = order.map((i) => score[i]);
        const bounds = Charts.extent([values]);
        if (!isLoss) { bounds[0] = Math.max(0, bounds[0]); bounds[1] = Math.min(1.005, bounds[1]); }
        points(host, { title, x: order.map((_, i) => i), y: values, colours: order.map(lot), margin: { left: 52, right: 10, top: 10, bottom: 24 }, height: 260, describe: (i) => facts(run, order[i]),
          axes: (f) => {
            const py = Charts.yAxis(f, bounds[0], bounds[1], isLoss ? short : (v) => `${+(100 * v).toFixed(2)} %`, null);
            const px = (v) => f.x0 + ((v + 0.5) / Math.max(1, order.length)) * (f.x1 - f.x0);
            // Names if all fit, otherwise numbers.
            const sizes = new Map();
            for (const i of order) sizes.set(lot(i), (sizes.get(lot(i)) || 0) + 1);
            const short_ = Math.min(...sizes.values()) * (px(1) - px(0)) < 58;
            let start = 0;
            while (start < order.length) {
              let stop = start;
              while (stop < order.length && lot(order[stop]) === lot(order[start])) stop++;
              const mean = values.slice(start, stop).reduce((a, b) => a + b, 0) / (stop - start);
              Charts.draw("line", { class: "mark", x1: px(start - 0.4), x2: px(stop - 0.6), y1: py(mean), y2: py(mean), stroke: colour(lot(order[start])), "stroke-width": 1.5, "stroke-dasharray": "4 3" }, f.svg);
              const room = px(stop) - px(start);
              if (!alone && room > 16) Charts.draw("text", { x: (px(start - 0.5) + px(stop - 0.5)) / 2, y: f.height - 6, "text-anchor": "middle", text: short_ ? (lot(order[start]) < 0 ? "–" : lot(order[start])) : clusterName(lot(order[start])) }, f.svg);
              start = stop;
            }
            return [px, py];
          } });
      }, { wide: order.length > 80, table: () => everyClient(run) });
    }
    if (run.fairness) {
      const f = run.fairness;
      panel(home, "fairness", "Fairness", "The five clients with the lowest accuracy, and how evenly accuracy is distributed.", (host) => {
        host.replaceChildren(
          table({ columns: [{ name: "client", wide: true }, { name: "accuracy", number: true, show: percent }, { name: "cluster", number: true }, ...(c.group ? [{ name: "true group" }] : []), { name: "samples", number: true }],
            rows: f.worst.map((i) => [c.name[i], c.accuracy[i], c.cluster ? (c.cluster[i] < 0 ? "not seen" : c.cluster[i]) : null, ...(c.group ? [run.groups[c.group[i]]] : []), c.samples ? c.samples[i] : null]) }),
          el("p", { class: "dim" }, `Mean ${percent(f.mean)}, standard deviation ${percent(f.deviation)}; ${f.parts.map(([label, value]) => `${label} ${percent(value)}`).join(", ")}; Jain's index ${f.jain.toFixed(4)} (1: all equal).`));
      });
    }
    if (run.labels) {
      const l = run.labels, names = run.groups;
      const legend = c.group && names.length <= 16 ? names.map((name, g) => ({ name, colour: g })) : null;
      const title = "Classes held by each client";
      const left = Math.max(34, Math.min(110, 10 + 6.2 * Math.max(...l.classes.map((name) => String(name).length))));
      if (l.kind === "bubbles") {
        panel(home, "labels", title, `The area of a bubble is the number of training samples${c.group ? "; clients are ordered by true group" : ""}.`,
          (host) => bubbles(host, { title, left, counts: l.counts, classes: l.classes, colours: l.clients.map((i) => (c.group ? c.group[i] : 0)), names: l.clients.map((i) => c.name[i]), legend, xLabel: `${l.clients.length} clients${c.group ? ", by true group" : ""}` }),
          { wide: l.clients.length > 60, table: () => plain(["client", ...l.classes.map((k) => `class ${k}`)], l.clients.map((i, row) => [c.name[i], ...l.counts[row]])) });
      } else {
        const bands = [];
        l.group.forEach((g, i) => { const last = bands[bands.length - 1]; if (last && last.colour === g) last.to = i + 1; else bands.push({ colour: g, from: i, to: i + 1, name: names[g] || "" }); });
        panel(home, "labels", title, `Share of each class at each client. Clients are ordered by ${c.group ? "true group, then by " : ""}most frequent class; neighbours are averaged.`,
          (host) => grid(host, { title, values: l.shares, rows: l.classes.map(String), columns: null, left, bottom: 22, cellHeight: l.classes.length > 20 ? 7 : 16, most: 40, bands: c.group ? bands : null, xLabel: `${l.of} clients`,
            describe: (r, i, v) => [`class ${l.classes[r]}`, `${percent(v)} of the samples${c.group ? ` (${names[l.group[i]]})` : ""}`] }), { wide: true });
      }
    }
  }

  function everyClient(run) {
    const c = run.clients;
    const parts = [["cluster", c.cluster && c.cluster.map(clusterName)], ["true group", c.group && c.group.map((g) => run.groups[g])], ["accuracy", c.accuracy], ["F1", c.f1], ["loss", c.loss], ["training samples", c.samples]].filter(([, v]) => v);
    return table({ columns: [{ name: "client", wide: true }, ...parts.map(([name]) => ({ name, number: !["cluster", "true group"].includes(name), show: ["accuracy", "F1"].includes(name) ? percent : undefined }))],
      rows: c.name.map((name, i) => [name, ...parts.map(([, v]) => v[i])]) });
  }

  // ---- bytes and seconds ----

  function sent(run) {
    const zero = run.curves.round.map(() => 0), at = (name) => run.curves[name] || zero;
    return run.curves.round.map((_, i) => (at("down")[i] || 0) + (at("up")[i] || 0) + (at("start_bytes")[i] || 0) + (at("repair_bytes")[i] || 0));
  }

  function costs(home, run) {
    const x = run.curves.round;
    if (!x.length) return;
    if (has(run, "down") && has(run, "up")) {
      const series = [["down", "to clients", 0], ["up", "from clients", 1], ["start_bytes", "start", 2], ["repair_bytes", "repairs", 3]].filter(([key]) => has(run, key) && run.curves[key].some((v) => v > 0)).map(([key, name, c]) => ({ name, colour: c, values: run.curves[key] }));
      if (series.length) panel(home, "bytes", "Bytes sent so far", "Models and arrays in both directions, without evaluation.",
        (host) => stacked(host, { title: "Bytes sent so far", x, xLabel: "round", series, format: bytes }),
        { table: () => table({ columns: [{ name: "round", number: true }, ...series.map((s) => ({ name: s.name, number: true, show: bytes }))], rows: x.map((r, i) => [r, ...series.map((s) => s.values[i])]) }) });
    }
    const score = has(run, "accuracy") ? "accuracy" : "loss";
    if (has(run, score) && has(run, "down") && sent(run).some((v) => v > 0)) {
      const format = score === "accuracy" ? percent : short, title = score === "accuracy" ? "Accuracy against bytes" : "Loss against bytes";
      panel(home, "against-bytes", title, "Bytes sent in both directions, including the start, when a score was reached.",
        (host) => lines(host, { title, x: sent(run), series: [{ name: score, colour: 0, values: run.curves[score], width: 2.2 }], xLabel: "bytes sent", xName: "sent", xFormat: bytes, format, xMin: 0, axisFormat: score === "accuracy" ? (v) => `${+(100 * v).toFixed(2)} %` : short }),
        { table: () => table({ columns: [{ name: "round", number: true }, { name: "sent", number: true, show: bytes }, { name: score, number: true, show: format }], rows: x.map((r, i) => [r, sent(run)[i], run.curves[score][i]]) }) });
    }
    if (has(run, "train_seconds")) {
      const series = [["train_seconds", "clients", 0], ["server_seconds", "server", 1], ["evaluate_seconds", "evaluation", 2]].map(([key, name, c]) => ({ name, colour: c, values: run.curves[key] || x.map(() => 0) }));
      panel(home, "seconds", "Seconds per round", "Time of each round by part.",
        (host) => stacked(host, { title: "Seconds per round", x, xLabel: "round", series, format: (v) => `${short(v)} s` }),
        { table: () => plain(["round", ...series.map((s) => s.name)], x.map((r, i) => [r, ...series.map((s) => s.values[i])])) });
    }
  }

  // ---- pictures ----

  function pictures(home, run) {
    if (run.members) {
      panel(home, "members", run.sizes ? "Samples of cluster members" : "Samples of some clients", "Training samples as the clients see them, ordered by class.", (host) => {
        host.replaceChildren(el("div", { class: "members" }, run.members.map((group) => {
          const box = el("section", { class: "mark" }, el("h4", {}, clusterName(group.cluster)), group.members.map((member) => el("figure", {},
            el("img", { class: "strip", src: member.strip, width: 300, alt: `samples of ${run.clients.name[member.client]}, classes ${member.labels.join(", ")}` }),
            el("figcaption", {}, run.clients.name[member.client], run.clients.group ? ` (${run.groups[run.clients.group[member.client]]})` : "", member.labels[0] >= 0 ? `: classes ${member.labels.join(" ")}` : ""))));
          box.style.borderColor = colour(group.cluster);
          return box;
        })));
      }, { wide: true });
    }
    if (run.pseudo) pseudo(home, run);
  }

  function pseudo(home, run) {
    const p = run.pseudo, K = p.clusters.length, L = p.told[0][0].length;
    if (p.strips) panel(home, "pseudo", "Pseudo samples of each center", "Inputs that the center classifies as class 0, 1, 2 … (columns), each on its own grey scale. They represent a kind of client but are no client's data.", (host) => {
      host.replaceChildren(el("div", { class: "members" }, p.clusters.map((k, i) => {
        const box = el("section", { class: "mark" }, el("h4", {}, clusterName(k)), el("img", { class: "strip", src: p.strips[i], width: 420, alt: `pseudo samples of ${clusterName(k)}` }));
        box.style.borderColor = colour(k);
        return box;
      })));
    }, { wide: true });
    const judge = p.witness ? "a model trained from scratch on the cluster's clients" : "the center itself";
    panel(home, "pseudo-map", "Classification of pseudo samples", `Rows: the intended class; columns: the mean prediction of ${judge}. The diagonal is correct.`, (host) => {
      const boxes = p.clusters.map((k) => [k, el("div", {})]);
      host.replaceChildren(el("div", { class: "members" }, boxes.map(([k, box]) => el("div", {}, el("h4", {}, clusterName(k)), box))));
      boxes.forEach(([k, box], j) => grid(box, { title: `Classification of pseudo samples of ${clusterName(k)}`, values: p.witness ? p.witness[j] : p.told[j][j], rows: [...Array(L).keys()], columns: [...Array(L).keys()], left: 26, bottom: 34, square: true, most: 26, top: 1, xLabel: "predicted",
        describe: (r, c, v) => [`intended class ${r}`, `predicted ${c}: ${percent(v)}`] }));
    }, { wide: true });
    if (K > 1) {
      const share = p.told.map((row) => row.map((m) => m.reduce((sum, line, k) => sum + line[k], 0) / L));
      panel(home, "pseudo-cross", "Pseudo samples across centers", "Mean probability that a center (column) gives to the intended class of another center's pseudo samples (row). A strong diagonal: the centers differ.",
        (host) => grid(host, { title: "Classification of pseudo samples across centers", values: share, rows: p.clusters.map(clusterName), columns: p.clusters.map((k) => `center ${k}`), left: 78, most: 80, cellHeight: 28, top: 1, numbers: (v) => v.toFixed(2), xLabel: "classified by",
          describe: (r, c, v) => [`samples of ${clusterName(p.clusters[r])}`, `classified by center ${p.clusters[c]}: ${percent(v)}`] }));
    }
  }

  // ---- repairs, failures, settings ----

  function trouble(home, run) {
    const started = run.movement && known(run.movement.moved);
    if (run.movement) panel(home, "movement", started ? "Start and end" : "Changes of cluster", started ? "What the start found, and what the rounds changed." : "How often clients came to another cluster.", (host) => {
      const m = run.movement, ari = (value) => (known(value) ? value.toFixed(2) : "–");
      const lines = started ? [`ARI after the start ${ari(m.start)}, at the end ${ari(m.end)}.`, `${m.moved} clients are in another cluster than after the start.`] : [];
      lines.push(m.changes.length ? "Clients that changed their cluster, by round:" : "No client changed its cluster in any round.");
      const parts = lines.map((line) => el("p", {}, line));
      host.replaceChildren(...parts, ...(m.changes.length ? [plain(["round", "clients"], m.changes)] : []));
    });
    if (run.repairs.length) panel(home, "repairs", "Repairs", "Broken clusters that the guard repaired during the run.", (host) => host.replaceChildren(plain(["round", "repair"], run.repairs.map((r) => [r.round, r.reason]), [true, false])));
    if (run.failures) panel(home, "failures", "Failures", `${run.failures.total.toLocaleString("en")} ${run.failures.total === 1 ? "answer" : "answers"} missing or unusable; the rounds continued without them.`, (host, item) => {
      host.replaceChildren(plain(["reason", "answers"], run.failures.reasons));
    }, { table: () => plain(["round", "client", "step", "reason"], run.failures.rows, [true, false, false, false]) });
    if (run.notes.length || run.choice || run.unseen) panel(home, "notes", "Notes", "Notes of the run.", (host) => {
      const more = [];
      if (run.choice) more.push(`Number of clusters chosen: ${run.choice.recommended} (${run.choice.reason})`);
      if (run.unseen) more.push(`${run.unseen.clients} clients were held out and evaluated at the end: ${known(run.unseen.accuracy) ? `accuracy ${percent(run.unseen.accuracy)}` : `loss ${known(run.unseen.loss) ? run.unseen.loss.toFixed(4) : "–"}`}, ARI with members ${known(run.unseen.ari) ? run.unseen.ari.toFixed(2) : "–"}`);
      host.replaceChildren(el("ul", {}, [...more, ...run.notes].map((note) => el("li", {}, note))));
    });
  }

  function closing(home, run) {
    panel(home, "settings", "Settings", "The command that repeats the run, and all resolved settings.", (host) => {
      host.replaceChildren(el("pre", {}, run.command), el("details", {}, el("summary", {}, `${run.settings.length} settings`), plain(["table", "field", "value"], run.settings, [false, false, false])),
        el("details", {}, el("summary", {}, "environment"), plain(["name", "value"], run.environment, [false, false])));
    }, { wide: true });
  }

  // ---- several runs ----

  function comparison(home) {
    let head = home.querySelector("h2"), cards = home.querySelector(".cards");
    if (!head) { head = el("h2", {}, ""); cards = el("div", { class: "cards" }); home.append(head, cards); }
    head.textContent = `${data.runs.length} runs compared`;
    if (data.compare.heat) heat(cards, data.compare.heat);
    const offered = data.runs[0].metrics.filter((m) => ["curves", "compare"].some((where) => m.shown.includes(where)) && data.runs.some((run) => has(run, m.key)));
    if (!offered.some((m) => m.key === choices.metric) && offered.length) choices.metric = offered[0].key;
    panel(cards, "overlay", "Curves", "One line per row of the table: the mean over its seeds, with the standard deviation as a band. Click a name in the legend to hide its line.", (host, item) => {
      const metric = data.runs[0].metrics.find((m) => m.key === choices.metric), name = metric.label, format = formatOf(metric);
      const select = el("select", { "aria-label": "score", onchange: (event) => { choices.metric = event.target.value; repaint(item); } }, offered.map((m) => el("option", { value: m.key, selected: m.key === choices.metric }, m.label)));
      const against = el("select", { "aria-label": "against", onchange: (event) => { choices.against = event.target.value; repaint(item); } }, [["round", "by round"], ["bytes", "by bytes sent"], ["seconds", "by seconds"]].map(([key, text]) => el("option", { value: key, selected: key === choices.against }, text)));
      const each = el("label", {}, el("input", { type: "checkbox", checked: choices.each, onchange: (event) => { choices.each = event.target.checked; repaint(item); } }), " every run");
      const places = data.compare.heat ? [el("select", { "aria-label": "situation", onchange: (event) => { choices.situation = event.target.value; repaint(item); } }, data.compare.heat.names.map((s) => el("option", { value: s, selected: s === choices.situation }, s)))] : [];
      item.controls.replaceChildren(...places, select, against, each);
      const isBytes = choices.against === "bytes", isTime = choices.against === "seconds";
      lines(host, { title: `${name} of ${data.runs.length} runs`, x: [], height: 320, series: overlay(choices.metric), format, nearest: true, floor: floorOf(metric), ceiling: format === percent ? 1 : undefined,
        axisFormat: format === percent ? (v) => `${+(100 * v).toFixed(2)} %` : short, xLabel: isBytes ? "bytes sent" : isTime ? "seconds" : "round", xFormat: isBytes ? bytes : short, xMin: isBytes || isTime ? 0 : undefined });
    }, { wide: true });
    panel(cards, "table", "Table", "", (host) => { host.replaceChildren(paper()); }, { wide: true });
  }

  // Situations and methods: the numbers are in the cells, so nothing is read from a colour or a tooltip alone.
  function heat(home, found) {
    const { names, about, methods, cells, maps, behind, worst } = found;
    if (!names.includes(choices.situation)) choices.situation = names[0];
    const chosen = () => maps.find((m) => m.key === choices.heat) || maps[0];
    const text = (m, pair, digits) => (known(pair[0]) ? (m.unit === "%" ? 100 * pair[0] : pair[0]).toFixed(digits) : "–") + (known(pair[1]) ? ` ±${(m.unit === "%" ? 100 * pair[1] : pair[1]).toFixed(digits)}` : "");
    const title = (m) => `${m.title}${m.unit ? `, ${m.unit}` : ""}`;
    panel(home, "heat", "Situations and methods", `Mean over the seeds. Colour of scores: how far a method is behind the best one in that situation; full colour and bold is the best, no colour is 15 points (of a loss: 15 %) or more behind. Regret: this distance, and the worst of all situations. Colour of ARI: its value.`, (host, item) => {
      const map = chosen(), isRegret = map.key === "regret"; // which has one more row: the worst of all situations
      const least = Math.min(...worst.filter(known)), last = worst.map((v) => (known(v) ? (behind ? Math.max(0, 1 - v / behind) : 0) : null));
      const pairOf = (r, c) => (r < names.length ? cells[r][c][map.key] : [worst[c]]);
      const isBest = (r, c) => (r < names.length ? map.relative && map.shades[r][c] === 1 : worst[c] === least);
      choose(item.controls, maps.map((m) => [m.key, m.title]), map.key, (key) => { choices.heat = key; repaint(item); });
      grid(host, { title: `${title(map)} of ${methods.length} methods in ${names.length} situations`, values: isRegret ? [...map.shades, last] : map.shades, top: 1, rows: isRegret ? [...names, "worst regret"] : names, columns: methods, left: 126, most: 120, cellHeight: 26, zeros: true, bold: isBest,
        numbers: (v, r, c, width) => { const pair = pairOf(r, c), digits = map.unit === "%" ? 1 : map.digits; return text(map, width < 76 ? [pair[0]] : pair, digits); },
        describe: (r, c) => { if (r === names.length) return [`${methods[c]}, worst regret: ${text(map, [worst[c]], map.digits)}`]; const cell = cells[r][c]; return [`${names[r]}, ${methods[c]}`, about[r], ...(cell ? [...maps.map((m) => `${title(m)}: ${text(m, cell[m.key], m.digits)}`), `sent: ${bytes(1e6 * cell.megabytes)}`, `${cell.seeds} seed(s)`] : ["no run"])].filter(Boolean); } });
    }, { wide: true,
      table: () => table({ columns: ["situation", "method", "seeds", ...maps.map(title), "MB sent", "what"].map((name, i, all) => ({ name, number: i > 1 && i < all.length - 1 })),
        rows: names.flatMap((name, r) => methods.flatMap((method, c) => { const cell = cells[r][c]; return cell ? [[name, method, cell.seeds, ...maps.map((m) => ({ text: text(m, cell[m.key], m.digits), sort: cell[m.key][0], best: m.relative && m.shades[r][c] === 1 })), cell.megabytes, about[r]]] : []; })) }) });
  }

  function xOf(run) {
    if (choices.against === "bytes") return sent(run);
    if (choices.against === "seconds") {
      let total = 0;
      return run.curves.round.map((_, i) => (total += ["train", "server", "evaluate"].reduce((sum, part) => sum + ((run.curves[`${part}_seconds`] || [])[i] || 0), 0)));
    }
    return run.curves.round;
  }

  function overlay(metric) {
    const several = data.compare.datasets > 1;
    const rows = data.compare.rows.filter((row) => !data.compare.heat || row.situation === choices.situation);
    return rows.flatMap((row, c) => {
      const name = several && !data.compare.heat ? `${row.label} on ${row.dataset}` : row.label, dash = ["", "9 3", "4 2.5", "10 3 2 3", "7 2 2 2 2 2"][c % 5]; // of two lines that coincide, both are visible
      const runs = row.runs.map((i) => data.runs[i]).filter((run) => has(run, metric));
      if (!runs.length) return [];
      if (choices.each || runs.length === 1) return runs.map((run) => ({ name: runs.length === 1 ? name : `${name}, seed ${run.seed}`, colour: c, dash, x: xOf(run), values: run.curves[metric], width: 1.4 }));
      // Rounds that all runs have: unfinished runs are compared up to the shortest.
      const common = runs[0].curves.round.filter((r) => runs.every((run) => run.curves.round.includes(r)));
      const x = [], mean = [], low = [], high = [];
      for (const r of common) {
        const at = runs.map((run) => run.curves.round.indexOf(r)), values = runs.map((run, j) => run.curves[metric][at[j]]);
        if (!values.every(known)) continue;
        const m = values.reduce((a, b) => a + b, 0) / values.length, s = Math.sqrt(values.reduce((a, b) => a + (b - m) ** 2, 0) / (values.length - 1));
        x.push(runs.reduce((sum, run, j) => sum + xOf(run)[at[j]], 0) / runs.length); mean.push(m); low.push(m - s); high.push(m + s);
      }
      return [{ name: `${name} (${runs.length} seeds)`, colour: c, dash, x, values: mean, band: [low, high], bands: [[low, high, 0.18]], width: 2 }];
    });
  }

  function paper() {
    const { columns, rows, datasets } = data.compare;
    const seeds = Math.max(...rows.map((row) => row.runs.length));
    const cell = (value, column) => {
      const [mean, deviation, best] = value;
      if (!known(mean)) return { text: "–", sort: null };
      return { text: mean.toFixed(column[2]) + (known(deviation) ? ` ±${deviation.toFixed(column[2])}` : ""), sort: mean, best };
    };
    const p = (row) => {
      if (row.best) return { text: "best", sort: 2 };
      if (!known(row.p)) return { text: "–", sort: null };
      return { text: `${row.p < 0.001 ? "< 0.001" : row.p.toFixed(3)} (n = ${row.pairs})`, sort: row.p };
    };
    const tested = rows.some((row) => known(row.p));
    const made = table({
      class: "paper", columns: [{ name: "method", wide: true }, ...(datasets > 1 ? [{ name: "data" }] : []), { name: "seeds", number: true }, ...columns.map(([, title, , unit]) => ({ name: unit === "%" ? `${title} %` : title, number: true })), ...(tested ? [{ name: "p against the best", number: true }] : [])],
      rows: rows.map((row) => [row.label, ...(datasets > 1 ? [row.dataset] : []), row.runs.length, ...row.cells.map((value, i) => cell(value, columns[i])), ...(tested ? [p(row)] : [])]) });
    const test = tested ? ` p: two-sided paired t-test of accuracy over the seeds that a row shares with the best row, with Holm's correction for the number of rows; with n = ${Math.min(...rows.filter((r) => known(r.p)).map((r) => r.pairs))} pairs it detects only large and consistent differences.` : seeds < 2 ? " One seed each: differences may be due to chance." : "";
    return el("div", {}, made, el("p", { class: "dim" }, `Mean${seeds > 1 ? " ± standard deviation over seeds" : ""}; the best value of each column is bold.${test} Click a column head to sort.`));
  }

  // ---- light and dark ----

  function theme() {
    const button = document.getElementById("theme"), html = document.documentElement;
    if (!button) return;
    const isDark = () => (html.dataset.theme ? html.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
    const name = () => { button.textContent = isDark() ? "light" : "dark"; };
    try { const kept = localStorage.getItem("coterie-theme"); if (kept === "light" || kept === "dark") html.dataset.theme = kept; } catch { /* a page opened from a file may have no storage */ }
    button.addEventListener("click", () => {
      html.dataset.theme = isDark() ? "light" : "dark";
      try { localStorage.setItem("coterie-theme", html.dataset.theme); } catch { /* as above */ }
      name();
    });
    name();
  }

  addEventListener("DOMContentLoaded", () => {
    theme();
    const inside = document.getElementById("data");
    if (inside) show(JSON.parse(inside.textContent), document.getElementById("page"));
  });
  return { show };
})();
