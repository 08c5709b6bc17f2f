// What the page can do beside being read: sort and filter candidates, copy a command, and draw its charts.
// Without this script everything is there too, as tables and pictures.
(() => {
  "use strict";
  const sections = JSON.parse(document.getElementById("report-data").textContent);
  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };

  // A frame without an address of its own can't follow "#part": the part is scrolled to instead.
  document.querySelector(".contents").addEventListener("click", (event) => {
    const link = event.target.closest("a");
    const part = link && document.getElementById(link.getAttribute("href").slice(1));
    if (!part) return;
    event.preventDefault();
    part.scrollIntoView();
    part.tabIndex = -1;
    part.focus({ preventScroll: true });
  });

  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const one of opened) one.open = true;
  });
  addEventListener("afterprint", () => opened.forEach((one) => { one.open = false; }));

  for (const command of document.querySelectorAll(".command")) {
    const button = make("button", { type: "button", textContent: "Copy" });
    button.addEventListener("click", async () => {
      const code = command.querySelector("code");
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      let copied = document.execCommand("copy");  // a sandboxed frame has no clipboard of its own
      if (!copied) copied = await navigator.clipboard?.writeText(code.textContent).then(() => true, () => false);
      button.textContent = copied ? "Copied" : "Selected";
    });
    command.append(button);
  }

  // ---------------------------------------------------------------------------------------------------- candidates
  for (const table of document.querySelectorAll("table[data-sortable]")) {
    const body = table.tBodies[0], rows = [...body.rows], headings = [...table.tHead.rows[0].cells];
    const value = (row, column) => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();
    headings.forEach((heading, column) => {
      const button = make("button", { type: "button", textContent: heading.textContent });
      heading.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = heading.getAttribute("aria-sort") === "ascending";
        headings.forEach((other) => other.removeAttribute("aria-sort"));
        heading.setAttribute("aria-sort", down ? "descending" : "ascending");
        const numeric = rows.every((row) => value(row, column) === "" || !Number.isNaN(Number(value(row, column))));
        const order = (a, b) => {
          const [x, y] = [value(a, column), value(b, column)];
          if (x === "" || y === "") return (x === "") - (y === "");  // what has no figure stays below
          return (numeric ? x - y : x.localeCompare(y)) * (down ? -1 : 1);
        };
        body.append(...[...rows].sort(order));
      });
    });
    const words = make("input", { type: "search" });
    const states = make("select");
    states.append(make("option", { value: "", textContent: "all" }));
    for (const state of new Set(rows.map((row) => row.dataset.state))) states.append(make("option", { textContent: state }));
    const shown = make("output");
    const filter = () => {
      const wanted = words.value.trim().toLowerCase().split(/\s+/);
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = (states.value !== "" && row.dataset.state !== states.value) || !wanted.every((word) => text.includes(word));
      }
      shown.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
    };
    words.addEventListener("input", filter);
    states.addEventListener("change", filter);
    filter();
    table.closest(".scroll").before(make("div", { className: "tools" },
      make("label", {}, "Filter", words), make("label", {}, "State", states), shown));
  }

  // -------------------------------------------------------------------------------------------------------- charts
  const columns = innerWidth < 600 ? 1 : 3;
  const colours = { won: "var(--good)", lost: "var(--accent)", failed: "var(--bad)", baseline: "var(--soft)" };
  const config = {
    background: null, view: { stroke: null }, font: "system-ui, 'DejaVu Sans', sans-serif",
    axis: { labelColor: "var(--soft)", titleColor: "var(--ink)", gridColor: "var(--line)", domainColor: "var(--faint)",
      tickColor: "var(--faint)", labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal", titlePadding: 8, labelOverlap: "greedy", gridOpacity: 0.6 },
    legend: { labelColor: "var(--ink)", titleColor: "var(--ink)", labelFontSize: 12, labelLimit: 280, orient: "bottom", columns },
    text: { fill: "var(--ink)", fontSize: 12 },
  };
  const stateColour = { field: "state", type: "nominal", legend: null,
    scale: { domain: Object.keys(colours), range: Object.values(colours) } };
  const palette = ["var(--t0)", "var(--t3)", "var(--t2)", "var(--t6)", "var(--t4)", "var(--t5)", "var(--t7)", "var(--t1)"];
  const draw = async (figure, holder, spec) => {
    // `ast`: expressions are interpreted, since the page's policy forbids making code of text.
    const result = await vegaEmbed(holder, { width: "container", autosize: { type: "fit", contains: "padding" }, config, ...spec },
      { actions: false, renderer: "svg", logLevel: 1, ast: true, defaultStyle: false, tooltip: { theme: "custom", disableDefaultStyle: true } });
    figure.classList.add("drawn");
    return result.view;
  };

  const pareto = (figure, data, section) => {
    const name = `pareto-${section}`, holder = make("div", { className: "drawing" });
    const readout = make("p", { className: "readout soft", ariaLive: "polite" });
    const choice = make("select", { id: name });
    for (const axis of data.axes) choice.append(make("option", { value: axis.key, textContent: axis.title }));
    const tools = make("div", { className: "tools" }, make("label", {}, "Against", choice),
      make("span", { className: "soft" }, "Arrow keys go from candidate to candidate, Enter to its row."));
    holder.tabIndex = 0;
    holder.setAttribute("role", "application");
    holder.setAttribute("aria-label", figure.getAttribute("aria-label"));
    figure.prepend(tools, holder, readout);
    let view, points = [], at = -1;
    const show = (index) => {
      at = index;
      const point = points[at];
      view.signal("focused", point ? point.id || "baseline" : "").run();
      readout.textContent = point ? `${point.label}: ${point.shown}${point.range ? ` (${point.range})` : ""}, ${point.value}. ${point.why}` : "";
    };
    const redraw = async () => {
      const axis = data.axes.find((one) => one.key === choice.value);
      const having = data.points.filter((point) => axis.key in point.values);
      const positive = having.map((point) => point.values[axis.key]).filter((value) => value > 0);
      const logarithmic = having.every((point) => point.values[axis.key] >= 0) && positive.length > 0
        && Math.max(...positive) / Math.min(...positive) > 5;
      const floor = logarithmic ? Math.min(...positive) / 3 : 0;
      points = having.map((point) => {
        const x = point.values[axis.key];
        return { ...point, x: logarithmic ? Math.max(x, floor) : x, value: `${axis.title} ${Number(x.toPrecision(3))}`,
          key: point.id || "baseline", front: axis.frontier.includes(point.id) && point.id !== "",
          filled: point.stable && point.state !== "failed", name: axis.frontier.includes(point.id) || point.state === "baseline" ? point.label : "" };
      }).sort((a, b) => a.x - b.x || a.p50 - b.p50);
      const place = (value) => (logarithmic ? Math.log(value) : value);
      const middle = points.length ? (place(points[0].x) + place(points.at(-1).x)) / 2 : 0;
      for (const point of points) point.right = place(point.x) > middle;
      const x = { field: "x", type: "quantitative", title: axis.title,
        scale: { type: logarithmic ? "log" : "linear", nice: false, padding: 30, ...(logarithmic ? {} : { zero: false }) }, axis: { format: "~g", tickCount: 6, grid: false } };
      const y = { field: "p50", type: "quantitative", title: "median latency (ms)",
        scale: { type: "log", nice: false, padding: 24 }, axis: { format: "~g", tickCount: 6 } };
      const tooltip = [{ field: "label", title: "candidate" }, { field: "shown", title: "median" }, { field: "range", title: "95 %" },
        { field: "value", title: "here" }, { field: "why", title: "why" }];
      at = -1;
      readout.textContent = "";
      view = await draw(figure, holder, {
        height: 340, data: { values: points }, params: [{ name: "focused", value: "" }],
        layer: [
          { transform: [{ filter: "datum.front" }], mark: { type: "line", aria: false, strokeDash: [6, 3], stroke: "var(--good)" }, encoding: { x, y, order: { field: "x" } } },
          { mark: { type: "rule", aria: false, strokeWidth: 2 }, encoding: { x, y: { ...y, field: "low" }, y2: { field: "high" }, color: stateColour } },
          { mark: { type: "point", size: 130, strokeWidth: 2, cursor: "pointer" }, encoding: { x, y, tooltip, color: stateColour,
            shape: { field: "state", type: "nominal", legend: null, scale: { domain: Object.keys(colours), range: ["diamond", "circle", "cross", "square"] } },
            fill: { condition: { test: "datum.filled", field: "state", type: "nominal", legend: null, scale: stateColour.scale }, value: "var(--card)" },
            description: { field: "label" } } },
          { transform: [{ filter: "datum.key === focused" }], mark: { type: "point", aria: false, size: 520, strokeWidth: 2.5, stroke: "var(--ink)", filled: false }, encoding: { x, y } },
          ...[["left", 12, "!datum.right"], ["right", -12, "datum.right"]].map(([align, dx, side]) => ({
            transform: [{ filter: `datum.name !== '' && ${side}` }], mark: { type: "text", aria: false, dy: -14, dx, align, limit: 280 },
            encoding: { x, y, text: { field: "name" } } })),
        ],
      });
      view.addEventListener("click", (_, item) => { if (item && item.datum && item.datum.id !== undefined) toRow(item.datum); });
    };
    const toRow = (point) => {
      const table = figure.closest("section").querySelector("table.candidates");
      for (const row of table.tBodies[0].rows) {
        const found = row.dataset.job === point.id;
        row.classList.toggle("found", found);
        if (found) { row.hidden = false; row.tabIndex = -1; row.scrollIntoView({ block: "center" }); row.focus({ preventScroll: true }); }
      }
    };
    holder.addEventListener("keydown", (event) => {
      const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
      if (event.key in steps) show((at + steps[event.key] + points.length) % points.length);
      else if (event.key === "Home") show(0);
      else if (event.key === "End") show(points.length - 1);
      else if (event.key === "Enter" && points[at]) toRow(points[at]);
      else if (event.key === "Escape") show(-1);
      else return;
      event.preventDefault();
    });
    choice.addEventListener("change", redraw);
    return redraw();
  };

  const lines = (figure, spec) => {
    const holder = make("div", { className: "drawing" });
    figure.prepend(holder);
    return draw(figure, holder, spec);
  };
  const withLegend = (height, values) => height + 18 * Math.ceil(new Set(values.map((one) => one.label)).size / columns);
  const byLabel = { field: "label", type: "nominal", title: null, sort: null, scale: { range: palette } };
  const rounds = (figure, values) => lines(figure, {
    height: withLegend(240, values), data: { values }, mark: { type: "line", point: { size: 14 }, strokeWidth: 1.5 },
    encoding: {
      x: { field: "round", type: "quantitative", title: "round", axis: { grid: false, format: "d" }, scale: { nice: false } },
      y: { field: "ms", type: "quantitative", title: "median of the round (ms)", scale: { type: "log", nice: false, padding: 10 }, axis: { format: "~g", tickCount: 6 } },
      color: byLabel, detail: { field: "process" }, strokeDash: { condition: { test: "datum.state === 'baseline'", value: [4, 3] }, value: [1, 0] },
      tooltip: [{ field: "label", title: "candidate" }, { field: "round" }, { field: "ms", title: "median (ms)", format: ".4g" }],
    },
  });
  const errors = (figure, values) => lines(figure, {
    height: withLegend(220, values), data: { values }, mark: { type: "line", strokeWidth: 1.5, interpolate: "step-after" },
    encoding: {
      x: { field: "share", type: "quantitative", title: "share of the samples", axis: { format: ".0%", grid: false } },
      y: { field: "error", type: "quantitative", title: "error, at most", scale: { type: "log", nice: false, padding: 10 }, axis: { format: "~g", tickCount: 6 } },
      color: byLabel, order: { field: "share" },
      tooltip: [{ field: "label", title: "candidate" }, { field: "share", format: ".0%" }, { field: "error", format: ".3g" }],
    },
  });
  const kinds = { pareto, rounds, errors };
  const drawAll = async () => {
    for (const figure of document.querySelectorAll("figure[data-chart]")) {
      const { chart, section } = figure.dataset;
      const data = sections[section][chart];
      if (data && (data.points || data).length) await kinds[chart](figure, data, section);
    }
    document.documentElement.dataset.ready = "yes";
  };
  drawAll();
})();
