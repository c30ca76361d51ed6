"use strict";
// A plotly template with the colours of the page's style, which follow the reader's light or dark scheme.
const pageTheme = {
  colour: (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim(),
  template() {
    const [ink, soft, line, grid, card] = ["--ink", "--soft", "--line", "--grid", "--card"].map(this.colour);
    const axis = {
      gridcolor: grid, zerolinecolor: grid, linecolor: line, automargin: true,
      ticks: "outside", ticklen: 4, tickcolor: "rgba(0,0,0,0)", // Keeps the two labels at the origin apart.
      title: { font: { size: 12.5, color: soft }, standoff: 8 }, tickfont: { size: 11.5, color: soft },
    };
    const bar = { outlinewidth: 0, tickfont: { size: 11.5, color: soft }, title: { font: { size: 12.5, color: soft } } };
    return {
      layout: {
        font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: ink },
        title: { x: 0, xanchor: "left", xref: "paper", y: 1, yref: "container", yanchor: "top", pad: { t: 10 }, font: { size: 14.5 } },
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        hoverlabel: { bgcolor: card, bordercolor: line, font: { color: ink } },
        legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", traceorder: "normal", font: { color: ink } },
        coloraxis: { colorbar: bar },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: line, activecolor: soft },
        margin: { l: 64, r: 24, t: 56, b: 48 },
        xaxis: axis, yaxis: axis,
      },
      data: { heatmap: [{ colorbar: bar }] },
    };
  },
  config: {
    responsive: true, displaylogo: false, displayModeBar: "hover",
    // The buttons are listed one by one, because other buttons would send the data to a server.
    plotlyServerURL: "",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  },
};
