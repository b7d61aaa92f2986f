// The chat: one conversation, kept in this tab. A turn is what the user said and the answer to it:
// {user, answer: {content, reasoning, phase, read, end, failed, times}}.

const CHAT = "regrow-chat";
let turns = [];
let running = null; // {id, turn, view} while an answer comes

// What is sent of the conversation: turns that were answered, and the last one.
function conversation() {
  const system = byId("system").value.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    const { content, reasoning } = turn.answer;
    if (!content && !reasoning && turn !== turns.at(-1)) continue;
    messages.push({ role: "user", content: turn.user });
    if (turn === turns.at(-1)) break;
    messages.push({ role: "assistant", content, ...(reasoning && { reasoning_content: reasoning }) });
  }
  return messages;
}

function say(text) {
  turns.push({ user: text, answer: null });
  begin(turns.at(-1));
}

function begin(turn) {
  turn.answer = { content: "", reasoning: "", phase: "Sending", asked: performance.now() };
  const request = { model: model(), messages: conversation(), regrow: { progress: true } };
  const temperature = byId("temperature").valueAsNumber;
  const longest = byId("max-tokens").valueAsNumber;
  if (!Number.isNaN(temperature)) request.temperature = temperature;
  if (!Number.isNaN(longest)) request.max_tokens = longest;
  const view = showTurn(turn);
  running = { id: null, turn, view };
  setRunning(true);
  running.id = stream.create(request, (message) => hear(turn, view, message));
}

function hear(turn, view, message) {
  const answer = turn.answer;
  switch (message.type) {
    case "queued":
      answer.phase = message.ahead ? `In the queue, ${plural(message.ahead, "request")} before this one` : "In the queue";
      break;
    case "placed":
      answer.read = { ...message, position: message.reused };
      answer.phase = message.reused
        ? `Slot ${message.slot} takes ${count(message.reused)} tokens from ${SOURCES[message.source]}`
        : `Slot ${message.slot} reads from the start`;
      break;
    case "progress":
      answer.read = { ...answer.read, ...message };
      answer.phase = `Reading: ${count(message.position)} of ${count(message.total)} tokens, `
        + `${count(message.tok_s)} a second, ${seconds(message.eta_ms / 1000)} left`;
      break;
    case "read":
      answer.phase = "Waiting for the first token";
      break;
    case "delta":
      answer.first ??= performance.now();
      answer.last = performance.now();
      answer.phase = message.reasoning ? "Thinking" : "Answering";
      answer.content += message.content ?? "";
      answer.reasoning += message.reasoning ?? "";
      break;
    case "done":
      end(turn, message);
      break;
    case "error":
      end(turn, message, message.error);
      break;
  }
  view.changed();
}

function end(turn, { finish_reason, usage, regrow }, error = null) {
  const { content, reasoning, asked, first, last } = turn.answer;
  const end = { finish_reason, usage, regrow, error };
  if (first) end.first_s = (first - asked) / 1000;
  const drawn = usage?.completion_tokens ?? 0;
  if (drawn > 1 && last > first) end.tok_s = (drawn - 1) / ((last - first) / 1000);
  turn.answer = { content, reasoning, end };
  if (running?.turn === turn) {
    running = null;
    setRunning(false);
  }
  save();
}

function stop() {
  if (running) stream.cancel(running.id);
}

function setRunning(on) {
  byId("stop").hidden = !on;
  byId("send").hidden = on;
  byId("log").setAttribute("aria-busy", on);
  if (!on && document.activeElement === document.body) byId("draft").focus();
}

// What is shown of a turn

function showTurn(turn) {
  const bar = make("div", { class: "bar" });
  const reasoning = make("div");
  const thoughts = make("details", { class: "reasoning", hidden: true }, make("summary", {}, "Thoughts"), reasoning);
  const text = make("div", { class: "text" });
  const facts = make("div", { class: "facts" });
  const element = make("article", { class: "turn" },
    make("h2", { class: "hidden" }, "You"),
    make("div", { class: "said" },
      make("div", { class: "mine" }, turn.user),
      make("button", { type: "button", class: "plain", "aria-label": "Edit this message", click: () => edit(turn) }, "Edit")),
    make("h2", { class: "hidden" }, "Answer"),
    make("div", { class: "answer" }, thoughts, text, make("div", { class: "facts" }, bar), facts));
  let shown = "";
  let due = false;

  function paint() {
    due = false;
    const answer = turn.answer;
    const scroll = byId("scroll");
    const atEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
    thoughts.hidden = !answer.reasoning;
    if (reasoning.textContent !== answer.reasoning) reasoning.textContent = answer.reasoning;
    if (shown !== answer.content) setText(text, (shown = answer.content));
    paintBar(bar, answer);
    show(facts, ...(answer.end ? ending(turn, answer.end) : [make("p", {}, answer.phase)]));
    if (atEnd) scrollToEnd();
  }

  byId("log").append(element);
  byId("chat-empty").hidden = true;
  paint();
  scrollToEnd();
  return {
    element,
    changed() {
      if (!due) requestAnimationFrame(paint);
      due = true;
    },
  };
}

