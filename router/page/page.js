// Starts the page: theme, API key, the live feed, and the parts that show it.

import { Charts } from "./charts.js";
import { byId, setText } from "./dom.js";
import { Fleets } from "./fleets.js";
import { Failure, apiKey, events, setApiKey } from "./http.js";
import { Kept } from "./kept.js";
import { Playground } from "./playground.js";

const MAX_SAMPLES = 600;
const SILENCE_MS = 10_000;
const RETRY_MS = 1500;

const fleets = new Fleets();
const charts = new Charts();
const playground = new Playground(askForKey);
let retryNow = () => {};

// ---------------------------------------------------------------------------------------------- theme
const theme = new Kept("localStorage", "baton-theme");
const prefersDark = matchMedia("(prefers-color-scheme: dark)");

const isDark = () => (theme.value ? theme.value === "dark" : prefersDark.matches);

function showTheme() {
  if (theme.value) document.documentElement.dataset.theme = theme.value;
  const dark = isDark();
  setText(byId("theme"), dark ? "Light" : "Dark");
  byId("theme").setAttribute("aria-label", `Switch to the ${dark ? "light" : "dark"} theme`);
}

byId("theme").addEventListener("click", () => {
  theme.set(isDark() ? "light" : "dark");
  showTheme();
});
prefersDark.addEventListener("change", showTheme);
showTheme();

// -------------------------------------------------------------------------------------------- API key
function showKeyForm(open) {
  byId("key-form").hidden = !open;
  byId("key-toggle").setAttribute("aria-expanded", String(open));
}

function askForKey() {
  showKeyForm(true);
  setText(byId("key-note"), apiKey() ? "The router refused this key." : "This router asks for a key.");
}

byId("key-toggle").addEventListener("click", () => {
  showKeyForm(byId("key-form").hidden);
  if (!byId("key-form").hidden) byId("key").focus();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setApiKey(byId("key").value.trim());
  setText(byId("key-note"), "Kept in this tab only, and gone when it is closed.");
  showKeyForm(false);
  playground.forgetRefusal();
  byId("key-toggle").focus();
  retryNow();
});
byId("key").value = apiKey();

// ------------------------------------------------------------------------------------------ live feed
const WORDS = { ok: "serving", degraded: "degraded", starting: "starting", stopping: "stopping", unavailable: "unavailable" };

function showService(state, text, why = "") {
  byId("service").dataset.state = state;
  setText(byId("service-text"), text);
  byId("service").title = why;
  setText(byId("feed-note"), why);
}

// The state of the router is not known: nothing on the page may look current.
function showLost(text, why) {
  showService("lost", text, why);
  fleets.lose(why);
  charts.lose(why);
}

function showRouter(router) {
  showService(router.status, WORDS[router.status] ?? router.status, router.reason);
  setText(byId("model"), router.model);
  document.title = router.model ? `${router.model} · Baton` : "Baton";
  setText(byId("version"), `Baton ${router.version}`);
  if (router.context_length !== null) {
    playground.allowChat(router.has_chat_template, "Chat is off: this model has no chat template.");
  }
}

async function watch(signal, alive) {
  let samples = null;
  for await (const event of events("/live", { signal })) {
    alive();
    samples = samples ? [...samples, ...event.samples].slice(-MAX_SAMPLES) : event.samples;
    document.body.dataset.feed = "on";
    showRouter(event.router);
    fleets.update(event.nodes);
    charts.update(samples, event.router);
  }
}

async function keepWatching() {
  for (;;) {
    const abort = new AbortController();
    let silence;
    const alive = () => {
      clearTimeout(silence);
      silence = setTimeout(() => abort.abort(new Failure("The router has gone silent.")), SILENCE_MS);
    };
    alive();
    let refused = false;
    try {
      await watch(abort.signal, alive);
      showLost("router stopped", "The router has stopped. Trying again …");
    } catch (error) {
      refused = error.status === 401;
      if (refused) askForKey();
      showLost(refused ? "key needed" : "unreachable", `${error.message} ${refused ? "" : "Trying again …"}`.trim());
    } finally {
      clearTimeout(silence);
    }
    document.body.dataset.feed = "off";
    await new Promise((resolve) => {
      retryNow = resolve;
      if (!refused) setTimeout(resolve, RETRY_MS); // a wrong key stays wrong until there is another
    });
  }
}

keepWatching();
