// The report: builds its sections from the data, and redraws a section when the reader changes something in it.
// Everything that comes from the data gets into the page as text.
"use strict";

const TOGETHER = 10;  // so many methods are shown at first; the reader chooses others
const find = (id) => document.getElementById(id);
let data = JSON.parse(find("data").textContent);
const chosen = {};  // what the reader has chosen, by name of the control
let hidden = new Set(data.methods.slice(TOGETHER).map((method) => method.label));

// -- elements ---------------------------------------------------------------------------------------------------------

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// A list to choose from. What was chosen is kept in `chosen`, as long as it is among the options.
function choice(name, label, options, redraw, preset = options[0]?.[0]) {
  if (!options.some(([value]) => value === chosen[name])) chosen[name] = preset;
  if (options.length < 2) return null;
  const select = make("select", {name, onchange: () => { chosen[name] = select.value; redraw(); }},
    options.map(([value, text]) => make("option", {value, selected: value === chosen[name]}, text)));
  return make("label", {}, label, select);
}

function table(head, rows, properties = {}) {
  return make("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": properties["aria-label"]},
    make("table", {class: properties.class}, make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows)));
}

const header = (text) => make("th", {scope: "col"}, text);
const textHeader = (text) => make("th", {scope: "col", class: "text"}, text);
const cell = (text, properties = {}) => make("td", properties, text ?? "");
const swatch = (place) => make("span", {class: "swatch", "data-place": place, "aria-hidden": "true"});
const named = (method) => make("span", {}, swatch(placeOf(method.label)), " ", method.label);
const terms = (pairs) => make("dl", {}, pairs.filter(([, text]) => text).flatMap(([term, text]) => [make("dt", {}, term), make("dd", {}, text)]));

// -- numbers ----------------------------------------------------------------------------------------------------------

const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);
const unit = () => (data.task.percent ? " (%)" : "");
const scoreTitle = () => `test ${data.task.metric}${unit()}`;
const score = (value) => (known(value) ? (data.task.percent ? value.toFixed(1) : Number(value.toPrecision(4)).toString()) : "–");
const signed = (value) => (known(value) ? (value > 0 ? "+" : value < 0 ? "−" : "±") + score(Math.abs(value)) : "–");
const count = (value) => value.toLocaleString("en");
const better = (a, b) => (data.task.higher ? a - b : b - a);  // more than 0 if `a` is better
const inUnits = (value, what) => {
  const prefixes = ["", "k", "M", "G", "T", "P"];
  let place = 0;
  for (; value >= 999.5 && place < prefixes.length - 1; place += 1) value /= 1000;
  return `${Number(value.toPrecision(3))} ${prefixes[place]}${what}`;
};
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// -- methods and clients ----------------------------------------------------------------------------------------------

const placeOf = (label) => data.methods.findIndex((method) => method.label === label);
const methodOf = (label) => data.methods[placeOf(label)];
const visible = () => data.methods.filter((method) => !hidden.has(method.label));
// the label of the one that is first on the leaderboard
const bestOf = (methods) => data.tables.find((found) => found.ranked)?.rows.find((row) => methods.some((m) => m.label === row.method))?.method;
const scales = (methods) => methods.map((method) => [method.label, placeOf(method.label)]);
const views = (methods) => Object.entries(data.views).filter(([view]) => methods.some((method) => method.final[view]));
const clientName = (i) => data.partition.names[i];

const decoded = new Map();
// Scores of clients: a function of the places of a round and a client. They come as 16-bit numbers, round by round.
function scoresOf(method, view) {
  const packed = method.scores[view];
  if (!packed) return null;
  if (!decoded.has(packed)) {
    const bytes = Uint8Array.from(atob(packed.data), (character) => character.charCodeAt(0));
    decoded.set(packed, new Uint16Array(bytes.buffer));
  }
  const values = decoded.get(packed), clients = data.partition.ids.length;
  return (t, i) => {
    const value = values[t * clients + i];
    return value === 65535 ? null : packed.low + (value / 65534) * (packed.high - packed.low);
  };
}

// -- drawing ----------------------------------------------------------------------------------------------------------

const drawings = new Map();  // element -> how its chart is made
let resting;
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const drawing = drawings.get(entry.target);
    if (!drawing) continue;
    drawing.near = entry.isIntersecting;
    if (drawing.near && drawing.stale) draw(entry.target, drawing);
  }
}, {rootMargin: "400px"});

// A place for a chart, which is drawn when it is about to be seen, or when the page has nothing else to do. `about` is
// read by screen readers.
function chart(about, spec, options = {}) {
  const place = make("div", {class: "chart", role: "img", "aria-label": about});
  drawings.set(place, {spec, stale: true, near: false, ...options});
  watcher.observe(place);
  drawRest();
  return place;
}

