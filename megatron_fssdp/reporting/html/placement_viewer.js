"use strict";
// Draws the placement of one layer at one iteration (experts × devices), with the tokens of both.
function placementViewer() {
  const runs = JSON.parse(document.getElementById("placements-data").textContent);
  const slider = document.getElementById("placement-iteration");
  if (!runs.length || !slider) return null;
  const runSelect = document.getElementById("placement-run");
  const layerSelect = document.getElementById("placement-layer");
  const words = document.getElementById("placement-words");
  const owner = "#4E79A7", replica = "#F28E2B", frame = "#CC79A7";

  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  for (const run of runs) {
    for (const name of ["owned", "present"]) run[name] = bytes(run[name]);
    for (const name of ["expert", "before", "after"]) run[name] = new Uint32Array(bytes(run[name]).buffer);
  }
  const slice = (array, run, length) => {
    const index = slider.valueAsNumber * run.layers.length + layerSelect.selectedIndex;
    return Array.from(array.subarray(index * length, (index + 1) * length));
  };
  const range = (count) => Array.from({ length: count }, (_, i) => i);

  // By device and expert: 0 if the device does not have the expert, 1 for the owner, 2 for a replica.
  function held(run) {
    const row = Math.ceil(run.devices / 8);
    const owned = slice(run.owned, run, run.experts * row), present = slice(run.present, run, run.experts * row);
    const bit = (array, expert, device) => (array[expert * row + (device >> 3)] >> (7 - (device & 7))) & 1;
    return range(run.devices).map((device) => range(run.experts).map((expert) =>
      bit(present, expert, device) ? 2 - bit(owned, expert, device) : 0));
  }

  function traces(run) {
    const experts = range(run.experts), devices = range(run.devices);
    const expert = slice(run.expert, run, run.experts);
    const before = slice(run.before, run, run.devices), after = slice(run.after, run, run.devices);
    const names = ["", "owner", "replica"];
    const z = held(run);
    const none = pageTheme.colour("--grid");
    const bar = { type: "bar", xaxis: "x2", orientation: "h", y: devices, yaxis: "y" };
    return {
      z, before, after,
      data: [
        {
          type: "heatmap", x: experts, y: devices, z, zmin: 0, zmax: 2, xgap: 1, ygap: 1, showscale: false,
          colorscale: [[0, none], [0.33, none], [0.33, owner], [0.67, owner], [0.67, replica], [1, replica]],
          text: z.map((line) => line.map((state) => names[state])),
          hovertemplate: "expert %{x} on device %{y}: %{text}<extra></extra>",
        },
        {
          type: "bar", x: experts, y: expert, yaxis: "y2", marker: { color: pageTheme.colour("--soft") },
          hovertemplate: "expert %{x}: %{y:,} tokens<extra></extra>", showlegend: false,
        },
        {
          ...bar, x: after, name: "computed", marker: { color: pageTheme.colour("--soft") }, showlegend: false,
          hovertemplate: "device %{y}: %{x:,} tokens<extra>computed</extra>",
        },
        {
          ...bar, x: before, name: "plain EP", showlegend: false,
          marker: { color: "rgba(0,0,0,0)", line: { color: frame, width: 1.5 } },
          hovertemplate: "device %{y}: %{x:,} tokens<extra>under plain EP</extra>",
        },
        ...[["owner", owner], ["replica", replica]].map(([name, color]) => ({
          type: "scatter", mode: "markers", x: [null], y: [null], name, marker: { symbol: "square", size: 11, color },
        })),
        { type: "scatter", mode: "markers", x: [null], y: [null], name: "tokens of the device", marker: { symbol: "square", size: 11, color: pageTheme.colour("--soft") } },
        {
          type: "scatter", mode: "markers", x: [null], y: [null], name: "its tokens under plain EP",
          marker: { symbol: "square-open", size: 11, color: frame },
        },
      ],
    };
  }

  function draw() {
    const run = runs[runSelect.selectedIndex];
    const { data, z, before, after } = traces(run);
    const mostTokens = (array) => array.reduce((most, value) => Math.max(most, value), 1);
    // The maximum over all iterations, so that bars can be compared while the slider moves.
    const mostOfLayer = (array, length) => Math.max(...run.iterations.map((_, i) => {
      const begin = (i * run.layers.length + layerSelect.selectedIndex) * length;
      return mostTokens(array.subarray(begin, begin + length));
    }));
    const highest = Math.max(mostOfLayer(run.before, run.devices), mostOfLayer(run.after, run.devices));
    // A tick label needs about 20 pixels.
    const width = document.getElementById("placement-figure").clientWidth;
    const few = (count, room) => (20 * count <= room ? { dtick: 1 } : {});
    const layout = {
      template: pageTheme.template(), barmode: "overlay", bargap: 0.25, margin: { l: 70, r: 24, t: 40, b: 52 },
      xaxis: { domain: [0, 0.76], anchor: "y", title: { text: "expert" }, range: [-0.5, run.experts - 0.5], showgrid: false, zeroline: false, ...few(run.experts, 0.6 * width) },
      yaxis: { domain: [0, 0.74], title: { text: "device" }, range: [run.devices - 0.5, -0.5], showgrid: false, zeroline: false, ...few(run.devices, 640) },
      yaxis2: { domain: [0.78, 1], anchor: "x", title: { text: "tokens" }, range: [0, 1.05 * mostOfLayer(run.expert, run.experts)], nticks: 4 },
      xaxis2: { domain: [0.79, 1], anchor: "y", title: { text: "tokens" }, range: [0, 1.05 * highest], nticks: 5 },
    };
    const replicas = z.flat().filter((state) => state === 2).length;
    const ratio = (tokens) => {
      const total = tokens.reduce((sum, value) => sum + value, 0);
      return total ? (mostTokens(tokens) * tokens.length / total).toFixed(2) : "–";
    };
    words.textContent = `iteration ${run.iterations[slider.valueAsNumber]}: ${replicas} replicas; busiest device `
      + `${ratio(after)} × mean, under plain EP ${ratio(before)} ×`;
    return Plotly.react("placement-figure", data, layout, pageTheme.config);
  }

  function show(select, names) {
    select.replaceChildren(...names.map((name) => new Option(name)));
    select.parentElement.hidden = names.length < 2;
  }

  // Start with the layer that is slowest under plain expert parallelism in the last iteration.
  function leastEven(run) {
    const last = run.before.length - run.layers.length * run.devices;
    const most = run.layers.map((_, layer) =>
      Math.max(...run.before.subarray(last + layer * run.devices, last + (layer + 1) * run.devices)));
    return most.indexOf(Math.max(...most));
  }

  function chooseRun() {
    const run = runs[runSelect.selectedIndex];
    show(layerSelect, run.layers);
    layerSelect.selectedIndex = leastEven(run);
    slider.max = run.iterations.length - 1;
    slider.value = run.iterations.length - 1;
    const height = Math.min(900, Math.max(360, 190 + run.devices * 40));
    document.getElementById("placement-figure").style.height = `${height}px`;
  }

  show(runSelect, runs.map((run) => run.name));
  // Start with the last run, because the first of several runs is usually plain expert parallelism.
  runSelect.selectedIndex = runs.length - 1;
  chooseRun();
  runSelect.addEventListener("change", () => { chooseRun(); draw(); });
  layerSelect.addEventListener("change", draw);
  slider.addEventListener("input", draw);
  return { draw };
}
