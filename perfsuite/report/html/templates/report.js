"use strict";
// Sorting, filtering and unfolding. Without this script, the page is complete, and cases are sorted by verdict.
(() => {
  const overview = document.getElementById("overview");
  if (!overview) return;
  const body = overview.tBodies[0];
  const rows = [...body.rows];
  const filter = document.getElementById("filter");
  const text = document.getElementById("text");
  const boxes = [...filter.querySelectorAll("input[type=checkbox]")];

  function value(row, column) {
    const cell = row.cells[column];
    if (!("number" in cell.dataset)) return cell.textContent.trim();
    return cell.dataset.number === "" ? null : Number(cell.dataset.number);
  }

  function sort(heading, column) {
    const down = heading.getAttribute("aria-sort") === "ascending";
    for (const other of overview.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const order = (a, b) => {
      const [x, y] = [value(a, column), value(b, column)];
      if (x === null || y === null) return (x === null) - (y === null); // unknown values come last
      const way = typeof x === "number" ? x - y : x.localeCompare(y);
      return down ? -way : way;
    };
    body.append(...rows.sort(order));
  }

  [...overview.tHead.rows[0].cells].forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    button.addEventListener("click", () => sort(heading, column));
    heading.append(button);
  });

  function show() {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const verdicts = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
    let shown = 0;
    for (const row of rows) {
      const searched = `${row.dataset.id} ${row.textContent}`.toLowerCase();
      const fits = verdicts.has(row.dataset.verdict) && words.every((word) => searched.includes(word));
      row.hidden = document.getElementById(row.dataset.case).hidden = !fits;
      shown += fits;
    }
    document.getElementById("shown").textContent = `${shown} of ${rows.length} cases`;
    document.getElementById("nothing").hidden = shown > 0;
  }

  filter.addEventListener("input", show);
  filter.addEventListener("submit", (event) => event.preventDefault());
  filter.hidden = false;
  show(); // after a reload, the browser might have kept the previous choices

  function unfold(id) {
    const details = document.getElementById(id)?.querySelector(":scope > details");
    if (details) details.open = true;
  }

  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#']");
    if (link) unfold(link.hash.slice(1));
  });
  window.addEventListener("hashchange", () => unfold(location.hash.slice(1)));
  unfold(location.hash.slice(1));

  const folding = document.getElementById("folding");
  folding.hidden = false;
  folding.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    for (const details of document.querySelectorAll(".case > details")) details.open = "open" in button.dataset;
  });
})();