// Draw what is not drawn yet, chart by chart, so that the page stays quick.
function drawRest(wait = 30) {
  clearTimeout(resting);
  resting = setTimeout(() => {
    for (const [place, drawing] of drawings) if (!place.isConnected) forget(place, drawing);
    const next = [...drawings].find(([, drawing]) => drawing.stale);
    if (next) { draw(...next); drawRest(0); }  // what the reader does comes in between
  }, wait);
}

function forget(place, drawing) {
  drawing.view?.finalize();
  watcher.unobserve(place);
  drawings.delete(place);
}

function draw(place, drawing) {
  drawing.stale = false;
  drawing.view?.finalize();
  delete place.dataset.drawn;
  place.replaceChildren();
  const width = Math.max(200, Math.min(place.clientWidth, drawing.most ?? Infinity));
  const specification = {width, autosize: {type: "fit-x", contains: "padding"}, config: config(), ...drawing.spec(width)};
  const inner = make("div", {"aria-hidden": "true"});
  place.append(inner);
  const view = new vega.View(vega.parse(vegaLite.compile(specification).spec), {renderer: "canvas", logLevel: vega.Error});
  drawing.view = view.tooltip(showTooltip).initialize(inner);
  if (drawing.click) view.addEventListener("click", (_, item) => item?.datum && drawing.click(item.datum));
  view.runAsync().then(() => { place.dataset.drawn = "true"; });
}

function redraw() {
  for (const [place, drawing] of drawings) {
    drawing.stale = true;
    if (drawing.near && place.isConnected) draw(place, drawing);
  }
  drawRest();
}

function showTooltip(_, event, item, value) {
  const box = find("tooltip");
  box.hidden = !value;
  if (!value) return;
  box.textContent = typeof value === "object" ? Object.entries(value).map(([name, text]) => `${name}: ${text}`).join("\n") : String(value);
  box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 8))}px`;
}

// -- sections ---------------------------------------------------------------------------------------------------------

// A section whose content `fill` makes anew whenever the reader changes a control in it.
function section(id, title, fill) {
  const body = make("div"), element = make("section", {id, "aria-labelledby": `${id}-title`}, make("h2", {id: `${id}-title`}, title), body);
  element.refill = () => {
    const focus = element.contains(document.activeElement) ? document.activeElement.name : null;
    body.replaceChildren(...[fill(element.refill)].flat().filter(Boolean));
    if (focus) body.querySelector(`[name="${focus}"]`)?.focus();
    paintSwatches();
  };
  element.refill();
  return element;
}

const about = (text) => make("p", {class: "about"}, text);
const controls = (...parts) => make("div", {class: "controls"}, parts);

const findings = () => make("ul", {}, data.findings.map((text) => make("li", {}, text.replaceAll(" %", "\u00a0%"))));

function leaderboard(refill) {
  const tables = data.tables.filter((found) => found.title !== "Local computation");
  const select = choice("table", "Models", tables.map((found) => [found.title, found.title]), refill);
  return [controls(select), ...boardTable(tables.find((found) => found.title === chosen.table), refill)];
}

function boardTable(found, refill) {
  if (!found) return [];
  const key = `sort-${found.title}`, order = chosen[key] ?? {column: null, down: true};
  const value = (row) => (order.column === "method" ? row.method : row.cells[found.columns.findIndex((c) => c.key === order.column)]?.[0]);
  const rows = [...found.rows];
  if (order.column) rows.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (!known(x) || !known(y)) return known(y) - known(x);
    return (x < y ? -1 : x > y ? 1 : 0) * (order.down ? -1 : 1);
  });
  const sortable = (name, title) => make("th", {scope: "col", "aria-sort": order.column !== name ? "none" : order.down ? "descending" : "ascending"},
    make("button", {type: "button", name: `${key}-${name}`, onclick: () => {
      chosen[key] = {column: name, down: order.column === name ? !order.down : name !== "method"};
      refill();
    }}, title));
  const head = [...(found.ranked ? [make("th", {scope: "col"}, make("abbr", {title: "rank"}, "#"))] : []), sortable("method", "method"), ...found.columns.map((c) => sortable(c.key, c.title))];
  const body = rows.map((row) => make("tr", {class: found.ranked && row.rank === 1 && rows.length > 1 ? "first" : null},
    ...(found.ranked ? [cell(row.rank === null ? "" : String(row.rank))] : []),
    make("th", {scope: "row", class: "text"}, ...(placeOf(row.method) >= 0 ? [swatch(placeOf(row.method)), " "] : []), row.method),
    ...row.cells.map(([, text]) => cell(text.replace("± ", "±\u00a0")))));
  return [table(head, body, {"aria-label": `${found.title}, table`}), about(found.about)];
}

function axes() {
  return {
    rounds: {title: "round", axis: {format: ",d", tickMinStep: 1}}, gradients: {title: "gradients per client", axis: {labelExpr: prefixed("")}},
    bytes: {title: "bytes sent, all clients", axis: {labelExpr: prefixed(" + 'B'")}}, seconds: {title: "seconds", axis: {labelExpr: prefixed("")}},
  };
}
const prefixed = (end) => `format(datum.value, datum.value < 1000 ? '~r' : '~s')${end}`;

function learningCurves(refill) {
  const methods = visible(), shown = Object.entries(data.views).filter(([view]) => methods.some((method) => method.curves[view]));
  const first = choice("curve-view", "Models", shown, refill);
  const second = choice("curve-x", "by", Object.entries(axes()).map(([key, x]) => [key, x.title]), refill);
  const third = choice("curve-y", "Value", [["mean", scoreTitle()], ["worst", "worst client"], ["loss", "test loss"]], refill);
  const fourth = choice("curve-band", "Band", [["yes", data.task.tails.join(" to ")], ["no", "none"]], refill, data.methods.length > 4 ? "no" : "yes");
  const [view, x, y] = [chosen["curve-view"], chosen["curve-x"], chosen["curve-y"]];
  const withBand = y === "mean" && chosen["curve-band"] === "yes" && methods.some((method) => method.curves[view]?.low5.some(known));
  const points = methods.flatMap((method) => {
    const found = method.curves[view];
    return !found ? [] : method.axes.rounds.map((round, t) => ({
      method: method.label, round, x: method.axes[x][t], y: found[y][t], low: found.low5[t], top: found.top5[t],
    })).filter((point) => known(point.y));
  });
  const title = y === "loss" ? "test loss" : y === "worst" ? `worst client's ${data.task.metric}${unit()}` : scoreTitle();
  const lasting = methods.filter((m) => m.curves[view]).map((m) => `${m.label} ${score(m.curves[view][y].filter(known).at(-1))}`);
  return [
    controls(first, second, third, fourth),
    points.length ? chart(`Learning curves, ${title} by ${axes()[x].title}. At the end: ${lasting.join(", ")}.`, () =>
      curves({points, methods: scales(methods), x: axes()[x], y: title, band: withBand ? data.task.tails : null})) : about("There are no such values."),
    about(`Lines are means over clients${methods.some((m) => m.seeds.length > 1) ? " and seeds" : ""}${withBand ? `; bands reach from the mean of the ${data.task.tails[0]} of clients to that of the ${data.task.tails[1]}` : ""}. The round that counts for the leaderboard is chosen on validation data.`),
  ];
}

