// The charts of the report: each function makes the Vega-Lite specification of one, from plain values.
"use strict";

const COLOURS = {  // of methods; readable for the colour-blind, with a contrast of 3 : 1 at least
  light: ["#0072b2", "#c44601", "#00806a", "#a8437f", "#7a5c00", "#5b50b5", "#2b2f36", "#b3001e", "#3c7a1c", "#7d6b73"],
  dark: ["#56b4e9", "#f08a4b", "#2fc9a4", "#e58fc2", "#e0c04a", "#a79df2", "#dfe3e8", "#ff7384", "#9bd16f", "#bfaab3"],
};
const MOST_ROWS = 150;  // of a heat strip; more clients are drawn as means of several
const MOST_LABELS = 40;  // of an axis; with more, it has none
const MOST_CIRCLES = 2500;  // with more clients and classes, the partition is drawn as a heat map

const theme = () => document.documentElement.dataset.theme;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const colourOf = (place) => COLOURS[theme()][place % COLOURS.light.length];
const dashOf = (place) => [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3]][Math.floor(place / COLOURS.light.length) % 4];

function config() {
  const axis = {
    labelColor: css("quiet"), titleColor: css("quiet"), gridColor: css("line"), domainColor: css("line"),
    tickColor: css("line"), titleFontWeight: "normal", labelLimit: 140,
  };
  return {
    background: null, font: "system-ui, sans-serif", view: {stroke: null}, axis, title: {color: css("ink")},
    legend: {labelColor: css("quiet"), titleColor: css("quiet"), titleFontWeight: "normal", orient: "bottom"},
    range: {ramp: [css("low"), css("high")], heatmap: [css("low"), css("high")]},
  };
}

// the scales by which methods have their colour and their dashes; `methods` are [label, place]
const methodColour = (methods) => ({
  field: "method", type: "nominal", legend: null,
  scale: {domain: methods.map(([label]) => label), range: methods.map(([, place]) => colourOf(place))},
});
const methodDash = (methods) => ({
  field: "method", type: "nominal", legend: null,
  scale: {domain: methods.map(([label]) => label), range: methods.map(([, place]) => dashOf(place))},
});
const quantity = (field, title, more = {}) => ({field, type: "quantitative", title, scale: {zero: false, nice: false}, ...more});
const unlabelled = (values) => (values.length > MOST_LABELS ? {labels: false, ticks: false} : {});
// the legend of symbols that are as large as `counts`: round numbers up to the largest
function sizes(counts) {
  const most = Math.max(1, ...counts), unit = 10 ** Math.floor(Math.log10(most)), top = [5, 2, 1].find((k) => k * unit <= most) * unit;
  return {symbolFillColor: css("quiet"), symbolStrokeColor: css("quiet"), values: [top / 4, top / 2, top].filter(Number.isInteger)};
}
// a line of a tooltip; numbers have a format
const tip = (field, title, format) => ({field, title: title ?? field, format, type: format ? "quantitative" : "nominal"});

// Mean over clients by round or by what was spent, with the range from the worst to the best clients.
function curves({points, methods, x, y, band, height = 320}) {
  const colour = methodColour(methods), ends = points.flatMap((p) => (band ? [p.y, p.low, p.top] : [p.y])).filter(known);
  const low = Math.min(...ends), flat = low === Math.max(...ends) ? {scale: {domain: [low - 1, low + 1]}} : {};
  const line = {x: quantity("x", x.title, {axis: {...x.axis, tickCount: 6}}), color: colour};
  const layers = [
    {mark: {type: "line", strokeWidth: 2, clip: true}, encoding: {...line, y: quantity("y", y, flat), strokeDash: methodDash(methods)}},
    {mark: {type: "circle", opacity: 0, size: 80}, encoding: {...line, y: quantity("y", y), tooltip: [
      tip("method"), tip("round"), tip("y", y, ".4~r"),
      ...(band ? [tip("low", band[0], ".4~r"), tip("top", band[1], ".4~r")] : []),
    ]}},
  ];
  if (band) layers.unshift(
    {mark: {type: "area", opacity: methods.length > 3 ? 0.04 : 0.12, clip: true}, encoding: {...line, y: quantity("low", y), y2: {field: "top"}}},
    {mark: {type: "line", strokeWidth: 0.8, opacity: 0.7, clip: true}, encoding: {...line, y: quantity("low", y)}},
  );
  return {height, data: {values: points}, layer: layers};
}

