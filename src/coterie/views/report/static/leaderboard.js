"use strict";
// Sort by a heading; show the columns of one paper, and take the means over them.
(() => {
  const table = document.querySelector("table.board"), body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const FIRST = 5; // name, cells, regret, rank, bytes
  let sorted = 2, up = true;
  const value = (row, column) => {
    const cell = row.cells[column];
    return column ? (cell.dataset.value ? Number(cell.dataset.value) : null) : cell.textContent;
  };
  const compare = (a, b) => {
    const x = value(a, sorted), y = value(b, sorted);
    if (x === null || y === null) return (x === null) - (y === null); // missing ones last, either way
    return (up ? 1 : -1) * (typeof x === "string" ? x.localeCompare(y) : x - y);
  };
  const sort = () => {
    heads.forEach((head, place) => {
      if (place === sorted) head.setAttribute("aria-sort", up ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    body.append(...[...body.rows].sort(compare));
  };
  const mean = (cells, name) => {
    const known = cells.map((cell) => cell.dataset[name]).filter((text) => text !== undefined).map(Number);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  };
  const choose = (paper) => {
    const shown = heads.map((head, place) => place < FIRST || !paper || head.dataset.paper === paper);
    heads.forEach((head, place) => { head.hidden = !shown[place]; });
    let count = 0;
    for (const row of body.rows) {
      [...row.cells].forEach((cell, place) => { cell.hidden = !shown[place]; });
      const own = [...row.cells].filter((cell, place) => place >= FIRST && shown[place] && cell.dataset.value);
      const means = [own.length, mean(own, "regret"), mean(own, "rank"), mean(own, "share")];
      means.forEach((number, place) => {
        row.cells[1 + place].dataset.value = number === null ? "" : number;
        row.cells[1 + place].textContent = number === null ? "-" : number.toFixed([0, 2, 1, 2][place]);
      });
      row.hidden = !own.length;
      count += own.length ? 1 : 0;
    }
    document.getElementById("count").textContent =
      `${count} methods, ${shown.filter((is, place) => is && place >= FIRST).length} cells`;
    sort();
  };
  heads.forEach((head, place) => head.querySelector("button").addEventListener("click", () => {
    // Names, regret, rank and bytes: the smallest first; accuracy and the number of cells: the largest.
    up = sorted === place ? !up : place !== 1 && place < FIRST;
    sorted = place;
    sort();
  }));
  document.getElementById("paper").addEventListener("change", (event) => choose(event.target.value));
  choose("");
})();