function distribution(refill) {
  const methods = visible(), select = choice("spread-view", "Models", views(methods), refill), view = chosen["spread-view"];
  const having = methods.filter((method) => method.final[view]?.mean.some(known));
  const all = having.flatMap((method) => method.final[view].mean.filter(known));
  if (!all.length) return [controls(select), about("There are no such values.")];
  const [step, low, high] = binsFor(all), bins = Math.max(1, Math.round((high - low) / step));
  const sorted = [...all].sort((a, b) => better(a, b)), key = `threshold-${view}`;
  const fine = data.task.percent ? 0.5 : step / 2;
  if (!known(chosen[key]) || chosen[key] < low || chosen[key] > high) chosen[key] = low + Math.round((sorted[Math.floor(sorted.length / 5)] - low) / fine) * fine;
  const side = data.task.higher ? "below" : "above";
  const share = (method) => {
    const values = method.final[view].mean.filter(known), limit = chosen[key];
    return (100 * values.filter((value) => (data.task.higher ? value < limit : value > limit)).length) / values.length;
  };
  const output = make("output", {for: "threshold"}), places = [];
  const moved = () => {
    output.textContent = score(chosen[key]) + (data.task.percent ? " %" : "");
    for (const [method, told, place] of places) {
      told.textContent = `${share(method).toFixed(0)} %`;
      drawings.get(place)?.view?.signal("threshold", chosen[key]).runAsync();
    }
  };
  const slider = make("input", {type: "range", id: "threshold", name: "threshold", min: low, max: high, step: fine, value: chosen[key],
    oninput: () => { chosen[key] = Number(slider.value); moved(); }});
  const rows = having.map((method) => {
    const values = method.final[view].mean.filter(known), counts = new Array(bins).fill(0);
    for (const value of values) counts[Math.min(bins - 1, Math.max(0, Math.floor((value - low) / step)))] += 1;
    const filled = counts.map((n, b) => ({from: low + b * step, to: low + (b + 1) * step, count: n, range: `${score(low + b * step)} to ${score(low + (b + 1) * step)}`})).filter((bin) => bin.count);
    const told = cell("", {class: "share", "data-title": `${side} the threshold`});
    const drawing = chart(`Histogram of clients' ${data.task.metric} with ${method.label}`, () => histogram({
      bins: filled, colour: colourOf(placeOf(method.label)), threshold: chosen[key], domain: [low, high], x: scoreTitle(), higher: data.task.higher,
    }));
    places.push([method, told, drawing]);
    return make("tr", {}, make("th", {scope: "row", class: "text"}, named(method)), make("td", {class: "drawing"}, drawing), told);
  });
  const drawn = make("table", {class: "wide"}, make("thead", {}, make("tr", {}, [header("method"), textHeader(`clients by ${scoreTitle()}`), header(`${side} the threshold`)])), make("tbody", {}, rows));
  moved();
  return [controls(select, make("label", {for: "threshold"}, "Threshold", slider), output), drawn,
    about(`Every client counts once, with its mean over seeds in the round that is best on validation data. Strong bars are ${side} the threshold.${some()}`)];
}