// How many clients have which score; the signal `threshold` can be moved.
function histogram({bins, colour, threshold, domain, x, higher}) {
  return {
    height: 56, params: [{name: "threshold", value: threshold}], data: {values: bins},
    layer: [
      {mark: {type: "rect", color: colour, stroke: css("back"), strokeWidth: 1}, encoding: {
        x: quantity("from", null, {scale: {domain, nice: false}, axis: {tickCount: 6, grid: false}}), x2: {field: "to"},
        y: {field: "count", type: "quantitative", title: null, axis: {tickCount: 2, tickMinStep: 1, minExtent: 26}}, y2: {datum: 0},
        opacity: {condition: {test: higher ? "datum.to <= threshold" : "datum.from >= threshold", value: 1}, value: 0.35},
        tooltip: [tip("range", x), tip("count", "clients")],
      }},
      {data: {values: [{}]}, mark: {type: "rule", color: css("ink"), strokeDash: [4, 3]}, encoding: {x: {datum: {expr: "threshold"}, type: "quantitative"}}},
    ],
  };
}

// Scores of clients (rows) over rounds.
function strip({cells, rows, rounds, x, y, score, higher}) {
  return {
    height: Math.min(520, Math.max(120, rows * 14)), data: {values: cells},
    mark: {type: "rect", tooltip: true},
    encoding: {
      x: {field: "round", type: "ordinal", title: x, axis: {values: spaced(rounds, 8), labelAngle: 0, grid: false}},
      y: {field: "row", type: "ordinal", title: y, sort: null, axis: rows > MOST_LABELS ? {labels: false, ticks: false} : {}},
      color: {field: "score", type: "quantitative", title: score, scale: {range: [css("low"), css("high")], reverse: !higher}, legend: {gradientLength: 160}},
      tooltip: [tip("who", "client"), tip("round"), tip("score", score, ".4~r")],
    },
  };
}

// Each client's score with one method against that with another.
function pairs({points, x, y}) {
  const ends = points.flatMap((p) => [p.x, p.y]);
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const scale = {domain: low < high ? [low, high] : [low - 1, high + 1], nice: true, zero: false};
  return {
    height: 380,
    layer: [
      {data: {values: [{a: low}, {a: high}]}, mark: {type: "line", color: css("quiet"), strokeDash: [4, 3]},
        encoding: {x: {field: "a", type: "quantitative", scale}, y: {field: "a", type: "quantitative", scale}}},
      {data: {values: points}, mark: {type: "point", filled: true, opacity: 0.8, cursor: "pointer"}, encoding: {
        x: {field: "x", type: "quantitative", title: x, scale, axis: {tickCount: 8}}, y: {field: "y", type: "quantitative", title: y, scale},
        size: {field: "samples", type: "quantitative", title: "samples", scale: {range: [30, 260]}, legend: sizes(points.map((p) => p.samples))},
        color: {field: "side", type: "nominal", title: null, scale: {domain: ["gains", "loses", "same"], range: [css("gain"), css("loss"), css("quiet")]}},
        shape: {field: "side", type: "nominal", title: null, scale: {domain: ["gains", "loses", "same"], range: ["triangle-up", "triangle-down", "circle"]}},
        tooltip: [tip("client"), tip("x", x, ".4~r"), tip("y", y, ".4~r"), tip("gain", undefined, "+.4~r"), tip("samples"), ...(points[0]?.classes ? [tip("classes")] : [])],
      }},
    ],
  };
}

