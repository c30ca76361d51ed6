"use strict";
// Draws every figure. Draws all of them again when the reader changes between the light and dark scheme.
(() => {
  const figures = JSON.parse(document.getElementById("figures-data").textContent);
  const drawn = figures.map((figure) => Plotly.newPlot(
    `figure-${figure.name}`, figure.data, { ...figure.layout, template: pageTheme.template() }, pageTheme.config,
  ));
  const viewer = placementViewer();
  if (viewer) drawn.push(viewer.draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const figure of figures) Plotly.relayout(`figure-${figure.name}`, { template: pageTheme.template() });
    if (viewer) viewer.draw();
  });
  Promise.all(drawn).then(() => { document.documentElement.dataset.drawn = String(drawn.length); });
})();
