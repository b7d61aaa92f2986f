// The monitor: what the server is doing (/v1/status), and what it keeps (/v1/cache).

const SAMPLES = 120; // of the rates, one each time the server is asked
const ANSWERS = 48; // the last ones, in the other time lines
const KINDS = {
  root: "system prompts (roots)",
  checkpoint: "checkpoints",
  parked: "parked conversations",
  keys: "keys (token ids)",
  buffer: "copies on their way",
};
const samples = []; // {at, read, drawn} a second
let before = null; // {at, status}

function showStatus(status) {
  const at = performance.now() / 1000;
  const passed = before ? at - before.at : 0;
  if (passed > 0) {
    const [now, then] = [status.device.counters, before.status.device.counters];
    const of = (name) => Math.max(0, now[name] - then[name]) / passed;
    samples.push({ read: of("read_tokens"), drawn: of("drawn") });
    if (samples.length > SAMPLES) samples.shift();
  }
  showTiles(status);
  show(byId("queue"), queueText(status.engine));
  show(byId("slots"), ...status.slots.map((slot) => slotCard(slot, status.model, passed)));
  show(byId("charts"), ...charts(status));
  showBudget(status.cache);
  show(byId("lanes"), lanes(status));
  const misses = Object.entries(status.engine.totals.misses).sort(([, a], [, b]) => b - a);
  show(byId("misses"), table([["Reason"], ["Times", true]], misses.map(([reason, times]) => [reason, count(times)]),
    "Every prompt so far was reused as far as it was known.", "How often not more was reused, by reason"));
  before = { at, status };
}