// Samples of each client and class: circles, or a heat map where they would not fit.
function partition({cells, clients, classes}) {
  const circles = clients.length * classes.length <= MOST_CIRCLES;
  const x = {type: "ordinal", field: "client", title: "client", scale: {domain: clients}, axis: {labelAngle: -90, grid: circles, ...unlabelled(clients)}};
  const y = {type: "ordinal", field: "class", title: "class", scale: {domain: classes}, axis: {grid: circles, ...unlabelled(classes)}};
  const tooltip = [tip("client"), tip("class"), tip("samples")];
  const height = Math.min(560, Math.max(120, classes.length * 18));
  if (!circles) return {height, data: {values: cells}, mark: "rect", encoding: {x, y, tooltip, color: {field: "samples", type: "quantitative"}}};
  return {
    height, data: {values: cells}, mark: {type: "circle", color: css("gain"), opacity: 0.8},
    encoding: {x, y, tooltip, size: {field: "samples", type: "quantitative", title: "samples", scale: {range: [4, 200]}, legend: sizes(cells.map((cell) => cell.samples))}},
  };
}

const bars = ({values, x, y, height = 120}) => ({
  height, data: {values}, mark: {type: "bar", color: css("gain")},
  encoding: {
    x: {field: "name", type: "ordinal", sort: null, title: x, axis: {labelAngle: -90, ...unlabelled(values)}},
    y: {field: "count", type: "quantitative", title: y}, tooltip: [tip("name", x), tip("count", y)],
  },
});

// What methods reach, by what they cost.
function cost({points, methods, x, y, width, height = 320}) {
  const limits = (values, from) => {  // with some room on both sides
    const [low, high] = [from ?? Math.min(...values), Math.max(...values)], room = (high - low || Math.abs(high) || 1) / 15;
    return [low - room, high + room];
  };
  const domain = {x: limits(points.map((p) => p.x), 0), y: limits(points.map((p) => p.y))};
  const pixel = (value, [low, high], length) => (length * (value - low)) / (high - low);
  const inner = width - 60;  // about what the axis leaves
  const names = withoutOverlap(points.map((p) => ({
    text: p.method, x: pixel(p.x, domain.x, inner), y: height - pixel(p.y, domain.y, height),
  })), inner, height);
  const values = points.map((p, i) => ({...p, ...names[i]}));
  const scale = (of) => ({scale: {domain: domain[of], nice: false, zero: false}});
  const places = {x: quantity("x", x.title, {axis: {...x.axis, tickCount: 6}, ...scale("x")}), y: quantity("y", y, scale("y"))};
  const tooltip = [tip("method"), tip("y", y, ".4~r"), tip("told", x.title)], color = methodColour(methods);
  return {
    height, data: {values},
    layer: [
      {mark: {type: "circle", size: 110, opacity: 1}, encoding: {...places, tooltip, color}},
      {mark: {type: "text", fontSize: NAME_SIZE, fontWeight: 600, dx: {expr: "datum.dx"}, dy: {expr: "datum.dy"}, align: {expr: "datum.align"}, baseline: "middle"},
        encoding: {...places, color, text: {field: "name", type: "nominal"}}},
    ],
  };
}

