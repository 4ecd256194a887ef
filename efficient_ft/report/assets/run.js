"use strict";
/* Sort a table by the column of the pressed button. Missing values are always last. */
for (const table of document.querySelectorAll("table.sort")) {
  for (const [column, head] of [...table.tHead.rows[0].cells].entries()) {
    head.firstChild.addEventListener("click", () => {
      const word = head.className === "word", up = head.ariaSort ? head.ariaSort !== "ascending" : word;
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = row => {
        const cell = row.cells[column], value = cell.dataset.value;
        return value === undefined ? cell.textContent : value === "" ? null : Number(value);
      };
      const rows = [...table.tBodies[0].rows].sort((one, other) => {
        const [a, b] = [key(one), key(other)];
        if (a === null || b === null) return (a === null) - (b === null);
        const order = typeof a === "number" ? a - b : a.localeCompare(b, "en", {numeric: true});
        return up ? order : -order;
      });
      table.tBodies[0].append(...rows);
    });
  }
}
/* Name the entry of a confusion matrix under the pointer, or the entry that the arrow keys select. */
for (const matrix of document.querySelectorAll(".matrix")) {
  const {names, support, correct, confusions} = JSON.parse(matrix.querySelector("script").textContent);
  const svg = matrix.querySelector("svg"), output = matrix.querySelector("output"), region = svg.parentNode;
  const size = Number(svg.dataset.size), margin = Number(svg.dataset.margin), counts = new Map();
  for (const text of confusions ? confusions.split(" ") : []) counts.set(...text.split(":"));
  const cursor = document.createElementNS(svg.namespaceURI, "rect");
  let row = 0, column = 0;
  const show = (r, c) => {
    [row, column] = [r, c];
    for (const [name, value] of Object.entries({class: "cursor", x: margin + c * size, y: margin + r * size, width: size,
      height: size})) cursor.setAttribute(name, value);
    svg.append(cursor);
    const number = r === c ? correct[r] : Number(counts.get(`${r}>${c}`) || 0);
    const share = support[r] ? ` (${(100 * number / support[r]).toFixed(1)} %)` : "";
    output.textContent = `true ${names[r]}, predicted ${names[c]}: ${number} of ${support[r]}${share}`;
  };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const [c, r] = [event.clientX - box.left, event.clientY - box.top].map(v => Math.floor((v * scale - margin) / size));
    if (r >= 0 && c >= 0 && r < names.length && c < names.length) show(r, c);
  });
  region.addEventListener("focus", () => show(row, column));
  region.addEventListener("keydown", event => {
    const [down, right] = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key] || [];
    if (down === undefined) return;
    event.preventDefault();
    const within = value => Math.min(Math.max(value, 0), names.length - 1);
    show(within(row + down), within(column + right));
    cursor.scrollIntoView({block: "nearest", inline: "nearest"});
  });
}
/* Show only the samples with the selected class. */
for (const filter of document.querySelectorAll(".filter")) {
  const group = filter.closest(".filtered"), output = group.querySelector("output");
  filter.addEventListener("change", () => {
    let shown = 0;
    const figures = group.querySelectorAll("figure");
    for (const figure of figures) {
      figure.hidden = filter.value !== "" && !figure.dataset.classes.split(" ").includes(filter.value);
      shown += !figure.hidden;
    }
    output.textContent = `${shown} of ${figures.length} samples are shown.`;
  });
}
document.documentElement.dataset.ready = "yes";
