"use strict";
// sort the table by a column, find adapters by name, and open the part that a link leads to
const table = document.getElementById("table");
const body = table.tBodies[0];

function keyOf(row, column) {
  const cell = row.cells[column];
  const key = column ? cell.dataset.key : row.dataset.name;
  return key === undefined || column < 2 ? key : Number(key);
}

function sortBy(column, head) {
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const rows = [...body.rows].sort((a, b) => {
    const [x, y] = [keyOf(a, column), keyOf(b, column)];
    if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
    return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
  });
  body.append(...rows);
}

[...table.tHead.rows[0].cells].forEach((head, column) => {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = head.textContent;
  button.addEventListener("click", () => sortBy(column, head));
  head.replaceChildren(button);
});

const find = document.getElementById("find");
if (find) {
  find.addEventListener("input", () => {
    const wanted = find.value.trim().toLowerCase();
    for (const part of document.querySelectorAll("[data-name]")) part.hidden = !part.dataset.name.includes(wanted);
  });
}

function openPart() {
  const part = location.hash && document.getElementById(location.hash.slice(1));
  if (part && part.tagName === "DETAILS") {
    part.open = true;
    part.scrollIntoView();
  }
}

addEventListener("hashchange", openPart);
openPart();