function paintBar(bar, answer) {
  const { reused, read, total } = prompt(answer);
  bar.hidden = !total;
  if (!total) return;
  setBar(bar, [["reused", reused / total], ["read", read / total]]);
  bar.setAttribute("role", answer.end ? "img" : "progressbar");
  bar.setAttribute("aria-label", answer.end
    ? `Of ${count(total)} prompt tokens ${count(reused)} were reused and ${count(read)} read` : "Reading the prompt");
  for (const [name, value] of [["valuemin", 0], ["valuenow", reused + read], ["valuemax", total]]) {
    if (answer.end) bar.removeAttribute(`aria-${name}`);
    else bar.setAttribute(`aria-${name}`, value);
  }
}

function prompt({ read, end }) {
  if (end?.usage) {
    const total = end.usage.prompt_tokens;
    const reused = end.regrow?.reused ?? 0;
    return { reused, read: total - reused, total };
  }
  if (end || !read) return { reused: 0, read: 0, total: 0 };
  return { reused: read.reused, read: read.position - read.reused, total: read.total };
}

function ending(turn, { finish_reason, usage, regrow, error, first_s, tok_s }) {
  const lines = [];
  if (error) lines.push(make("p", { class: "problem", role: "alert" }, error.message));
  if (usage && regrow) {
    const { reused, read } = prompt({ end: { usage, regrow } });
    const facts = [
      reused ? `Reused ${count(reused)} tokens from ${SOURCES[regrow.source]}` : "Reused nothing",
      `read ${count(read)}`,
      `answered ${count(usage.completion_tokens)}`,
    ];
    if (first_s) facts.push(`first token after ${seconds(first_s)}`);
    if (tok_s) facts.push(`${rate(tok_s)} tokens a second`);
    if (regrow.slot != null) facts.push(`slot ${regrow.slot}`);
    lines.push(make("p", {}, facts.map((fact) => fact.replaceAll(" ", "\u00a0")).join(" · ")));
    if (regrow.why) lines.push(make("p", {}, make("b", {}, "Why not more: "), regrow.why));
    if (regrow.diverged) lines.push(difference(regrow.diverged));
    if (regrow.repacked) {
      const { messages, characters } = regrow.repacked;
      lines.push(make("p", {}, `${plural(messages, "old message")} shortened by ${count(characters)} characters, since the conversation was not kept any more.`));
    }
  }
  if (finish_reason === "cancelled") lines.push(make("p", {}, "You stopped this answer."));
  if (finish_reason === "length") lines.push(make("p", {}, "The answer ended at its longest length."));
  if (error || finish_reason === "cancelled") {
    lines.push(make("button", { type: "button", class: "plain", click: () => again(turn) }, "Try again"));
  }
  return lines;
}

// Where the prompt left the nearest known one, in its own words.
function difference({ before, after, position }) {
  return make("blockquote", {}, make("span", { class: "hidden" }, `From token ${position} on it is new: `),
    before ? `… ${before}` : "", make("mark", {}, after || "(the end)"), " …");
}

// What the user can do with a turn

function cut(turn) {
  stop();
  running = null;
  setRunning(false);
  turns.length = turns.indexOf(turn);
  const log = byId("log");
  while (log.children.length > turns.length) log.lastChild.remove();
  byId("chat-empty").hidden = turns.length > 0;
  save();
}

function edit(turn) {
  cut(turn);
  byId("draft").value = turn.user;
  byId("draft").focus();
}

function again(turn) {
  if (running) return;
  cut(turn);
  say(turn.user);
  byId("draft").focus();
}

function newChat() {
  if (turns.length) cut(turns[0]);
  byId("draft").focus();
}

function save() {
  const kept = turns.filter(({ answer }) => answer.end);
  try {
    sessionStorage.setItem(CHAT, JSON.stringify({ system: byId("system").value, turns: kept }));
  } catch {
    sessionStorage.removeItem(CHAT); // it has outgrown what a tab may keep
  }
}

function restore() {
  const kept = JSON.parse(sessionStorage.getItem(CHAT) ?? '{"system": "", "turns": []}');
  byId("system").value = kept.system;
  turns = kept.turns;
  turns.forEach(showTurn);
}

function scrollToEnd() {
  byId("scroll").scrollTop = byId("scroll").scrollHeight;
}

function startChat() {
  restore();
  const draft = byId("draft");
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = draft.value.trim();
    if (!text || running || byId("send").disabled) return;
    draft.value = "";
    say(text);
    draft.focus();
  });
  draft.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("composer").requestSubmit();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("key-dialog").open) stop();
  });
  byId("stop").addEventListener("click", () => {
    stop();
    draft.focus();
  });
  byId("new-chat").addEventListener("click", newChat);
  byId("system").addEventListener("change", save);
}
