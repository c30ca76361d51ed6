"use strict";
// Draws every figure in the colours of the page, again when the reader changes the light or dark scheme.
(() => {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  function template() {
    const [ink, soft, line, grid, card] = ["--ink", "--soft", "--line", "--grid", "--card"].map(colour);
    const axis = {
      gridcolor: grid, zerolinecolor: grid, linecolor: line, automargin: true,
      ticks: "outside", ticklen: 4, tickcolor: "rgba(0,0,0,0)", // Keeps the two labels at the origin apart.
      title: { font: { size: 12.5, color: soft }, standoff: 8 }, tickfont: { size: 11.5, color: soft },
    };
    const bar = {
      outlinewidth: 0, thickness: 12, tickfont: { size: 11.5, color: soft },
      title: { side: "right", font: { size: 12.5, color: soft } },
    };
    return {
      layout: {
        font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: ink },
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        hoverlabel: { bgcolor: card, bordercolor: line, font: { color: ink } },
        legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", traceorder: "normal", font: { color: ink } },
        annotationdefaults: { font: { size: 13, color: ink }, showarrow: false },
        coloraxis: { colorbar: bar },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: line, activecolor: soft },
        margin: { l: 64, r: 24, t: 56, b: 48 },
        xaxis: axis, yaxis: axis,
      },
      data: { heatmap: [{ colorbar: bar }] },
    };
  }
  const config = {
    responsive: true, displaylogo: false, displayModeBar: "hover",
    // The buttons are listed one by one, because other buttons would send the data to a server.
    plotlyServerURL: "",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };
  // The page shows the titles as text above the figures, where they can have several lines.
  const layout = (figure) => ({ ...figure.layout, title: undefined, template: template() });
  const figures = JSON.parse(document.getElementById("figures-data").textContent);
  const drawn = figures.map((figure, i) => Plotly.newPlot(`figure-${i}`, figure.data, layout(figure), config));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    figures.forEach((_, i) => Plotly.relayout(`figure-${i}`, { template: template() }));
  });
  Promise.all(drawn).then(() => { document.documentElement.dataset.drawn = String(drawn.length); });
})();