// Width of the bins, and where they begin and end: points of a percentage, or forty bins.
function binsFor(values) {
  const low = Math.min(...values), high = Math.max(...values);
  const step = data.task.percent ? (high - low > 60 ? 2 : 1) : 10 ** Math.floor(Math.log10(Math.max(high - low, 1e-9) / 15));
  return [step, Math.floor(low / step) * step, (Math.floor(high / step) + 1) * step];
}

function heatStrip(refill) {
  const having = data.methods.filter((method) => Object.keys(method.scores).length);
  const first = choice("strip-method", "Method", having.map((m) => [m.label, m.label]), refill, bestOf(having)), method = methodOf(chosen["strip-method"]);
  if (!method) return [about("There are no scores of single clients.")];
  const second = choice("strip-view", "Models", views([method]), refill), view = chosen["strip-view"];
  const third = choice("strip-order", "Clients by", [["final", "their final score"], ["samples", "samples"], ["id", "number"]], refill);
  const values = scoresOf(method, view), final = method.final[view].mean;
  const order = final.map((_, i) => i).filter((i) => known(final[i]));
  if (chosen["strip-order"] === "final") order.sort((a, b) => better(final[b], final[a]));
  if (chosen["strip-order"] === "samples") order.sort((a, b) => data.partition.samples[b] - data.partition.samples[a]);
  const together = Math.ceil(order.length / MOST_ROWS), every = Math.max(1, Math.ceil(method.rounds.length / 200)), cells = [];
  const rounds = method.rounds.filter((_, t) => t % every === 0 || t === method.rounds.length - 1);
  for (let start = 0; start < order.length; start += together) {
    const group = order.slice(start, start + together), who = together === 1 ? clientName(group[0]) : `${clientName(group[0])} and ${group.length - 1} others`;
    const row = together === 1 ? clientName(group[0]) : String(start);
    for (const round of rounds) {
      const found = group.map((i) => values(method.rounds.indexOf(round), i)).filter(known);
      if (found.length) cells.push({round, row, who, score: mean(found)});
    }
  }
  return [controls(first, second, third),
    chart(`Heat strip: ${data.task.metric} of every client over rounds with ${method.label}`, () => strip({
      cells, rows: Math.ceil(order.length / together), rounds, x: "round", y: together === 1 ? "client" : `clients, ${together} to a row`, score: scoreTitle(), higher: data.task.higher})),
    about(`One row per ${together === 1 ? "client" : `${together} clients`}, one column per ${every === 1 ? "evaluated round" : `${every} evaluated rounds`}. The stronger the colour, the better${method.seeds.length > 1 ? "; means over seeds" : ""}.${some()}`)];
}

// What is said where not all clients are shown.
const some = () => (data.partition.ids.length < data.partition.clients ? ` ${count(data.partition.ids.length)} of ${count(data.partition.clients)} clients are shown, at equal distances from the one that the first method serves worst to the one that it serves best.` : "");

