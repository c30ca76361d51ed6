// Returns what is wrong with the texts of the open page, one sentence each: texts that lie on each other or
// touch, texts of pictures that are cut off, and a page that is wider than its window.
(() => {
  const TOLERANCE = 1.5; // Boxes of texts include the empty space above and below letters.
  const SPACE = 3; // Least gap between two words of a picture, so that numbers are not read as one.

  // Part of a rectangle that its ancestors show: [left, top, right, bottom].
  function shown(element, rect) {
    let [left, top, right, bottom] = [rect.left, rect.top, rect.right, rect.bottom];
    for (let box = element; box && box !== document.documentElement; box = box.parentElement) {
      const style = getComputedStyle(box);
      if (style.display === "contents" || (style.display === "inline" && box.localName !== "svg")) continue;
      if (style.overflowX === "visible" && style.overflowY === "visible") continue;
      const edge = box.getBoundingClientRect();
      if (style.overflowX !== "visible") [left, right] = [Math.max(left, edge.left), Math.min(right, edge.right)];
      if (style.overflowY !== "visible") [top, bottom] = [Math.max(top, edge.top), Math.min(bottom, edge.bottom)];
    }
    return [Math.max(left, 0), top, right, bottom];
  }

  const isVisible = (element) => element.checkVisibility({
    checkOpacity: true, checkVisibilityCSS: true, contentVisibilityAuto: true,
  });
  const corners = (left, top, right, bottom) => [[left, top], [right, top], [right, bottom], [left, bottom]];
  const words = (text) => text.replace(/\s+/g, " ").trim().slice(0, 60);

  const boxes = [], faults = [];

  // Lines of text outside of pictures.
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement;
    if (!node.data.trim() || parent.closest("svg, script, style, noscript, select, template")) continue;
    if (!isVisible(parent)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const rect of range.getClientRects()) {
      const [left, top, right, bottom] = shown(parent, rect);
      if (right - left < 3 || bottom - top < 3) continue;
      boxes.push({ text: words(node.data), quad: corners(left, top, right, bottom), owner: parent });
    }
  }

  // Texts of pictures, which can be turned.
  for (const text of document.querySelectorAll("svg text")) {
    if (!text.textContent.trim() || !isVisible(text)) continue;
    const svg = text.ownerSVGElement;
    if (svg.id === "js-plotly-tester") continue;
    const lines = text.querySelectorAll("tspan").length ? [...text.querySelectorAll("tspan.line, tspan")] : [text];
    for (const line of lines) {
      if (!line.textContent.trim()) continue;
      const box = line === text || !line.getBBox ? text.getBBox() : line.getBBox();
      const matrix = text.getScreenCTM();
      if (!box.width || !matrix) continue;
      const place = ([x, y]) => {
        const point = new DOMPoint(x, y).matrixTransform(matrix);
        return [point.x, point.y];
      };
      const plain = corners(box.x, box.y, box.x + box.width, box.y + box.height).map(place);
      const scale = Math.hypot(matrix.a, matrix.b) || 1, gap = SPACE / 2 / scale;
      const wide = corners(box.x - gap, box.y, box.x + box.width + gap, box.y + box.height).map(place);
      const xs = plain.map((point) => point[0]), ys = plain.map((point) => point[1]);
      const rect = { left: Math.min(...xs), right: Math.max(...xs), top: Math.min(...ys), bottom: Math.max(...ys) };
      const [left, top, right, bottom] = shown(svg, rect);
      if (right < left || bottom < top) continue;
      const lost = Math.max(left - rect.left, rect.right - right, top - rect.top, rect.bottom - bottom);
      if (lost > TOLERANCE) faults.push(`cut off by ${lost.toFixed(0)} px: "${words(line.textContent)}"`);
      boxes.push({ text: words(line.textContent), quad: wide, owner: line });
    }
  }

  // Depth to which two convex quadrilaterals overlap; at most 0 if they do not.
  function depth(one, other) {
    let least = Infinity;
    for (const quad of [one, other]) {
      for (let i = 0; i < 2; i++) {
        const [x, y] = [quad[i + 1][0] - quad[i][0], quad[i + 1][1] - quad[i][1]];
        const length = Math.hypot(x, y) || 1;
        const project = (points) => points.map((point) => (point[0] * x + point[1] * y) / length);
        const a = project(one), b = project(other);
        least = Math.min(least, Math.min(Math.max(...a), Math.max(...b)) - Math.max(Math.min(...a), Math.min(...b)));
      }
    }
    return least;
  }

  for (const box of boxes) {
    box.top = Math.min(...box.quad.map((point) => point[1]));
    box.bottom = Math.max(...box.quad.map((point) => point[1]));
  }
  boxes.sort((one, other) => one.top - other.top);
  for (let i = 0; i < boxes.length; i++) {
    for (let j = i + 1; j < boxes.length && boxes[j].top < boxes[i].bottom; j++) {
      if (boxes[i].owner === boxes[j].owner) continue;
      const found = depth(boxes[i].quad, boxes[j].quad);
      if (found > TOLERANCE) {
        faults.push(`overlap by ${found.toFixed(0)} px: "${boxes[i].text}" and "${boxes[j].text}"`);
      }
    }
  }

  const excess = document.documentElement.scrollWidth - window.innerWidth;
  if (excess > 0) faults.push(`the page is ${excess} px wider than its window`);
  return faults;
})()
