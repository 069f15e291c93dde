"use strict";
// Sorting and filtering of the tables. Without this script they are whole, worst first.
(() => {
  const LIMIT = 250; // rows that are drawn until someone asks for all; the template leaves out the same
  const marks = { scalar: -1 };
  const key = (text) => {
    const number = parseFloat(text);
    return text in marks ? marks[text] : Number.isNaN(number) ? text.toLowerCase() : number;
  };
  const compare = (a, b) => {
    if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
    return typeof a === "number" ? -1 : 1; // what is no number stands behind all numbers
  };
  const isNumbers = (rows, at) => rows.some((row) => row.cells[at] && /^[-+]?[\d.]/.test(row.cells[at].textContent));
  for (const table of document.querySelectorAll("table[id]")) {
    const body = table.tBodies[0];
    const rows = Array.from(body.rows);
    const texts = { known: new Map(), get(row) { // read when first asked for: thousands of rows take a while
      if (!this.known.has(row)) this.known.set(row, row.textContent.toLowerCase());
      return this.known.get(row);
    } };
    const heads = Array.from(table.tHead.rows[0].cells);
    heads.forEach((head, at) => head.firstElementChild.addEventListener("click", () => {
      const falling = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const numeric = at > 1 && isNumbers(rows, at);
      const keys = new Map(rows.map((row) => {
        const text = row.cells[at].textContent.trim();
        return [row, numeric ? key(text) : text.toLowerCase()];
      }));
      const sorted = rows.slice().sort((a, b) => compare(keys.get(a), keys.get(b)) * (falling ? -1 : 1));
      body.append(...sorted);
      filter();
    }));
    const tools = Array.from(document.querySelectorAll(`[data-filters="${table.id}"]`));
    const count = document.querySelector(`[data-counts="${table.id}"]`);
    const more = document.querySelector(`[data-all="${table.id}"]`);
    const limit = () => more && more.getAttribute("aria-pressed") === "false" ? LIMIT : Infinity;
    const filter = () => {
      const words = tools[0].value.toLowerCase();
      const outcome = tools[1] ? tools[1].value : "";
      let shown = 0;
      for (const row of body.rows) {
        const fits = texts.get(row).includes(words) && (!outcome || row.classList.contains(outcome));
        row.hidden = !fits;
        shown += fits;
        row.classList.toggle("later", fits && shown > limit());
      }
      count.textContent = `${shown.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows`;
    };
    if (more) more.addEventListener("click", () => {
      more.setAttribute("aria-pressed", String(more.getAttribute("aria-pressed") === "false"));
      filter();
    });
    for (const tool of tools) tool.addEventListener("input", filter);
  }
})();