function gains(refill) {
  const all = data.methods, select = choice("gain-view", "Models", views(all), refill), view = chosen["gain-view"];
  const having = all.filter((method) => method.final[view]);
  const alone = having.find((method) => method.name === "local") ?? having[0];
  const second = choice("gain-reference", "against", having.map((m) => [m.label, m.label]), refill, alone?.label);
  const others = having.filter((method) => method.label !== chosen["gain-reference"]);
  const first = choice("gain-method", "Clients with", others.map((m) => [m.label, m.label]), refill, bestOf(others));
  const reference = methodOf(chosen["gain-reference"]), method = methodOf(chosen["gain-method"]);
  if (!reference || !method || !others.length) return [
    about("With one method there is nothing to compare. A comparison with local shows who gains and who loses against training alone."), storyControls(refill), story(),
  ];
  const points = data.partition.ids.map((_, i) => {
    const [x, y] = [reference.final[view].mean[i], method.final[view].mean[i]];
    const gain = known(x) && known(y) ? better(y, x) : null;
    return {i, client: clientName(i), x, y, gain, samples: data.partition.samples[i], classes: mix(i), side: gain > 0 ? "gains" : gain < 0 ? "loses" : "same"};
  }).filter((point) => known(point.gain));
  const losing = points.filter((point) => point.gain < 0).sort((a, b) => a.gain - b.gain);
  const winning = points.filter((point) => point.gain > 0);
  const told = `${winning.length} of ${points.length} clients gain with ${method.label} against ${reference.label}, ${losing.length} lose` +
    (losing.length ? `; ${losing[0].client} loses most (${signed(losing[0].gain)})` : "") + ".";
  const open = (i) => { chosen.client = String(i); refill(); find("story").focus(); };
  const worst = losing.slice(0, 5).map((point) => make("tr", {},
    make("th", {scope: "row", class: "text"}, make("button", {type: "button", class: "link", onclick: () => open(point.i)}, point.client)),
    cell(score(point.x)), cell(score(point.y)), cell(signed(point.gain)), cell(count(point.samples)), cell(mix(point.i), {class: "text"})));
  return [
    controls(select, first, second), make("p", {id: "gain-told"}, told),
    chart(`${told} A list to choose clients from is below.`, () => pairs({points, x: `${reference.label}: ${scoreTitle()}`, y: `${method.label}: ${scoreTitle()}`}), {most: 620, click: (datum) => known(datum.i) && open(datum.i)}),
    about(`One mark per client, as large as its number of samples; ${data.task.higher ? "above" : "below"} the line a client is better off with ${method.label}. A click shows the client's story.`),
    worst.length ? make("h3", {}, "Clients that lose most") : null,
    worst.length ? table([...["client", reference.label, method.label, "gain", "samples"].map(header), textHeader("classes")], worst, {"aria-label": "Clients that lose most"}) : null,
    storyControls(refill), story(),
  ];
}

// The classes that most of a client's samples have.
function mix(i) {
  const labels = data.partition.labels?.[i];
  if (!labels?.length) return "";
  const total = labels.reduce((a, b) => a + b, 0), order = labels.map((n, c) => [n, c]).filter(([n]) => n).sort((a, b) => b[0] - a[0]);
  const shown = order.slice(0, 3).map(([n, c]) => `${data.partition.classes[c]}: ${Math.round((100 * n) / total)} %`);
  return shown.join(", ") + (order.length > 3 ? `, ${order.length - 3} more` : "");
}

function storyControls(refill) {
  const options = data.partition.ids.map((_, i) => [String(i), clientName(i)]);
  return controls(choice("client", "The story of", options, refill));
}

function story() {
  const i = Number(chosen.client), sizes = data.partition.sizes, methods = visible(), heldOut = data.partition.held_out?.[i];
  const [view, second] = heldOut ? ["new", "joined"] : [views(methods)[0]?.[0]];
  const anyLost = methods.some((method) => Object.values(method.screened).some((counts) => counts[i]));
  const seeds = methods.some((method) => method.seeds.length > 1);
  const compared = data.methods.length > 1, reference = methodOf(chosen["gain-reference"]), final = (method) => method?.final[view]?.mean[i];
  const rows = methods.filter((method) => known(final(method))).sort((a, b) => better(final(b), final(a))).map((method) => {
    const found = method.final[view], others = found.mean.filter(known);
    const place = 1 + others.filter((value) => better(value, found.mean[i]) > 0).length;
    const lost = Object.entries(method.screened).map(([why, counts]) => (counts[i] ? `${counts[i]} uploads ${why.replace("_", " ")}` : "")).filter(Boolean).join(", ");
    return make("tr", {}, make("th", {scope: "row", class: "text"}, named(method)), cell(score(found.mean[i])),
      seeds ? cell(method.seeds.length > 1 ? `${score(found.low[i])} to ${score(found.high[i])}` : "") : null,
      compared ? cell(known(final(reference)) ? signed(better(found.mean[i], final(reference))) : "") : null, cell(`${place} of ${others.length}`),
      second ? cell(score(method.final[second]?.mean[i])) : null, anyLost ? cell(lost, {class: "text"}) : null);
  });
  const points = methods.flatMap((method) => {
    const values = scoresOf(method, view);
    return values ? method.rounds.map((round, t) => ({method: method.label, round, x: round, y: values(t, i)})).filter((p) => known(p.y)) : [];
  });
  const labels = data.partition.labels?.[i] ?? [];
  return make("div", {id: "story", class: "story", tabindex: "-1", "aria-live": "polite"},
    make("h3", {}, clientName(i)),
    terms([["samples", `${count(data.partition.samples[i])} (${Object.entries(sizes).map(([split, of]) => `${split} ${count(of[i])}`).join(", ")})`], ["classes", mix(i)], ["held out", heldOut ? "yes: did not take part in training" : ""]]),
    rows.length ? table(["method", data.views[view] + unit(), ...(seeds ? ["over seeds"] : []), ...(compared ? [`against ${reference?.label ?? ""}`] : []), "rank among clients", ...(second ? [data.views[second]] : []), ...(anyLost ? ["uploads not used"] : [])].map(header), rows, {"aria-label": "Scores of this client"}) : null,
    make("div", {class: "grid"},
      points.length ? make("figure", {}, make("figcaption", {}, `${scoreTitle()} by round`), chart(`${data.task.metric} of ${clientName(i)} over rounds`, () => curves({points, methods: scales(methods), x: axes().rounds, y: scoreTitle(), band: null, height: 200}))) : null,
      labels.length ? make("figure", {}, make("figcaption", {}, "samples by class"), chart(`Samples of ${clientName(i)} by class: ${mix(i)}`, () => bars({
        values: labels.map((n, c) => ({name: data.partition.classes[c], count: n})), x: "class", y: "samples", height: 200}))) : null));
}

