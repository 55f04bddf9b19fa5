// Live parts: one stream while the page is visible, and a line that says when it is not fresh any more.
"use strict";

(function () {
  const LOST_MS = 6000;
  let heard = Date.now();

  // What the SSE extension takes for an EventSource; it can pause, so that hidden tabs hold no connection.
  class Stream {
    constructor(url) {
      this.url = url;
      this.listeners = [];
      this.open();
    }
    open() {
      const source = this.source = new EventSource(this.url);
      source.onopen = (event) => this.onopen && this.onopen(event);
      source.onerror = (event) => this.onerror && this.onerror(event);
      this.listeners.forEach(([name, listener]) => source.addEventListener(name, listener));
    }
    get readyState() {
      return this.source.readyState;
    }
    addEventListener(name, listener) {
      this.listeners.push([name, listener]);
      this.source.addEventListener(name, listener);
    }
    removeEventListener(name, listener) {
      this.listeners = this.listeners.filter((one) => one[1] !== listener);
      this.source.removeEventListener(name, listener);
    }
    close() {
      this.source.close();
    }
  }

  let stream = null;
  htmx.createEventSource = (url) => (stream = new Stream(url));

  document.addEventListener("visibilitychange", () => {
    if (!stream) return;
    if (document.hidden) {
      stream.close();
    } else if (stream.readyState === EventSource.CLOSED) {
      heard = Date.now();
      stream.open();
    }
  });

  document.addEventListener("htmx:sseMessage", () => {
    heard = Date.now();
    show();
  });

  function show() {
    const line = document.getElementById("lost");
    if (!line) return;
    const lost = !document.hidden && Date.now() - heard > LOST_MS;
    if (lost === !line.hidden) return;
    const fresh = document.getElementById("fresh");
    line.textContent = lost ? "Connection lost. Last update " + (fresh ? fresh.textContent : "unknown") + "." : "";
    line.hidden = !lost;
  }
  window.setInterval(show, 1000);
})();
