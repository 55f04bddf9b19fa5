// Curves: draws what the page says at data-from, again every few seconds while the page is visible; or, in a page that
// stands alone, what its element data-inline holds. `marks` are events, drawn on every curve.
"use strict";

(function () {
  const board = document.getElementById("curves");
  if (!board || !window.uPlot) return;
  const AGAIN_MS = 4000;
  const HEIGHT = 170;
  const WHOLE = [1, 10, 100, 1000, 10000, 100000, 1000000].flatMap((size) => [size, 2 * size, 5 * size]);
  const together = uPlot.sync("curves");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const plots = new Map(); // key of a chart → its uPlot
  let axis = board.dataset.axis || "step";
  let charts = [];
  let marks = [];
  let drawn = "";

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function short(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return size && size < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(4)));
  }

  function element(name, css, text) {
    const made = document.createElement(name);
    if (css) made.className = css;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  // One table of all lines: their x values differ.
  function table(chart) {
    const tables = chart.lines.map((line) => {
      const from = startOf();
      const xs = axis === "step" ? line.steps : line.at.map((at) => (at - from(line)) / 60);
      const order = xs.map((_, at) => at).sort((one, other) => xs[one] - xs[other]);
      const seen = new Map(order.map((at) => [xs[at], line.values[at]]));
      return [[...seen.keys()], [...seen.values()]];
    });
    return uPlot.join(tables);
  }

  // Time counts from the first step of a run; runs that are compared start together.
  function startOf() {
    const runs = board.dataset.compared === "yes";
    const first = new Map();
    charts.forEach((chart) => chart.lines.forEach((line) => {
      const key = runs ? line.name : "";
      if (line.at.length) first.set(key, Math.min(first.has(key) ? first.get(key) : Infinity, line.at[0]));
    }));
    return (line) => first.get(runs ? line.name : "");
  }

  function figureOf(chart) {
    const grid = board.querySelector(".charts");
    let figure = [...grid.children].find((one) => one.dataset.key === chart.key);
    if (!figure) {
      figure = element("figure", "chart");
      figure.dataset.key = chart.key;
      const caption = element("figcaption");
      caption.append(element("b", "", chart.title), " ", element("span", "muted", chart.unit), element("small", "", chart.about));
      figure.append(caption, element("div", "plot"), element("ul", "lines"));
      grid.append(figure);
    }
    return figure;
  }

  function drawMarks(plot, axisName) {
    const { left, top, width, height } = plot.bbox;
    const ratio = window.devicePixelRatio || 1;
    const first = charts.length ? startOf()(charts[0].lines[0]) : 0;
    marks.forEach((mark) => {
      const x = plot.valToPos(axisName === "step" ? mark.step : (mark.at - first) / 60, "x", true);
      if (x < left || x > left + width) return;
      const pen = plot.ctx;
      pen.save();
      pen.strokeStyle = pen.fillStyle = style("--bad");
      pen.lineWidth = ratio;
      pen.setLineDash([4 * ratio, 3 * ratio]);
      pen.beginPath();
      pen.moveTo(x, top);
      pen.lineTo(x, top + height);
      pen.stroke();
      pen.font = 11 * ratio + "px " + getComputedStyle(document.body).fontFamily;
      pen.textAlign = x > left + width * 0.7 ? "right" : "left";
      pen.textBaseline = "top";
      const place = [mark.name, x + (pen.textAlign === "right" ? -4 : 4) * ratio, top + 2 * ratio];
      pen.setLineDash([]);
      pen.lineWidth = 4 * ratio;
      pen.lineJoin = "round";
      pen.strokeStyle = style("--card");
      pen.strokeText(...place); // readable over the lines
      pen.fillText(...place);
      pen.restore();
    });
  }

  function tell(figure, chart, plot, at) {
    const items = figure.querySelectorAll(".lines li b");
    chart.lines.forEach((line, number) => {
      if (!items[number]) return;
      const values = plot.data[number + 1];
      items[number].textContent = short(at === null ? line.values[line.values.length - 1] : nearest(values, at));
    });
    const place = figure.querySelector(".place");
    const x = at === null ? null : plot.data[0][at];
    place.textContent = x === null || x === undefined ? "" : axis === "step" ? chart.x + " " + short(x) : short(x) + " min";
  }

  function nearest(values, at) {
    for (let away = 0; away < values.length; away += 1) {
      if (values[at - away] !== null && values[at - away] !== undefined) return values[at - away];
      if (values[at + away] !== null && values[at + away] !== undefined) return values[at + away];
    }
    return null;
  }

  // Lines that are zero all along lie at the bottom, not in the middle of nothing.
  function ranged(_, least, most) {
    return least || most ? uPlot.rangeNum(least, most, 0.1, true) : [0, 1];
  }
  // Accuracy, F1 and the like: the whole axis, so that two pages and two runs compare.
  function scored(plot, least, most) {
    return least >= 0 && most <= 1 ? [0, 1] : ranged(plot, least, most);
  }
  // One point has its neighbours around it; uPlot would show 0 to 100.
  function spanned(_, least, most) {
    return least < most ? [least, most] : [Math.max(0, least - 1), least + 1];
  }
  const RANGES = { share: [0, 1], score: scored };

  function draw(chart) {
    const figure = figureOf(chart);
    const box = figure.querySelector(".plot");
    const list = figure.querySelector(".lines");
    const data = table(chart);
    const held = plots.get(chart.key);
    if (held && held.series.length === data.length && held.axisName === axis && held.width === box.clientWidth) {
      held.setData(data);
      tell(figure, chart, held, null);
      return;
    }
    if (held) held.destroy();
    list.replaceChildren(...chart.lines.map((line) => {
      const item = element("li", "c" + (line.colour % 8));
      item.append(element("span", "", line.name), " ", element("b"));
      return item;
    }));
    list.append(element("li", "place muted"));
    box.replaceChildren();
    const font = "11px " + getComputedStyle(document.body).fontFamily;
    const ruler = { stroke: style("--muted"), font, grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line"), width: 1, size: 4 } };
    const plot = new uPlot({
      width: box.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key: together.key }, y: false, points: { size: 6 } },
      scales: { x: { time: false, range: spanned }, y: { range: RANGES[chart.unit] || ranged } },
      series: [{}, ...chart.lines.map((line) => ({
        stroke: style("--c" + (line.colour % 8)),
        width: 1.75,
        spanGaps: true,
        points: { show: line.values.length < 20, size: 5 },
      }))],
      axes: [
        { ...ruler, ...(axis === "step" && chart.x !== "minute" && { incrs: WHOLE }), size: 20, label: axis === "step" ? chart.x : "minutes", labelSize: 16, labelFont: font, labelGap: 0, space: 60 },
        { ...ruler, size: 52, space: 32, values: (_, ticks) => ticks.map(short) },
      ],
      hooks: { draw: [(self) => drawMarks(self, axis)], setCursor: [(self) => tell(figure, chart, self, self.cursor.idx === undefined ? null : self.cursor.idx)] },
    }, data, box);
    plot.axisName = axis;
    together.sub(plot);
    plots.set(chart.key, plot);
    tell(figure, chart, plot, null);
  }

  function drawAll() {
    if (!board.querySelector(".charts") && charts.length) {
      const grid = element("div", "charts");
      grid.tabIndex = 0;
      grid.setAttribute("role", "region");
      grid.setAttribute("aria-label", "Curves");
      const empty = board.querySelector(".empty");
      if (empty) empty.replaceWith(grid); else board.append(grid);
    }
    charts.forEach(draw);
    board.dataset.drawn = String(charts.length);
  }

  function show(text) {
    if (text === drawn) return;
    drawn = text;
    ({ charts, marks = [] } = JSON.parse(text));
    drawAll();
  }

  async function load() {
    if (document.hidden) return;
    try {
      const answer = await fetch(board.dataset.from, { headers: { Accept: "application/json" } });
      if (!answer.ok) return;
      show(await answer.text());
    } catch (error) {
      if (!(error instanceof TypeError)) throw error; // the server is away; the page says so elsewhere
    }
  }

  function fresh() {
    plots.forEach((plot) => plot.destroy());
    plots.clear();
    drawAll();
  }

  const axes = board.querySelector(".axes");
  axes.hidden = Boolean(board.dataset.axis); // then there is one axis only
  axes.addEventListener("click", (event) => {
    const chosen = event.target.closest("button");
    if (!chosen) return;
    axis = chosen.dataset.axis;
    axes.querySelectorAll("button").forEach((one) => one.setAttribute("aria-pressed", String(one === chosen)));
    fresh();
  });
  dark.addEventListener("change", fresh);
  let resized = 0;
  window.addEventListener("resize", () => {
    window.clearTimeout(resized);
    resized = window.setTimeout(drawAll, 150);
  });
  const inline = document.getElementById(board.dataset.inline);
  if (inline) {
    show(inline.textContent);
    return;
  }
  document.addEventListener("visibilitychange", load);
  load();
  if (board.dataset.live !== "no") window.setInterval(load, AGAIN_MS);
})();
