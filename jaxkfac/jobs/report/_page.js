"use strict";
// Values under the pointer: positions are read back by the scales that stand at each drawing.
const tip = document.getElementById("tip");
const value = (at, [low, high, log, start, end]) => {
  const part = (at - start) / (end - start);
  return log ? low * (high / low) ** part : low + part * (high - low);
};
const words = (x) => Math.abs(x) >= 1000 && Math.abs(x) < 1e5 ? x.toFixed(0)
  : String(Number(x.toPrecision(3)));
const points = new WeakMap();
const of = (path) => {
  const steps = /[ML](-?[\d.]+) (-?[\d.]+)/g;
  if (!points.has(path))
    points.set(path, [...path.getAttribute("d").matchAll(steps)].map((m) => [+m[1], +m[2]]));
  return points.get(path);
};
for (const svg of document.querySelectorAll(".panel svg")) {
  const x = JSON.parse(svg.dataset.x), y = JSON.parse(svg.dataset.y);
  const at = document.createElementNS(svg.namespaceURI, "circle");
  at.setAttribute("class", "at");
  const leave = () => { at.remove(); tip.style.display = "none"; };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), unit = svg.viewBox.baseVal.width / box.width;
    const px = (event.clientX - box.left) * unit, py = (event.clientY - box.top) * unit;
    let best = null;
    for (const path of svg.querySelectorAll("path.line")) of(path).forEach(([a, b], i) => {
      const far = Math.hypot(a - px, (b - py) / 3);
      if (!best || far < best.far) best = { far, a, b, i, path };
    });
    if (!best || best.far > 40) return leave();
    at.setAttribute("cx", best.a); at.setAttribute("cy", best.b); at.setAttribute("r", 3.5);
    svg.append(at);
    const names = JSON.parse(best.path.dataset.names || "[]");
    const where = names.length ? names[best.i] : words(value(best.a, x));
    tip.textContent = `${best.path.dataset.label} · ${where}: ${words(value(best.b, y))}`;
    tip.style.display = "block";
    const left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 6);
    tip.style.left = `${Math.max(left, 4)}px`;
    tip.style.top = `${Math.max(event.clientY - tip.offsetHeight - 10, 4)}px`;
  });
  svg.addEventListener("pointerleave", leave);
}
const filter = document.querySelector(".filter input");
if (filter) filter.addEventListener("input", () => {
  const part = filter.value.trim().toLowerCase();
  for (const one of document.querySelectorAll("[data-layer]"))
    one.hidden = !one.dataset.layer.toLowerCase().includes(part);
});
