// The server: the key that it may want, its JSON, and the WebSocket that chats stream over (/v1/stream). Its
// addresses are relative, so that the page also works behind a proxy that serves it under a path.

const KEY = "regrow-key";
let key = sessionStorage.getItem(KEY) ?? "";
let asked = false; // for this key, once: who closes the dialog is left alone

class Refusal extends Error {
  constructor(status, error) {
    super(error?.message ?? `The server answered with status ${status}.`);
    this.status = status;
    this.code = error?.code ?? null;
  }
}

async function ask(path, method = "GET") {
  const headers = {};
  if (key) headers.authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`;
  const response = await fetch(path, { method, headers, cache: "no-store" });
  const body = await response.json().catch(() => null);
  if (!response.ok) {
    const refusal = new Refusal(response.status, body?.error);
    if (refusal.status === 401) wantKey();
    throw refusal;
  }
  return body;
}

function wantKey() {
  if (!asked) enterKey();
}

function enterKey() {
  asked = true;
  byId("key-error").textContent = key ? "The server does not take this key." : "";
  byId("key-dialog").showModal();
}

function setKey(value) {
  key = value;
  asked = false;
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
  stream.close();
}

// Many requests share one connection; it is opened when there is something to ask.
class Stream {
  #socket = null;
  #opening = null;
  #heard = new Map();
  #number = 0;

  // Ask for an answer. hear: called with every message about it, the last is of type done or error.
  create(request, hear) {
    const id = String(++this.#number);
    this.#heard.set(id, hear);
    this.#open().then(
      () => this.#heard.has(id) && this.#say({ type: "create", id, request }),
      (error) => this.#tell(id, { type: "error", error: { message: error.message, code: error.code } }),
    );
    return id;
  }

  cancel(id) {
    if (this.#socket?.readyState === WebSocket.OPEN) this.#say({ type: "cancel", id });
    else this.#tell(id, { type: "done", finish_reason: "cancelled" });
  }

  close() {
    this.#socket?.close();
  }

  #say(message) {
    this.#socket.send(JSON.stringify(message));
  }

  #tell(id, message) {
    const hear = this.#heard.get(id);
    if (message.type === "done" || message.type === "error") this.#heard.delete(id);
    hear?.(message);
  }

  #open() {
    this.#opening ??= new Promise((opened, failed) => {
      const socket = new WebSocket(new URL("v1/stream", location.href.replace(/^http/, "ws")));
      this.#socket = socket;
      socket.onopen = () => {
        if (key) this.#say({ type: "auth", key });
        else opened();
      };
      socket.onmessage = ({ data }) => {
        const message = JSON.parse(data);
        if (message.type === "authorized") opened();
        else if (message.id !== undefined) this.#tell(message.id, message);
        else if (message.status === 401) {
          wantKey();
          this.#lost(message.error);
          failed(new Refusal(401, message.error));
        }
      };
      socket.onclose = ({ reason }) => {
        const error = { message: reason || "The connection to the server was lost.", code: "connection_lost" };
        failed(new Refusal(0, error));
        if (this.#socket === socket) this.#lost(error);
      };
    });
    return this.#opening;
  }

  // The connection is gone, and with it all that was asked over it.
  #lost(error) {
    this.#socket = null;
    this.#opening = null;
    for (const id of [...this.#heard.keys()]) this.#tell(id, { type: "error", error });
  }
}

const stream = new Stream();