function partitionSection() {
  const {ids, samples, labels, classes, clients} = data.partition;
  const sorted = [...samples].sort((a, b) => a - b), told = `${count(clients)} clients have ${count(sorted[0])} to ${count(sorted.at(-1))} samples, half of them at most ${count(sorted[Math.floor((sorted.length - 1) / 2)])}.`;
  const parts = [make("p", {}, told)];
  if (labels && classes.length) {
    const cells = labels.flatMap((row, i) => row.map((n, c) => ({client: clientName(i), class: classes[c], samples: n})).filter((found) => found.samples));
    parts.push(chart(`Samples of each client and class. ${told}`, () => partition({cells, clients: ids.map((_, i) => clientName(i)), classes})));
  }
  parts.push(chart(`Samples of each client. ${told}`, () => bars({values: ids.map((_, i) => ({name: clientName(i), count: samples[i]})), x: "client", y: "samples", height: 90})));
  if (some()) parts.push(about(some()));
  return parts;
}

function costs(refill) {
  const methods = visible(), shown = views(methods), select = choice("cost-view", "Models", shown, refill), view = chosen["cost-view"];
  const second = choice("cost-x", "by", Object.entries(axes()).filter(([key]) => key !== "rounds").map(([key, x]) => [key, x.title]), refill, "bytes"), x = axes()[chosen["cost-x"]];
  const points = methods.filter((method) => known(method.final[view]?.score)).map((method) => {
    const spent = method.axes[chosen["cost-x"]].at(-1);
    return {method: method.label, x: spent, y: method.final[view].score, told: chosen["cost-x"] === "bytes" ? inUnits(spent, "B") : String(Number(spent.toPrecision(4)))};
  });
  const computed = data.tables.find((found) => found.title === "Local computation");
  const sends = data.methods.filter((method) => method.uploads !== null).map((method) => make("tr", {},
    make("th", {scope: "row", class: "text"}, named(method)),
    cell(Object.entries(method.uploads).map(([name, text]) => `${name}: ${text}`).join("; ") || "nothing", {class: "text"}),
    cell(known(method.epsilon) ? `epsilon ${Number(method.epsilon.toPrecision(3))}` : "none", {class: "text"})));
  return [
    controls(select, second),
    points.length ? chart(`Scores by cost: ${points.map((p) => `${p.method} ${score(p.y)} for ${p.told}`).join(", ")}.`, (width) => cost({points, methods: scales(methods), x, y: scoreTitle(), width})) : null,
    ...(computed ? boardTable(computed, refill) : []),
    sends.length ? make("h3", {}, "What leaves a client") : null,
    sends.length ? table(["method", "what is uploaded", "differential privacy"].map(textHeader), sends, {"aria-label": "What leaves a client"}) : null,
    about("Labels, samples and private state stay with the clients. What is uploaded can still tell about the samples unless it has differential privacy: fedloom audit attacks it."),
  ];
}

