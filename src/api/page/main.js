// Which view is shown, and when the server is asked how it is: never while the page is hidden.

const VIEWS = ["chat", "monitor", "about"];
const EVERY_MS = { chat: 5000, monitor: 1000, about: 5000 };
const CACHE_EVERY = 3; // times that the status is asked for
let view = "chat";
let status = null;
let timer = null;
let asking = false;
let times = 0;

const model = () => status?.served_names[0] ?? "";

function route() {
  const name = location.hash.replace("#/", "");
  view = VIEWS.includes(name) ? name : "chat";
  for (const each of VIEWS) byId(each).hidden = each !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#/${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (view === "chat") scrollToEnd();
  document.title = view === "chat" ? "regrow" : `${view[0].toUpperCase()}${view.slice(1)} · regrow`;
  poll(true);
}

// Ask the server how it is, and show it. all: the cache too, whoever's turn it is.
async function poll(all = false) {
  clearTimeout(timer);
  if (document.hidden || asking) {
    timer = asking ? setTimeout(poll, 200, all) : null;
    return;
  }
  asking = true;
  try {
    status = await ask("v1/status");
    showState(status.ready ? "ready" : "loading", status.ready ? model() : "Takes no requests now");
    byId("send").disabled = !status.model.has_template;
    byId("draft").placeholder = status.model.has_template ? "Your message" : "This model has no chat template";
    if (view === "monitor") {
      showStatus(status);
      if (all || times++ % CACHE_EVERY === 0) showCache(await ask("v1/cache"), status);
    }
    if (view === "about") showAbout(status);
    notice("");
  } catch (error) {
    if (error.status === 401) showState("locked", key ? "Does not take the key" : "Wants a key");
    else if (error.code === "loading") showState("loading", "The model is loading");
    else showState("away", error.status ? "In trouble" : "Not reachable");
    notice(error.status ? error.message : "The server cannot be reached. What you see is what it said last.");
  } finally {
    asking = false;
  }
  clearTimeout(timer);
  timer = setTimeout(poll, status ? EVERY_MS[view] : EVERY_MS.monitor);
}

function notice(text) {
  byId("monitor-notice").hidden = !text;
  byId("monitor-notice").textContent = text;
}

function showState(is, text) {
  byId("state").dataset.is = is;
  byId("enter-key").hidden = is !== "locked";
  if (byId("state-text").textContent !== text) byId("state-text").textContent = text;
}

byId("key-form").addEventListener("submit", () => {
  setKey(byId("key").value.trim());
  byId("key").value = "";
  poll(true);
});
byId("forget-key").addEventListener("click", () => {
  setKey("");
  poll(true);
});
byId("enter-key").addEventListener("click", enterKey);
byId("forget-all").addEventListener("click", () => {
  if (confirm("Forget everything that is kept and not in use? It will be read again when it is needed.")) forget("v1/cache");
});
document.addEventListener("visibilitychange", () => document.hidden || poll(true));
window.addEventListener("hashchange", () => {
  route();
  byId("main").focus();
});

startChat();
route();
if (matchMedia("(pointer: fine)").matches) byId("draft").focus();
