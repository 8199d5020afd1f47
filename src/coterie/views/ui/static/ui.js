// The live pages: poll the server and show what has changed. Answers have an ETag, so that an unchanged run costs almost
// nothing.
"use strict";
(() => {
  const { el, table, percent, short, known } = Charts;
  const body = document.body, source = body.dataset.source, isList = body.dataset.kind === "list";
  const home = document.getElementById("page"), status = document.getElementById("status");
  let mark = null, timer = 0;

  async function ask() {
    clearTimeout(timer);
    let wait = 1500;
    try {
      const answer = await fetch(source, { headers: mark ? { "If-None-Match": mark } : {}, cache: "no-store" });
      if (answer.status === 200) {
        const data = await answer.json();
        mark = answer.headers.get("ETag");
        if (isList) list(data); else run(data);
        say("");
      } else if (answer.status !== 304) {
        const refusal = await answer.json().catch(() => ({}));
        mark = null;
        say(refusal.error || `The server answered ${answer.status}.`, true);
        wait = 4000;
      } else say("");
    } catch (error) {
      if (error instanceof TypeError && !String(error.message).includes("fetch")) throw error;
      say("The server does not respond; retrying.", true);
      wait = 4000;
    }
    timer = setTimeout(ask, document.hidden ? 5000 : wait);
  }

  function say(text, bad) {
    status.textContent = text;
    status.className = bad ? "note" : "dim";
    status.hidden = !text;
  }

  // ---- a run, or several ----

  function run(data) {
    const fetchMap = async (one) => {
      const answer = await fetch(`/api/tsne/${one.id.split("/").map(encodeURIComponent).join("/")}`);
      return answer.ok ? answer.json() : null;
    };
    Report.show(data, home, { tsne: fetchMap });
  }

  // ---- the list ----

  const selected = new Set(), order = { by: null, down: false };
  let shown = null, wanted = "";
  const filter = el("input", { type: "search", placeholder: "filter", "aria-label": "filter runs", oninput: (event) => { wanted = event.target.value.toLowerCase(); list(shown); } });
  const go = el("button", { type: "button", id: "compare", disabled: true, onclick: () => { location.href = "/compare?" + [...selected].map((id) => "run=" + encodeURIComponent(id)).join("&"); } }, "compare");
  const link = (id) => "/run/" + id.split("/").map(encodeURIComponent).join("/");
  const ago = (s) => (s < 90 ? `${Math.max(0, Math.round(s))} s ago` : s < 5400 ? `${Math.round(s / 60)} min ago` : s < 172800 ? `${Math.round(s / 3600)} h ago` : `${Math.round(s / 86400)} days ago`);

  function name() {
    go.textContent = selected.size > 1 ? `compare ${selected.size} runs` : "compare (select two or more)";
    go.disabled = selected.size < 2;
  }

  function list(data) {
    shown = data;
    for (const id of selected) if (!data.runs.some((r) => r.id === id && r.state !== "damaged")) selected.delete(id);
    const runs = data.runs.filter((r) => !wanted || `${r.id} ${r.algorithm} ${r.dataset} ${r.state}`.toLowerCase().includes(wanted));
    const now = Date.now() / 1000;
    const rows = runs.map((r) => {
      const box = r.state === "damaged" ? null : el("input", { type: "checkbox", "aria-label": `compare ${r.id}`, checked: selected.has(r.id), onchange: (event) => { if (event.target.checked) selected.add(r.id); else selected.delete(r.id); name(); } });
      if (r.state === "damaged") return [{ text: "", sort: 2 }, { node: el("span", {}, r.id, el("br"), el("span", { class: "bad" }, r.reason)), sort: r.id }, { node: el("span", { class: "badge damaged" }, "damaged"), sort: "damaged" }, ...Array(8).fill({ text: "", sort: null })];
      const progress = el("span", {}, el("progress", { max: r.planned || 1, value: r.done, "aria-label": "progress" }), ` ${r.done}/${r.planned}`, known(r.left) ? ` (${Math.round(r.left)} s left)` : "");
      return [{ node: box, sort: selected.has(r.id) ? 0 : 1 }, { node: el("a", { href: link(r.id) }, r.id), sort: r.id }, { node: el("span", { class: `badge ${r.state}` }, r.state), sort: r.state },
        { node: progress, sort: r.planned ? r.done / r.planned : 0 }, r.algorithm, r.dataset, r.seed, { text: known(r.accuracy) ? percent(r.accuracy) : known(r.loss) ? `loss ${short(r.loss)}` : "–", sort: r.accuracy },
        { text: known(r.ari) ? r.ari.toFixed(2) : "–", sort: r.ari }, { text: known(r.seconds) ? `${r.seconds.toFixed(1)} s` : "–", sort: r.seconds }, { text: ago(now - r.changed), sort: r.changed }];
    });
    const columns = [{ name: "select" }, { name: "run", wide: true }, { name: "state" }, { name: "rounds" }, { name: "method" }, { name: "data" }, { name: "seed", number: true }, { name: "accuracy", number: true }, { name: "ARI", number: true }, { name: "time", number: true }, { name: "changed", number: true }];
    if (!go.isConnected) home.replaceChildren(el("p", { class: "dim", id: "folder" }, ""), el("div", { class: "controls" }, filter, go), el("div", { id: "runs" }));
    const damaged = data.runs.filter((r) => r.state === "damaged").length;
    document.getElementById("folder").textContent = `${data.runs.length} runs in ${data.folder}` + (damaged ? `, ${damaged} damaged` : "");
    document.getElementById("runs").replaceChildren(rows.length ? table({ columns, rows, class: "runs", state: order }) : el("p", {}, data.runs.length ? "No run matches the filter." : "No runs yet. Start one with: coterie run"));
    name();
  }

  ask();
  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
})();