function reports(refill) {
  const having = data.methods.filter((method) => method.reports.length);
  const select = choice("report-method", "Method", having.map((m) => [m.label, m.label]), refill, bestOf(having)), method = methodOf(chosen["report-method"]);
  return [controls(select ?? named(method)), make("div", {class: "grid"}, method.reports.map((found) => {
    const where = {clients: "mean and range over clients", server: "mean and range over seeds", vector: "mean over clients"}[found.who];
    const colour = () => colourOf(placeOf(method.label)), title = found.name, entry = title.startsWith("layer") ? "layer" : "entry";
    const drawing = found.who === "vector"
      ? chart(`${title} of ${method.label} by round`, () => reportedVector({title, entry, rounds: found.rounds, cells: found.rounds.flatMap((round, t) => found.values[t].map((value, entry) => ({round, entry, value})))}))
      : chart(`${title} of ${method.label} by round, ending at ${Number(found.mean.at(-1)?.toPrecision(3))}`, () => reported({title, colour: colour(), points: found.rounds.map((round, t) => ({round, mean: found.mean[t], min: found.min[t], max: found.max[t]}))}));
    return make("figure", {}, make("figcaption", {}, `${title}: ${where}`), drawing);
  }))];
}

function screened() {
  const rows = data.methods.flatMap((method) => Object.entries(method.screened).map(([why, counts]) => {
    const clients = Object.entries(counts).sort((a, b) => b[1] - a[1]), shown = clients.slice(0, 8).map(([i, n]) => `${clientName(i)} (${n})`);
    return make("tr", {}, make("th", {scope: "row", class: "text"}, named(method)), cell(why === "diverged" ? "not finite" : "left out by screening", {class: "text"}),
      cell(String(clients.reduce((sum, [, n]) => sum + n, 0))), cell(shown.join(", ") + (clients.length > 8 ? ` and ${clients.length - 8} more` : ""), {class: "text"}));
  }));
  return [table([header("method"), textHeader("why"), header("uploads"), textHeader("clients")], rows, {"aria-label": "Uploads that were not used"}), about("Uploads that the server did not use, over all seeds.")];
}

function quality(refill) {
  const matrices = data.methods.filter((method) => method.confusion), parts = [];
  if (matrices.length) {
    const select = choice("confusion-method", "Method", matrices.map((m) => [m.label, m.label]), refill, bestOf(matrices)), method = methodOf(chosen["confusion-method"]);
    const names = data.partition.classes, wrong = [];
    const cells = method.confusion.flatMap((row, c) => {
      const total = row.reduce((a, b) => a + b, 0);
      return row.map((n, p) => {
        if (p !== c && n) wrong.push([n, `${names[c]} taken for ${names[p]} (${n})`]);
        return {class: names[c], predicted: names[p], samples: n, share: total ? (100 * n) / total : null};
      });
    });
    const told = wrong.sort((a, b) => b[0] - a[0]).slice(0, 3).map(([, text]) => text);
    parts.push(controls(select), make("p", {}, told.length ? `Most frequent mistakes: ${told.join(", ")}.` : "There are no mistakes."),
      chart(`Confusion matrix of ${method.label}. ${told.join(", ")}`, () => confusion({cells, classes: names}), {most: 560}));
  }
  const methods = visible().filter((method) => method.reliability);
  if (methods.length) {
    const points = methods.flatMap((method) => method.reliability.filter(([n]) => n).map(([n, confidence, accuracy]) => ({method: method.label, samples: n, confidence, accuracy})));
    parts.push(make("h3", {}, "Calibration"), chart("Accuracy by confidence of the predictions", () => calibration({points, methods: scales(methods)}), {most: 560}),
      about("Predictions in 15 bins of confidence, all clients and seeds. Below the line a method is surer than it should be."));
  }
  return parts;
}

function origin() {
  const rows = data.runs.map((run) => make("tr", {}, make("th", {scope: "row", class: "text"}, run.label), cell(String(run.seed)), cell(run.finished ? `${run.round}` : `${run.round} of ${run.rounds}`), cell(`${Number(run.seconds.toPrecision(3))}`), cell(run.folder, {class: "text"}), cell(run.machine, {class: "text"})));
  const firsts = data.runs.filter((run, i) => data.runs.findIndex((other) => other.label === run.label) === i);
  return [
    table([...["method", "seed", "rounds", "seconds"].map(header), ...["folder", "machine"].map(textHeader)], rows, {"aria-label": "Runs"}),
    ...firsts.map((run) => make("details", {"data-run": run.label}, make("summary", {}, `${run.label}: command, versions, plan, configuration`),
      terms([["command", run.command], ["versions", Object.entries(run.packages).map(([name, version]) => `${name} ${version}`).join(", ")], ["plan", Object.entries(run.plan).map(([name, value]) => `${name} ${value}`).join(", ")]]),
      make("pre", {}, run.config))),
  ];
}

