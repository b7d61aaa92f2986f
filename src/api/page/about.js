// What the server is: its model, where it is reached, and the settings that hold.

const ADDRESSES = [
  ["POST /v1/chat/completions", "chats, as OpenAI's clients speak"],
  ["POST /v1/responses", "the Responses API; as a WebSocket with GET"],
  ["POST /v1/messages", "chats, as Anthropic's clients speak"],
  ["POST /v1/completions", "texts to be continued"],
  ["GET /v1/stream", "the WebSocket that this page chats over"],
  ["GET /v1/status", "what the monitor shows, as JSON"],
  ["GET /v1/cache", "what is kept, as JSON"],
  ["GET /metrics", "figures for Prometheus"],
  ["GET /openapi.json", "every route, described"],
];

function showAbout({ version, served_names, model, cache, settings }) {
  const sampling = Object.entries(model.default_sampling).filter(([, value]) => typeof value === "number");
  show(byId("model"), table([["Fact"], ["Value"]], [
    ["Served as", served_names.join(", ")],
    ["Model", model.name],
    ["Kind", model.hybrid ? "hybrid: it keeps a running state beside its cells" : "attention only"],
    ...(model.runs_on ? [["Runs on", `${model.runs_on.device} in ${model.runs_on.dtype}, ${plural(model.runs_on.threads, "thread")}`]] : []),
    ...(model.runs_on ? [["Linear layers", `${model.runs_on.linear}, ${bytes(model.runs_on.linear_bytes)}`]] : []),
    ["Context", plural(model.context, "token")],
    ["A token takes", bytes(model.bytes_per_token)],
    ["A checkpoint takes", model.hybrid ? bytes(model.bytes_per_checkpoint) : "nothing"],
    ["Cache budget", bytes(cache.budget)],
    ["Exactness", model.exact],
    ["Chat template", model.has_template ? "yes" : "no: completions only"],
    ["Drawn with, where a request says nothing", sampling.map(([name, value]) => `${name} ${value}`).join(", ")],
    ["Loaded", new Date(model.created * 1000).toLocaleString()],
    ["Server", `regrow ${version}`],
  ], "", "The model"));
  show(byId("addresses"),
    make("p", {}, "The base URL for clients is ", make("code", {}, new URL("v1", location).href), "."),
    table([["Route"], ["What for"]], ADDRESSES.map(([route, use]) => [make("code", {}, route), use]), "", "Routes"));
  const rows = Object.entries(settings).map(([name, value]) => [make("code", {}, name), settingText(value)]);
  show(byId("settings"), table([["Setting"], ["Value"]], rows, "", "Settings"));
  byId("key-panel").hidden = !key;
}

function settingText(value) {
  if (value === null) return "none";
  if (Array.isArray(value)) return value.join(", ") || "none";
  if (typeof value === "boolean") return value ? "on" : "off";
  return String(value);
}
