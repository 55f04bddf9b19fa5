"""The run in a browser: pages made here, kept fresh by server-sent events.

    broker ──inspect, once a second─▶ Monitor ─▶ pages (Jinja2) ──▶ browser
                                        │                            ▲
    history files ──HistoryReader───────┘──▶ Live fragments ──/events┘

- `app`: the process and its middleware; `auth`: who may ask; `monitor`: the newest state of the run.
- Pages: `overview`, `jobs`, `sequences` (with `tokens`, `outcome` and `picture`), `workers`, `dead_letters`,
  `settings`. They are made with `render` and `formats`, and kept fresh by `live`.
- Read-only, unless actions are allowed; then dead letters can be replayed and dropped.
- Nothing is loaded from another host, no script or style is inline, and every page works without scripts.
- What is shown comes from others (ids, texts, tracebacks): it is escaped, bounded, and never trusted.
"""