const SECTIONS = [
  ["findings", "Findings", () => data.findings.length, findings],
  ["leaderboard", "Leaderboard", () => data.tables.length, leaderboard],
  ["curves", "Learning curves", () => true, learningCurves],
  ["distribution", "Distribution over clients", () => data.methods.some((method) => Object.keys(method.final).length), distribution],
  ["strip", "Clients over rounds", () => data.methods.some((method) => Object.keys(method.scores).length), heatStrip],
  ["gains", "Who gains, who loses", () => data.methods.some((method) => Object.keys(method.final).length), gains],
  ["partition", "Data of the clients", () => data.partition.ids.length, partitionSection],
  ["cost", "Cost, and what is sent", () => true, costs],
  ["reports", "What the methods report", () => data.methods.some((method) => method.reports.length), reports],
  ["screened", "Uploads not used", () => data.methods.some((method) => Object.keys(method.screened).length), screened],
  ["quality", "Confusion and calibration", () => data.methods.some((method) => method.confusion || method.reliability), quality],
  ["origin", "How it was made", () => true, origin],
];

// -- the page ---------------------------------------------------------------------------------------------------------

function paintSwatches() {
  for (const element of document.querySelectorAll(".swatch")) {
    const place = Number(element.dataset.place), [, gap] = dashOf(place);
    element.style.borderTopColor = colourOf(place);
    element.style.borderTopStyle = gap ? "dashed" : "solid";
  }
}

function methodFilter() {
  if (data.methods.length < 2) return;
  find("methods").replaceChildren(make("fieldset", {}, make("legend", {}, "Methods"), data.methods.map((method) => {
    const box = make("input", {type: "checkbox", name: "method", value: method.label, onchange: () => {
      if (box.checked) hidden.delete(method.label); else hidden.add(method.label);
      document.querySelectorAll("main section").forEach((element) => element.refill());
    }});
    box.checked = !hidden.has(method.label);
    return make("label", {}, box, named(method));
  })));
}

function build() {
  const {task} = data, seeds = new Set(data.runs.map((run) => run.seed)).size;
  document.title = data.title;
  find("title").textContent = data.title;
  find("subtitle").textContent = [`${count(data.partition.clients)} clients`, task.partition, task.model, `${seeds} ${seeds === 1 ? "seed" : "seeds"}`, `ranked by ${task.metric}`].filter(Boolean).join(" · ");
  tellProgress();
  find("footer").textContent = `Made by FedLoom ${data.version} at ${data.made.replace("T", " ").replace("+00:00", " UTC")}.`;
  methodFilter();
  const shown = SECTIONS.filter(([, , there]) => there());
  find("contents").replaceChildren(...shown.map(([id, title]) => make("li", {}, make("a", {href: `#${id}`}, title))));
  find("content").replaceChildren(...shown.map(([id, title, , fill]) => section(id, title, fill)));
  redraw();
  paintSwatches();
}

function tellProgress() {
  const text = data.progress ? `Not all is done: ${data.progress}.` : "";
  if (find("progress").textContent !== text) find("progress").textContent = text;
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  find("theme").textContent = name === "dark" ? "Light" : "Dark";
  paintSwatches();
  redraw();
}

// Build the page anew, and leave the reader where he was.
function rebuild() {
  const [x, y] = [scrollX, scrollY], {name, value} = document.activeElement ?? {};
  const open = [...document.querySelectorAll("details[open]")].map((element) => element.dataset.run);
  build();
  for (const element of document.querySelectorAll("details")) element.open = open.includes(element.dataset.run);
  if (name) [...document.querySelectorAll("[name]")].find((element) => element.name === name && element.value === value)?.focus();
  scrollTo(x, y);
}

// A live page asks for newer data; the server answers 304 while there are none.
async function poll(etag) {
  try {
    const answer = await fetch("data.json", {headers: {"If-None-Match": etag}, cache: "no-store"});
    if (answer.status === 200) {
      data = await answer.json();
      etag = answer.headers.get("ETag");
      rebuild();
    }
    tellProgress();
  } catch {
    find("progress").textContent = "The server of this page does not answer; it was stopped, or is busy.";
  }
  setTimeout(poll, 2000, etag);
}

const system = matchMedia("(prefers-color-scheme: dark)");
document.documentElement.dataset.theme = system.matches ? "dark" : "light";
system.addEventListener("change", () => setTheme(system.matches ? "dark" : "light"));
find("theme").addEventListener("click", () => setTheme(theme() === "dark" ? "light" : "dark"));
let resized, width = innerWidth;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => { if (innerWidth !== width) { width = innerWidth; redraw(); } }, 150);
});
let before = null;
addEventListener("beforeprint", () => {  // everything is drawn, dark on white
  before = theme();
  document.documentElement.dataset.theme = "light";
  paintSwatches();
  for (const [place, drawing] of drawings) if (place.isConnected) draw(place, drawing);
});
addEventListener("afterprint", () => setTheme(before ?? theme()));
setTheme(theme());
build();
if (data.live) setTimeout(poll, 2000, `"${data.live}"`);