const NAME_SIZE = 12;  // pixels
// Where the names of points are written: each at the first place around its point where it overlaps no point and no
// other name. One that finds none is left out.
function withoutOverlap(points, width, height) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `600 ${NAME_SIZE}px system-ui, sans-serif`;
  const taken = points.map(({x, y}) => [x - 7, y - 7, x + 7, y + 7]);
  const free = ([a, b, c, d]) => a >= 0 && b >= 0 && c <= width && d <= height && !taken.some(([e, f, g, h]) => a < g && c > e && b < h && d > f);
  const rows = [0, 1, -1, 2, -2, 3, -3, 4, -4, 5, -5, 6, -6, 7, -7];
  const around = rows.flatMap((row) => [["left", 10], ["right", -10], ["center", 0]].map(([align, dx]) => ({align, dx, dy: row * (NAME_SIZE + 3)})));
  return points.map(({text, x, y}) => {
    const long = pen.measureText(text).width + 4, start = {left: 0, center: -long / 2, right: -long};
    const box = ({align, dx, dy}) => [x + dx + start[align], y + dy - NAME_SIZE / 2, x + dx + start[align] + long, y + dy + NAME_SIZE / 2];
    const place = around.find((each) => free(box(each)));
    if (place) taken.push(box(place));
    return {name: place ? text : "", dx: 0, dy: 0, align: "left", ...place};
  });
}

// A number that a method reports, with its range over clients.
const reported = ({points, title, colour}) => ({
  height: 130, data: {values: points},
  layer: [
    {mark: {type: "area", opacity: 0.18, color: colour}, encoding: {x: quantity("round", "round"), y: quantity("min", null), y2: {field: "max"}}},
    {mark: {type: "line", color: colour, point: points.length < 2 ? {color: colour} : false}, encoding: {
      x: quantity("round", "round", {axis: {tickMinStep: 1, tickCount: 5}}), y: quantity("mean", null),
      tooltip: [tip("round"), tip("mean", title, ".4~r"), tip("min", undefined, ".4~r"), tip("max", undefined, ".4~r")],
    }},
  ],
});

// A vector that a method reports, such as a score of every layer.
const reportedVector = ({cells, title, rounds, entry}) => ({
  height: 150, data: {values: cells}, mark: "rect",
  encoding: {
    x: {field: "round", type: "ordinal", axis: {values: spaced(rounds, 5), labelAngle: 0}},
    y: {field: "entry", type: "ordinal", title: entry},
    color: {field: "value", type: "quantitative", title, legend: {gradientLength: 120}, scale: {range: [css("low"), css("high")]}},
    tooltip: [tip("round"), tip("entry", entry), tip("value", title, ".4~r")],
  },
});

// Predicted classes by true classes, each row in percent.
const confusion = ({cells, classes}) => ({
  height: Math.min(420, Math.max(140, classes.length * 22)), data: {values: cells}, mark: "rect",
  encoding: {
    x: {field: "predicted", type: "ordinal", sort: null, title: "predicted class", axis: {labelAngle: -90, ...unlabelled(classes)}},
    y: {field: "class", type: "ordinal", sort: null, title: "true class", axis: unlabelled(classes)},
    color: {field: "share", type: "quantitative", title: "% of the class", scale: {domain: [0, 100], range: [css("low"), css("high")]}, legend: {gradientLength: 140}},
    tooltip: [tip("class"), tip("predicted"), tip("samples"), tip("share", "% of the class", ".1f")],
  },
});

// Accuracy by confidence; a calibrated model is on the diagonal.
function calibration({points, methods}) {
  const unit = {domain: [0, 1]};
  return {
    height: 320,
    layer: [
      {data: {values: [{a: 0}, {a: 1}]}, mark: {type: "line", color: css("quiet"), strokeDash: [4, 3]},
        encoding: {x: {field: "a", type: "quantitative"}, y: {field: "a", type: "quantitative"}}},
      {data: {values: points}, mark: {type: "line", point: true}, encoding: {
        x: quantity("confidence", "confidence", {scale: unit, axis: {tickCount: 5}}), y: quantity("accuracy", "accuracy", {scale: unit}),
        color: methodColour(methods), strokeDash: methodDash(methods),
        tooltip: [tip("method"), tip("confidence", undefined, ".3f"), tip("accuracy", undefined, ".3f"), tip("samples")],
      }},
    ],
  };
}

function spaced(values, count) {
  const step = Math.max(1, Math.ceil(values.length / count));
  return values.filter((_, i) => i % step === 0);
}