function showTiles({ engine, recent }) {
  const { totals } = engine;
  const firsts = recent.map(({ ttft_s }) => ttft_s).filter((value) => value != null);
  const tiles = [
    ["requests running", count(engine.running)],
    ["requests waiting", count(engine.waiting)],
    ["of prompt tokens reused", percent(totals.reused, totals.reused + totals.read)],
    ["first token, median", firsts.length ? seconds(median(firsts)) : "–"],
    ["answers", count(totals.finished)],
    ["failed", count(totals.failed)],
  ];
  show(byId("tiles"), ...tiles.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}

function queueText({ waiting, draining }) {
  if (draining) return "The server is stopping: what runs may finish, nothing new is taken.";
  return waiting ? `${plural(waiting, "request")} ${waiting === 1 ? "waits" : "wait"} for a slot.` : "Nobody waits for a slot.";
}

function slotCard(slot, { context }, passed) {
  const then = before?.status.slots[slot.slot];
  const same = passed > 0 && then?.request === slot.request;
  const speed = (name) => (same && slot[name] > then[name] ? `${rate((slot[name] - then[name]) / passed)} tokens a second` : null);
  const bar = make("div", { class: "bar", role: "img" });
  let words;
  if (slot.phase === "decoding" || slot.phase === "stopping") {
    const held = Math.min(1, slot.length / context);
    words = [`${count(slot.drawn)} answered`, speed("drawn"), `${count(slot.reused)} of ${count(slot.prompt)} reused`];
    setBar(bar, [["reused", held]]);
  } else if (slot.request) {
    words = [`${count(slot.position)} of ${count(slot.prompt)} tokens`, speed("position"), `${count(slot.reused)} reused`];
    setBar(bar, [["reused", slot.reused / slot.prompt], ["read", Math.max(0, slot.position - slot.reused) / slot.prompt]]);
  } else {
    words = [slot.length ? "Keeps what it has read" : "Empty"];
    setBar(bar, [["keys", Math.min(1, slot.length / context)]]);
  }
  const kept = slot.checkpoints.length ? plural(slot.checkpoints.length, "checkpoint") : null;
  const filled = `holds ${count(slot.length)} of ${count(context)} tokens`;
  bar.setAttribute("aria-label", slot.phase === "reading" ? "How far the prompt is read" : "How full the slot is");
  return make("li", { class: "slot" },
    make("header", {}, `Slot ${slot.slot}`,
      make("span", { class: "badge", "data-phase": slot.phase }, slot.phase)),
    bar,
    make("p", {}, words.filter(Boolean).join(" · ")),
    make("p", {}, [filled, kept].filter(Boolean).join(" · ")));
}

function charts({ recent }) {
  const shown = recent.slice(-ANSWERS);
  const last = samples.at(-1) ?? { read: 0, drawn: 0 };
  const timed = (name, title, what) => {
    const values = shown.map((answer) => answer[name]).filter((value) => value != null);
    const told = values.length ? `last ${seconds(values.at(-1))} · most ${seconds(Math.max(...values))}` : "no answer yet";
    const label = `${what} of the last ${plural(values.length, "answer")}: ${told}`;
    return figure(title, told, bars(values.map((value) => [["", value]]), ANSWERS, label));
  };
  const reused = shown.reduce((sum, answer) => sum + answer.reused, 0);
  const prompts = shown.reduce((sum, answer) => sum + answer.prompt, 0);
  const share = shown.length ? `${percent(reused, prompts)} of ${count(prompts)} tokens reused` : "no answer yet";
  const speeds = `${rate(last.read)} read · ${rate(last.drawn)} answered`;
  const series = [["reading", samples.map(({ read }) => read)], ["drawn", samples.map(({ drawn }) => drawn)]];
  return [
    figure("Tokens a second, now", speeds, lines(series, SAMPLES, `Tokens a second while this page was open: ${speeds}`),
      legend(["reading", "read"], ["drawn", "answered"])),
    figure("Prompts", share,
      bars(shown.map((answer) => [["reused", answer.reused], ["read", answer.prompt - answer.reused]]), ANSWERS,
        `Prompts of the last ${plural(shown.length, "answer")}: ${share}`),
      legend(["reused", "reused"], ["read", "read"])),
    timed("ttft_s", "First token", "Time to the first token"),
    timed("gap_s", "Longest gap in an answer", "Longest time between two tokens"),
  ];
}

function showBudget({ budget, used, evictions, refusals }) {
  const place = byId("budget");
  const kinds = Object.keys(KINDS).map((kind) => [kind, used[kind] ?? 0]);
  const all = kinds.reduce((sum, [, size]) => sum + size, 0);
  const bar = make("div", { class: "bar", role: "img", "aria-label": `${bytes(all)} of ${bytes(budget)} are used` });
  setBar(bar, kinds.map(([kind, size]) => [kind, budget ? size / budget : 0]));
  const evicted = Object.values(evictions).reduce((sum, number) => sum + number, 0);
  const room = [`${bytes(all)} of ${bytes(budget)} used`];
  if (evicted) room.push(`${count(evicted)} had to make room`);
  if (refusals) room.push(`${count(refusals)} found no room`);
  if (!budget) room.splice(0, 1, "The cache is off");
  show(place,
    make("p", { class: "quiet" }, room.join(" · ")),
    bar,
    legend(...kinds.map(([kind, size]) => [kind, `${KINDS[kind]}: ${bytes(size)}`]), ["free", `free: ${bytes(budget - all)}`]));
}

function lanes({ engine, device, disk }) {
  const { counters } = device;
  const per = (amount, time, text) => (time > 0 ? `${text(amount / time)}/s` : "–");
  const tokens = (number) => `${rate(number)} tokens`;
  const rows = [
    ["compute: read", plural(counters.read_tokens, "token"), seconds(counters.read_s), per(counters.read_tokens, counters.read_s, tokens)],
    ["compute: answer", plural(counters.drawn, "token"), seconds(counters.step_s), per(counters.drawn, counters.step_s, tokens)],
  ];
  for (const [source, { nbytes, seconds: time }] of Object.entries(engine.copied)) {
    rows.push([`copy from ${SOURCES[source] ?? source}`, bytes(nbytes), seconds(time), per(nbytes, time, bytes)]);
  }
  if (disk) {
    const { written_bytes, written_s, restored_bytes, restored_s } = disk.counters;
    rows.push(["disk: write", bytes(written_bytes), seconds(written_s), per(written_bytes, written_s, bytes)]);
    rows.push(["disk: read", bytes(restored_bytes), seconds(restored_s), per(restored_bytes, restored_s, bytes)]);
  }
  return table([["Lane"], ["Moved", true], ["Time", true], ["Rate", true]], rows, "", "What was computed and copied since the start");
}

function showCache({ roots, parked, disk }, status) {
  const perToken = status.model.bytes_per_token;
  show(byId("roots"), table(
    [["Root"], ["Tokens", true], ["Cells", true], ["Age", true], ["Uses", true], ["", true]],
    roots.map((root) => [
      make("code", {}, root.prefix.slice(0, 8)), count(root.tokens), bytes(root.tokens * perToken), age(root.age_s), count(root.uses),
      make("button", { type: "button", "data-name": root.prefix, "aria-label": `Forget the system prompt ${root.prefix.slice(0, 8)}`,
        click: () => forget(`v1/cache/roots/${root.prefix}`) }, "Forget"),
    ]),
    "None yet. A system prompt that is long enough is kept once it was read.", "System prompts that are kept"));
  show(byId("parked"), table(
    [["Conversation"], ["Tokens", true], ["Size", true], ["Age", true], ["Uses", true]],
    parked.map((kept) => [kept.name, count(kept.tokens), bytes(kept.nbytes), age(kept.age_s), count(kept.uses)]),
    "None. A conversation is parked in memory when its slot is needed for another.", "Conversations that are parked in memory"));
  show(byId("disk"), ...diskContent(disk, status.disk));
}

function diskContent(records, tier) {
  if (!tier) return [make("p", { class: "quiet" }, "Nothing is kept on disk: the server was started without --cache-dir.")];
  const { counters, budget, directory } = tier;
  const state = counters.state === "on" ? "" : ` The disk is ${counters.state}: ${counters.reason}.`;
  const now = Date.now() / 1000;
  return [
    make("p", { class: "quiet" }, `${bytes(counters.used)} of ${bytes(budget)} used in ${directory}.${state}`),
    table([["Record"], ["Tokens", true], ["Size", true], ["Last use", true], ["Uses", true]],
      records.map((record) => [
        `${record.kind === "root" ? "system prompt" : "conversation"} ${record.name.split("-")[0].replace(/^0+/, "")}`,
        count(record.tokens), bytes(record.nbytes), age(Math.max(0, now - record.used_at)), count(record.uses),
      ]),
      "Nothing yet. A conversation is written a moment after its last answer.", "What is kept on disk"),
  ];
}

async function forget(path) {
  try {
    const { forgotten } = await ask(path, "DELETE");
    byId("forgotten").textContent = `${plural(forgotten, "entry", "entries")} forgotten.`;
  } catch (error) {
    byId("forgotten").textContent = error.message;
  }
  poll(true);
}
